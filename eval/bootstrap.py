"""Confidence intervals of ratios, by resampling prompts: tokens of one prompt are not independent of each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import stats

LEVEL = 0.95
RESAMPLES = 2_000


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> list[float] | None:
    """Percentile bootstrap interval, at LEVEL, of sum(numerators) / sum(denominators), one pair per prompt.

    Prompts with a denominator of 0 say nothing about the ratio and are left out; None for fewer than two others.
    The resamples are the same at every call, so that a report rebuilt from its results does not change."""
    pairs = np.array([pair for pair in zip(numerators, denominators, strict=True) if pair[1] > 0], dtype=float)
    if len(pairs) < 2:
        return None
    found = stats.bootstrap(
        (pairs[:, 0], pairs[:, 1]),
        lambda above, below, axis: above.sum(axis) / below.sum(axis),
        paired=True,
        vectorized=True,
        method="percentile",
        confidence_level=LEVEL,
        n_resamples=RESAMPLES,
        rng=np.random.default_rng(0),
    )
    return [float(found.confidence_interval.low), float(found.confidence_interval.high)]
