"""Prediction against measurement, on machines of known speed; `specdec plan check` is for real ones."""

import random

import pytest

import eval.plan.check
from eval.plan.acceptance import Acceptance
from eval.plan.check import TOLERANCE, check_batches, compare, within
from eval.plan.predict import LinearCost, MeasuredCost, Planner
from eval.plan.steady import Steady

ACCEPTED = (0.8,) * 6
REST, DRAFT = LinearCost(1e-3, 1e-4, 1e-5), LinearCost(2e-4, 1e-5, 0)


def forward(rows, width, context):
    return 0.02 + 0.001 * rows * width + 1e-6 * context


def machine(model, drafter, length, prompts, steps):
    """A loop whose steps take what the costs above say, within 3 %, and accept with the probabilities above."""
    rng, rows = random.Random(len(prompts) + length), len(prompts)
    accepted = [
        next((depth for depth in range(length) if rng.random() > ACCEPTED[depth]), length) for _ in range(rows * steps)
    ]
    seconds = {
        "draft": DRAFT(rows, rows * length, length) if length else 0,
        "forward": forward(rows, 1 + length, 100),
        "verify": REST(rows, rows * (1 + length)),
        "loop": 0,
    }
    noisy = {phase: steps * spent * rng.uniform(0.97, 1.03) for phase, spent in seconds.items()}
    return Steady(rows, length, steps, [length] * (rows * steps), accepted, noisy, 100.0)


def compared(planner: Planner, monkeypatch) -> list[dict]:
    monkeypatch.setattr(eval.plan.check, "steady", machine)
    return compare(planner, None, object(), [[1]] * 8, [1, 4, 8], [1, 6], steps=400)


def test_a_planner_that_knows_the_machine_is_within_tolerance(monkeypatch):
    right = Planner(forward, REST, MeasuredCost(DRAFT), Acceptance.given(ACCEPTED))
    rows = compared(right, monkeypatch)
    assert [(row["batch_size"], row["draft_length"]) for row in rows] == [(b, n) for b in (1, 4, 8) for n in (1, 6)]
    assert within(rows) and max(abs(row["error"]) for row in rows) < 0.1


def test_a_planner_for_which_drafts_are_free_to_verify_is_caught(monkeypatch):
    """Broken control: a forward over the draft taken to cost what one over a token per row does."""
    wrong = Planner(
        lambda rows, width, context: forward(rows, 1, context), REST, MeasuredCost(DRAFT), Acceptance.given(ACCEPTED)
    )
    rows = compared(wrong, monkeypatch)
    assert not within(rows) and rows[-1]["error"] > TOLERANCE


def test_a_planner_that_takes_acceptance_as_unconditional_is_caught(monkeypatch):
    """Broken control: 0.8, 0.64, ... are the shares of steps that accept so deep, not what is planned with."""
    wrong = Planner(forward, REST, MeasuredCost(DRAFT), Acceptance.given([0.8**depth for depth in range(1, 7)]))
    assert not within(compared(wrong, monkeypatch))


def test_prompts_that_do_not_fill_batches_are_refused():
    check_batches([[1]] * 8, [1, 2, 4, 8])
    with pytest.raises(ValueError, match="8 prompts do not fill batches of 3"):
        check_batches([[1]] * 8, [1, 3])
