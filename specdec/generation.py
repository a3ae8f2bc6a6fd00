"""The drop-in: `specdec.generate(model, ...)` and `model.generate(..., custom_generate=specdec.speculate(...))`.

Hugging Face's `generate` prepares everything (generation config, processors, stopping criteria, expansion for
`num_return_sequences`) and calls the function made here instead of its own sampling loop. What this function cannot
honour yet it refuses by name, before anything is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from specdec.budget import Budget
from specdec.call_checks import (
    check_draft_length,
    check_positions,
    check_prompt,
    check_token_ids,
    fitting_verifier,
    refuse_arguments,
    refuse_cache,
    refuse_unsupported,
    whole_number,
)
from specdec.compat import cached_tokens, handed_over, is_callers, mark_callers
from specdec.contracts import Drafter, Verifier
from specdec.drafter_spec import DrafterSpec, build_drafter
from specdec.draws import request_array
from specdec.layout import Layout, layout
from specdec.loop import CHUNK, Batch, OnCommit
from specdec.models import LoadedModel
from specdec.outputs import SpeculativeOutput, collect
from specdec.processors import Processors
from specdec.prompt_reader import PromptReader
from specdec.registry import VERIFIERS, known
from specdec.score_recorder import ScoreRecorder
from specdec.stats import Stats
from specdec.stopping import Stops, with_stop_strings
from specdec.target import Target

DRAFT_LENGTH = 5  # where it is fixed and nobody says
LONGEST = 8  # where it is learned
DRAFTS_INSTEAD = dict.fromkeys(("assistant_model", "custom_generate"), "say what drafts with drafter=")


def generate(
    model: PreTrainedModel,
    input_ids: Tensor | None = None,
    *,
    drafter: str | Drafter | None = "ngram",
    verifier: str | Verifier = "auto",
    draft_length: int | None = None,
    seed: int | None = None,
    request_ids: Sequence[int] | None = None,
    streamer: BaseStreamer | None = None,
    stop_strings: str | list[str] | None = None,
    tokenizer: Any = None,
    on_commit: OnCommit | None = None,
    max_batch: int | None = None,
    return_stats: bool = False,
    **kwargs: Any,
) -> Any:
    """`model.generate(input_ids, **kwargs)`, decoded speculatively; the same output type.

    input_ids:    [B, columns] int64, left-padded, with `attention_mask` of the same shape where there is padding.
    drafter:      a name as on the command line ("ngram", "mtp", "ngram:max_n=3"), an object with the `Drafter` methods,
                  or None for plain decoding.
    verifier:     "auto" (the lossless rule that fits the draft, see verifiers/auto.py), a name, or an object.
    draft_length: drafted tokens per row and step, at most; 0 is plain decoding. None: as many as pay, from 0 to
                  LONGEST, by what steps turn out to cost and to accept (see specdec.budget); but DRAFT_LENGTH where
                  the sample depends on the length (sampling with another rule than "coupled"), so that a seed gives
                  the same sample whatever the clock does. A name's own length= goes before it.
    seed:         of the sampling streams; None draws one from torch's generator, so `set_seed` works.
    request_ids:  B ints in [0, 2**32) that name the rows' random streams; default: the row's index.
    streamer:     gets tokens as they are accepted (batch of 1).
    tokenizer:    the target's, for stop_strings and for a draft model given by name.
    on_commit:    called as on_commit(row, tokens, n_drafted) after every step of every row.
    max_batch:    most rows at work at a time, None = all; a row that ends makes place for the next one at once.
    return_stats: also return the call's `Stats`: (output, stats).
    Raises ValueError or NotImplementedError, in one sentence, for what it cannot do.

    Example: specdec.generate(model, **tokenizer("Hello", return_tensors="pt"), drafter="ngram", max_new_tokens=32)
    """
    refuse_arguments(kwargs, "specdec.generate", DRAFTS_INSTEAD)
    decode = speculate(
        drafter=drafter, verifier=verifier, draft_length=draft_length, seed=seed, request_ids=request_ids,
        streamer=streamer, tokenizer=tokenizer, on_commit=on_commit, max_batch=max_batch,
    )  # fmt: skip
    refuse_cache(kwargs.get("cache_implementation"))
    mark_callers(kwargs)
    if cached_tokens(handed_over(kwargs)) == 0 and kwargs.get("inputs_embeds") is None:
        check_prompt(input_ids, kwargs.get("attention_mask"))
    kwargs = with_stop_strings(model, tokenizer, kwargs | {"stop_strings": stop_strings})
    output = model.generate(input_ids, custom_generate=decode, **kwargs)
    return (output, decode.stats) if return_stats else output


class speculate:
    """A decoding function for `model.generate(..., custom_generate=specdec.speculate(drafter="ngram"))`.

    Arguments as in `specdec.generate`. A streamer must be given here: `generate` hands neither its own nor an
    `assistant_model` on to a custom function. After each call, `stats` holds that call's statistics."""

    def __init__(
        self,
        drafter: str | Drafter | None = "ngram",
        verifier: str | Verifier = "auto",
        draft_length: int | None = None,
        seed: int | None = None,
        request_ids: Sequence[int] | None = None,
        streamer: BaseStreamer | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        on_commit: OnCommit | None = None,
        max_batch: int | None = None,
    ):
        if draft_length is not None:
            check_draft_length(draft_length)
        if max_batch is not None:
            advice = "give how many rows may run at a time, at least 1, or None"
            max_batch = whole_number(max_batch, "max_batch", advice, least=1)
        self.max_batch = max_batch
        self.drafter = DrafterSpec.parse(drafter) if isinstance(drafter, str) else _checked(drafter)
        if isinstance(self.drafter, DrafterSpec) and self.drafter.length is not None:
            draft_length = self.drafter.length
        self.verifier = known(VERIFIERS, verifier, "verifier") if isinstance(verifier, str) else verifier
        if not isinstance(self.verifier, type | Verifier):
            raise ValueError(f"verifier is {verifier!r}: give a name, or an object with all of specdec.Verifier")
        if seed is not None:
            seed = whole_number(seed, "seed", "give an integer, or None to draw one from torch's generator")
        self.draft_length, self.seed, self.request_ids = draft_length, seed, request_ids
        self.streamer, self.tokenizer, self.on_commit = streamer, tokenizer, on_commit
        self.stats: Stats | None = None
        self._made: tuple[PreTrainedModel, Drafter | None] | None = None  # for a drafter given by name

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Tensor | SpeculativeOutput:
        batch = self.prepare(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs)
        if self.streamer is not None:
            if len(batch.requests) > 1:
                raise ValueError(f"a streamer was given for a batch of {len(batch.requests)}: stream one row at a time")
            self.streamer.put(input_ids.cpu())
        batch.run()
        if self.streamer is not None:
            self.streamer.end()
        output = collect(batch, input_ids, generation_config, handed_over(model_kwargs) if batch.keeps_cache else None)
        return output if generation_config.return_dict_in_generate else output.sequences

    def prepare(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Batch:
        """What `generate` hands over, checked and ready to run."""
        refuse_unsupported(generation_config, model_kwargs)
        target = Target(model)
        stops = Stops(stopping_criteria)
        prompts = layout(input_ids, model_kwargs, generation_config)
        requests = prompts.requests(self._request_ids(len(input_ids)), int(stops.max_length) - input_ids.shape[1])
        check_token_ids(target, requests)
        check_positions(target, requests)
        verifier = fitting_verifier(self.verifier, bool(generation_config.do_sample))
        learns = self.draft_length is None and verifier.draws != "fresh"
        length = self.draft_length if self.draft_length is not None else LONGEST if learns else DRAFT_LENGTH
        drafter = None if self.draft_length == 0 else self._drafter(model)
        reader = None if prompts.is_plain else self._reader(target, prompts, model_kwargs, drafter)
        returns = bool(generation_config.return_dict_in_generate)
        asked = returns and bool(generation_config.output_scores), returns and bool(generation_config.output_logits)
        cache = handed_over(model_kwargs)
        batch = Batch(
            target=target,
            drafter=drafter,
            verifier=verifier,
            processors=Processors(logits_processor, target.vocab_size),
            stops=stops,
            requests=requests,
            seed=self._seed(verifier),
            draft_length=length,
            budget=Budget(length) if learns else None,
            on_commit=self._committed,
            max_rows=self.max_batch,
            chunk=_chunk(generation_config.prefill_chunk_size) if reader is None else prompts.seen.size,
            reader=reader,
            recorder=ScoreRecorder(requests, *asked) if any(asked) else None,
            keeps_cache=any(asked) or (returns and cache is not None) or is_callers(cache),
        )
        self.stats = batch.stats
        return batch

    def _reader(
        self, target: Target, prompts: Layout, model_kwargs: dict[str, Any], drafter: Drafter | None
    ) -> PromptReader:
        if self.max_batch is not None and self.max_batch < len(prompts.ids):
            raise NotImplementedError(
                f"max_batch is {self.max_batch} for {len(prompts.ids)} prompts that the model itself has to read (a "
                f"cache, embeddings, positions or a mask that is no left padding were given): leave it out"
            )
        if getattr(drafter, "needs_hidden", None) and not prompts.names_all_tokens:
            raise NotImplementedError(
                f"drafter {drafter.name!r} needs the target's state of every token of the prompt, which a cache passed "
                f"in or embeddings do not give: use another drafter"
            )
        return PromptReader(target, prompts, model_kwargs)

    def _request_ids(self, B: int) -> list[int]:
        ids = list(range(B)) if self.request_ids is None else list(self.request_ids)
        if len(ids) != B:
            raise ValueError(f"request_ids has {len(ids)} entries for {B} rows: give one per returned sequence")
        ids = [whole_number(id_, "an entry of request_ids", "give integers in [0, 2**32)", least=0) for id_ in ids]
        request_array(ids)  # too large is too large also where nothing will be drawn
        return ids

    def _drafter(self, model: PreTrainedModel) -> Drafter | None:
        """The drafter given, or the named one made for `model`, once as long as the model stays the same."""
        if not isinstance(self.drafter, DrafterSpec):
            return self.drafter
        if self._made is None or self._made[0] is not model:
            self._made = model, _checked(build_drafter(self.drafter, LoadedModel(model, self.tokenizer, "")))
        return self._made[1]

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


def _checked(drafter: Any) -> Drafter | None:
    """`drafter`, if it is one."""
    if drafter is not None and (isinstance(drafter, type) or not isinstance(drafter, Drafter)):
        raise ValueError(
            f"drafter is {drafter!r}, which lacks some of what specdec.Drafter asks for: give an instance, of a class "
            f"derived from specdec.BaseDrafter"
        )
    return drafter


def _chunk(size: int | None) -> int:
    """Most prompt tokens per step."""
    if size is None:
        return CHUNK
    return whole_number(size, "prefill_chunk_size", "give how many prompt tokens may enter in a step, 1 or more", 1)
