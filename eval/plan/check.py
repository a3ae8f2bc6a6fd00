"""Prediction against measurement: the decode loop's speed-up at several batch sizes and draft lengths, both ways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from eval.plan.predict import Planner
from eval.plan.steady import Steady, steady
from specdec.contracts import Drafter

TOLERANCE = 0.15  # relative error of a predicted speed-up


def compare(
    planner: Planner,
    model: PreTrainedModel,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    batch_sizes: Sequence[int],
    draft_lengths: Sequence[int],
    steps: int,
) -> list[dict[str, Any]]:
    """One row per batch size and draft length. All prompts are run at every batch size, in batches of it, and every
    draft length and plain decoding in turn on each batch, so that a slow spell of the machine hits all alike."""
    rows = []
    for size in batch_sizes:
        runs: dict[int, list[Steady]] = {length: [] for length in (0, *draft_lengths)}
        for first in range(0, len(prompts), size):
            for length, done in runs.items():
                group = prompts[first : first + size]
                done.append(steady(model, drafter if length else None, length, group, steps))
        plain = Steady.joined(runs[0])
        rows += [_row(planner, plain, Steady.joined(runs[length])) for length in draft_lengths]
    return rows


def check_batches(prompts: Sequence[Sequence[int]], batch_sizes: Sequence[int]) -> None:
    """Raises ValueError where the prompts do not fill batches of a size."""
    for size in batch_sizes:
        if size < 1 or len(prompts) % size:
            raise ValueError(f"{len(prompts)} prompts do not fill batches of {size}: give a multiple of it as --limit")


def _row(planner: Planner, plain: Steady, speculative: Steady) -> dict[str, Any]:
    size, length, context = speculative.rows, speculative.draft_length, speculative.context
    predicted = planner.speedup(size, length, context)
    measured = speculative.tokens_per_second / plain.tokens_per_second
    return {
        "batch_size": size,
        "draft_length": length,
        "context": context,
        "predicted_length": planner.acceptance.length(length),
        "measured_length": speculative.mean_accepted_length,
        "predicted_plain_step_ms": 1e3 * planner.plain_seconds(size, plain.context),
        "measured_plain_step_ms": 1e3 * plain.step_seconds,
        "predicted_step_ms": 1e3 * sum(planner.parts(size, length, context).values()),
        "measured_step_ms": 1e3 * speculative.step_seconds,
        "predicted_speedup": predicted,
        "measured_speedup": measured,
        "error": predicted / measured - 1,
    }


def within(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether every predicted speed-up is within TOLERANCE of the measured one."""
    return all(abs(row["error"]) <= TOLERANCE for row in rows)
