"""What the decode loop and a drafter cost beside the target's forward, and how much of the drafts is accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from eval.plan.acceptance import Acceptance
from eval.plan.predict import LinearCost
from eval.plan.steady import Steady, steady
from specdec.contracts import Drafter


@dataclass(frozen=True)
class Calibration:
    """rest: processors, verification and the loop.   draft, acceptance: None without a drafter."""

    rest: LinearCost
    draft: LinearCost | None
    acceptance: Acceptance | None


def calibrate(
    model: PreTrainedModel, drafter: Drafter | None, draft_length: int, prompts: Sequence[Sequence[int]], steps: int
) -> Calibration:
    """From greedy decoding of one prompt alone and of all in one batch: plain, and with drafts of 1 and `draft_length`.

    Acceptance is that of the long drafts over all prompts; a shorter draft is the beginning of a longer one."""
    lengths = sorted({1, draft_length})
    drafted: list[Steady] = []
    plain = [steady(model, None, 0, group, steps) for group in (prompts[:1], prompts)]
    if drafter is None:
        return Calibration(rest_cost(plain), None, None)
    for group in (prompts[:1], prompts):
        drafted += [steady(model, drafter, length, group, steps) for length in lengths]
    longest = drafted[-1]
    acceptance = Acceptance.of_steps(zip(longest.drafted, longest.accepted, strict=True))
    return Calibration(rest_cost([*plain, *drafted]), draft_cost(drafted), acceptance)


def draft_cost(runs: Sequence[Steady]) -> LinearCost:
    """Of proposing and observing, by drafted tokens."""
    return LinearCost.fitted(
        [(run.rows, run.rows * run.mean_drafted, run.draft_length, run.seconds["draft"] / run.steps) for run in runs]
    )


def rest_cost(runs: Sequence[Steady]) -> LinearCost:
    """Of everything but the drafter and the target's forward, by packed tokens."""
    return LinearCost.fitted(
        [
            (run.rows, run.rows * (1 + run.mean_drafted), 0, (run.seconds["verify"] + run.seconds["loop"]) / run.steps)
            for run in runs
        ]
    )
