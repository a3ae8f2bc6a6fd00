"""Measures what `specdec plan` predicts from: the packed forward over a grid, a copy and a matrix product."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from eval.plan.roofline import Device, Point
from eval.timing import interleaved
from specdec.cache import SlotCache
from specdec.contracts import Draft
from specdec.step import Segment
from specdec.target import Target

COPY_BYTES = {"cuda": 2**31, "cpu": 2**27}  # read and written: far more than any cache holds
MATRIX = {"cuda": 8192, "cpu": 1024}  # side of the square matrices of the product
REPEATS = 5


def measure_device(device: torch.device, dtype: torch.dtype) -> Device:
    """Bandwidth of a copy (bytes read and written per second) and FLOP/s of a matrix product in `dtype`."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    source = torch.zeros(COPY_BYTES[kind] // 2, dtype=torch.uint8, device=device)
    destination = torch.zeros_like(source)
    side = MATRIX[kind]
    a, b = torch.ones(2, side, side, dtype=dtype, device=device)
    seconds = interleaved({"copy": lambda: destination.copy_(source), "product": lambda: a @ b}, REPEATS, device)
    copied, multiplied = (statistics.median(seconds[name]) for name in ("copy", "product"))
    return Device(bandwidth=COPY_BYTES[kind] / copied, compute=2 * side**3 / multiplied)


def measure_forwards(
    model: PreTrainedModel, rows: Sequence[int], widths: Sequence[int], contexts: Sequence[int], repeats: int
) -> list[Point]:
    """Median seconds of the target's packed forward at every point of the grid, all of it once per round.

    Raises ValueError for an empty or repeated axis, for sizes below 1 and for more positions than the model has."""
    calls, _ = forward_calls(model, rows, widths, contexts, repeats + 1)  # `interleaved` runs one that does not count
    seconds = interleaved(calls, repeats, model.device)
    return [Point(*place, statistics.median(times)) for place, times in seconds.items()]


def forward_calls(
    model: PreTrainedModel,
    rows: Sequence[int],
    widths: Sequence[int],
    contexts: Sequence[int],
    times: int,
    compile: bool = False,
) -> tuple[dict[tuple[int, int, int], Callable[[], Any]], SlotCache]:
    """The target's packed forward at every (rows, width, context) of the grid, each to be called `times` times, and the
    cache that they share. compile: through a compiled graph. Raises ValueError as `measure_forwards` does."""
    target = Target(model)
    check_grid(rows, widths, contexts, target.max_positions)
    target.compile(compile)
    cache = target.new_cache()
    cache.admit(range(max(rows)))
    cache.reserve(max(contexts) + max(widths))
    return {place: _forward(target, cache, *place, times) for place in product(rows, widths, contexts)}, cache


def check_grid(rows: Sequence[int], widths: Sequence[int], contexts: Sequence[int], max_positions: int | None) -> None:
    """Raises ValueError for a grid that cannot be measured."""
    for name, axis in {"batch sizes": rows, "widths": widths, "contexts": contexts}.items():
        if not axis or min(axis) < 1 or len(set(axis)) < len(axis):
            raise ValueError(f"{name} are {list(axis)}: give one or more different positive numbers")
    if max_positions is not None and max(contexts) + max(widths) > max_positions:
        raise ValueError(
            f"a context of {max(contexts)} with {max(widths)} tokens per row is more than the model's {max_positions} "
            f"positions: give shorter contexts"
        )


def _forward(
    target: Target, cache: SlotCache, rows: int, width: int, context: int, calls: int
) -> Callable[[], tuple[Tensor, Tensor | None]]:
    """A forward of the first `rows` rows of the cache, to be called `calls` times. What the cache holds does not change
    the time: zeros. Each call has a step of its own, since a step keeps its masks, which are part of the time."""
    segments = [Segment(row, np.zeros(1, dtype=np.int64), context, scored=True) for row in range(rows)]
    draft = Draft(torch.zeros(rows, width - 1, dtype=torch.long, device=target.device), [width - 1] * rows)
    steps = iter([target.pack(segments, draft, cache) for _ in range(calls)])
    return lambda: target.forward(next(steps), cache)
