"""Draft lengths against an exhaustive search, and what is learned from steps whose true costs are known."""

import gc
import weakref
from itertools import product
from operator import lt

import numpy as np
import pytest

from drafters.ngram import NGramDrafter
from eval.audit import AuditedDrafter
from eval.bench_schedule import Watched
from specdec.budget import CALLS, WINDOW, Acceptance, Budget, Cost, Drafted, allocate, budget_for
from specdec.contracts import BaseDrafter
from tests.tiny_models import tiny


def cost(points: dict[int, float]) -> Cost:
    made = Cost()
    for size, seconds in points.items():
        made.add(size, seconds)
    return made


FREE = cost({0: 0.0})
LINEAR = cost({0: 1.0, 100: 11.0})


def record(budget, rows, drafts, step_seconds, draft_seconds):
    budget.acceptance.record(drafts)
    budget.time(rows, [draft.tokens for draft in drafts], step_seconds, draft_seconds)


def rate(worth, lengths, step_cost, draft_cost):
    emitted = len(worth) + sum(sum(values[:n]) for values, n in zip(worth, lengths, strict=True))
    return emitted / (step_cost(len(worth) + sum(lengths)) + draft_cost(max(lengths)))


@pytest.mark.parametrize("seed", range(20))
def test_no_other_lengths_are_faster(seed):
    random = np.random.default_rng(seed)
    worth = [np.sort(random.random(random.integers(0, 4)))[::-1] for _ in range(4)]
    steps = cost({1: 1.0, 4: 1.1, 6: 1.0 + random.random(), 16: 2 + 3 * random.random()})
    drafts = cost({0: 0.0, 1: 0.2 * random.random(), 3: 0.5})
    chosen = allocate(worth, steps, drafts)
    best = max(rate(worth, other, steps, drafts) for other in product(*(range(len(values) + 1) for values in worth)))
    assert rate(worth, chosen, steps, drafts) == pytest.approx(best)


def test_the_search_would_notice_a_worse_choice():
    worth, chosen = [[0.9, 0.8]], allocate([[0.9, 0.8]], LINEAR, FREE)
    assert chosen == [2] and rate(worth, [1], LINEAR, FREE) < rate(worth, [2], LINEAR, FREE)


@pytest.mark.parametrize(
    ("worth", "expected"),
    [
        ([[0.9, 0.8, 0.7], [0.01, 0.001]], [3, 0]),  # one row is predictable, the other is not
        ([[0.04], [0.04]], [0, 0]),  # a token costs 0.1 of the 1.2 that the step takes for two
        ([[], []], [0, 0]),
    ],
)
def test_rows_draft_what_they_are_worth(worth, expected):
    assert allocate(worth, LINEAR, FREE) == expected


def test_costs_are_medians_that_never_fall():
    seen = Cost()
    for seconds in (1.0, 1.2, 50.0):  # one of them in a slow spell
        seen.add(4, seconds)
    seen.add(8, 1.0)  # cannot be less than four tokens
    seen.add(16, 3.0)
    four, eight, twelve, many = map(seen, (4, 8, 12, 99))
    assert four == eight == pytest.approx((3 * 1.2 + 1.0) / 4)
    assert twelve == pytest.approx((eight + 3.0) / 2) and many == 3.0
    assert seen.knows(4) and not seen.knows(7)


def test_only_the_latest_timings_count():
    seen = Cost()
    for seconds in (1.0,) * 2 * WINDOW + (2.0,) * (WINDOW // 2):
        seen.add(1, seconds)
    assert seen(1) == 1.0
    seen.add(1, 2.0)
    assert seen(1) == 2.0


def test_acceptance_is_learned_by_request_and_fades():
    known = Acceptance(3)
    start = known.of(7)
    assert start == pytest.approx([0.6, 0.36, 0.216])
    for _ in range(30):
        known.record([Drafted(1, tokens=3, accepted=3), Drafted(2, tokens=3, accepted=0)])
    assert known.of(1)[2] > 0.8 and known.of(2)[0] < 0.2
    assert 0.3 < known.of(3)[0] < 0.7  # a new request is taken for one of all
    for _ in range(100):
        known.record([Drafted(2, tokens=0, accepted=0)])
    assert known.of(2)[0] > 0.3  # nothing was tried for long: worth another try
    known.forget(1)
    assert known.of(1) == pytest.approx(known.of(99))


def test_acceptance_is_learned_by_grade():
    known = Acceptance(2)
    for step in range(40):
        known.record([Drafted(step, 2, 0, grade=2), Drafted(step + 100, 2, 2, grade=4)])
    low, between, high, above = (known.of(999, grade) for grade in (2, 3, 4, 7))
    assert low[1] < 0.1 and high[1] > 0.8
    assert between == pytest.approx(low) and above == pytest.approx(high)  # at least as much as of the one below
    assert known.of(999, 1) == pytest.approx([0.6, 0.36])  # below all that was seen
    # one step, by hand: of grade 2 (0 + 3 x 0.6) / (1 + 3), of grade 4 (1 + 3 x 0.45) / (1 + 3)
    once = Acceptance(1)
    once.record([Drafted(1, 1, 0, grade=2), Drafted(2, 1, 1, grade=4)])
    assert once.of(999, 2)[0] == pytest.approx(0.45) and once.of(999, 4)[0] == pytest.approx(0.5875)


def test_rows_whose_drafts_rest_on_more_draft():
    """Of two grades one is accepted always, one never, at a cost that does not pay for their average."""
    speeds = {}
    for told in (True, False):
        budget, random, tokens, seconds = Budget(4), np.random.default_rng(0), 0, 0.0
        for step in range(200):
            requests = range(4 * step, 4 * step + 4)  # each of them new
            grades = random.choice([2, 4], 4).tolist()
            lengths = budget.lengths(requests, [4] * 4, grades if told else [0] * 4)
            accepted = [n if grade == 4 else 0 for n, grade in zip(lengths, grades, strict=True)]
            drafts = zip(requests, lengths, accepted, grades if told else [0] * 4, strict=True)
            took = 1 + 0.15 * (4 + sum(lengths))
            record(budget, 4, [Drafted(*of) for of in drafts], took, 0.0)
            tokens, seconds = tokens + 4 + sum(accepted), seconds + took
        speeds[told] = tokens / seconds / (4 / 1.6)
    assert speeds[True] > 1.5 and speeds[False] < 1.2


def simulated(budget, steps, accept, step_seconds, draft_seconds=lambda depth: 0.0, rows=4, longest=5, seed=0):
    """Decode with known laws: tokens, seconds and the lengths of every step."""
    random = np.random.default_rng(seed)
    tokens, seconds, lengths = 0, 0.0, []
    for _ in range(steps):
        drafted = budget.lengths(range(rows), [longest] * rows, [0] * rows)
        accepted = [int((random.random(n) < accept(row)).cumprod().sum()) for row, n in enumerate(drafted)]
        took = step_seconds(rows + sum(drafted)) * random.uniform(0.95, 1.05)
        drafting = draft_seconds(max(drafted))
        record(budget, rows, [Drafted(*of) for of in zip(range(rows), drafted, accepted, strict=True)], took, drafting)
        tokens, seconds = tokens + rows + sum(accepted), seconds + took + drafting
        lengths.append(drafted)
    return tokens / seconds, lengths


@pytest.mark.parametrize("slope", [0.0, 0.05, 0.2, 1.0])
@pytest.mark.parametrize("accept", [0.02, 0.3, 0.6, 0.9])
def test_close_to_the_best_fixed_length_and_never_slower_than_none(slope, accept):
    def step_seconds(M):
        return 1 + slope * M

    got, _ = simulated(Budget(5), 400, lambda row: accept, step_seconds)
    fixed = []
    for length in range(6):
        expected = 4 * (1 - accept ** (length + 1)) / (1 - accept)
        fixed.append(expected / step_seconds(4 + 4 * length))
    assert got > 0.97 * fixed[0]
    assert got > 0.93 * max(fixed)


def test_a_dear_drafter_is_left_alone():
    got, lengths = simulated(Budget(5), 600, lambda row: 0.5, lambda M: 1.0, lambda depth: 2.0 * depth)
    assert got > 0.97 * 4 and sum(map(sum, lengths[20:])) < 0.05 * 580 * 20


def test_rows_differ():
    _, lengths = simulated(Budget(5), 200, lambda row: 0.9 if row == 0 else 0.02, lambda M: 1 + 0.1 * M)
    mean = np.mean(lengths[50:], axis=0)
    assert mean[0] > 3 and max(mean[1:]) < 0.5


def test_a_smaller_batch_is_not_taken_for_as_dear_as_a_larger_one(monkeypatch, controls):
    """Else a few drafts in it would cost nothing, be made in every step, and what none costs never be known."""

    def beside_plain():
        budget = Budget(5)
        simulated(budget, 50, lambda row: 0.02, lambda M: 1 + 0.2 * M, rows=5)
        return simulated(budget, 200, lambda row: 0.02, lambda M: 1 + 0.2 * M, rows=4)[0] / (4 / 1.8)

    assert beside_plain() > 0.97
    monkeypatch.setattr(Cost, "knows", lambda self, size: any(size <= timed for timed in self._timings))
    assert beside_plain() < 0.93
    controls("a size known by a larger one", "tokens per second of a batch that has shrunk")


def test_what_is_spent_without_drafting_too_is_no_cost_of_drafting(monkeypatch, controls):
    budget = Budget(1)
    for tokens in (0, 1) * 20:
        record(budget, 1, [Drafted(0, tokens, tokens)], 1.0, 3.0 + 0.1 * tokens)
    assert budget.acceptance.of(0)[0] > 0.9
    assert budget.lengths([0], [1], [0]) == [1]  # 1.9 tokens in 4.1 s beside 1 in 4.0
    forgotten = lambda worth, steps, drafts: allocate(worth, steps, lambda depth: drafts(depth) if depth else 0.0)  # noqa: E731
    with monkeypatch.context() as control:
        control.setattr("specdec.budget.allocate", forgotten)
        assert budget.lengths([0], [1], [0]) == [0]  # beside 1 in 1.0
    controls("drafting that is spent anyway taken for free without drafts", "none drafted where drafts pay")
    budget.draft_cost = cost({0: 0.0, 1: 5.0})
    assert budget.lengths([0], [1], [0]) == [0]


def finished(rows_ending_together, tokens, seed):
    """Seconds until four rows, in the first of which no draft is accepted, have emitted `tokens` each."""
    budget, random, left, seconds = Budget(5), np.random.default_rng(seed), np.full(4, tokens), 0.0
    while left.any():
        rows = [row for row in range(4) if left[row]]
        limits, rooms = [min(5, left[row] - 1) for row in rows], [int(left[row]) for row in rows]
        drafted = budget.lengths(rows, limits, [0] * len(rows), rooms if rows_ending_together else None)
        accept = [0.02 if row == 0 else 0.6 for row in rows]
        accepted = [int((random.random(n) < p).cumprod().sum()) for p, n in zip(accept, drafted, strict=True)]
        took = (1 + 0.1 * (len(rows) + sum(drafted))) * random.uniform(0.95, 1.05)
        record(budget, len(rows), [Drafted(*of) for of in zip(rows, drafted, accepted, strict=True)], took, 0.0)
        left[rows] -= 1 + np.array(accepted)
        seconds += took
    return seconds


def test_rows_that_are_ahead_wait_for_the_last(controls):
    tokens, plain = 400, 400 * 1.4
    together, apart = (np.mean([finished(which, tokens, seed) for seed in range(4)]) for which in (True, False))
    assert plain / together > 0.96  # what is left is what trying takes
    assert plain / apart < 0.92  # the others' tokens per second, while the first takes as long as ever
    controls("every token worth the same where rows end together", "time until the last row ends")


def test_the_next_call_begins_with_what_was_learned(controls):
    def short_call(budget, seed):
        """Tokens per second of 30 steps in which drafts do not pay, beside those of plain decoding."""
        got, _ = simulated(budget, 30, lambda row: 0.2, lambda M: 1 + 0.3 * M, rows=8, longest=8, seed=seed)
        return got / (8 / (1 + 0.3 * 8))

    first, later = [], []
    for seed in range(0, 40, 4):
        budget = Budget(8)
        first.append(short_call(budget, seed))
        for call in range(3):
            budget = budget.next()
            later.append(short_call(budget, seed + call + 1))
    assert np.mean(later) > 0.97
    assert np.mean(first) < 0.93
    controls("every call beginning anew", "tokens per second of short calls")


def test_costs_that_are_not_timed_any_more_are_forgotten():
    budget = Budget(3)
    for size in (2, 8):
        budget.step_cost.add(size, float(size))
    for _ in range(CALLS):
        assert budget.step_cost.knows(8)
        budget = budget.next()
        budget.step_cost.add(2, 2.0)
    assert budget.next().step_cost.knows(2) and not budget.next().step_cost.knows(8)
    assert budget.draft_cost(0) == 0


def test_calls_of_one_kind_on_one_model_share_what_they_learned():
    model, other = tiny("llama"), tiny("llama")
    record(budget_for(model, "ngram", "greedy", 3), 1, [Drafted(0, 3, 0)], 1.0, 0.0)
    assert budget_for(model, "ngram", "greedy", 3).step_cost.knows(4)
    elsewhere = [(model, "mtp", "greedy", 3), (model, "ngram", "coupled", 3), (model, "ngram", "greedy", 2)]
    for kind in (*elsewhere, (other, "ngram", "greedy", 3)):
        assert not budget_for(*kind).step_cost.knows(4)
    fresh, known = (budget.acceptance.of(0) for budget in (Budget(3), budget_for(model, "ngram", "greedy", 3)))
    assert all(map(lt, known, fresh))
    gone = weakref.ref(model)
    del model, elsewhere, kind
    gc.collect()
    assert gone() is None


def test_a_drafter_given_as_an_object_shares_with_none_but_who_watches_it():
    model, drafter = tiny("llama"), NGramDrafter()
    record(budget_for(model, drafter, "greedy", 3), 1, [Drafted(0, 3, 0)], 1.0, 0.0)
    assert budget_for(model, drafter, "greedy", 3).step_cost.knows(4)
    for watching in (AuditedDrafter(drafter, ["a"]), Watched(drafter)):
        assert budget_for(model, watching, "greedy", 3).step_cost.knows(4)
        assert watching.trimmable and not AuditedDrafter(BaseDrafter(), ["a"]).trimmable
    assert not budget_for(model, NGramDrafter(), "greedy", 3).step_cost.knows(4)
    gone = weakref.ref(drafter)
    del drafter, watching
    gc.collect()
    assert gone() is None


def test_tokens_deeper_than_a_request_ever_drafted_are_judged_by_those_it_did():
    known = Acceptance(4)
    for _ in range(30):
        known.record([Drafted(1, 1, 1), Drafted(2, 1, 0), Drafted(3, 1, 0), Drafted(4, 1, 0)])
    sure, unsure = known.of(1), known.of(2)
    assert sure[0] > 0.7 and sure[3] > 0.6 * sure[0]
    assert unsure[0] < 0.15 and unsure[3] < 0.01


def test_where_others_wait_every_token_counts():
    budget = Budget(3)
    record(budget, 2, [Drafted(0, 3, 3), Drafted(1, 3, 3)], 1.0, 0.0)
    record(budget, 2, [Drafted(0, 0, 0), Drafted(1, 0, 0)], 1.0, 0.0)
    full = sum(budget.acceptance.of(0))  # what a full draft of the last row is expected to give
    assert 2 < full < 3
    assert budget.lengths([0, 1], [3, 3], [0, 0]) == budget.lengths([0, 1], [3, 3], [0, 0], [20, 18]) == [3, 3]
    assert budget.lengths([0, 1], [3, 3], [0, 0], [20, 17]) == [3, 0]


def test_the_cost_without_drafts_is_measured_first():
    budget = Budget(3)
    assert budget.lengths([0, 1], [3, 3], [0, 0]) == [0, 0]
    record(budget, 2, [Drafted(0, 0, 0), Drafted(1, 0, 0)], 1.0, 0.0)
    assert budget.lengths([0, 1], [3, 1], [0, 0]) == [3, 1]  # as far as is known more costs nothing, so it is tried
    assert budget.lengths([5, 6, 7], [3, 3, 3], [0, 0, 0]) == [0, 0, 0]
