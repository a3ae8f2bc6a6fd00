"""The drop-in: `specdec.generate(model, ...)` and `model.generate(..., custom_generate=specdec.speculate(...))`.

Hugging Face's `generate` prepares everything (generation config, processors, stopping criteria, expansion for
`num_return_sequences`) and calls the function made here instead of its own sampling loop. What this function cannot
honour yet it refuses by name, before anything is computed.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput, StopStringCriteria
from transformers.generation.streamers import BaseStreamer

from specdec.compat import CACHE_KWARGS
from specdec.contracts import Drafter, Verifier
from specdec.loop import Batch, OnCommit
from specdec.processors import Processors
from specdec.registry import DRAFTERS, VERIFIERS, known
from specdec.requests import Request
from specdec.stats import Stats
from specdec.stopping import Stops
from specdec.target import Target

DRAFT_LENGTH = 5


class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """What `generate` returns with `return_dict_in_generate=True`, with `stats` (specdec.stats.Stats) beside it."""

    stats: Stats | None = None


def generate(
    model: PreTrainedModel,
    input_ids: Tensor | None = None,
    *,
    drafter: str | Drafter | None = "ngram",
    verifier: str | Verifier = "auto",
    draft_length: int = DRAFT_LENGTH,
    seed: int | None = None,
    request_ids: Sequence[int] | None = None,
    streamer: BaseStreamer | None = None,
    stop_strings: str | list[str] | None = None,
    tokenizer: Any = None,
    on_commit: OnCommit | None = None,
    return_stats: bool = False,
    **kwargs: Any,
) -> Any:
    """`model.generate(input_ids, **kwargs)`, decoded speculatively; the same output type.

    input_ids:    [B, columns] int64, left-padded, with `attention_mask` of the same shape where there is padding.
    drafter:      a name ("ngram", ...), an object with the `Drafter` methods, or None for plain decoding.
    verifier:     "auto" (the lossless rule that fits the draft, see verifiers/auto.py), a name, or an object.
    draft_length: most drafted tokens per row and step; 0 is plain decoding.
    seed:         of the sampling streams; None draws one from torch's generator, so `set_seed` works.
    request_ids:  B ints in [0, 2**32) that name the rows' random streams; default: the row's index.
    streamer:     gets tokens as they are accepted (batch of 1). stop_strings need `tokenizer`.
    on_commit:    called as on_commit(row, tokens, n_drafted) after every step of every row.
    return_stats: also return the call's `Stats`: (output, stats).
    Raises ValueError or NotImplementedError, in one sentence, for what it cannot do.

    Example: specdec.generate(model, **tokenizer("Hello", return_tensors="pt"), drafter="ngram", max_new_tokens=32)
    """
    decode = speculate(
        drafter=drafter, verifier=verifier, draft_length=draft_length, seed=seed, request_ids=request_ids,
        streamer=streamer, on_commit=on_commit,
    )  # fmt: skip
    check_prompt(model, input_ids, kwargs.get("attention_mask"))
    if stop_strings is not None:
        # `generate` builds this criterion itself, but does not hand the tokenizer on to a custom function.
        if tokenizer is None:
            raise ValueError("stop_strings was given without tokenizer: pass tokenizer= as well")
        kwargs["stopping_criteria"] = StoppingCriteriaList(
            [*(kwargs.get("stopping_criteria") or []), StopStringCriteria(tokenizer, stop_strings)]
        )
    output = model.generate(input_ids, custom_generate=decode, **kwargs)
    return (output, decode.stats) if return_stats else output


class speculate:
    """A decoding function for `model.generate(..., custom_generate=specdec.speculate(drafter="ngram"))`.

    Arguments as in `specdec.generate`. After each call, `stats` holds that call's statistics."""

    def __init__(
        self,
        drafter: str | Drafter | None = "ngram",
        verifier: str | Verifier = "auto",
        draft_length: int = DRAFT_LENGTH,
        seed: int | None = None,
        request_ids: Sequence[int] | None = None,
        streamer: BaseStreamer | None = None,
        on_commit: OnCommit | None = None,
    ):
        if not isinstance(draft_length, int) or draft_length < 0:
            raise ValueError(
                f"draft_length is {draft_length!r}: give 0 (plain decoding) or more drafted tokens per step"
            )
        self.drafter = _drafter(drafter) if isinstance(drafter, str) else drafter
        if self.drafter is not None and not callable(getattr(self.drafter, "propose", None)):
            raise ValueError(f"drafter is {drafter!r}, which has no propose method: see specdec.Drafter")
        self.verifier = known(VERIFIERS, verifier, "verifier") if isinstance(verifier, str) else verifier
        self.draft_length, self.seed, self.request_ids = draft_length, seed, request_ids
        self.streamer, self.on_commit = streamer, on_commit
        self.stats: Stats | None = None

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Tensor | SpeculativeOutput:
        refuse_unsupported(generation_config, model_kwargs)
        mask = model_kwargs.get("attention_mask")
        check_prompt(model, input_ids, mask)
        target = Target(model)
        stops = Stops(stopping_criteria)
        requests = self._requests(input_ids, mask, stops)
        check_positions(target, requests)
        verifier = self._verifier(bool(generation_config.do_sample))
        batch = Batch(
            target=target,
            drafter=self.drafter if self.draft_length else None,
            verifier=verifier,
            processors=Processors(logits_processor, target.vocab_size),
            stops=stops,
            requests=requests,
            seed=self._seed(verifier),
            draft_length=self.draft_length,
            on_commit=self._committed,
        )
        self.stats = batch.stats
        if self.streamer is not None:
            self.streamer.put(input_ids.cpu())
        batch.run()
        if self.streamer is not None:
            self.streamer.end()
        sequences = assemble(requests, input_ids, generation_config)
        if not generation_config.return_dict_in_generate:
            return sequences
        output = SpeculativeOutput(sequences=sequences)
        output.stats = batch.stats
        return output

    def _verifier(self, sampling: bool) -> Verifier:
        """The rule of this call; a class is one of the table's."""
        verifier = self.verifier
        if isinstance(verifier, type):
            verifier = verifier(sampling) if "sampling" in inspect.signature(verifier).parameters else verifier()
        if (verifier.draws == "argmax") == sampling:
            raise ValueError(
                f"verifier {verifier.name!r} does not fit do_sample={sampling}: greedy rules go without sampling, all "
                f"others with it; verifier='auto' chooses"
            )
        return verifier

    def _requests(self, input_ids: Tensor, mask: Tensor | None, stops: Stops) -> list[Request]:
        columns = input_ids.cpu().numpy()
        B, width = columns.shape
        pads = [0] * B if mask is None else (width - mask.sum(1)).tolist()
        ids = list(range(B)) if self.request_ids is None else list(self.request_ids)
        if len(ids) != B:
            raise ValueError(f"request_ids has {len(ids)} entries for {B} rows: give one per returned sequence")
        limit = int(stops.max_length) - width
        return [Request(b, ids[b], b, columns[b].astype(np.int64), pads[b], limit) for b in range(B)]

    def _seed(self, verifier: Verifier) -> int:
        if self.seed is not None or verifier.draws == "argmax":  # greedy search leaves torch's generator alone, as HF's
            return self.seed or 0
        return int(torch.randint(0, 2**63 - 1, ()).item())

    def _committed(self, row: int, tokens: list[int], drafted: int) -> None:
        if self.streamer is not None:
            for token in tokens:
                self.streamer.put(torch.tensor([token]))
        if self.on_commit is not None:
            self.on_commit(row, tokens, drafted)


def _drafter(name: str) -> Drafter:
    factory = known(DRAFTERS, name, "drafter")
    if "target" in inspect.signature(factory).parameters:
        raise ValueError(
            f"drafter {name!r} needs a model or settings of its own: pass an object made from drafters.{name}"
        )
    return factory()


def check_prompt(model: PreTrainedModel, input_ids: Tensor | None, mask: Tensor | None) -> None:
    """ValueError for a prompt batch that nothing can be generated from."""
    if input_ids is None:
        raise ValueError("input_ids is missing: give the prompts as a [batch, columns] tensor of token ids")
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise ValueError(
            f"input_ids has shape {tuple(input_ids.shape)}: give at least one row and one token, [batch, columns]"
        )
    if mask is None:
        return
    if mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)} but input_ids {tuple(input_ids.shape)}: make them equal"
        )
    mask = mask.bool()
    if not mask.any(1).all():
        empty = (~mask.any(1)).nonzero()[0].item()
        raise ValueError(f"row {empty} of attention_mask masks every token: an empty prompt cannot be continued")
    if (mask[:, :-1] & ~mask[:, 1:]).any():
        raise NotImplementedError(
            "attention_mask has zeros after ones (right padding or a hole), which is not supported yet: pad on the left"
        )


def check_positions(target: Target, requests: Sequence[Request]) -> None:
    """ValueError where a request cannot fit the model's positions."""
    limit = target.max_positions
    if limit is None:
        return
    for request in requests:
        length = len(request.tokens)
        if length > limit or (target.positions_are_a_table and length + request.limit - 1 > limit):
            raise ValueError(
                f"row {request.index} has a prompt of {length} tokens and may emit {request.limit}, but the model has "
                f"{limit} positions: shorten the prompt or lower max_new_tokens"
            )


def refuse_unsupported(config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """NotImplementedError that names the first argument which asks for something not supported yet."""
    asked = {
        "num_beams": (config.num_beams or 1) > 1,
        "penalty_alpha": bool(config.penalty_alpha),
        "constraints": bool(getattr(config, "constraints", None) or getattr(config, "force_words_ids", None)),
        "output_scores": config.output_scores,
        "output_logits": config.output_logits,
        "output_attentions": config.output_attentions,
        "output_hidden_states": config.output_hidden_states,
        "prefill_chunk_size": config.prefill_chunk_size is not None,
        "cache_implementation": config.cache_implementation is not None,
        "prompt_lookup_num_tokens": config.prompt_lookup_num_tokens is not None,
        "assistant_early_exit": config.assistant_early_exit is not None,
        "use_cache=False": config.use_cache is False,
        "inputs_embeds": model_kwargs.get("inputs_embeds") is not None,
        "cache": any(_holds_tokens(model_kwargs.get(name)) for name in CACHE_KWARGS),
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise NotImplementedError(
                f"{name} is not supported by specdec yet: leave it out, or call model.generate without specdec"
            )


def assemble(requests: Sequence[Request], input_ids: Tensor, config: GenerationConfig) -> Tensor:
    """[B, columns + longest output] as HF returns it: prompts, outputs, then the pad token."""
    longest = max(len(r.emitted) for r in requests)
    pad = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    out = np.full((len(requests), longest), pad, dtype=np.int64)
    for b, request in enumerate(requests):
        out[b, : len(request.emitted)] = request.emitted
    return torch.cat([input_ids, torch.from_numpy(out).to(input_ids.device)], dim=1)


def _holds_tokens(cache: Cache | None) -> bool:
    """Whether a cache was passed in to continue from; `generate` itself hands over an empty one."""
    return cache is not None and int(cache.get_seq_length()) > 0
