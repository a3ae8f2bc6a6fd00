"""Many requests through a few rows: `stream_batch` yields each as soon as it is finished.

A row that ends gives its place to the next request at the following step, and prompts enter in chunks beside the rows
that decode, in the same packed forwards (iteration-level scheduling, Orca, Yu et al. OSDI 2022; chunked prefill,
Sarathi, Agrawal et al. 2308.16369).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from specdec import generation
from specdec.call_checks import check_per_request, refuse_arguments
from specdec.loop import Batch
from specdec.peers import are_needed
from specdec.speculation import speculate
from specdec.stats import RowStats
from specdec.stopping import with_stop_strings
from specdec.target import device_of

INSTEAD = generation.INSTEAD | {
    "streamer": "each request is yielded when it ends",
    "on_commit": "each request is yielded when it ends, with its stats",
    "attention_mask": "give every prompt without padding",
    **dict.fromkeys(("cache", "past_key_values", "inputs_embeds", "position_ids"), "give every prompt as token ids"),
    **dict.fromkeys(("assistant_model", "prompt_lookup_num_tokens"), "say what drafts with drafter="),
}


@dataclass(frozen=True)
class Finished:
    """One finished request. index: its place among the prompts.   tokens: [n] int64 what was emitted, on the host."""

    index: int
    tokens: Tensor
    stats: RowStats


def stream_batch(
    model: PreTrainedModel,
    prompts: Sequence[Tensor | Sequence[int]],
    *,
    max_batch: int = 8,
    drafter: Any = "ngram",
    verifier: Any = "auto",
    draft_length: int | None = None,
    seed: int | None = None,
    request_ids: Sequence[int] | None = None,
    tokenizer: Any = None,
    invariant: bool = False,
    compile: Any = False,
    **kwargs: Any,
) -> Iterator[Finished]:
    """Generate for every prompt, at most `max_batch` at a time, and yield the requests in the order in which they end.

    prompts: token ids, one sequence of at least one id per request. They start in this order.
    kwargs:  of `model.generate`: max_new_tokens (to be given), do_sample, temperature, prefill_chunk_size (most prompt
             tokens per step, 512 unless given: with fewer, rows that decode beside a prompt go more steadily),
             stop_strings (with tokenizer), ...
    The other arguments are those of `specdec.generate`. What a request emits, and with one seed its sample, does not
    depend on the others or on `max_batch`, up to floating point unless `invariant`: processors and stopping criteria
    see its own tokens, without padding. Raises ValueError or NotImplementedError before anything is computed.

    Example: for done in specdec.stream_batch(model, tokenizer(texts).input_ids, max_new_tokens=64): print(done.index)
    """
    refuse_arguments(kwargs, "specdec.stream_batch", INSTEAD)
    rows = _rows(prompts)
    decode = speculate(
        drafter=drafter, verifier=verifier, draft_length=draft_length, seed=seed, request_ids=request_ids,
        tokenizer=tokenizer, max_batch=max_batch, invariant=invariant, compile=compile,
    )  # fmt: skip
    if not rows:
        return iter(())
    longest = max(map(len, rows))
    input_ids, mask = torch.zeros(2, len(rows), longest, dtype=torch.long)
    for b, row in enumerate(rows):
        input_ids[b, longest - len(row) :], mask[b, longest - len(row) :] = row, 1
    at = device_of(model)

    def prepare(*args: Any, generation_config: GenerationConfig, **inputs: Any) -> Batch:
        check_per_request(generation_config)
        if are_needed(model):
            raise NotImplementedError(
                "the model is sharded over processes (FSDP, ZeRO-3): call specdec.generate for it"
            )
        return decode.prepare(*args, generation_config=generation_config, **inputs)

    kwargs = with_stop_strings(model, tokenizer, kwargs)
    # `generate` prepares processors and stops, and gives back what its decoding function does: here the batch itself.
    batch = model.generate(input_ids.to(at), attention_mask=mask.to(at), custom_generate=prepare, **kwargs)
    for request in batch.requests:
        request.leave_pads()
    return (
        Finished(request.index, torch.from_numpy(request.emitted.copy()), request.stats) for request in batch.finished()
    )


def _rows(prompts: Sequence[Tensor | Sequence[int]]) -> list[Tensor]:
    """The prompts' token ids, each [n] with n > 0. ValueError for anything else."""
    try:
        rows = [torch.as_tensor(prompt) for prompt in prompts]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"prompts is a {type(prompts).__name__} of which torch makes no tensors ({error}): give one sequence of "
            f"token ids per request, such as tokenizer(texts).input_ids"
        ) from error
    for index, row in enumerate(rows):
        if not row.numel():
            raise ValueError(f"prompt {index} is empty: give at least one token to go on from")
        if row.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"prompt {index} is of {row.dtype}: give token ids, integers")
        if row.shape[-1:] != (row.numel(),):
            raise ValueError(f"prompt {index} has shape {list(row.shape)}: give one sequence of token ids per request")
    return [row.flatten() for row in rows]
