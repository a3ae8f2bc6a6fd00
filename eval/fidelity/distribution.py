"""Tests of the emitted tokens against p that need no reference samples, and what they could have seen.

Every result carries the smallest bias that its sample would have shown: passing says nothing without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats
from scipy.optimize import brentq

from eval.fidelity.samples import FUNCTIONS, Samples
from eval.fidelity.settings import ALPHA, CONFIDENCE, LEVEL, POWER


@dataclass(frozen=True)
class Statistic:
    """One test. `value` is z for a function, the distance for "pit", chi-square for "joint law".

    smallest: bias found with probability POWER at LEVEL: of f's mean for a function, a distance otherwise.
    bound:    upper bound, at CONFIDENCE, on the distance from p's law; None for a function.
    p_holm:   the p-value, corrected for all tests of the run (Holm 1979); compare it to ALPHA.
    """

    name: str
    tokens: int
    value: float
    p_value: float
    smallest: float
    bound: float | None = None
    p_holm: float = math.nan

    @property
    def failed(self) -> bool:
        return self.p_holm < ALPHA


def all_tests(samples: Iterable[Samples]) -> list[Statistic]:
    """All tests that the pooled samples allow, not yet corrected; independent requests and seeds only.

    A function without any variance over the sample (q = 0 or 1 throughout) has no test."""
    samples = list(samples)
    found = []
    for name in FUNCTIONS:
        rows = [row for sample in samples for row in sample[name] if row is not None]
        if rows and (test := function_test(name, np.array(rows))) is not None:
            found.append(test)
    pit = [u for sample in samples for u in sample["pit"] if u is not None]
    return [*found, transform_test(np.array(pit))] if pit else found


def function_test(name: str, rows: np.ndarray) -> Statistic | None:
    """rows: [n, 3] excess, variance and third moment of each token. z = sum of excesses / sqrt(sum of variances).

    The p-value is the larger of two: the normal law's, and that of Pearson's type III with the skewness that the third
    moments give. Where nearly all mass lies on one token, single rare tokens make up the sum and the normal law is far
    off; where only some positions are so, the short tail of type III ends before that of the sum."""
    excess, variance, third = rows.sum(0).tolist()
    if variance <= 0:
        return None
    z, skew = excess / math.sqrt(variance), third / variance**1.5
    p_value = min(1.0, 2 * max(float(min(law.sf(z), law.cdf(z))) for law in (stats.norm, stats.pearson3(skew))))
    detectable = float(stats.norm.isf(LEVEL / 2) + stats.norm.ppf(POWER)) * math.sqrt(variance) / len(rows)
    return Statistic(name, len(rows), z, p_value, detectable)


def transform_test(pit: np.ndarray) -> Statistic:
    """Kolmogorov-Smirnov of the transforms [n] against the uniform law; and, after Dvoretzky, Kiefer and Wolfowitz with
    Massart's constant, their law is nearer to uniform than the distance + sqrt(log(2 / (1 - CONFIDENCE)) / 2n)."""
    result = stats.kstest(pit, "uniform")
    smallest = _dkw(len(pit), LEVEL) + _dkw(len(pit), 1 - POWER)
    bound = min(1.0, result.statistic + _dkw(len(pit), 1 - CONFIDENCE))
    return Statistic("pit", len(pit), float(result.statistic), float(result.pvalue), smallest, bound)


def joint_test(cells: np.ndarray, law: np.ndarray, tokens: int) -> Statistic:
    """Chi-square of n draws (counts by `cells` [K]) against the exact `law` [K], the rarest cells pooled until each is
    expected 5 times.

    bound: on the total variation, from E TV(empirical, true) <= sqrt((K - 1) / n) / 2 and McDiarmid's inequality.
    A draw where the law has no mass fails for certain."""
    n, K = cells.sum(), len(cells)
    possible = law.argsort()[(law == 0).sum() :]  # the rarest first
    observed, expected = cells[possible], n * law[possible]
    pooled = max((expected < 5).sum(), np.searchsorted(expected.cumsum(), 5) + 1)
    observed, expected = (np.append(x[:pooled].sum(), x[pooled:]) for x in (observed, expected))
    statistic, degrees = float(((observed - expected) ** 2 / expected).sum()), max(1, len(expected) - 1)
    p_value = float(stats.chi2.sf(statistic, degrees))
    if cells[law == 0].any():
        statistic, p_value = math.inf, 0.0
    spread = math.sqrt((K - 1) / n) / 2
    distance = np.abs(cells / n - law).sum() / 2
    bound = min(1.0, distance + spread + math.sqrt(math.log(1 / (1 - CONFIDENCE)) / (2 * n)))
    return Statistic("joint law", tokens, statistic, p_value, _chi_square_detectable(n, degrees), bound)


def corrected(tests: Sequence[Statistic]) -> list[Statistic]:
    """The tests with Holm's correction, which holds however they depend on each other; in the order given."""
    order = sorted(range(len(tests)), key=lambda i: tests[i].p_value)
    holm, running = [0.0] * len(tests), 0.0
    for rank, i in enumerate(order):
        running = max(running, min(1.0, (len(tests) - rank) * tests[i].p_value))
        holm[i] = running
    return [replace(test, p_holm=p) for test, p in zip(tests, holm, strict=True)]


def _dkw(n: int, alpha: float) -> float:
    """Distance that the empirical law of n draws exceeds with probability alpha at most."""
    return math.sqrt(math.log(2 / alpha) / (2 * n))


def _chi_square_detectable(n: int, degrees: int) -> float:
    """Total variation over the pooled cells that is detected with probability POWER: chi-square distance >= 4 TV^2."""
    critical = stats.chi2.isf(LEVEL, degrees)
    noncentrality = brentq(lambda c: stats.ncx2.sf(critical, degrees, c) - POWER, 1e-9, 1e6)
    return math.sqrt(noncentrality / n) / 2
