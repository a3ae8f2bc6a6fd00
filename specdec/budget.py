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

The lengths are fixed before anything is drafted, from earlier steps alone: a rule that looked at a sampled token and
then dropped it would bias the output.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from scipy.optimize import isotonic_regression
from transformers import PreTrainedModel

WINDOW = 33  # latest timings of one size that count: their median is deaf to slow spells, also to long ones
NEAR = 1.25  # a timing at up to this many times a size tells what the size itself costs
PRIOR = 0.6  # acceptance of a token that is reached, before any was seen
WEIGHT = 3.0  # tokens that what is known of all requests counts for beside a request's own, a lower grade beside a higher
MEMORY = {"request": 0.9, "all": 0.99}  # what each step leaves of earlier ones; what is forgotten is tried again
CALLS = 8  # after as many in which it was not timed, what a size costs is forgotten

_latest: weakref.WeakKeyDictionary[PreTrainedModel, dict[Hashable, Budget]] = weakref.WeakKeyDictionary()


def budget_for(model: PreTrainedModel, kind: Hashable, longest: int) -> Budget:
    """A call's budget of drafts up to `longest`, which begins with what the model's latest call of this kind (how it
    runs, what drafts) has learned."""
    of_model = _latest.setdefault(model, {})
    earlier = of_model.get((kind, longest))
    of_model[kind, longest] = budget = Budget(longest) if earlier is None else earlier.next()
    return budget


class Cost:
    """Seconds as a non-decreasing function of a size (packed tokens, or depths), from the latest timings."""

    def __init__(self) -> None:
        self._timings: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._medians: dict[int, float] = {}
        self._idle: dict[int, int] = {}  # calls that have begun since a size was last timed

    def add(self, size: int, seconds: float) -> None:
        self._timings[size].append(seconds)
        self._medians[size] = median(self._timings[size])
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
        """Whether anything from `size` to a little above it has been timed."""
        return any(size <= timed <= NEAR * size for timed in self._timings)

    def __call__(self, sizes: np.ndarray) -> np.ndarray:
        """Seconds at `sizes`: between timed ones linear, beyond the largest as there, so that more is tried once."""
        timed = sorted(self._timings)
        medians = [self._medians[size] for size in timed]
        weights = [len(self._timings[size]) for size in timed]
        return np.interp(sizes, timed, isotonic_regression(medians, weights=weights).x)


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
        self._all: dict[int, np.ndarray] = {}  # grade -> [2, longest] times reached and accepted, fading
        self._own: dict[int, np.ndarray] = {}  # request -> [2, 1], the same over all depths

    def of(self, request: int, grade: int = 0) -> np.ndarray:
        """[longest] estimates, which never rise from one token to the next."""
        known = [self._all[lower] for lower in sorted(self._all) if lower <= grade]
        if request in self._own:
            known.append(self._own[request])
        accepted_if_reached = np.full(self.longest, PRIOR)
        for reached, accepted in known:
            accepted_if_reached = (accepted + WEIGHT * accepted_if_reached) / (reached + WEIGHT)
        return accepted_if_reached.cumprod()

    def record(self, drafts: Sequence[Drafted]) -> None:
        """One step; of a request that drafted nothing what is known fades towards where it started."""
        fading = MEMORY["all"] ** len(drafts)
        self._all = {grade: fading * known for grade, known in self._all.items()}
        depth = np.arange(self.longest)
        for draft in drafts:
            accepted = depth < draft.accepted
            seen = np.stack([(depth < draft.tokens) & (depth <= draft.accepted), accepted]).astype(float)
            self._all[draft.grade] = self._all.get(draft.grade, 0.0) + seen
            own = self._own.get(draft.request, 0.0)
            self._own[draft.request] = MEMORY["request"] * own + seen.sum(1, keepdims=True)

    def forget(self, request: int) -> None:
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
        rooms: Sequence[int] | None = None,
        grades: Sequence[int] | None = None,
    ) -> list[int]:
        """How many tokens each request drafts now, at most `limits`; none where the cost of none is not known yet.

        rooms: tokens that each may still emit, for requests that end together; None where others take their places.
        grades: of what each could draft; None where the drafter tells none."""
        B = len(requests)
        if not self.step_cost.knows(B):
            return [0] * B
        expected = [self.acceptance.of(*of) for of in zip(requests, grades or [0] * B, strict=True)]
        value = np.ones(B)
        if rooms is not None:
            most = max(rooms)
            last = np.array(rooms) >= most - expected[rooms.index(most)].sum()
            value = last * B / last.sum()
        worth = [v * each[:limit] for v, each, limit in zip(value, expected, limits, strict=True)]
        return allocate(worth, self.step_cost, self.draft_cost)

    def record(self, rows: int, drafts: Sequence[Drafted], step_seconds: float, draft_seconds: float) -> None:
        """What a step of `rows` rows without prompt tokens took: all but drafting, and drafting.   drafts: of the rows
        that could draft."""
        drafted = [draft.tokens for draft in drafts]
        self.step_cost.add(rows + sum(drafted), step_seconds)
        if any(drafted):
            self.draft_cost.add(max(drafted), draft_seconds)
        self.acceptance.record(drafts)

    def forget(self, request: int) -> None:
        """The request is done."""
        self.acceptance.forget(request)

    def next(self) -> Budget:
        """For another call."""
        budget = Budget(self.acceptance.longest)
        budget.step_cost, budget.draft_cost = self.step_cost.next(), self.draft_cost.next()
        budget.acceptance = self.acceptance.next()
        return budget


def allocate(worth: Sequence[np.ndarray], step_cost: Cost, draft_cost: Cost) -> list[int]:
    """Lengths per row that maximise (B + worth of the drafted tokens) / seconds.

    worth: per row, of each token it may draft: the probability that it is accepted, times what a token of this row is
    worth beside those of others; never rising.

    For a greatest depth and a number k of drafted tokens the best choice is the k most valuable ones, which are whole
    prefixes since worth never rises; so the maximum is over these two alone. Of equal rates the fewest tokens win.
    """
    B = len(worth)
    rows = np.repeat(np.arange(B), [len(values) for values in worth])
    depths = np.concatenate([np.arange(1, len(values) + 1) for values in worth])
    values = np.concatenate(worth)
    order = np.lexsort((rows, depths, -values))  # of equal worth the shallower first: prefixes stay whole
    seconds = step_cost(B + np.arange(len(order) + 1))
    best, chosen = B / seconds[0], order[:0]
    deepest = max(map(len, worth))
    drafting_by_depth = draft_cost(np.arange(deepest + 1))
    for depth in range(1, deepest + 1):
        drafting = drafting_by_depth[depth]
        if depth < deepest and drafting == drafting_by_depth[deepest]:
            continue  # for the same, more is allowed
        allowed = order[depths[order] <= depth]
        rates = (B + np.cumsum(values[allowed])) / (seconds[1 : len(allowed) + 1] + drafting)
        k = int(np.argmax(rates))
        if rates[k] > best:
            best, chosen = rates[k], allowed[: k + 1]
    return np.bincount(rows[chosen], minlength=B).tolist()
