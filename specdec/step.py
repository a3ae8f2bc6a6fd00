"""The layout of one step: which tokens of which rows go through the target, where they are written and what they see.

All tokens of a step form one packed sequence of M tokens. Rows that feed one committed token plus drafts come first
(attended together in a grid of [places, T] cells), then prompt chunks (attended one by one, so that a chunk does not
pad the decoding rows).

Worked example: place 0 holds row 7 with 4 cached tokens, feeding committed token c and drafts d0 d1; place 1 holds
row 3 with 9 cached tokens, feeding only its committed token e. Then M = 4, packed tokens = [c d0 d1 e], positions =
[4 5 6 9], grid T = 3 with cells [c d0 d1 | e - -], scored nodes R = 4, index = [[0 1 2], [3 3 3]].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from specdec.cache import BUCKET, SlotCache, bucketed
from specdec.contracts import Draft


@dataclass(frozen=True, eq=False)
class Segment:
    """One row's part of a step.

    tokens: its committed tokens to run now (a prompt chunk, or the one last token), host int64.
    start:  position of the first of them = the row's cached tokens.
    scored: whether the row is scored after the last of them (false inside a prompt); scored segments are, in order,
            the rows of the step's `Draft`.
    shift:  what the model's positions are ahead of the slots by; 0 but for prompts with positions of their own.
    """

    row: int
    tokens: np.ndarray
    start: int
    scored: bool
    shift: int = 0


@dataclass
class Step:
    """A step on the device. Index tensors are int64; the module docstring has the example.

    input_ids, position_ids: [1, M].     token_places, token_slots: [M] where each token's keys and values go.
    keep: [R] packed tokens to score, row after row of the draft, each root first.
    index: [B, N + 1] row of the scored logits for each node, see `Scores`.
    places, slots: n and S, the part of the cache that attention may see.
    grid_places, width: n' <= n and T of the grid; grid: [Md] the cell (place * T + t) of packed tokens 0..Md-1.
    cell_slots: [n' * T] slot of each cell's token; 0 in empty cells, which then see slot 0 and stay finite.
    chunks: (first, end, place, start) per prompt chunk: packed range, cache place, slot of its first token.
    rows: [rows, 4] int64 on the host, the same of the rows in the grid and then of the chunks.
    first: row id -> the packed index of its first token.
    parents: [n', T - 1] drafted tree by place (rows without one hold a chain), or None where all are chains.
    masked: [n', S] slots that no token of a place may see, or None where there are none.
    apart: places of the grid's rows where they attend one by one, so that none depends on how many there are. The grid
           then holds these rows alone, and packed tokens that are in no cell attend to nothing.
    attended_by_torch: whether a compiled forward left attention to torch's operators, see specdec.cpu_attention.
    """

    input_ids: Tensor
    position_ids: Tensor
    token_places: Tensor
    token_slots: Tensor
    keep: Tensor
    index: Tensor
    places: int
    slots: int
    grid_places: int
    width: int
    grid: Tensor
    cell_slots: Tensor
    rows: np.ndarray
    chunks: list[tuple[int, int, int, int]]
    first: dict[int, int]
    parents: Tensor | None = None
    masked: Tensor | None = None
    apart: list[int] | None = None
    attended_by_torch: bool = False
    windows: set[int] = field(default_factory=set)  # sliding windows that attention asked for
    _masks: dict = field(default_factory=dict)

    @property
    def packed(self) -> list[int]:
        """Tokens of each forward of the step."""
        return [self.input_ids.shape[1]]

    @property
    def only_chunks(self) -> bool:
        """Whether the step has nothing but prompt chunks."""
        return self.grid_places == 0

    @property
    def grid_is_full(self) -> bool:
        """Every cell holds a token, so that filling the grid is a view and not a copy."""
        return len(self.grid) == self.grid_places * self.width

    def to_grid(self, packed_M: Tensor, fill: int = 0) -> Tensor:
        """[n' * T, ...] the first Md of `packed_M` [M, ...] in their cells; empty cells hold `fill`."""
        if self.grid_is_full:
            return packed_M[: len(self.grid)]
        cells = packed_M.new_full((self.grid_places * self.width, *packed_M.shape[1:]), fill)
        return cells.index_copy_(0, self.grid, packed_M[: len(self.grid)])

    def from_grid(self, cells: Tensor) -> Tensor:
        """[Md, ...] the packed tokens out of their cells, the inverse of `to_grid`."""
        return cells if self.grid_is_full else cells.index_select(0, self.grid)

    def grid_mask(self, window: int | None, groups: int, dtype: torch.dtype) -> Tensor:
        """[n', 1, T * groups, S] additive mask (0 or -inf); its row t * groups + g is cell t."""
        key = (window, groups, dtype)
        if key not in self._masks:
            self._masks[key] = additive(self.visible(window), dtype).repeat_interleave(groups, dim=1)[:, None]
        return self._masks[key]

    def visible(self, window: int | None) -> Tensor:
        """[n', T, S] bool: may cell t of a place see slot s. `window`: at most that many positions, itself included."""
        key = ("visible", window)
        if key not in self._masks:
            seen = self._reached(window)
            self._masks[key] = seen if self.masked is None else seen & ~self.masked[:, None]
        return self._masks[key]

    def _reached(self, window: int | None) -> Tensor:
        slot_S = torch.arange(self.slots, device=self.token_slots.device)
        cell_nT = self.cell_slots.view(self.grid_places, self.width)
        if self.parents is None:  # slots are positions
            seen = slot_S <= cell_nT[..., None]
            return seen if window is None else seen & (slot_S > cell_nT[..., None] - window)
        ancestors_nTT, depth_nT = tree_layout(self.parents)
        root_n1 = cell_nT[:, :1]
        node_nS = (slot_S - root_n1).clamp(0, self.width - 1)
        in_tree_nS = (slot_S > root_n1) & (slot_S < root_n1 + self.width)
        is_ancestor = ancestors_nTT.gather(2, node_nS[:, None].expand(-1, self.width, -1))
        seen = torch.where(in_tree_nS[:, None], is_ancestor, (slot_S <= root_n1)[:, None])
        if window is None:
            return seen
        position_nS = torch.where(in_tree_nS, root_n1 + depth_nT.gather(1, node_nS), slot_S)
        return seen & (position_nS[:, None] > (root_n1 + depth_nT)[..., None] - window)

    def chunk_mask(self, chunk: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """[Tc, start + Tc] additive mask of a prompt chunk, or None where plain causal attention is the same."""
        first, end, _, start = self.chunks[chunk]
        total = start + end - first
        if start == 0 and (window is None or window >= total):
            return None
        key = (chunk, "chunk", window, dtype)
        if key not in self._masks:
            slot_S = torch.arange(total, device=self.token_slots.device)
            query_T1 = slot_S[start:, None]
            seen = slot_S <= query_T1 if window is None else (slot_S <= query_T1) & (slot_S > query_T1 - window)
            self._masks[key] = additive(seen, dtype)
        return self._masks[key]


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `seen`, -inf elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


def tree_layout(parents_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Ancestor relation and depth of every node of a drafted tree, node 0 being the root.

    parents_BN: [B, N] parent of each drafted token, -1 = the root; a parent comes before its children.
    Returns ancestors [B, N + 1, N + 1] bool (a node is its own ancestor) and depth [B, N + 1].
    """
    B, N = parents_BN.shape
    reached = torch.eye(N + 1, dtype=torch.bool, device=parents_BN.device).repeat(B, 1, 1)
    for node in range(1, N + 1):  # a node sees itself and all that its parent sees
        parent = (parents_BN[:, node - 1] + 1).view(B, 1, 1).expand(-1, 1, N + 1)
        reached[:, node] |= reached.gather(1, parent)[:, 0]
    return reached, reached.sum(-1) - 1


def pack(
    segments: Sequence[Segment],
    draft: Draft,
    cache: SlotCache,
    device: torch.device,
    one_grid: bool,
    bucket: int = BUCKET,
    apart: bool = False,
) -> Step:
    """Lay out a step; the cache grows if a row needs it.

    draft:    one row per scored segment, in their order.
    one_grid: put prompt chunks into the grid too (the padded forward needs one rectangle).
    bucket:   attention sees a multiple of so many slots.   apart: rows attend one by one.
    """
    plan = _Plan(segments, draft, cache, one_grid, bucket, apart)
    sent = plan.send(device)  # the step's one host-to-device copy
    parents = None
    if len(sent["draft_at"]):
        sent["ids"][sent["draft_at"]] = draft.tokens.flatten()[sent["draft_from"]]
        if draft.parents is not None:
            depth = tree_layout(draft.parents)[1][:, 1:].flatten()
            sent["positions"][sent["draft_at"]] = sent["draft_root"] + depth[sent["draft_from"]]
            parents = plan.parents_by_place(draft.parents)
    return Step(
        input_ids=sent["ids"][None],
        position_ids=sent["positions"][None],
        token_places=sent["token_places"],
        token_slots=sent["token_slots"],
        keep=sent["keep"],
        index=sent["index"].view(-1, draft.tokens.shape[1] + 1),
        places=cache.places,
        slots=plan.slots,
        grid_places=plan.grid_places,
        width=plan.width,
        grid=sent["grid"],
        cell_slots=sent["cell_slots"],
        rows=np.array([*plan.rows, *plan.chunks], dtype=np.int64).reshape(-1, 4),
        chunks=plan.chunks,
        first=plan.first,
        parents=parents,
        masked=plan.masked_by_place(device) if cache.masked else None,
        apart=[cache.place(segment.row) for segment in plan.grid_segments] if apart else None,
    )


class _Plan:
    """The host side of `pack`: where every token goes, as lists of ints."""

    SENT = (
        "ids", "positions", "token_places", "token_slots", "grid", "cell_slots", "keep", "index", "draft_at",
        "draft_from", "draft_root",
    )  # fmt: skip

    def __init__(
        self, segments: Sequence[Segment], draft: Draft, cache: SlotCache, one_grid: bool, bucket: int, apart: bool
    ):
        scored = [s for s in segments if s.scored]
        self.order = {s.row: b for b, s in enumerate(scored)}  # row id -> the draft's row
        self.drafted = dict(zip(self.order, draft.lengths, strict=True))
        self.cache, self.N = cache, draft.tokens.shape[1]
        self.slots = bucketed(max(s.start + self._count(s) for s in segments), bucket)
        cache.reserve(self.slots)
        in_grid = [s for s in segments if one_grid or (s.scored and len(s.tokens) == 1)]
        self.grid_segments = sorted(in_grid, key=lambda s: cache.place(s.row))
        self.grid_row = {s.row: i if apart else cache.place(s.row) for i, s in enumerate(self.grid_segments)}
        self.grid_places = 1 + max(self.grid_row.values(), default=-1)
        self.width = max((self._count(s) for s in in_grid), default=0)
        for name in self.SENT:
            setattr(self, name, [])
        self.rows: list[tuple[int, int, int, int]] = []
        self.chunks: list[tuple[int, int, int, int]] = []
        self.first: dict[int, int] = {}
        self.cell_slots = [0] * (self.grid_places * self.width)
        self.scored_at = [range(0)] * len(scored)  # packed tokens to score, by row of the draft
        for segment in self.grid_segments:
            self._place_in_grid(segment)
            self.rows.append(self._add(segment))
        for segment in segments:
            if segment not in in_grid:
                self.chunks.append(self._add(segment))
        for nodes in self.scored_at:
            node0 = len(self.keep)
            self.keep.extend(nodes)
            self.index.extend(node0 + (node if node < len(nodes) else 0) for node in range(self.N + 1))

    def _count(self, segment: Segment) -> int:
        return len(segment.tokens) + self.drafted.get(segment.row, 0)

    def _place_in_grid(self, segment: Segment) -> None:
        count = self._count(segment)
        cell = self.grid_row[segment.row] * self.width
        self.grid.extend(range(cell, cell + count))
        self.cell_slots[cell : cell + count] = range(segment.start, segment.start + count)

    def _add(self, segment: Segment) -> tuple[int, int, int, int]:
        """As in `Step.chunks`."""
        known, total = len(segment.tokens), self._count(segment)
        first, root = len(self.ids), segment.start + known - 1
        self.first[segment.row] = first
        self.ids.extend(segment.tokens.tolist())
        self.ids.extend([0] * (total - known))  # drafted tokens are on the device: filled in there
        self.positions.extend(range(segment.start + segment.shift, segment.start + segment.shift + total))
        place = self.cache.place(segment.row)
        self.token_places.extend([place] * total)
        self.token_slots.extend(range(segment.start, segment.start + total))
        if segment.scored:
            b = self.order[segment.row]
            self.draft_at.extend(range(first + known, first + total))
            self.draft_from.extend(range(b * self.N, b * self.N + total - known))
            self.draft_root.extend([root + segment.shift] * (total - known))
            self.scored_at[b] = range(first + known - 1, first + total)
        return first, first + total, place, segment.start

    def send(self, device: torch.device) -> dict[str, Tensor]:
        """All index lists on the device by name, in one copy."""
        arrays = [np.asarray(getattr(self, name), dtype=np.int64) for name in self.SENT]
        sent = torch.from_numpy(np.concatenate(arrays)).to(device, non_blocking=True)
        return dict(zip(self.SENT, sent.split([len(array) for array in arrays]), strict=True))

    def masked_by_place(self, device: torch.device) -> Tensor:
        """[grid_places, slots] which slots nobody sees, by row of the grid."""
        masked = np.zeros((self.grid_places, self.slots), dtype=bool)
        for segment in self.grid_segments:
            masked[self.grid_row[segment.row], self.cache.masked.get(segment.row, [])] = True
        return torch.from_numpy(masked).to(device, non_blocking=True)

    def parents_by_place(self, parents_BN: Tensor) -> Tensor:
        """[grid_places, width - 1] the drafted trees by row of the grid; other rows (prompt chunks) hold a chain."""
        chain = torch.arange(-1, self.width - 2, device=parents_BN.device)
        by_place = chain.repeat(self.grid_places, 1)
        rows = [s for s in self.grid_segments if s.scored and len(s.tokens) == 1]
        pairs = torch.tensor([[self.grid_row[s.row] for s in rows], [self.order[s.row] for s in rows]])
        places, taken = pairs.to(parents_BN.device, non_blocking=True)
        n = min(self.N, self.width - 1)
        by_place[places, :n] = parents_BN[taken, :n]
        return by_place
