"""Slot KV cache: one buffer per layer in which every row owns a run of slots.

Row b's token at position i sits in slot i of that row, so rolling back rejected drafts is a smaller length and nothing
else: the slots past it are overwritten by the next step. Rows are known by a stable id; where they sit in the buffer
is this file's affair, and it keeps the used ones contiguous (a freed place is filled by the last used one), so that
attention always works on a view of the first n places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

if TYPE_CHECKING:
    from specdec.step import Step

BUCKET = 64  # slots handed to attention, and capacity, are multiples of this
GROWTH = 1.25  # capacity grows with the text by this factor, so copying stays a small part of the work


def bucketed(slots: int, bucket: int = BUCKET) -> int:
    """The smallest multiple of `bucket` that holds `slots`."""
    return -(-slots // bucket) * bucket


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, each [places, H_kv, capacity + 1, D]; the last slot is where padding goes.

    A head's slots lie side by side, since attention reads them all at every step and writes only a few."""

    is_sliding = False  # windows are the mask's affair: every token keeps its slot

    def __init__(self, owner: SlotCache):
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # Zeros, never empty: a masked slot still enters 0 * V, and 0 * NaN is NaN.
        places, slots = self.owner.places, self.owner.capacity + 1
        self.keys = key_states.new_zeros(places, key_states.shape[1], slots, key_states.shape[3])
        self.values = value_states.new_zeros(places, value_states.shape[1], slots, value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write the step's keys and values ([1, H_kv, M, D] packed or [n, H_kv, T, D] padded) to their slots.

        Returns views [n, H_kv, S, D] over the first n places and S slots that the step may look at."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        step = self.owner.step
        if step.only_chunks:  # prompts alone: whole runs of slots, copied as such
            for first, end, place, start in step.chunks:
                self.keys[place, :, start : start + end - first] = key_states[0, :, first:end]
                self.values[place, :, start : start + end - first] = value_states[0, :, first:end]
            return self.keys[: step.places, :, : step.slots], self.values[: step.places, :, : step.slots]
        self.keys[step.token_places, :, step.token_slots] = key_states.transpose(1, 2).flatten(0, 1)
        self.values[step.token_places, :, step.token_slots] = value_states.transpose(1, 2).flatten(0, 1)
        return self.keys[: step.places, :, : step.slots], self.values[: step.places, :, : step.slots]

    def resize(self) -> None:
        """Take the owner's new size, keeping what the old one held."""
        for name in ("keys", "values"):
            buffer = getattr(self, name)
            places, H, slots, D = buffer.shape
            grown = buffer.new_zeros(self.owner.places, H, self.owner.capacity + 1, D)
            grown[:places, :, : slots - 1] = buffer[:, :, : slots - 1]
            setattr(self, name, grown)

    def move_slots(self, places: Tensor, source: Tensor, target: Tensor) -> None:
        """Copy slots `source` to `target` [B, P] of `places` [B, 1]; all are read before any is written."""
        self.keys[places, :, target] = self.keys[places, :, source]
        self.values[places, :, target] = self.values[places, :, source]

    def get_seq_length(self) -> int:
        """The longest row's length: models ask before they see that positions are given."""
        return max(self.owner.lengths.values(), default=0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        raise NotImplementedError("masks over a slot cache are built by specdec.step")

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):
    """`places` rows, each with slots for `capacity` tokens; both grow as they are needed.

    lengths: row id -> cached tokens of that row (host). The caller moves it after each step.
    masked:  row id -> slots that no token may see (a prompt's masked columns), of the rows that have any.
    step:    the step in flight; layers find their slots there (per generation, so threads do not meet).
    """

    def __init__(self, layers: int):
        super().__init__(layers=[SlotLayer(self) for _ in range(layers)])
        self.places = 0
        self.capacity = 0
        self.lengths: dict[int, int] = {}
        self.masked: dict[int, np.ndarray] = {}
        self.step: Step | None = None
        self._row_at: list[int] = []  # place -> row id
        self._place_of: dict[int, int] = {}

    def admit(self, rows: Sequence[int]) -> None:
        """Give each row id a place. Raises ValueError for an id that has one, and then admits none."""
        for row in rows:
            if row in self._place_of:
                raise ValueError(f"row {row} is already in the cache: release it before it is admitted again")
        for row in rows:
            self._place_of[row] = len(self._row_at)
            self._row_at.append(row)
            self.lengths[row] = 0
        if len(self._row_at) > self.places:
            self._resize(len(self._row_at), self.capacity)

    def release(self, rows: Sequence[int]) -> None:
        """Free the rows' places; the last of those that stay move into the holes (one contiguous copy per layer). The
        buffers go with the last row."""
        gone = {row: self._place_of.pop(row) for row in rows}
        left = len(self._row_at) - len(gone)
        holes = [place for place in gone.values() if place < left]
        moving = [row for row in self._row_at[left:] if row not in gone]
        for hole, row in zip(holes, moving, strict=True):
            place, length = self._place_of[row], self.lengths[row]
            for layer in self._filled_layers():
                for buffer in (layer.keys, layer.values):
                    buffer[hole, :, :length] = buffer[place, :, :length]
            self._row_at[hole], self._place_of[row] = row, hole
        del self._row_at[left:]
        for row in gone:
            del self.lengths[row]
            self.masked.pop(row, None)
        if not self._row_at:  # idle: the next user may have another dtype, device or autograd mode
            self.places = self.capacity = 0
            for layer in self.layers:
                layer.is_initialized, layer.keys, layer.values = False, None, None

    def place(self, row: int) -> int:
        """Where row id `row` sits now."""
        return self._place_of[row]

    def reserve(self, slots: int) -> None:
        """Make every row able to hold `slots` tokens."""
        if slots > self.capacity:
            self._resize(self.places, bucketed(max(slots, int(self.capacity * GROWTH))))

    def _resize(self, places: int, capacity: int) -> None:
        self.places, self.capacity = places, capacity
        for layer in self._filled_layers():
            layer.resize()

    def keep_path(self, row_starts: Sequence[tuple[int, int]], path: Tensor) -> None:
        """After a tree step: move each row's accepted nodes to the slots right after its root.

        row_starts: (row id, slot of the root) per row of `path` [B, P] (node indices, -1 = none)."""
        placed = torch.tensor([(self.place(row), start + 1) for row, start in row_starts])
        placed = placed.to(path.device, non_blocking=True)
        places, first = placed[:, :1], placed[:, 1:]
        # A missing node copies onto itself; where a row ends before the longest path would, onto the padding slot.
        target = (first + torch.arange(path.shape[1], device=path.device)).clamp(max=self.capacity)
        source = torch.where(path >= 0, first + path, target)
        for layer in self._filled_layers():
            layer.move_slots(places, source, target)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' buffers."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self._filled_layers())

    def _filled_layers(self) -> list[SlotLayer]:
        return [layer for layer in self.layers if layer.is_initialized]
