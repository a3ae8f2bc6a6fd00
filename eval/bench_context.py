"""What a decode step costs by its context, part of `specdec bench step`: attention apart from the rest, and memory.

The cache is not filled by a prefill but declared full: what it holds, zeros, does not change a step's time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import AttentionInterface, PreTrainedModel

from drafters.ngram import NGramDrafter
from eval.endless import endless
from eval.memory import FullDrafts, beside_cache, weight_bytes
from eval.plan.show import Columns
from eval.plan.steady import PhasedBatch
from eval.timing import in_ms, spread, synchronize
from specdec import attention, compiled
from specdec.loop import Batch
from specdec.stats import PHASES
from specdec.target import Target

BESIDES = 2  # steps beside those that count: one to warm up, one to look at memory
PARTS = ("attention", "rest of the forward", *(phase for phase in PHASES if phase != "forward"))
COLUMNS: Columns = {
    "rows": lambda row: str(row["rows"]),
    "context": lambda row: f"{row['context']:,}",
    **{part: lambda row, part=part: in_ms(row[part]) for part in PARTS},
    "cache": lambda row: f"{row['cache_bytes'] / 1e6:,.1f} MB",
    "a step beside it": lambda row: "-" if row["step_bytes"] is None else f"{row['step_bytes'] / 1e6:,.1f} MB",
}


@torch.no_grad()
def measure(
    model: PreTrainedModel, B: int, draft_length: int, contexts: Sequence[int], repeats: int, compile: bool = False
) -> list[dict[str, Any]]:
    """One row per context: seconds of each of PARTS, and bytes. Batches of all contexts are stepped in turn, with full
    n-gram drafts. compile: the forwards are compiled; what a compiled step holds does not show, so `step_bytes` is
    None. `check` first what is too long."""
    steps = repeats + BESIDES
    batches = {context: filled(model, B, draft_length, context, steps, compile) for context in contexts}
    seconds: dict[int, dict[str, list[float]]] = {context: {part: [] for part in PARTS} for context in contexts}
    for number in range(repeats + 1):
        for context, batch in batches.items():
            parts = timed_step(batch)
            if number:
                for part in PARTS:
                    seconds[context][part].append(parts[part])
    return [
        {
            "rows": B,
            "context": context,
            **{part: spread(seconds[context][part]) for part in PARTS},
            "step_bytes": None if compile else beside_cache(batch),
            "cache_bytes": batch.cache.nbytes,
            "slots": batch.cache.capacity + 1,
            "bytes_per_slot": batch.cache.nbytes / (B * (batch.cache.capacity + 1)),
            "weight_bytes": weight_bytes(model),
        }
        for context, batch in batches.items()
    ]


def check(model: PreTrainedModel, draft_length: int, contexts: Sequence[int], repeats: int) -> None:
    """Raises ValueError where a context and its steps are past the model's positions."""
    most, room = Target(model).max_positions, (repeats + BESIDES) * (draft_length + 1)
    for context in contexts:
        if most is not None and context + room > most:
            raise ValueError(
                f"a context of {context} tokens with {room} more for the steps is past the model's {most} positions: "
                f"give shorter --contexts"
            )


def filled(model: PreTrainedModel, B: int, draft_length: int, context: int, steps: int, compile: bool = False) -> Batch:
    """A batch whose rows have `context` tokens cached and decode from there."""
    target, room = Target(model), steps * (draft_length + 1)
    texts = np.random.default_rng(0).integers(0, target.vocab_size, (B, context + 1))
    batch = endless(target, FullDrafts(NGramDrafter()), draft_length, list(texts), 2 * room, PhasedBatch)
    target.compile(compile)
    batch.admit()
    batch.cache.reserve(context + room)
    for request in batch.requests:
        request.steps, batch.cache.lengths[request.row] = 1, context
    return batch


def timed_step(batch: Batch) -> dict[str, float]:
    """Seconds of one step by PARTS."""
    before = dict(batch.stats.seconds)
    with attention_timed(batch.target) as in_attention:
        batch.step()
    phases = {phase: batch.stats.seconds[phase] - before[phase] for phase in PHASES}
    forward, spent = phases.pop("forward"), in_attention()
    return {"attention": spent, "rest of the forward": forward - spent, **phases}


@contextmanager
def attention_timed(target: Target) -> Iterator[Callable[[], float]]:
    """Time attention in the target's forwards; what is handed out gives its seconds in all.

    That is every call of packed attention, or, where it is compiled, of the operator in its place, which stores keys
    and values too."""
    marks: list[tuple[Any, Any]] = []

    def timed(function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = _now(target.device)
            result = function(*args, **kwargs)
            marks.append((started, _now(target.device)))
            return result

        return call

    if target.graph is None:
        timing = patch.dict(AttentionInterface._global_mapping, {attention.NAME: timed(attention.packed_attention)})
    else:
        timing = patch.object(compiled, "attend", timed(compiled.attend))
    with timing:
        yield lambda: sum(_between(target.device, *pair) for pair in marks)


def _now(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(device: torch.device, start: Any, end: Any) -> float:
    if device.type != "cuda":
        return end - start
    synchronize(device)
    return start.elapsed_time(end) / 1e3


def growth(rows: Sequence[dict[str, Any]]) -> str:
    """What the longest context costs more than the shortest, and memory as a formula."""
    first, last = rows[0], rows[-1]
    more = ", ".join(f"{part} {1e3 * (last[part]['seconds'] - first[part]['seconds']):+.2f} ms" for part in PARTS)
    return (
        f"from {first['context']:,} to {last['context']:,} tokens: {more}; memory: {last['weight_bytes'] / 1e6:,.1f} "
        f"MB of weights + rows x slots x {last['bytes_per_slot']:,.0f} bytes of cache + what a step holds beside it"
    )
