"""Speculation's speed-up by batch size, draft length and context, from a step's costs and what is accepted."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from scipy.optimize import nnls

from eval.plan.acceptance import Acceptance
from eval.plan.roofline import ForwardCost
from eval.plan.shape import ModelShape
from eval.theory import ideal_speedup

LARGEST_BATCH = 512
EXACT_BATCH = 8  # beyond it what rows draft differs too little between steps to be added up exactly


@dataclass(frozen=True)
class LinearCost:
    """Seconds of a part of a step: so much per step, per row, per token that the part works on, and, where it works
    depth by depth as a draft model does, per depth."""

    per_step: float
    per_row: float
    per_token: float
    per_depth: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= part < math.inf for part in (self.per_step, self.per_row, self.per_token, self.per_depth)):
            raise ValueError(f"{self} has an impossible part: a cost is 0 or more, and finite")

    def __call__(self, rows: float, tokens: float, depth: float = 0) -> float:
        return self.per_step + self.per_row * rows + self.per_token * tokens + self.per_depth * depth

    @staticmethod
    def fitted(measured: Sequence[tuple[float, float, float, float]]) -> LinearCost:
        """To (rows, tokens, depth, seconds), by least squares among costs that are not negative."""
        *features, seconds = np.array(measured, dtype=float).T
        return LinearCost(*nnls(np.stack([np.ones_like(seconds), *features], axis=1), seconds)[0].tolist())


class DraftCost(Protocol):
    """Seconds that drafting takes for `rows` rows, `drafted` tokens each on average and `draft_length` at most."""

    def __call__(self, rows: float, drafted: float, draft_length: int, context: float) -> float: ...


@dataclass(frozen=True)
class MeasuredCost:
    """A drafter whose cost was measured; it is taken to be the same whatever the target and the context."""

    cost: LinearCost

    def __call__(self, rows: float, drafted: float, draft_length: int, context: float) -> float:
        return self.cost(rows, rows * drafted, draft_length)


@dataclass(frozen=True)
class DraftModel:
    """A smaller model that drafts token by token: one forward of one token per row and drafted token."""

    forward: ForwardCost

    def __call__(self, rows: float, drafted: float, draft_length: int, context: float) -> float:
        return draft_length * self.forward(rows, 1, context)


@dataclass(frozen=True)
class CostRatio:
    """Leviathan's c: a drafted token costs `c` times the target's forward of one token per row."""

    c: float
    target: ForwardCost

    def __post_init__(self) -> None:
        if not 0 <= self.c < math.inf:
            raise ValueError(
                f"the draft ratio is {self.c}: give the drafter's time per token over the target's, 0 or more"
            )

    def __call__(self, rows: float, drafted: float, draft_length: int, context: float) -> float:
        return self.c * draft_length * self.target(rows, 1, context)


@dataclass(frozen=True)
class Planner:
    """Everything that a speed-up follows from.

    forward: the target's.   rest: processors, verification and the loop, by packed tokens.   draft: the drafter's.
    """

    forward: ForwardCost
    rest: LinearCost
    draft: DraftCost
    acceptance: Acceptance

    def plain_seconds(self, batch: int, context: float) -> float:
        """A step of plain decoding."""
        return self.forward(batch, 1, context) + self.rest(batch, batch)

    def parts(self, batch: int, draft_length: int, context: float) -> dict[str, float]:
        """Mean seconds of the parts of a speculative step, named as `eval.theory.ideal_speedup` does."""
        drafted = self.acceptance.mean_drafted(draft_length)
        return {
            "t_draft": self.draft(batch, drafted, draft_length, context),
            "t_verify": self._forward(batch, draft_length, context),
            "t_sample": self.rest(batch, batch * (1 + drafted)),
        }

    def _forward(self, batch: int, draft_length: int, context: float) -> float:
        """Mean seconds of the target's forward over what the rows of a step draft.

        A forward's time is no straight line in its width, so its mean is not its time at the mean width; that is dear
        where a drafter often finds nothing. The rows are taken to draft independently of each other: their mean is
        exact up to EXACT_BATCH, and has one row's law drawn in about its mean, to its own variance, beyond."""
        mean, law = self.acceptance.mean_drafted(draft_length), self.acceptance.drafted_shares(draft_length)
        rows = batch if batch <= EXACT_BATCH else 1
        totals = functools.reduce(np.convolve, [law] * rows)  # by what `rows` rows draft in all: 0, 1, ...
        narrower = math.sqrt(rows / batch)
        return sum(
            share * self.forward(batch, 1 + mean + (total / rows - mean) * narrower, context)
            for total, share in enumerate(totals)
            if share
        )

    def speedup(self, batch: int, draft_length: int, context: float) -> float:
        """Ideal speed-up over plain decoding at the same batch size; 1 for draft length 0, which is plain decoding."""
        if draft_length == 0:
            return 1.0
        plain, parts = self.plain_seconds(batch, context), self.parts(batch, draft_length, context)
        return ideal_speedup(self.acceptance.length(draft_length), plain, **parts)

    def best_length(self, batch: int, context: float) -> int:
        """The fastest draft length; 0 where none is faster than plain decoding."""
        return max(range(self.acceptance.depth + 1), key=lambda length: self.speedup(batch, length, context))

    def paying(self, context: float) -> list[tuple[int, int]]:
        """All runs (first, last) of batch sizes up to LARGEST_BATCH at which some draft length beats plain decoding.

        For a dense model the first begins at 1; a model with experts may begin to pay later, once plain decoding wakes
        most of them too."""
        runs = itertools.groupby(
            range(1, LARGEST_BATCH + 1),
            key=lambda batch: any(
                self.speedup(batch, length, context) > 1 for length in range(1, self.acceptance.depth + 1)
            ),
        )
        groups = [list(batches) for pays, batches in runs if pays]
        return [(batches[0], batches[-1]) for batches in groups]


def table(
    planner: Planner, shape: ModelShape, batch_sizes: Sequence[int], contexts: Sequence[int]
) -> list[dict[str, Any]]:
    """One row per context and batch size, for JSON, tables and plots.

    memory_bytes: weights and all rows' keys and values; whether they fit the device is the reader's to see.
    speedups: by draft length, from 1 on."""
    return [_row(planner, shape, batch, context) for context in contexts for batch in batch_sizes]


def _row(planner: Planner, shape: ModelShape, batch: int, context: int) -> dict[str, Any]:
    best = planner.best_length(batch, context)
    plain = batch / planner.plain_seconds(batch, context)
    speedup = planner.speedup(batch, best, context)
    return {
        "context": context,
        "batch_size": batch,
        "plain_tokens_per_second": plain,
        "best_draft_length": best,
        "mean_accepted_length": planner.acceptance.length(best),
        "speedup": speedup,
        "tokens_per_second": plain * speedup,
        "speedups": [planner.speedup(batch, length, context) for length in range(1, planner.acceptance.depth + 1)],
        "memory_bytes": shape.stored_weights * shape.itemsize + batch * shape.kv_bytes(context),
    }
