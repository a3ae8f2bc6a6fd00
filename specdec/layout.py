"""How the prompts of a call lie in Hugging Face's columns, and the requests that they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from transformers import GenerationConfig

from specdec.compat import cached_tokens, handed_over
from specdec.requests import Request


@dataclass(frozen=True)
class Layout:
    """B prompts in C columns, on the host.

    ids:       [B, c] int64 what `generate` was given as ids: of all C columns, of the new ones only, or none.
    seen:      [B, C] whether the mask lets a column be seen.
    positions: [B, n] of the last n columns, or None where the model counts by itself.
    past:      columns that a cache passed in holds already.
    by_embeds: whether the prompt was given as embeddings.
    """

    ids: np.ndarray
    seen: np.ndarray
    positions: np.ndarray | None
    past: int = 0
    by_embeds: bool = False

    @property
    def columns(self) -> int:
        """C."""
        return self.seen.shape[1]

    @property
    def pads(self) -> np.ndarray:
        """[B] masked columns before the first that is seen: they get no slot."""
        return self.seen.argmax(1)

    @property
    def is_plain(self) -> bool:
        """Whether the prompts are token ids alone, padded on the left if at all, whose positions count them."""
        if self.past or self.by_embeds:
            return False
        counted = np.arange(self.columns) - self.pads[:, None]
        if not ((counted >= 0) == self.seen).all():
            return False
        return self.positions is None or bool(((self.positions == counted) | ~self.seen).all())

    @property
    def names_all_tokens(self) -> bool:
        """Whether every token of the prompts is there by its id, none as an embedding or in a cache alone."""
        return self.past == 0 and self.ids.shape[1] == self.columns

    def requests(self, request_ids: Sequence[int], limit: int) -> list[Request]:
        """One request per row, with at most `limit` tokens to emit."""
        pads = self.pads
        whole = self.ids.shape[1] == self.columns  # else new tokens after a cache, or none, without padding
        slots = self.columns - pads
        following = self.seen.sum(1) if self.positions is None else self.positions[:, -1] + 1
        return [
            Request(
                row=b,
                request_id=request_ids[b],
                index=b,
                columns=self.ids[b],
                pads=int(pads[b]) if whole else 0,
                limit=limit,
                before=0 if whole else int(slots[b]) - self.ids.shape[1],
                shift=int(following[b % len(following)] - slots[b]),
            )
            for b in range(len(self.ids))
        ]


def layout(input_ids: Tensor, model_kwargs: Mapping[str, Any], config: GenerationConfig) -> Layout:
    """The layout of what `generate` hands to a decoding function.

    After a cache, `input_ids` is the whole text, or what is new of it beside a mask of the whole text. Raises
    ValueError where these do not fit each other."""
    ids = input_ids.cpu().numpy().astype(np.int64)
    mask, embeds = model_kwargs.get("attention_mask"), model_kwargs.get("inputs_embeds")
    past = cached_tokens(handed_over(model_kwargs))
    given = ids.shape[1] if embeds is None else embeds.shape[1]
    masked = getattr(config, "_mask_length", None) if mask is None else mask.shape[1]
    columns = given if past == 0 or masked in (given, None) else past + given
    if masked not in (columns, None):
        raise ValueError(
            f"attention_mask has {masked} columns for a text of {columns}, of which {past} are in the cache: give it "
            f"one for every column"
        )
    if past >= columns:
        raise ValueError(f"the cache holds {past} tokens and the text has {columns}: give a text that goes on after it")
    seen = np.ones((len(ids), columns), dtype=bool) if mask is None else mask.cpu().numpy() != 0
    if not seen.any(1).all():
        raise ValueError(
            f"row {int(seen.any(1).argmin())} of attention_mask masks every token: an empty prompt cannot be continued"
        )
    positions = model_kwargs.get("position_ids")
    if positions is not None and positions.ndim != 2:
        raise NotImplementedError(
            f"position_ids of shape {tuple(positions.shape)} are not supported: give one per token, [batch, columns]"
        )
    if positions is not None and positions.shape[1] not in (given, columns):
        raise ValueError(
            f"position_ids has {positions.shape[1]} columns for {given} that are to be read: give one per token"
        )
    counted = None if positions is None else positions.cpu().numpy()
    return Layout(ids, seen, counted, past, embeds is not None)
