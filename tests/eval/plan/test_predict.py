"""Speed-ups by hand, the best draft length and the break-even batch by brute force, and which way they move."""

import itertools
import math

import pytest

from eval.plan.acceptance import Acceptance
from eval.plan.predict import (
    LARGEST_BATCH,
    CostRatio,
    DraftModel,
    LinearCost,
    MeasuredCost,
    Planner,
    table,
)
from eval.plan.roofline import Device, Roofline
from eval.plan.shape import AttentionLayers, ModelShape
from eval.plan.show import stops_paying, verdict
from tests.eval.plan.shapes import NO_ATTENTION, dense

FREE = LinearCost(0, 0, 0)
DEVICE = Device(bandwidth=1e12, compute=1e14)  # 2 ms to read `dense()`, 20 us of arithmetic per token
LONG = (AttentionLayers(count=10, kv_elements=1000, flops=4000, window=None),)  # 20 KB per cached token


def planner(accepted=(0.8, 0.6, 0.4, 0.2), attention=None, draft=FREE, rest=FREE) -> Planner:
    shape = dense(attention) if attention else dense()
    return Planner(Roofline(shape, DEVICE), rest, MeasuredCost(draft), Acceptance.given(accepted))


def test_by_hand_where_reading_weights_is_all():
    """AL = 1 + 0.8 + 0.48 = 2.28 for two drafted tokens; forwards take 2 ms, drafting 0.1 + 0.05 per token, the rest
    0.2 + 0.1 per token: plain 2.3, speculative 0.2 + 2 + 0.5."""
    found = planner(draft=LinearCost(1e-4, 0, 5e-5), rest=LinearCost(2e-4, 0, 1e-4))
    assert found.plain_seconds(1, 0) == pytest.approx(2.3e-3)
    assert found.speedup(1, 2, 0) == pytest.approx(2.28 * 2.3 / 2.7)
    assert found.speedup(1, 0, 0) == 1


def test_by_hand_where_arithmetic_is_all():
    """From batch 100 on a plain step takes 20 us per row; a draft of one then costs twice that for 1.8 tokens."""
    assert planner().speedup(200, 1, 0) == pytest.approx(1.8 / 2)
    assert planner().speedup(50, 1, 0) == pytest.approx(1.8)  # 100 packed tokens still hide behind the weights


def test_drafts_that_are_not_always_there_cost_and_give_less():
    """Half of the steps draft a token, always a right one: 1.5 tokens for 1.5 packed ones."""
    found = Planner(Roofline(dense(), DEVICE), FREE, MeasuredCost(FREE), Acceptance((0.5,), (0.5,)))
    assert found.speedup(200, 1, 0) == pytest.approx(1.0)
    assert found.speedup(10, 1, 0) == pytest.approx(1.5)


def concave(rows: float, width: float, context: float) -> float:
    """A forward whose first drafted token is what costs, as on a machine that computes one token apart."""
    return rows**0.5 * (1 + max(width - 1, 0) ** 0.5)


def rarely() -> Planner:
    """A third of the steps drafts four tokens, the rest none."""
    return Planner(concave, FREE, MeasuredCost(FREE), Acceptance((0.25, 1.0, 1.0, 1.0), (1 / 3,) * 4))


def test_steps_that_draft_nothing_cost_a_plain_forward():
    """At batch 1: two of three steps take 1, the third 1 + 2; the time at the mean width of 7/3 would be 2.15."""
    assert rarely().parts(1, 4, 0)["t_verify"] == pytest.approx(5 / 3)
    assert rarely().parts(1, 1, 0)["t_verify"] == pytest.approx(4 / 3)
    assert rarely().parts(1, 0, 0)["t_verify"] == pytest.approx(1)


@pytest.mark.parametrize("batch", [2, 4, 8, 16])
def test_the_mean_forward_of_a_batch_is_that_of_all_its_drafts(batch):
    """Against the exact mean over how many of the rows draft; the time at the mean width (control) is not it."""
    exact = sum(
        math.comb(batch, n) * (1 / 3) ** n * (2 / 3) ** (batch - n) * concave(batch, 1 + 4 * n / batch, 0)
        for n in range(batch + 1)
    )
    assert rarely().parts(batch, 4, 0)["t_verify"] == pytest.approx(exact, rel=0.002)
    assert concave(batch, 1 + 4 / 3, 0) > 1.009 * exact


def test_cost_of_a_draft_model_and_of_a_ratio():
    """A drafter of a tenth of the target's cost, 3 tokens deep."""
    target = Roofline(dense(), DEVICE)
    small = DraftModel(lambda rows, width, context: 0.1 * target(rows, width, context))
    assert small(8, 3, 3, 100) == pytest.approx(0.6e-3) == CostRatio(0.1, target)(8, 3, 3, 100)


PLANNERS = {
    "no attention": planner(),
    "attention": planner(attention=LONG),
    "dear drafts": planner(draft=LinearCost(2e-4, 1e-5, 3e-5)),
    "hopeless": planner(accepted=(0.01,), draft=LinearCost(1e-3, 0, 0)),
    "always right": planner(accepted=(1.0,) * 6, attention=LONG),
}


@pytest.mark.parametrize("name", PLANNERS)
@pytest.mark.parametrize("context", [0, 2000, 20_000])
def test_best_length_and_break_even_are_those_of_a_search(name, context):
    found = PLANNERS[name]
    pays = []
    for batch in range(1, LARGEST_BATCH + 1):
        speeds = {length: found.speedup(batch, length, context) for length in range(found.acceptance.depth + 1)}
        pays.append(max(speeds.values()) > 1)
        if batch in (1, 3, 64, 200, 512):
            assert speeds[found.best_length(batch, context)] == max(speeds.values())
    runs = found.paying(context)
    assert [any(first <= batch <= last for first, last in runs) for batch in range(1, 513)] == pays


def test_where_it_pays_by_hand():
    """Plain steps take 2 ms up to batch 100. With a token accepted with probability 0.79, 1.79 of them are beaten until
    two packed tokens a row take as long: 2 x 20 us x B = 1.79 x 2 ms at B = 89.5."""
    found = planner(accepted=(0.79,)).paying(0)
    assert found == [(1, 89)] and stops_paying(found) == 90
    assert verdict(7, found) == "with 7 tokens of context speculation stops paying at batch 90"


def test_where_it_pays_at_the_ends():
    assert PLANNERS["hopeless"].paying(0) == [] and stops_paying([]) == 1
    assert PLANNERS["always right"].paying(20_000) == [(1, 512)] and stops_paying([(1, 512)]) is None
    assert "does not pay at any" in verdict(0, []) and "pays at every batch size up to 512" in verdict(0, [(1, 512)])


def test_experts_make_speculation_pay_only_from_some_batch_on():
    """64 experts, one per token: at batch 1 a draft wakes a second one, so that a step takes twice as long; at batch
    512 plain decoding has woken them all."""
    experts = ModelShape("experts", 10, 1, 64 * 10**9, 64, 1, NO_ATTENTION, 64 * 10**9 + 1, 1000, 2)
    found = Planner(Roofline(experts, Device(1e12, 1e18)), FREE, MeasuredCost(FREE), Acceptance.given([0.8]))
    assert found.speedup(1, 1, 0) == pytest.approx(1.8 / (2 - 1 / 64)) and found.speedup(512, 1, 0) > 1.79
    ((first, last),) = found.paying(0)
    assert 1 < first < 64 and last == 512
    assert verdict(0, found.paying(0)).endswith(f"pays at batch {first} to 512 alone, of sizes up to 512")


def test_speedup_falls_with_the_batch_and_the_best_length_with_it():
    batches = [1, 8, 64, 100, 150, 250, 400]
    for a, b in itertools.pairwise(batches):
        assert planner().best_length(a, 0) >= planner().best_length(b, 0)
        for length in (1, 2, 4):
            assert planner().speedup(a, length, 0) >= planner().speedup(b, length, 0) - 1e-12


def test_better_drafts_are_never_slower():
    worse, better = planner(accepted=(0.6, 0.5)), planner(accepted=(0.7, 0.5))
    assert all(better.speedup(b, n, 0) > worse.speedup(b, n, 0) for b in (1, 64, 512) for n in (1, 2))


def test_a_long_context_makes_speculation_pay_at_large_batches():
    """Each row's cache is read once per step, however many tokens look at it."""
    found = planner(attention=LONG)
    assert found.speedup(256, 2, 50_000) > 1 > found.speedup(256, 2, 100)


def test_costs_are_found_again():
    true = LinearCost(1e-3, 2e-4, 3e-5, 4e-4)
    places = [(1, 1, 1), (1, 5, 5), (8, 8, 1), (8, 40, 5), (4, 8, 2)]
    found = LinearCost.fitted([(*place, true(*place)) for place in places])
    assert (found.per_step, found.per_row, found.per_token, found.per_depth) == pytest.approx((1e-3, 2e-4, 3e-5, 4e-4))


def test_fitted_costs_are_never_negative():
    """A larger batch that was measured faster, by noise, does not make rows pay back time."""
    found = LinearCost.fitted([(1, 1, 0, 2e-3), (8, 8, 0, 1e-3)])
    assert min(found.per_step, found.per_row, found.per_token) >= 0


def test_table_has_every_context_and_batch():
    rows = table(planner(attention=LONG), dense(LONG), [1, 64], [100, 1000])
    assert [(row["context"], row["batch_size"]) for row in rows] == [(100, 1), (100, 64), (1000, 1), (1000, 64)]
    first = rows[0]
    assert first["speedup"] == max(first["speedups"]) and len(first["speedups"]) == 4
    assert first["tokens_per_second"] == pytest.approx(first["plain_tokens_per_second"] * first["speedup"])
    assert rows[3]["memory_bytes"] == 2e9 + 64 * 1000 * 20_000


def test_negative_costs_are_refused():
    with pytest.raises(ValueError, match="a cost is 0 or more"):
        LinearCost(0, -1e-3, 0)
    with pytest.raises(ValueError, match="a cost is 0 or more"):
        LinearCost(0, float("nan"), 0)
    with pytest.raises(ValueError, match="draft ratio is -0.1"):
        CostRatio(-0.1, lambda rows, width, context: 1.0)
