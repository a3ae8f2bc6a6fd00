"""Hugging Face's own ways of generating, as rows of the same table: `generate`, prompt lookup, an assistant model."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from eval.methods import EncodedPrompt, Method, Outcome, Request, left_padded, outputs

HF = "hf"


def hf_method(model: PreTrainedModel, request: Request) -> Method:
    """HF `generate` as it is, seeded anew for each batch."""
    return _method(HF, model, request)


def prompt_lookup(model: PreTrainedModel, request: Request, draft_length: int) -> Method:
    """HF's n-gram drafting with the same draft length as ours; its other settings are HF's defaults. Batch 1 only."""
    return _method(f"{HF} + prompt lookup", model, request, 1, prompt_lookup_num_tokens=draft_length)


def assisted(
    name: str, model: PreTrainedModel, request: Request, assistant: PreTrainedModel, draft_length: int
) -> Method:
    """HF's assisted generation with the draft model of our drafter `name` and its draft length. HF ends a draft early
    where the assistant is not confident, which is its default and stays on. Batch 1 only."""
    own = copy.copy(assistant)  # the same weights, its own settings: other lengths' rows share the assistant
    own.generation_config = copy.deepcopy(assistant.generation_config)
    own.generation_config.num_assistant_tokens = draft_length  # HF reads it from there
    return _method(f"{HF} + {name}", model, request, 1, assistant_model=own)


def _method(
    name: str, model: PreTrainedModel, request: Request, largest_batch: int | None = None, **options: Any
) -> Method:
    def generate(prompts: list[EncodedPrompt], max_new_tokens: int) -> Outcome:
        input_ids, mask = left_padded([prompt.tokens for prompt in prompts], request.pad, model.device)
        torch.manual_seed(request.seed % 2**64)  # as the engine takes any int
        watch = _Watch(input_ids.shape[1])
        output = model.generate(
            input_ids=input_ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            pad_token_id=request.pad,
            stopping_criteria=StoppingCriteriaList([watch]),
            **options,
            **request.sampling,
        ).cpu()  # waits for the device
        seconds = time.perf_counter() - watch.started
        tokens = outputs(output, input_ids, request.stops)
        return Outcome(tokens, seconds, watch.prefill_seconds, watch.prefill_tokens, watch.forwards, None)

    dtype = str(model.dtype).removeprefix("torch.")
    return Method(name, None, request.temperature, dtype, None, generate, largest_batch)


class _Watch(StoppingCriteria):
    """Stops nothing. HF asks it once per forward of the target, first when every row has its first token."""

    def __init__(self, prompt_columns: int) -> None:
        self.started = time.perf_counter()
        self.prompt_columns = prompt_columns
        self.forwards, self.prefill_seconds, self.prefill_tokens = 0, 0.0, 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if self.forwards == 0:
            self.prefill_tokens = input_ids[:, self.prompt_columns :].cpu().numel()  # waits for the device
            self.prefill_seconds = time.perf_counter() - self.started
        self.forwards += 1
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
