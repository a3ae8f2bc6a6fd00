"""How many tokens each row drafts in a step: as many as make the expected tokens per second highest.

A step of B rows that drafts k tokens in all takes T(B + k) + D(depth) seconds, T the target's and D the drafter's part,
and emits B tokens plus those accepted. Drafted tokens are spent in the order of what they are worth, the probability of
being accepted, so the best k is a maximum over one sequence. T, D and the probabilities are learned from the steps.

Where no request waits for a place, a batch takes as long as its last row, and tokens of the others are worth nothing:
rows that are ahead of the last by more than a full draft is expected to give it draft nothing until it has caught up.

A drafter may know which of its drafts rest on more (an n-gram's match is longer), and grade them: how often drafts are
accepted is learned by grade, and by request.

What a call has learned is where the next one on the same model begins: in a batch of eight, trying a length that does
not pay costs as much as several plain steps.

A length depends on earlier steps alone, and where the draft is a function of the committed text, on that draft too: a
rule that looked at a sampled token and then dropped it would bias the output.
"""

from __future__ import annotations

import inspect
import weakref
from collections import defaultdict, deque
from collections.abc import Hashable, MutableMapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from scipy.optimize import isotonic_regression
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from specdec.contracts import Drafter

WINDOW = 33  # latest timings of one size that count: their median is deaf to slow spells of half as many
MOVED = 0.01  # change of a median, relative, that counts
PRIOR = 0.6  # acceptance of a token that is reached, before any was seen
WEIGHT = 3.0  # tokens seen of all requests that one's own are held against; so too a lower grade's against a higher's
MEMORY = {"request": 0.9, "all": 0.99}  # what a draft leaves of earlier ones; what is forgotten is tried again
CALLS = 8  # after as many in which it was not timed, what a size costs is forgotten

_Latest = weakref.WeakKeyDictionary[PreTrainedModel, dict[Hashable, "Budget"]]
_of_named: defaultdict[str, _Latest] = defaultdict(weakref.WeakKeyDictionary)
_of_given: MutableMapping[Drafter, _Latest] = WeakIdKeyDictionary()


def budget_for(model: PreTrainedModel, drafter: str | Drafter, kind: Hashable, longest: int) -> Budget:
    """A call's budget of drafts up to `longest`, which begins with what the latest call of this kind with the model and
    the drafter (a named one as it is written, else this very object) has learned.

    Drafters that stand for another one, to watch it, name it as `__wrapped__`."""
    if isinstance(drafter, str):
        latest = _of_named[drafter]
    else:
        latest = _of_given.setdefault(inspect.unwrap(drafter), weakref.WeakKeyDictionary())
    of_model = latest.setdefault(model, {})
    earlier = of_model.get((kind, longest))
    of_model[kind, longest] = budget = Budget(longest) if earlier is None else earlier.next()
    return budget


class Cost:
    """Seconds as a non-decreasing function of a size (packed tokens, or depths), from the latest timings."""

    def __init__(self) -> None:
        self._timings: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._medians: dict[int, float] = {}
        self._curve: list[float] | None = None  # seconds by size, until a median has moved
        self._idle: dict[int, int] = {}  # calls that have begun since a size was last timed

    def add(self, size: int, seconds: float) -> None:
        self._timings[size].append(seconds)
        now, before = median(self._timings[size]), self._medians.get(size)
        if before is None or abs(now - before) > MOVED * before:
            self._medians[size], self._curve = now, None
        self._idle[size] = 0

    def next(self) -> Cost:
        """For another call."""
        cost = Cost()
        for size, idle in list(self._idle.items()):  # which `add` writes last: another thread's call may be adding some
            if size == 0 or idle < CALLS:
                cost._timings[size].extend(self._timings[size].copy())
                cost._medians[size] = self._medians[size]
                cost._idle[size] = idle + 1
        return cost

    def knows(self, size: int) -> bool:
        """Whether just this size has been timed: taken for as dear as the next larger one it would never be."""
        return size in self._timings

    def __call__(self, size: int) -> float:
        """Seconds at `size`: between timed ones linear, beyond the largest as there, so that more is tried once."""
        if self._curve is None:
            timed = sorted(self._medians)
            medians, weights = zip(*((self._medians[size], len(self._timings[size])) for size in timed), strict=True)
            seconds = isotonic_regression(medians, weights=weights).x
            self._curve = np.interp(np.arange(timed[-1] + 1), timed, seconds).tolist()
        return self._curve[min(size, len(self._curve) - 1)]


@dataclass(frozen=True)
class Drafted:
    """What a step drafted for a request that could draft (`tokens` may be 0 even so), and how many were accepted."""

    request: int
    tokens: int
    accepted: int
    grade: int = 0


class Acceptance:
    """Probability that the first j drafted tokens of a row are accepted, j = 1...

    What is learned is whether a token is accepted once those before it are: by depth from all requests, of every grade
    leaning on the one below it, and over all depths from the request itself. So deeper tokens than it ever drafted
    are judged by those it did."""

    def __init__(self, longest: int):
        self.longest = longest
        self._all: dict[int, list[list[float]]] = {}  # grade -> by depth, times reached and times accepted, fading
        self._own: dict[int, tuple[float, float]] = {}  # request -> the same over all depths
        self._by_grade: dict[int, list[float]] = {}  # of all requests, by depth; emptied by `record`

    def of(self, request: int, grade: int = 0) -> list[float]:
        """[longest] estimates, which never rise from one token to the next."""
        if grade not in self._by_grade:
            self._by_grade[grade] = self._of_all(grade)
        reached, accepted = self._own.get(request, (0.0, 0.0))
        estimates, estimate = [], 1.0
        for of_all in self._by_grade[grade]:
            estimate *= (accepted + WEIGHT * of_all) / (reached + WEIGHT)
            estimates.append(estimate)
        return estimates

    def _of_all(self, grade: int) -> list[float]:
        estimates = [PRIOR] * self.longest
        for known in sorted(known for known in self._all if known <= grade):
            estimates = [
                (accepted + WEIGHT * lower) / (reached + WEIGHT)
                for reached, accepted, lower in zip(*self._all[known], estimates, strict=True)
            ]
        return estimates

    def record(self, drafts: Sequence[Drafted]) -> None:
        """One step; of a request that drafted nothing what is known fades towards where it started."""
        fading, fading_own = MEMORY["all"] ** len(drafts), MEMORY["request"]
        self._by_grade = {}
        self._all = {
            grade: [[fading * times for times in by_depth] for by_depth in known] for grade, known in self._all.items()
        }
        for draft in drafts:
            reached = min(draft.tokens, draft.accepted + 1)
            known = self._all.setdefault(draft.grade, [[0.0] * self.longest, [0.0] * self.longest])
            for times, tokens in zip(known, (reached, draft.accepted), strict=True):
                for depth in range(tokens):
                    times[depth] += 1
            own = self._own.get(draft.request, (0.0, 0.0))
            self._own[draft.request] = fading_own * own[0] + reached, fading_own * own[1] + draft.accepted

    def forget(self, request: int) -> None:
        """The request is done."""
        self._own.pop(request, None)

    def next(self) -> Acceptance:
        """For another call: of other requests, but like those of this one."""
        acceptance = Acceptance(self.longest)
        acceptance._all = self._all.copy()
        return acceptance


class Budget:
    """Draft lengths of chains, learned while decoding. longest: most drafted tokens per row and step."""

    def __init__(self, longest: int):
        self.step_cost, self.draft_cost = Cost(), Cost()
        self.acceptance = Acceptance(longest)
        self.draft_cost.add(0, 0.0)

    def lengths(
        self,
        requests: Sequence[int],
        limits: Sequence[int],
        grades: Sequence[int],
        rooms: Sequence[int] | None = None,
    ) -> list[int]:
        """How many tokens each request drafts now, at most `limits`; none where the cost of none is not known yet.

        grades: of what each could draft, see `Draft.grades`; 0 where nothing tells.
        rooms: tokens that each may still emit, for requests that end together; None where others take their places."""
        B = len(requests)
        if not self.step_cost.knows(B):
            return [0] * B
        value = [1.0] * B
        if rooms is not None:
            most = max(rooms)
            row = rooms.index(most)
            behind = most - sum(self.acceptance.of(requests[row], grades[row]))
            last = [room >= behind for room in rooms]
            share = B / sum(last)
            value = [share * is_last for is_last in last]
        worth = [
            [tokens * estimate for estimate in self.acceptance.of(request, grade)[:limit]] if tokens else []
            for request, grade, limit, tokens in zip(requests, grades, limits, value, strict=True)
        ]
        return allocate(worth, self.step_cost, self.draft_cost)

    def time(self, rows: int, drafted: Sequence[int], step_seconds: float, draft_seconds: float) -> None:
        """What a step of `rows` rows without prompt tokens took: all but drafting, and drafting.   drafted: tokens by
        row."""
        self.step_cost.add(rows + sum(drafted), step_seconds)
        self.draft_cost.add(max(drafted), draft_seconds)

    def next(self) -> Budget:
        """For another call."""
        budget = Budget(self.acceptance.longest)
        budget.step_cost, budget.draft_cost = self.step_cost.next(), self.draft_cost.next()
        budget.acceptance = self.acceptance.next()
        return budget


def allocate(worth: Sequence[Sequence[float]], step_cost: Cost, draft_cost: Cost) -> list[int]:
    """Lengths per row that maximise (B + worth of the drafted tokens) / seconds.

    worth: by row, of each token that it may draft: the probability that it is accepted, times what a token of this row
           is worth beside those of others; never rising along a row.

    For a greatest depth and a number k of drafted tokens the best choice is the k most valuable ones, which are whole
    prefixes since worth never rises; so the maximum is over these two alone. Of equal rates the fewest tokens win.
    """
    B, longest = len(worth), max(map(len, worth))
    tokens = [(value, row, depth) for row, values in enumerate(worth) for depth, value in enumerate(values, 1)]
    tokens.sort(key=lambda token: -token[0])  # equal ones stay as in the row
    seconds = [step_cost(B + k) for k in range(len(tokens) + 1)]
    best, chosen = B / (seconds[0] + draft_cost(0)), tokens[:0]
    for depth in range(1, longest + 1):
        drafting = draft_cost(depth)
        if depth < longest and drafting == draft_cost(longest):
            continue  # for the same more is allowed
        allowed = [token for token in tokens if token[2] <= depth]
        emitted, k = float(B), 0
        for drafted, (value, *_) in enumerate(allowed, 1):
            emitted += value
            if emitted > best * (seconds[drafted] + drafting):
                best, k = emitted / (seconds[drafted] + drafting), drafted
        if k:
            chosen = allowed[:k]
    lengths = [0] * B
    for _, row, _ in chosen:
        lengths[row] += 1
    return lengths
