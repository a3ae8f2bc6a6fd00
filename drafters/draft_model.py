"""Drafting with a smaller language model (Leviathan et al. 2211.17192; Chen et al. 2302.01318).

The draft model decodes a chain for all rows at once over a slot cache of its own. Its state after a verdict is the
longest prefix that both agree on: a smaller length, nothing is recomputed and nothing copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from drafters.autoregressive import SampledChain, within_positions
from heads.projection import head_rows
from heads.submodel import layers_of, submodel
from specdec.contracts import BaseDrafter, Draft, Draws, Rows, Verdict
from specdec.models import LoadedModel, load_target
from specdec.step import Segment
from specdec.target import Target

CHUNK = 512  # tokens per draft forward and row while a prompt is read in


class DraftModelDrafter(BaseDrafter):
    """Any causal LM whose token ids mean the same as the target's.

    model:  the draft model. Its vocabulary may be padded to another size than the target's.
    tokenizer, target_tokenizer: if both are given, their token ids are compared; a mismatch is a ValueError that
    names the first differing token.

    Drafts are sampled with the request's warpers and come with the exact q they were drawn from; without sampling they
    are arg-maxes.
    """

    name = "draft_model"

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        if tokenizer is not None and target_tokenizer is not None:
            check_same_tokens(tokenizer, target_tokenizer)
        # From `specdec train draft --draft_vocab_size`: the ids that it was trained to propose.
        ids = getattr(model.config, "draft_ids", None)
        self.ids = None if ids is None else torch.tensor(ids, device=model.device)
        self.embedded = model.get_input_embeddings().weight.shape[0]
        if self.ids is not None and model.get_output_embeddings().weight.shape[0] != len(ids):
            model = submodel(model, range(len(layers_of(model))), share=True)  # the caller's own keeps its head
            model.set_output_embeddings(head_rows(model.get_output_embeddings(), self.ids))
        self.model = Target(model)
        self.cache = self.model.new_cache()

    def admit(self, ids: Sequence[int]) -> None:
        self.cache.admit(ids)

    def release(self, ids: Sequence[int]) -> None:
        self.cache.release(ids)

    def compile(self, on: bool) -> None:
        self.model.compile(on)

    def propose(self, rows: Rows, budget: Sequence[int], draws: Draws) -> Draft:
        chain = SampledChain(rows, within_positions(budget, rows, self.model), draws)
        for depth in range(chain.longest):
            active = chain.active(depth)
            if depth == 0:
                logits = self._read(rows, active)
            else:
                logits = self._next(rows, active, chain.tokens[chain.at(active), depth - 1])
            chain.draw(depth, active, logits, self.ids)
        return chain.draft()

    def observe(self, rows: Rows, verdict: Verdict, hidden: Sequence[Tensor] | None) -> None:
        """Keep, of each row's cached drafts, those that became text: all but its last token is in the cache at most."""
        for row, text in zip(rows.ids, rows.tokens, strict=True):
            self.cache.lengths[row] = min(self.cache.lengths[row], len(text) - 1)

    def _read(self, rows: Rows, active: Sequence[int]) -> Tensor:
        """[b, V] logits after the whole text of the active rows, running what the cache does not hold yet."""

        def segment(b: int, most: int | None) -> Segment:
            start = self.cache.lengths[rows.ids[b]]
            end = len(rows.tokens[b]) if most is None else start + most
            return Segment(rows.ids[b], rows.tokens[b][start:end], start, scored=most is None)

        def missing(b: int) -> int:
            return len(rows.tokens[b]) - self.cache.lengths[rows.ids[b]]

        while behind := [b for b in active if missing(b) > CHUNK]:
            self._forward([segment(b, CHUNK) for b in behind])
        return self._forward([segment(b, None) for b in active])

    def _next(self, rows: Rows, active: Sequence[int], tokens: Tensor) -> Tensor:
        """[b, V] logits after one more token [b] (on the device) in each active row."""
        unknown = np.zeros(1, dtype=np.int64)
        return self._forward(
            [Segment(r, unknown, self.cache.lengths[r], True) for r in (rows.ids[b] for b in active)], tokens
        )

    def _forward(self, segments: list[Segment], tokens: Tensor | None = None) -> Tensor:
        """[b, V] logits of the scored segments; `tokens` [b] replace the host's where only the device knows them."""
        scored = sum(segment.scored for segment in segments)
        step = self.model.pack(segments, Draft.empty(scored, self.model.device), self.cache)
        if tokens is not None:
            step.input_ids[0, step.keep] = tokens.to(step.input_ids.device)
        step.input_ids.clamp_(max=self.embedded - 1)  # an id that only the target knows; its drafts may be poor
        logits, _ = self.model.forward(step, self.cache)
        for segment in segments:
            self.cache.lengths[segment.row] += len(segment.tokens)
        return logits


def build(target: LoadedModel, model: str | None = None, layers: int | None = None) -> DraftModelDrafter:
    """The drafter that `draft_model:model=NAME` (a Hub id, folder or .gguf file) or `draft_model:layers=K` (the
    target's own first K layers) names. Raises ValueError unless exactly one of them is given, or where the tokenizers
    differ."""
    if (model is None) == (layers is None):
        raise ValueError("draft_model needs model=NAME or layers=K, one of them: for example draft_model:layers=6")
    if layers is not None:
        return DraftModelDrafter(first_layers(target.model, layers))
    if target.tokenizer is None:
        raise ValueError(
            f"draft_model:model={model} needs the target's tokenizer to compare token ids: pass tokenizer="
        )
    device, dtype = target.model.device, target.model.dtype
    loaded = load_target(model, dtype=str(dtype).removeprefix("torch."), device=str(device))
    return DraftModelDrafter(loaded.model, loaded.tokenizer, target.tokenizer)


def check_same_tokens(draft: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase) -> None:
    """ValueError unless every id that both tokenizers know stands for the same token, and every token for one id."""
    draft_ids, target_ids = draft.get_vocab(), target.get_vocab()
    draft_tokens = {id_: token for token, id_ in draft_ids.items()}
    for token, id_ in sorted(target_ids.items(), key=lambda item: item[1]):
        if draft_ids.get(token, id_) != id_ or draft_tokens.get(id_, token) != token:
            raise ValueError(
                f"the draft model's tokenizer differs from the target's at id {id_}: the target has {token!r} there, "
                f"the draft {draft_tokens.get(id_)!r}; use a draft model of the target's own family"
            )


def first_layers(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A model of the target's class made of its first `layers` layers, norm and head, sharing its weights."""
    total = len(layers_of(model))
    if not isinstance(layers, int) or not 1 <= layers < total:
        raise ValueError(f"layers={layers!r} of a target with {total}: give 1 to {total - 1}")
    return submodel(model, range(layers), share=True)
