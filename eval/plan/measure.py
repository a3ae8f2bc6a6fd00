"""Measures what `specdec plan` predicts from: the packed forward over a grid, a copy and a matrix product."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from eval.plan.roofline import Device, Point
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
    copy = median_seconds(lambda: destination.copy_(source), device)
    side = MATRIX[kind]
    a, b = torch.ones(2, side, side, dtype=dtype, device=device)
    product = median_seconds(lambda: a @ b, device)
    return Device(bandwidth=COPY_BYTES[kind] / copy, compute=2 * side**3 / product)


def median_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Of REPEATS calls after one that does not count."""
    return statistics.median([timed(call, device) for _ in range(REPEATS + 1)][1:])


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, the device's work included."""
    synchronize(device)
    started = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - started


def synchronize(device: torch.device) -> None:
    """Wait for the device's queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_forwards(
    model: PreTrainedModel, rows: Sequence[int], widths: Sequence[int], contexts: Sequence[int], repeats: int
) -> list[Point]:
    """Median seconds of the target's packed forward at every point of the grid; all are measured once per round, so
    that a slow spell of the machine hits all alike.

    Raises ValueError for an empty or repeated axis, for sizes below 1 and for more positions than the model has."""
    target = Target(model)
    check_grid(rows, widths, contexts, target.max_positions)
    seconds: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for _ in range(repeats):
        for context in contexts:
            for count in rows:
                for width, spent in _round(target, count, widths, context):
                    seconds[count, width, context].append(spent)
    return [Point(*place, statistics.median(times)) for place, times in seconds.items()]


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


def _round(target: Target, rows: int, widths: Sequence[int], context: int) -> Iterator[tuple[int, float]]:
    """Each width once, over the same cache, after a forward that allocates it. What the cache holds does not change the
    time: zeros. A step is packed anew each time, since it keeps its masks, which are part of the forward's time."""
    cache = target.new_cache()
    cache.admit(range(rows))
    token = np.zeros(1, dtype=np.int64)
    segments = [Segment(row, token, context, scored=True) for row in range(rows)]

    def forward(width: int) -> float:
        tokens = torch.zeros(rows, width - 1, dtype=torch.long, device=target.device)
        step = target.pack(segments, Draft(tokens, [width - 1] * rows), cache)
        return timed(lambda: target.forward(step, cache), target.device)

    forward(max(widths))
    for width in widths:
        yield width, forward(width)
