"""A decoding function for `model.generate(..., custom_generate=...)`.

`generate` prepares everything (generation config, processors, stopping criteria, expansion for `num_return_sequences`)
and calls the function made here instead of its own sampling loop. What this function cannot honour it refuses by name,
before anything is computed.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Sequence
from typing import Any, Literal

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

from specdec.budget import Budget, budget_for
from specdec.call_checks import (
    check_draft_length,
    check_positions,
    check_token_ids,
    fitting_verifier,
    refuse_foreign_inputs,
    refuse_unsupported,
    whole_number,
)
from specdec.columns import Columns
from specdec.compat import handed_over, is_callers
from specdec.compiled import wanted
from specdec.contracts import BaseDrafter, Drafter, Verifier
from specdec.draft_checks import claimed
from specdec.drafter_spec import DrafterSpec, build_drafter
from specdec.draws import request_array
from specdec.invariant import LONGEST_DRAFT, check_fits, target_for
from specdec.layout import Layout, layout
from specdec.loop import CHUNK, Batch, OnCommit
from specdec.models import LoadedModel
from specdec.outputs import SpeculativeOutput, collect, pad_token
from specdec.peers import PeerTarget, are_needed
from specdec.processors import Processors
from specdec.prompt_reader import PromptReader
from specdec.registry import VERIFIERS, known
from specdec.score_recorder import ScoreRecorder
from specdec.stats import Stats
from specdec.stopping import Stops
from specdec.target import Target

DRAFT_LENGTH = 5  # where it is fixed and nobody says
LONGEST = 8  # where it is learned


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
        synced_gpus: bool | None = None,
        invariant: bool = False,
        compile: bool | Literal["auto"] = False,
    ):
        if draft_length is not None:
            check_draft_length(draft_length)
        if max_batch is not None:
            advice = "give how many rows may run at a time, at least 1, or None"
            max_batch = whole_number(max_batch, "max_batch", advice, least=1)
        if compile not in (True, False, "auto"):
            raise ValueError(f"compile is {compile!r}: give True, False or 'auto'")
        self.max_batch, self.compile = max_batch, compile
        self.drafter = DrafterSpec.parse(drafter) if isinstance(drafter, str) else _checked(drafter)
        if isinstance(self.drafter, DrafterSpec) and self.drafter.length is not None:
            draft_length = self.drafter.length
        if invariant:
            check_fits(draft_length)
        self.invariant = invariant
        self.verifier = known(VERIFIERS, verifier, "verifier") if isinstance(verifier, str) else verifier
        if not isinstance(self.verifier, type | Verifier):
            raise ValueError(f"verifier is {verifier!r}: give a name, or an object with all of specdec.Verifier")
        if seed is not None:
            seed = whole_number(seed, "seed", "give an integer, or None to draw one from torch's generator")
        self.draft_length, self.seed, self.request_ids = draft_length, seed, request_ids
        self.streamer, self.tokenizer, self.on_commit = streamer, tokenizer, on_commit
        self.synced_gpus = synced_gpus
        self.__signature__ = _call_signature()
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
        self._go_together(batch, input_ids, generation_config)
        batch.run()
        if self.streamer is not None:
            self.streamer.end()
        output = collect(batch, input_ids, generation_config, handed_over(model_kwargs) if batch.keeps_cache else None)
        if isinstance(batch.target, PeerTarget):
            batch.target.wait()
        return output

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
        refuse_foreign_inputs(model)
        synced = are_needed(model) if self.synced_gpus is None else self.synced_gpus
        if synced and self.invariant:
            raise NotImplementedError(
                "invariant mode does not run a model that is sharded over processes: leave it out"
            )
        target = PeerTarget(model) if synced else target_for(model, self.invariant)
        stops = Stops(stopping_criteria)
        stops.device = input_ids.device
        prompts = layout(input_ids, model_kwargs, generation_config)
        requests = prompts.requests(self._request_ids(len(input_ids)), int(stops.max_length) - input_ids.shape[1])
        check_token_ids(target, requests)
        check_positions(target, requests)
        verifier = fitting_verifier(self.verifier, bool(generation_config.do_sample))
        drafter = None if self.draft_length == 0 else self.drafter_for(model)
        learns = self.draft_length is None and drafter is not None and verifier.draws != "fresh"
        if getattr(model, "tp_size", None) is not None:
            learns = False  # tensor-parallel processes draft the same, and their clocks would not say the same
        longest = min(LONGEST, LONGEST_DRAFT) if self.invariant else LONGEST
        length = self.draft_length if self.draft_length is not None else longest if learns else DRAFT_LENGTH
        returns = bool(generation_config.return_dict_in_generate)
        layers = returns and bool(generation_config.output_hidden_states or generation_config.output_attentions)
        reader = None
        if layers or not prompts.is_plain:
            reader = self._reader(target, prompts, model_kwargs, drafter)
        asked = returns and bool(generation_config.output_scores), returns and bool(generation_config.output_logits)
        cache = handed_over(model_kwargs)
        compile_seconds = self._compile(target, drafter)
        batch = Batch(
            target=target,
            drafter=drafter,
            verifier=verifier,
            processors=Processors(logits_processor, target.vocab_size, len(requests)),
            stops=stops,
            requests=requests,
            seed=self._seed(verifier),
            draft_length=length,
            budget=self._budget(target, verifier, length) if learns else None,
            on_commit=self.on_commit,
            max_rows=self.max_batch,
            chunk=_chunk(generation_config.prefill_chunk_size, target.chunk) if reader is None else prompts.seen.size,
            reader=reader,
            recorder=ScoreRecorder(requests, *asked) if any(asked) else None,
            keeps_cache=any(asked) or (returns and cache is not None) or is_callers(cache),
        )
        self.stats = batch.stats
        self.stats.compile_seconds = compile_seconds
        return batch

    def _budget(self, target: Target, verifier: Verifier, longest: int) -> Budget:
        drafter = self.drafter.text if isinstance(self.drafter, DrafterSpec) else self.drafter
        return budget_for(target.model, drafter, (verifier.name, type(target), target.graph is not None), longest)

    def _compile(self, target: Target, drafter: Drafter | None) -> float:
        """Compile both, or have the drafter run eagerly again; the seconds that compiling took."""
        started, on = time.perf_counter(), wanted(self.compile, target.device)
        if on:
            target.compile()
        if isinstance(drafter, BaseDrafter):
            with claimed(drafter, drafter.name):  # one at work stays as it is
                drafter.compile(on)
        return time.perf_counter() - started if on else 0.0

    def _reader(
        self, target: Target, prompts: Layout, model_kwargs: dict[str, Any], drafter: Drafter | None
    ) -> PromptReader:
        if self.invariant:
            raise NotImplementedError(
                "invariant mode reads prompts itself, in chunks of a fixed length: give no cache, embeddings, "
                "positions or mask that is no left padding, and ask for no hidden states or attentions"
            )
        if self.max_batch is not None and self.max_batch < len(prompts.ids):
            raise NotImplementedError(
                f"max_batch is {self.max_batch} for {len(prompts.ids)} prompts that the model itself has to read (for "
                f"a cache, embeddings, positions or a mask that is no left padding, or for hidden states or "
                f"attentions): leave it out"
            )
        if getattr(drafter, "needs_hidden", None) and not prompts.names_all_tokens:
            raise NotImplementedError(
                f"drafter {drafter.name!r} needs the target's state of every token of the prompt, which a cache passed "
                f"in or embeddings do not give: use another drafter"
            )
        return PromptReader(target, prompts, model_kwargs)

    def _go_together(self, batch: Batch, input_ids: Tensor, config: GenerationConfig) -> None:
        """Where something is to meet all rows column by column, as in plain `generate`, let it; but rows that wait for
        a place stop each by itself."""
        stops, recorder, rows = batch.stops, batch.recorder, len(batch.requests)
        sees_scores = recorder is not None and recorder.scores is not None
        all_at_work = self.max_batch is None or self.max_batch >= rows
        stops.together = stops.asks_more and all_at_work and (rows > 1 or sees_scores)
        if stops.together or self.streamer is not None:
            pad = pad_token(config) if stops.pads or not all_at_work else None
            batch.columns = Columns(batch.requests, input_ids, stops, pad, recorder, self.streamer)

    def _request_ids(self, B: int) -> list[int]:
        ids = list(range(B)) if self.request_ids is None else list(self.request_ids)
        if len(ids) != B:
            raise ValueError(f"request_ids has {len(ids)} entries for {B} rows: give one per returned sequence")
        ids = [whole_number(id_, "an entry of request_ids", "give integers in [0, 2**32)", least=0) for id_ in ids]
        request_array(ids)  # too large is too large also where nothing will be drawn
        return ids

    def drafter_for(self, model: PreTrainedModel) -> Drafter | None:
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


@functools.cache
def _call_signature() -> inspect.Signature:
    """Of a decoding function: `generate` looks at it several times in every call."""
    _, *handed_over = inspect.signature(speculate.__call__).parameters.values()
    return inspect.Signature(handed_over)


def _checked(drafter: Any) -> Drafter | None:
    """`drafter`, if it is one."""
    if drafter is None or isinstance(drafter, BaseDrafter):  # looking for every part of the contract takes its time
        return drafter
    if isinstance(drafter, type) or not isinstance(drafter, Drafter):
        raise ValueError(
            f"drafter is {drafter!r}, which lacks some of what specdec.Drafter asks for: give an instance, of a class "
            f"derived from specdec.BaseDrafter"
        )
    return drafter


def _chunk(size: int | None, least: int) -> int:
    """Most prompt tokens per step, and at least as many as enter at once."""
    if size is None:
        return CHUNK
    advice = f"give how many prompt tokens may enter in a step, {least} or more"
    return whole_number(size, "prefill_chunk_size", advice, least)
