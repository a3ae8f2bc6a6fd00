"""Prompts that only the model's own forward can read.

They are embeddings, masks with holes, positions of one's own, what follows a cache that was passed in, and the prompts
of calls that ask for hidden states or attentions. The model reads them as it does in `generate`, into Hugging Face's
cache; keys and values are copied to the slot cache, a slot per column, and decoding goes on from there as after any
other prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from transformers.utils import ModelOutput

from specdec.cache import SlotCache
from specdec.capture import HiddenContract
from specdec.compat import handed_over
from specdec.contracts import Draft
from specdec.layout import Layout
from specdec.step import Segment
from specdec.target import Target

READABLE = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)


class PromptReader:
    """In place of a `Target` for the step that reads all prompts: the model's own forward, from `layout.past` on.

    kwargs: what `generate` hands over; its cache, if there is one, is left with all columns of the prompt.
    asked:  which of "hidden_states" and "attentions" it asks for.
    Raises NotImplementedError for a cache that does not hold keys and values as they are."""

    def __init__(self, target: Target, layout: Layout, kwargs: Mapping[str, Any]):
        self.target, self.layout, self.kwargs = target, layout, kwargs
        self.asked = [name for name in ("hidden_states", "attentions") if kwargs.get(f"output_{name}")]
        self.first: ModelOutput | None = None  # what the prompts' forward gave of it
        cache = handed_over(kwargs)
        self.cache = DynamicCache(config=target.config) if cache is None else cache
        check_readable(self.cache)
        check_rows(self.cache, len(layout.ids))

    def pack(self, segments: Sequence[Segment], draft: Draft, cache: SlotCache) -> _Reading:
        """All rows, in order; nothing is drafted in this step."""
        first = dict(zip((s.row for s in segments), np.cumsum([0, *(len(s.tokens) for s in segments)]), strict=False))
        return _Reading(torch.arange(len(segments), device=self.target.device)[:, None], first, segments)

    @torch.no_grad()
    def forward(
        self, step: _Reading, cache: SlotCache, hidden: HiddenContract | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [B, V] after the last column and, if `hidden` asks, the states [M, D] of the rows' tokens."""
        new = self.layout.columns - self.layout.past
        embeds = self.kwargs.get("inputs_embeds")
        if embeds is not None:
            inputs = {"inputs_embeds": embeds[:, -new:]}
        else:
            inputs = {"input_ids": torch.from_numpy(self.layout.ids[:, -new:]).to(self.target.device)}
        with self.target.capture(hidden) as captured:
            out = self._run(inputs, new, 0, self.cache)
        self._load(cache, [segment.row for segment in step.segments])
        self.first = out if self.asked else None
        if hidden is None:
            return out.logits[:, -1], None
        pads = self.layout.pads.tolist()
        return out.logits[:, -1], torch.cat([row[pad:] for row, pad in zip(captured[0], pads, strict=True)])

    @torch.no_grad()
    def read(self, ids: Tensor) -> ModelOutput:
        """Go on, into the same cache, with `ids` [B, T] that were emitted after the text that it holds."""
        after = int(self.cache.get_seq_length()) - self.layout.columns
        return self._run({"input_ids": ids}, ids.shape[1], after + ids.shape[1], self.cache)

    @torch.no_grad()
    def read_again(self, ids: Tensor) -> ModelOutput:
        """The whole text, the emitted `ids` [B, T] included, without a cache."""
        text = torch.cat([torch.from_numpy(self.layout.ids).to(ids), ids], dim=1)
        return self._run({"input_ids": text}, text.shape[1], ids.shape[1], None)

    def _run(self, inputs: dict[str, Tensor], columns: int, emitted: int, cache: Cache | None) -> ModelOutput:
        """The last `columns` columns of a text of which `emitted` were emitted."""
        mask, positions = self.kwargs.get("attention_mask"), self.kwargs.get("position_ids")
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(mask), emitted)], dim=1)
        if positions is not None:
            following = positions[:, -1:] + 1 + torch.arange(emitted, device=positions.device)
            inputs |= {"position_ids": torch.cat([positions, following], dim=1)[:, -columns:].to(self.target.device)}
        if cache is not None:
            inputs |= {self.target.cache_argument: cache}
        return self.target.run_model(
            **inputs,
            attention_mask=mask,
            use_cache=cache is not None,
            **{f"output_{name}": True for name in self.asked},
            **self.target.last_logits_only,
        )

    def _load(self, cache: SlotCache, rows: Sequence[int]) -> None:
        """Copy the keys and values of every column from the first that is seen on; what is masked is zeroed, since it
        is multiplied with weights of 0 and may be anything."""
        columns, pads = self.layout.columns, self.layout.pads.tolist()
        cache.reserve(columns)
        for slots, layer in zip(cache.layers, self.cache.layers, strict=True):
            count = min(columns, layer.keys.shape[2])  # a window keeps the last ones, and needs no others
            last = slice(0, columns) if count == columns else slice(-count, None)
            # Of an offloaded cache they are elsewhere than where the layer computes.
            keys, values = (states[:, :, last].to(layer.device) for states in (layer.keys, layer.values))
            slots.lazy_initialization(keys, values)
            for b, row in enumerate(rows):
                skip = max(0, pads[b] - (columns - count))
                seen = torch.from_numpy(self.layout.seen[b, columns - count + skip :]).to(keys.device)[:, None]
                at = slice(columns - count + skip - pads[b], columns - pads[b])
                slots.keys[cache.place(row), :, at] = keys[b, :, skip:] * seen
                slots.values[cache.place(row), :, at] = values[b, :, skip:] * seen
        for row, pad, seen in zip(rows, pads, self.layout.seen, strict=True):
            if not seen[pad:].all():
                cache.masked[row] = np.flatnonzero(~seen[pad:])


@dataclass(frozen=True)
class _Reading:
    """What the loop needs to know of the step, see `Step`."""

    index: Tensor
    first: dict[int, int]
    segments: Sequence[Segment]

    @property
    def packed(self) -> list[int]:
        """Tokens of the step's one forward."""
        return [sum(len(segment.tokens) for segment in self.segments)]


def check_readable(cache: Cache) -> None:
    """NotImplementedError, naming the kind, for a cache whose keys and values cannot be copied as they are."""
    for layer in cache.layers:
        if type(layer) not in READABLE:
            raise NotImplementedError(
                f"a cache with layers of type {type(layer).__name__} is not supported: give a DynamicCache or a "
                f"StaticCache"
            )


def check_rows(cache: Cache, rows: int) -> None:
    """ValueError where a cache holds another batch than one of `rows` rows."""
    held = {layer.keys.shape[0] for layer in cache.layers if layer.is_initialized} or {rows}
    if held != {rows}:
        raise ValueError(
            f"the cache holds {min(held)} rows and the batch has {rows}: give it one row per returned sequence"
        )
