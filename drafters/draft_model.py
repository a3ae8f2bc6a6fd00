"""Drafting with a smaller language model (Leviathan et al. 2211.17192; Chen et al. 2302.01318).

The draft model decodes a chain for all rows at once over a slot cache of its own. Its state after a verdict is the
longest prefix that both agree on: a smaller length, nothing is recomputed and nothing copied.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

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
        self.model = Target(model)
        self.cache = self.model.new_cache()

    def admit(self, ids: Sequence[int]) -> None:
        self.cache.admit(ids)

    def release(self, ids: Sequence[int]) -> None:
        self.cache.release(ids)

    def propose(self, rows: Rows, budget: Sequence[int], draws: Draws) -> Draft:
        budget = self._within_positions(rows, budget)
        B, N = len(rows.ids), max(budget)
        tokens = torch.zeros(B, N, dtype=torch.long, device=rows.device)
        q_logits, q_logz = [], []
        for depth in range(N):
            active = [b for b in range(B) if budget[b] > depth]
            index = torch.tensor(active, device=rows.device)
            logits = self._read(rows, active) if depth == 0 else self._next(rows, active, tokens[index, depth - 1])
            drawn, log_q, logz = draws.sample(fit_vocabulary(logits, rows.vocab_size), depth, active)
            tokens[index, depth] = drawn
            if log_q is not None:
                q_logits.append(_spread(log_q, index, B))
                q_logz.append(_spread(logz, index, B))
        if not q_logits:
            return Draft(tokens, list(budget))
        return Draft(tokens, list(budget), q_logits=torch.stack(q_logits, 1), q_logz=torch.stack(q_logz, 1))

    def observe(self, rows: Rows, verdict: Verdict, hidden: Sequence[Tensor] | None) -> None:
        """Keep, of each row's cached drafts, those that became text: all but its last token is in the cache at most."""
        for row, text in zip(rows.ids, rows.tokens, strict=True):
            self.cache.lengths[row] = min(self.cache.lengths[row], len(text) - 1)

    def _within_positions(self, rows: Rows, budget: Sequence[int]) -> Sequence[int]:
        """`budget`, less where the draft model's table of positions ends before the target's does."""
        if not self.model.positions_are_a_table or self.model.max_positions is None:
            return budget
        room = [max(0, self.model.max_positions - len(text) + 1) for text in rows.tokens]
        return [min(pair) for pair in zip(budget, room, strict=True)]

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
        step.input_ids.clamp_(max=self.model.vocab_size - 1)  # an id that only the target knows; its drafts may be poor
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
    device, dtype = target.model.device, target.model.dtype
    loaded = load_target(model, dtype=str(dtype).removeprefix("torch."), device=str(device))
    return DraftModelDrafter(loaded.model, loaded.tokenizer, target.tokenizer)


def fit_vocabulary(logits: Tensor, V: int) -> Tensor:
    """[b, V] logits over the target's ids: padding columns that the target lacks are cut, those it adds get -inf."""
    if logits.shape[-1] >= V:
        return logits[:, :V]
    return torch.nn.functional.pad(logits, (0, V - logits.shape[-1]), value=-torch.inf)


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
    total = model.config.num_hidden_layers
    if not isinstance(layers, int) or not 1 <= layers < total:
        raise ValueError(f"layers={layers!r} of a target with {total}: give 1 to {total - 1}")
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:layers]
    with torch.device(model.device):
        small = type(model)(config).to(model.dtype)
    weights = model.state_dict()
    small.load_state_dict({name: weights[name] for name in small.state_dict()}, assign=True)
    small.tie_weights()
    return small.eval().requires_grad_(False)


def _spread(values: Tensor, index: Tensor, B: int) -> Tensor:
    """[B, ...] with `values` at rows `index`, zero elsewhere; the same tensor where every row is active."""
    return values if len(index) == B else values.new_zeros(B, *values.shape[1:]).index_copy_(0, index, values)
