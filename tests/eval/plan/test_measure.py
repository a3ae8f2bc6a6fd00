"""What is measured on tiny models: the grid, the device, and the loop's steps against those of `generate`."""

import itertools
from dataclasses import replace

import pytest
import torch

import specdec
from drafters.ngram import NGramDrafter
from eval.plan.calibrate import calibrate
from eval.plan.measure import check_grid, measure_device, measure_forwards
from eval.plan.steady import WARM_UP, Steady, steady
from specdec.contracts import BaseDrafter
from specdec.stats import PHASES
from tests.tiny_models import tiny

STEPS = 30
PROMPTS = [[5, 6, 7, 8, 5, 6, 7], [9] * 5, [1, 2, 3, 4, 5, 6]]


@pytest.fixture(scope="module")
def model():
    return tiny("llama", dtype=torch.float32)


def test_every_point_of_the_grid_is_measured(model):
    points = measure_forwards(model, [1, 3], [1, 2, 5], [8, 40], repeats=2)
    assert {(p.rows, p.width, p.context) for p in points} == set(itertools.product([1, 3], [1, 2, 5], [8, 40]))
    assert len(points) == 12 and all(p.seconds > 0 for p in points)


def test_the_forwards_measured_have_the_asked_shape(model):
    """Seen from inside the model: packed tokens, and positions after the context."""
    seen = set()

    def look(module, args, kwargs):
        positions = kwargs["position_ids"]
        seen.add((positions.shape[1], positions.min().item(), positions.max().item()))

    handle = model.get_decoder().register_forward_pre_hook(look, with_kwargs=True)
    try:
        measure_forwards(model, [3], [1, 4], [20], repeats=1)
    finally:
        handle.remove()
    assert seen == {(3, 20, 20), (12, 20, 23)}


def test_the_device_is_measured():
    found = measure_device(torch.device("cpu"), torch.float32)
    assert 1e8 < found.bandwidth < 1e13 and 1e8 < found.compute < 1e15


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        (([], [1], [8]), "batch sizes are"),
        (([1, 1], [1], [8]), "different positive"),
        (([1], [0], [8]), "widths are"),
        (([1], [2], [255]), "256 positions"),
    ],
)
def test_grids_that_cannot_be_measured_are_refused(grid, said):
    with pytest.raises(ValueError, match=said):
        check_grid(*grid, max_positions=256)


@pytest.mark.parametrize("length", [1, 4])
def test_steps_are_those_of_generate(model, length):
    """A prompt alone is prefilled in one step, so its steps are generate's own after the warm-up."""
    found = steady(model, NGramDrafter(min_n=1), length, PROMPTS[:1], STEPS)
    _, stats = specdec.generate(
        model,
        torch.tensor(PROMPTS[:1]),
        attention_mask=torch.ones(1, len(PROMPTS[0]), dtype=torch.long),
        drafter=NGramDrafter(min_n=1),
        draft_length=length,
        return_stats=True,
        do_sample=False,
        max_new_tokens=(WARM_UP + STEPS) * (length + 1) + 1,
    )
    counted = slice(WARM_UP, WARM_UP + STEPS)
    assert found.accepted == stats.rows[0].accepted[counted] and sum(found.accepted) > 0
    assert found.drafted == stats.rows[0].drafted[counted]


def test_a_steady_run_counts_every_row_and_step(model):
    found = steady(model, NGramDrafter(min_n=1), 3, PROMPTS, STEPS)
    assert len(found.accepted) == len(found.drafted) == found.rows * STEPS == 90
    assert found.seconds.keys() == set(PHASES) and all(spent > 0 for spent in found.seconds.values())
    assert found.step_seconds == pytest.approx(sum(found.seconds.values()) / STEPS)
    assert min(map(len, PROMPTS)) < found.context < max(map(len, PROMPTS)) + 4 * (WARM_UP + 1 + STEPS)


def test_the_drafter_is_released_even_where_a_step_fails(model):
    released = []

    class Recorded(BaseDrafter):
        name, release = "recorded", staticmethod(released.extend)
        propose = staticmethod(NGramDrafter().propose)

    drafter = Recorded()
    with pytest.raises(ValueError, match="positions"):
        steady(model, drafter, 3, [[1] * 250], STEPS)
    assert released == []  # refused before it was admitted
    steady(model, drafter, 3, PROMPTS, STEPS)
    assert sorted(released) == [0, 1, 2]


def test_trees_are_refused(model):
    """Accepted tokens are counted by depth and costs by node, so that neither says what the other is worth."""

    class Trees(NGramDrafter):
        trimmable = False

        def propose(self, rows, budget, draws):
            draft = super().propose(rows, budget, draws)
            return replace(draft, parents=torch.full_like(draft.tokens, -1))

    with pytest.raises(ValueError, match="'ngram' drafts trees: give one that drafts chains"):
        steady(model, Trees(min_n=1), 3, PROMPTS, STEPS)


def test_joined_runs_by_hand():
    one = Steady(2, 3, 4, [3] * 8, [1] * 8, dict.fromkeys(PHASES, 1.0), 10.0)
    other = Steady(2, 3, 4, [3] * 8, [3] * 8, dict.fromkeys(PHASES, 2.0), 20.0)
    both = Steady.joined([one, other])
    assert (both.steps, both.context, both.mean_accepted_length) == (8, 15.0, 3.0)
    assert both.step_seconds == pytest.approx(12 / 8)
    assert both.tokens_per_second == pytest.approx(2 * 3 / 1.5)


def test_calibration_counts_acceptance_over_all_prompts(model):
    found = calibrate(model, NGramDrafter(min_n=1), 4, PROMPTS, STEPS)
    run = steady(model, NGramDrafter(min_n=1), 4, PROMPTS, STEPS)
    assert found.acceptance.length(4) == pytest.approx(run.mean_accepted_length)
    assert found.acceptance.mean_drafted(4) == pytest.approx(run.mean_drafted)
    assert found.rest(3, 6) > 0 and found.draft(3, 6, 2) > 0


def test_calibration_without_a_drafter(model):
    found = calibrate(model, None, 0, PROMPTS, STEPS)
    assert found.draft is None and found.acceptance is None and found.rest(3, 3) > 0
