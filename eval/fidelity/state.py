"""How far the engine's scores lie from teacher forcing's where nothing is wrong, and which results lie outside that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from eval.fidelity.ladder import PLAIN, PLAIN_BATCHED
from eval.fidelity.results import Result

FACTOR = (
    4.0  # largest shift of a correct run / largest one of the plain runs: rounding stays below, a wrong cache above
)


@dataclass(frozen=True)
class Envelope:
    """plain: largest shift of the plain runs, at batch 1 and at the run's; limit: what a correct run stays below."""

    plain: float
    limit: float

    @staticmethod
    def of(results: Iterable[Result], dtype: torch.dtype) -> Envelope:
        """dtype: the serving one. A shift below one unit in the last place of the largest score is never too much."""
        plain = [r for r in results if r.rung in (PLAIN.number, PLAIN_BATCHED.number)]
        largest = max((abs(shift) for r in plain for shift in r.shifts if shift is not None), default=0.0)
        magnitude = max((abs(score) for r in plain for score in r.scores), default=0.0)
        unit = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)  # scores are processed in float32
        return Envelope(largest, FACTOR * max(largest, unit * magnitude))

    def first_outside(self, result: Result) -> int | None:
        """Position of the result's first token whose score is shifted by more than the limit."""
        return next((i for i, x in enumerate(result.shifts) if x is not None and abs(x) > self.limit), None)
