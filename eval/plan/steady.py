"""Runs the real decode loop in its steady state, where no row ends, and counts and times its steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from eval.endless import endless
from eval.timing import synchronize
from specdec.contracts import Draft, Drafter, Draws
from specdec.loop import CHUNK, Batch
from specdec.requests import Request
from specdec.stats import PHASES, Clock, Stats
from specdec.target import Target

WARM_UP = 2  # decode steps that do not count


@dataclass(frozen=True)
class Steady:
    """Decode steps of one or more batches of `rows` rows each, all of them live all the time.

    drafted, accepted: one entry per row and step.   seconds: by phase, over all `steps` steps.   context: mean cached
    tokens of a row.   draft_length: 0 for plain decoding.
    """

    rows: int
    draft_length: int
    steps: int
    drafted: list[int]
    accepted: list[int]
    seconds: dict[str, float]
    context: float

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values()) / self.steps

    @property
    def mean_accepted_length(self) -> float:
        return 1 + sum(self.accepted) / len(self.accepted)

    @property
    def mean_drafted(self) -> float:
        return sum(self.drafted) / len(self.drafted)

    @property
    def tokens_per_second(self) -> float:
        return self.rows * self.mean_accepted_length / self.step_seconds

    @staticmethod
    def joined(parts: Sequence[Steady]) -> Steady:
        """Batches of equal size and number of steps as one."""
        return Steady(
            rows=parts[0].rows,
            draft_length=parts[0].draft_length,
            steps=sum(part.steps for part in parts),
            drafted=[count for part in parts for count in part.drafted],
            accepted=[count for part in parts for count in part.accepted],
            seconds={phase: sum(part.seconds[phase] for part in parts) for phase in PHASES},
            context=float(np.mean([part.context for part in parts])),
        )


def steady(
    model: PreTrainedModel,
    drafter: Drafter | None,
    draft_length: int,
    prompts: Sequence[Sequence[int]],
    steps: int,
    compile: bool = False,
) -> Steady:
    """Greedy decoding of all `prompts` (token ids) in one batch: `steps` steps after its prefill and a short warm-up.

    compile: the target's forwards are compiled, the drafter's as it is set to. Stop tokens are ordinary tokens here.
    Raises ValueError where a prompt leaves no room for the steps, and for trees.
    """
    with warm(model, drafter, draft_length, prompts, steps, compile) as batch:
        first = [len(request.stats.accepted) for request in batch.requests]
        before = dict(batch.stats.seconds)
        contexts = []
        for _ in range(steps):
            contexts.extend(batch.cache.lengths.values())
            batch.step()
    rows = [request.stats for request in batch.requests]
    return Steady(
        rows=len(prompts),
        draft_length=draft_length,
        steps=steps,
        drafted=[n for row, start in zip(rows, first, strict=True) for n in row.drafted[start:]],
        accepted=[n for row, start in zip(rows, first, strict=True) for n in row.accepted[start:]],
        seconds={phase: batch.stats.seconds[phase] - before[phase] for phase in PHASES},
        context=float(np.mean(contexts)),
    )


@contextmanager
def warm(
    model: PreTrainedModel,
    drafter: Drafter | None,
    draft_length: int,
    prompts: Sequence[Sequence[int]],
    steps: int,
    compile: bool = False,
) -> Iterator[Batch]:
    """A batch after its prefill and a few steps, to be stepped `steps` times at most. compile: as for `steady`, which
    raises the same."""
    batch = _batch(model, drafter, draft_length, prompts, steps)
    batch.target.compile(compile)
    try:
        while any(request.steps <= WARM_UP for request in batch.requests):
            batch.step()
        yield batch
    finally:
        if drafter is not None:
            drafter.release(list(batch.live))


def _batch(
    model: PreTrainedModel, drafter: Drafter | None, draft_length: int, prompts: Sequence[Sequence[int]], steps: int
) -> Batch:
    target = Target(model)
    prefill = len(prompts) + sum(map(len, prompts)) // CHUNK  # at most so many steps; rows that are ready decode on
    longest = max(map(len, prompts)) + (prefill + WARM_UP + steps) * (draft_length + 1)
    if longest > (target.max_positions or longest):
        raise ValueError(
            f"{steps} steps of {draft_length} drafted tokens after a prompt of {max(map(len, prompts))} may need "
            f"{longest} positions and the model has {target.max_positions}: ask for fewer steps"
        )
    texts = [np.array(prompt, dtype=np.int64) for prompt in prompts]
    return endless(target, drafter, draft_length, texts, 2 * longest, PhasedBatch)


class PhasedBatch(Batch):
    """Waits for the device after drafting and after each forward, so that their time is not counted to the phase that
    reads the result, and refuses trees: their depths say nothing about their cost."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._clock = _WaitingClock(self.stats, self.device)

    def propose(self, scored: Sequence[Request], draws: Draws) -> tuple[Draft, Tensor]:
        proposed = super().propose(scored, draws)
        synchronize(self.target.device)
        if proposed[0].parents is not None:
            raise ValueError(f"drafter {self.drafter.name!r} drafts trees: give one that drafts chains to plan with")
        return proposed


class _WaitingClock(Clock):
    def __init__(self, stats: Stats, device: torch.device):
        super().__init__(stats)
        self.device = device

    def lap(self, phase: str) -> None:
        if phase == "forward":
            synchronize(self.device)
        super().lap(phase)
