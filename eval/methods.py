"""The ways of generating that an evaluation compares: HF `generate`, plain decoding with our engine, each drafter."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.contracts import Drafter
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


@dataclass(frozen=True)
class EncodedPrompt:
    """One encoded request. `number` names its random stream, whatever batch it is in."""

    number: int
    id: str
    category: str
    tokens: list[int]


@dataclass(frozen=True)
class Outcome:
    """tokens: per row, after the prompt; seconds: the whole call; stats: None where HF generated."""

    tokens: list[list[int]]
    seconds: float
    target_forwards: int
    stats: Stats | None


@dataclass(frozen=True)
class Method:
    """`generate(prompts, max_new_tokens)` runs one batch. `drafter` is its name on the command line, if any."""

    name: str
    drafter: str | None
    generate: Callable[[list[EncodedPrompt], int], Outcome]


def hf_method(model: PreTrainedModel, request: Request) -> Method:
    """HF `generate` as it is, seeded anew for each batch."""

    def generate(prompts: list[EncodedPrompt], max_new_tokens: int) -> Outcome:
        input_ids, mask = left_padded([prompt.tokens for prompt in prompts], request.pad, model.device)
        torch.manual_seed(request.seed % 2**64)  # as the engine takes any int
        started = time.perf_counter()
        output = model.generate(
            input_ids=input_ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            pad_token_id=request.pad,
            **request.sampling,
        ).cpu()  # waits for the device
        seconds = time.perf_counter() - started
        columns = output.shape[1] - input_ids.shape[1]  # one forward each
        return Outcome(_outputs(output, input_ids, request.stops), seconds, columns, None)

    return Method("hf", None, generate)


def engine_method(
    name: str,
    model: PreTrainedModel,
    request: Request,
    drafter: Drafter | None,
    draft_length: int,
    verifier: str,
    engine: Callable[..., tuple[Tensor, Stats]],
) -> Method:
    """`engine` (specdec.generate) with `drafter`, or plain for None."""

    def generate(prompts: list[EncodedPrompt], max_new_tokens: int) -> Outcome:
        input_ids, mask = left_padded([prompt.tokens for prompt in prompts], request.pad, model.device)
        started = time.perf_counter()
        output, stats = engine(
            model,
            input_ids,
            attention_mask=mask,
            drafter=drafter,
            draft_length=draft_length,
            verifier=verifier,
            seed=request.seed,
            request_ids=[prompt.number for prompt in prompts],
            return_stats=True,
            max_new_tokens=max_new_tokens,
            pad_token_id=request.pad,
            **request.sampling,
        )
        output = output.cpu()
        seconds = time.perf_counter() - started
        return Outcome(_outputs(output, input_ids, request.stops), seconds, stats.forwards, stats)

    return Method(name, None if drafter is None else name, generate)


def left_padded(rows: list[list[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """input_ids [B, T] and attention_mask [B, T] of prompts of different lengths."""
    width = max(map(len, rows))
    input_ids = [[pad] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(input_ids, device=device), torch.tensor(mask, device=device)


def _outputs(output: Tensor, input_ids: Tensor, stops: frozenset[int]) -> list[list[int]]:
    return [through_stop(row, stops) for row in output[:, input_ids.shape[1] :].tolist()]


def through_stop(tokens: list[int], stops: frozenset[int]) -> list[int]:
    """`tokens` up to and including the first stop."""
    for place, token in enumerate(tokens):
        if token in stops:
            return tokens[: place + 1]
    return tokens
