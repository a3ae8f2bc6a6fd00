"""Step-cost curves T(M) from measured forwards: exact where measured, interpolated between, extended by a model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.interpolate import RegularGridInterpolator

from eval.plan.roofline import ForwardCost, Point

AXES = ("rows", "width", "context")


class Curve:
    """A `ForwardCost` from a full grid of measured forwards and a model of them.

    It is the model times a correction: at a measured point the measured time over the model's, between points linear in
    the logarithms of 1 + rows, 1 + width and 1 + context, and beyond the grid that of its nearest edge.

    Raises ValueError where the points are not a full grid, naming the first one that is missing or given twice."""

    def __init__(self, points: Sequence[Point], model: ForwardCost):
        self.model = model
        axes = [sorted({getattr(point, axis) for point in points}) for axis in AXES]
        found = {(point.rows, point.width, point.context): point for point in points}
        if len(found) < len(points):
            raise ValueError("step costs hold a point more than once: measure or give each once")
        ratios = np.empty([len(axis) for axis in axes])
        for place in np.ndindex(ratios.shape):
            key = tuple(axis[i] for axis, i in zip(axes, place, strict=True))
            if key not in found:
                raise ValueError(
                    f"step costs have no point at rows {key[0]}, width {key[1]}, context {key[2]}: they must be a full "
                    f"grid, every row count with every width and context"
                )
            ratios[place] = np.log(found[key].seconds / model(*key))
        self._varied = [i for i, axis in enumerate(axes) if len(axis) > 1]
        self._limits = [(axis[0], axis[-1]) for axis in axes]
        self._constant = ratios.item() if ratios.size == 1 else None
        if self._varied:
            logs = [np.log1p(axes[i]) for i in self._varied]
            self._ratio = RegularGridInterpolator(logs, ratios.squeeze())

    def __call__(self, rows: float, width: float, context: float) -> float:
        return self.model(rows, width, context) * math.exp(self._log_ratio((rows, width, context)))

    @property
    def largest(self) -> tuple[int, int, int]:
        """Rows, width and context up to which forwards were measured."""
        return tuple(high for _, high in self._limits)

    def _log_ratio(self, asked: tuple[float, float, float]) -> float:
        if self._constant is not None:
            return self._constant
        inside = [np.log1p(np.clip(asked[i], *self._limits[i])) for i in self._varied]
        return self._ratio(inside).item()
