"""The time of a target's forward from what it reads and computes: a roofline model, and its fit to measured forwards.

The roofline model (Williams, Waterman and Patterson 2009): an operation takes as long as its memory traffic or its
arithmetic, whichever is longer. Here it is applied to a step's linear layers and to its attention one by one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy.optimize import least_squares

from eval.plan.shape import ModelShape

PRIOR = 0.1  # how much a factor between fitted and measured bandwidth counts against the same factor in a step's time
OVERHEADS = (1e-9, 1e-1)  # seconds per layer between which the fit looks


class ForwardCost(Protocol):
    """Seconds of the target's forward of `rows` rows with `width` packed tokens and `context` cached tokens each."""

    def __call__(self, rows: float, width: float, context: float) -> float: ...


@dataclass(frozen=True)
class Device:
    """bandwidth: bytes/s.   compute: FLOP/s.   layer_overhead: seconds per layer that neither explains.

    overlap: how much of the shorter of memory traffic and arithmetic hides behind the longer: 1 is the roofline, 0
             means one after the other.
    """

    bandwidth: float
    compute: float
    layer_overhead: float = 0.0
    overlap: float = 1.0

    def __post_init__(self) -> None:
        if not (0 < self.bandwidth < math.inf and 0 < self.compute < math.inf):
            raise ValueError(
                f"the device has a bandwidth of {self.bandwidth:g} bytes/s and a compute of {self.compute:g} FLOP/s: "
                f"both must be positive and finite"
            )
        if not 0 <= self.layer_overhead < math.inf or not 0 <= self.overlap <= 1:
            raise ValueError(
                f"the overhead per layer is {self.layer_overhead} s and the overlap {self.overlap}: the first may not "
                f"be negative, the second is between 0 and 1"
            )

    def seconds(self, read: float, flops: float) -> float:
        """Of an operation that reads `read` bytes and computes `flops`."""
        memory, arithmetic = read / self.bandwidth, flops / self.compute
        return max(memory, arithmetic) + (1 - self.overlap) * min(memory, arithmetic)


@dataclass(frozen=True)
class Roofline:
    """A `ForwardCost` for any model on any device.

    Worked example: 1e9 weights of 2 bytes on 1e12 bytes/s and 1e14 FLOP/s, no attention: reading takes 2 ms and a token
    20 us of arithmetic, so 1 to 100 packed tokens take 2 ms, and 200 take 4 ms."""

    shape: ModelShape
    device: Device

    def __call__(self, rows: float, width: float, context: float) -> float:
        tokens, seen = rows * width, context + width
        linear = self.device.seconds(self.shape.weight_bytes(tokens), self.shape.weight_flops(tokens))
        attention = self.device.seconds(rows * self.shape.kv_bytes(seen), tokens * self.shape.attention_flops(seen))
        return self.shape.layers * self.device.layer_overhead + linear + attention


@dataclass(frozen=True)
class Point:
    """One measured forward: seconds with `rows` rows of `width` packed tokens and `context` cached tokens each."""

    rows: int
    width: int
    context: int
    seconds: float

    def __post_init__(self) -> None:
        if min(self.rows, self.width) < 1 or self.context < 0 or not 0 < self.seconds < math.inf:
            raise ValueError(f"{self} is not a measured forward: rows, width and seconds are positive, and finite")


def fit(points: Sequence[Point], shape: ModelShape, measured: Device) -> Device:
    """The device whose roofline model comes closest, in relative error, to measured forwards of `shape`.

    measured: bandwidth of a copy and compute of a matrix product. What the points do not tell (one model's curve cannot
    tell its weights' reading from an overhead) stays near it: a Gaussian prior on the logarithms, of weight PRIOR."""
    seconds = np.array([point.seconds for point in points])
    anchor = np.log([measured.bandwidth, measured.compute])

    def device(x: np.ndarray) -> Device:
        return Device(np.exp(x[0]), np.exp(x[1]), np.exp(x[2]), x[3])

    def residuals(x: np.ndarray) -> np.ndarray:
        roofline = Roofline(shape, device(x))
        predicted = np.array([roofline(point.rows, point.width, point.context) for point in points])
        return np.concatenate([np.log(predicted / seconds), PRIOR * (x[:2] - anchor)])

    lowest, highest = np.log(OVERHEADS)
    start = [*anchor, np.log(0.1 * seconds.min() / shape.layers).clip(lowest, highest), 0.5]
    bounds = [-np.inf, -np.inf, lowest, 0.0], [np.inf, np.inf, highest, 1.0]
    return device(least_squares(residuals, start, bounds=bounds).x)
