"""What the parts of one verification step cost beside the target's forward, part of `specdec bench step`.

The forward of B rows with N drafted tokens each, every verification rule as the engine calls it, and the logits
processors, timed in turn in one process, so that a slow spell of the machine hits all alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper

from eval.bench_verify import peaked
from eval.plan.measure import forward_calls
from eval.plan.show import Columns
from eval.timing import in_ms, interleaved, spread
from specdec.contracts import Draft, Scores, Verifier
from specdec.draws import make_draws
from specdec.processors import Prefixes, Processors
from specdec.registry import VERIFIERS, known
from specdec.target import Target

FORWARD = "target forward"
RULES = {"greedy": False, "rejection, one-hot": False, "rejection, q": True, "block, q": True, "coupled": False}
PROCESSORS = {
    "temperature": [TemperatureLogitsWarper(0.7)],
    "temperature, top-k": [TemperatureLogitsWarper(0.7), TopKLogitsWarper(50)],
    "repetition penalty, temperature": [RepetitionPenaltyLogitsProcessor(1.1), TemperatureLogitsWarper(0.7)],
}

COLUMNS: Columns = {
    "part": lambda row: row["part"],
    "ms": lambda row: in_ms(row),
    "of the forward": lambda row: f"{row['of_forward']:.1%}",
}


@torch.no_grad()
def measure(
    model: PreTrainedModel, B: int, N: int, context: int, repeats: int, compile: bool = False
) -> list[dict[str, Any]]:
    """One row per part, with its share of the forward. context: cached tokens per row. compile: the forward is
    compiled. Raises ValueError for sizes that cannot be measured."""
    parts = operations(model, B, N, context, repeats, compile)
    seconds = interleaved(parts, repeats, model.device)
    forward = statistics.median(seconds[FORWARD])
    return [summary(part, seconds[part], forward) for part in parts]


def operations(
    model: PreTrainedModel, B: int, N: int, context: int, repeats: int, compile: bool
) -> dict[str, Callable[[], Any]]:
    """Every part by name, bound to its inputs: the target's forward first, to be called in `interleaved` rounds."""
    V = Target(model).vocab_size
    logits, q_logits = peaked(B, N, V, model.device)
    tokens = torch.zeros(B, N, dtype=torch.long, device=model.device)
    one_hot = Draft(tokens, [N] * B)
    with_q = Draft(tokens, [N] * B, q_logits=q_logits, q_logz=q_logits.logsumexp(-1))
    scores = Scores(logits, torch.arange(B * (N + 1), device=model.device).view(B, N + 1))
    calls, _ = forward_calls(model, [B], [N + 1], [context], repeats + 1, compile)
    parts: dict[str, Callable[[], Any]] = {FORWARD: calls[B, N + 1, context]}
    for rule, takes_q in RULES.items():
        verifier = known(VERIFIERS, rule.partition(",")[0], "verifier")()
        parts[f"verify: {rule}"] = partial(verify, verifier, with_q if takes_q else one_hot, scores)
    columns = [np.arange(context, dtype=np.int64) % V for _ in range(B)]
    for name, processors in PROCESSORS.items():
        processors = Processors(LogitsProcessorList(processors), V)
        parts[f"processors: {name}"] = partial(process, processors, logits, columns, one_hot)
    return parts


def verify(verifier: Verifier, draft: Draft, scores: Scores) -> None:
    """One verdict as in a step: new draws, and nothing kept from the last one."""
    B = len(draft.lengths)
    draws = make_draws(verifier.draws, 0, range(B), [0] * B, [0] * B, lambda x: x, draft.tokens.device)
    verifier.verify(draft, Scores(scores.logits, scores.index), draws)


def process(processors: Processors, logits: Tensor, columns: list[np.ndarray], draft: Draft) -> None:
    """p at every position."""
    processors.apply(logits, Prefixes(columns, range(len(columns)), draft))


def summary(part: str, seconds: list[float], forward_seconds: float) -> dict[str, Any]:
    """Median, quartiles (seconds) and the median's share of the forward's."""
    found = spread(seconds)
    return {"part": part, "kind": part.partition(":")[0], **found, "of_forward": found["seconds"] / forward_seconds}
