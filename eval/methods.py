"""The ways of generating that an evaluation compares. Here: plain decoding with our engine, and each drafter."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eval.audit import audited
from specdec.contracts import Drafter, Verifier
from specdec.stats import Stats


@dataclass(frozen=True)
class Request:
    """What is asked of every method alike.

    stops: ids that end a row; pad: id that fills up shorter rows. An output is counted up to and including its stop.
    """

    sampling: dict[str, Any]
    seed: int
    stops: frozenset[int]
    pad: int

    @staticmethod
    def of(model: PreTrainedModel, sampling: dict[str, Any], seed: int) -> Request:
        """With the stops and the padding of the model's own generation configuration."""
        eos = model.generation_config.eos_token_id
        stops = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        pad = model.generation_config.pad_token_id
        return Request(sampling, seed, frozenset(stops), (stops or [0])[0] if pad is None else pad)

    @property
    def temperature(self) -> float:
        """0 for greedy decoding."""
        return self.sampling.get("temperature", 1.0) if self.sampling["do_sample"] else 0.0


@dataclass(frozen=True)
class EncodedPrompt:
    """One encoded request. `number` names its random stream, whatever batch it is in; `conversation` is the id that the
    turns of one chat share, None for a chat of a single turn."""

    number: int
    id: str
    category: str
    tokens: list[int]
    conversation: str | None = None


@dataclass(frozen=True)
class Outcome:
    """tokens: per row, after the prompt; seconds: the whole call; stats: None where another engine generated.

    prefill_seconds: from the call until every row has its first token; prefill_tokens: how many all rows had by then.
    trees: whether a draft was a tree, whose acceptance probabilities are not listed by depth.
    audit_seconds: host time that looking over the drafts took, see `eval.audit`; None without a drafter.
    """

    tokens: list[list[int]]
    seconds: float
    prefill_seconds: float
    prefill_tokens: int
    target_forwards: int | None
    stats: Stats | None
    trees: bool = False
    audit_seconds: float | None = None


@dataclass(frozen=True)
class Method:
    """`generate(prompts, max_new_tokens)` runs one batch of at most `largest_batch` prompts (None: any number).

    drafter: its name on the command line, if any.   draft_length: None where it is learned while
    decoding, and where another engine generates."""

    name: str
    drafter: str | None
    temperature: float
    dtype: str
    draft_length: int | None
    generate: Callable[[list[EncodedPrompt], int], Outcome]
    largest_batch: int | None = None


def engine_method(
    name: str,
    model: PreTrainedModel,
    request: Request,
    drafter: Drafter | None,
    draft_length: int | None,
    verifier: str | Verifier,
    engine: Callable[..., tuple[Tensor, Stats]],
) -> Method:
    """`engine` (specdec.generate) with `drafter`, or plain for None."""

    def generate(prompts: list[EncodedPrompt], max_new_tokens: int) -> Outcome:
        input_ids, mask = left_padded([prompt.tokens for prompt in prompts], request.pad, model.device)
        first = FirstTokens(len(prompts))
        with audited(drafter, [prompt.id for prompt in prompts]) as watched:
            output, stats = engine(
                model,
                input_ids,
                attention_mask=mask,
                drafter=watched,
                draft_length=draft_length,
                verifier=verifier,
                seed=request.seed,
                request_ids=[prompt.number for prompt in prompts],
                return_stats=True,
                on_commit=first.on_commit,
                max_new_tokens=max_new_tokens,
                pad_token_id=request.pad,
                **request.sampling,
            )
            output = output.cpu()
            seconds = time.perf_counter() - first.started
        tokens = outputs(output, input_ids, request.stops)
        trees, audit = (False, None) if watched is None else (watched.trees, watched.seconds)
        return Outcome(tokens, seconds, first.seconds, first.tokens, stats.forwards, stats, trees, audit)

    dtype = str(model.dtype).removeprefix("torch.")
    return Method(name, None if drafter is None else name, request.temperature, dtype, draft_length, generate)


class FirstTokens:
    """When every one of B rows has its first token, counted from when this was made, and how many tokens all had then.

    on_commit: the engine's callback."""

    def __init__(self, B: int) -> None:
        self.started = time.perf_counter()
        self.seconds, self.tokens = 0.0, 0
        self._waiting = set(range(B))

    def on_commit(self, row: int, tokens: list[int], n_drafted: int) -> None:
        if self._waiting:
            self._waiting.discard(row)
            self.tokens += len(tokens)
            self.seconds = time.perf_counter() - self.started


def check_room(model: PreTrainedModel, prompts: Sequence[Any], max_new_tokens: int) -> None:
    """Raises ValueError that names the first prompt (anything with an `id` and `tokens`) which, with its output, would
    not fit the model's positions."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)  # not every family has a limit
    for prompt in prompts:
        if positions is not None and len(prompt.tokens) + max_new_tokens > positions:
            raise ValueError(
                f"prompt {prompt.id!r} has {len(prompt.tokens)} tokens, which with {max_new_tokens} new ones is more "
                f"than the model's {positions} positions: shorten it, drop it or generate fewer tokens"
            )


def left_padded(rows: list[list[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """input_ids [B, T] and attention_mask [B, T] of prompts of different lengths."""
    width = max(map(len, rows))
    input_ids = [[pad] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(input_ids, device=device), torch.tensor(mask, device=device)


def outputs(output: Tensor, input_ids: Tensor, stops: frozenset[int]) -> list[list[int]]:
    """What follows the prompts in `output`, each row up to and including its first stop."""
    return [through_stop(row, stops) for row in output[:, input_ids.shape[1] :].tolist()]


def through_stop(tokens: list[int], stops: frozenset[int]) -> list[int]:
    """`tokens` up to and including the first stop."""
    for place, token in enumerate(tokens):
        if token in stops:
            return tokens[: place + 1]
    return tokens
