"""Invariant mode: a token's logits are the same bits whatever else its step holds.

In what order a matrix product sums depends on its shape, so in the default mode the last bits of a token's logits
depend on how many others are packed beside it. Here every shape that a kernel meets is one of the constants below,
never derived from the batch: a step is as many forwards as its tokens need, each filled up with tokens that nobody
reads. Rows attend one by one, over a multiple of SLOTS slots: attention kernels walk the keys in blocks, and a block in
which all is masked leaves their running sums as they are.

A compiled graph that is batch invariant as it is (see specdec.compiled) needs none of that: its steps are those of the
default mode.

Worked example: a prompt of 300 tokens enters, another row feeds its last token and a draft. The prompt's first 256
tokens are a forward of CHUNK, its other 44 another one with 212 behind them; the second row's two tokens fill, with six
as if drafted, the first WIDTH of a forward of TOKENS. Three forwards, 576 packed tokens, of which 302 are real.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from specdec.cache import SlotCache
from specdec.capture import HiddenContract
from specdec.contracts import Draft
from specdec.step import Segment, Step, pack
from specdec.target import Target

TOKENS = 64  # M, packed tokens of a decode forward
WIDTH = 8  # T, those of one row there: its last committed token and its drafts
CHUNK = 256  # those of a prefill forward, all of one row: prompts are cut at multiples of it
SLOTS = 512  # keys per block of torch's CPU kernel; the GPU's blocks are smaller powers of two
LONGEST_DRAFT = WIDTH - 1


@dataclass(frozen=True, eq=False)
class FixedStep:
    """A step as the forwards that run it, in this order; tokens and scored logits are counted through all of them.

    keep:   [R] the logits that are real, row after row of the draft, each root first.
    index:  [B, N + 1] row of those for each node, see `Scores`.
    tokens: [M] the packed tokens that are real, segment after segment.   first: row id -> its first one among those.
    """

    forwards: list[Step]
    keep: Tensor
    index: Tensor
    tokens: Tensor
    first: dict[int, int]

    @property
    def packed(self) -> list[int]:
        """Tokens of each forward of the step."""
        return [length for step in self.forwards for length in step.packed]


class InvariantTarget(Target):
    """A `Target` in whose forwards a token's logits depend on nothing beside it. Raises NotImplementedError for models
    where fixed shapes are not enough.

    fixed: whether shapes are fixed; `compile` may find that they need not be."""

    chunk = CHUNK
    fixed = True

    def __init__(self, model: PreTrainedModel):
        refuse_mixing(model)
        super().__init__(model, padded=False)

    def compile(self, on: bool = True) -> None:
        super().compile(on)
        self.fixed = self.graph is None or not self.graph.batch_invariant
        self.chunk = CHUNK if self.fixed else Target.chunk

    def pack(self, segments: list[Segment], draft: Draft, cache: SlotCache) -> FixedStep | Step:
        """Lay out `segments` for `forward`: where shapes are fixed, those of several tokens start at a multiple of
        CHUNK, and no row drafts more than LONGEST_DRAFT.

        Raises NotImplementedError for trees: what a node sees lies in other slots there than in plain decoding, and
        attention sums in the order of the slots."""
        if draft.parents is not None:
            raise NotImplementedError("the drafter drafts trees, which invariant mode cannot run: use one with chains")
        if not self.fixed:
            return super().pack(segments, draft, cache)
        rows = {segment.row: b for b, segment in enumerate(s for s in segments if s.scored)}
        pieces = [piece for segment in segments for piece in _pieces(segment)]
        decoding = [piece for piece in pieces if piece.scored and len(piece.tokens) == 1]
        # Prompts go first: the last token of one may be among what decodes.
        forwards = [self._prefill(piece, cache) for piece in pieces if piece not in decoding]
        for i in range(0, len(decoding), TOKENS // WIDTH):
            group = decoding[i : i + TOKENS // WIDTH]
            forwards.append(self._decode(group, draft, [rows[piece.row] for piece in group], cache))
        return _counted_through(forwards, segments, draft.tokens.shape[1], self.device)

    def _prefill(self, piece: Segment, cache: SlotCache) -> _Forward:
        """A prompt's piece, of which the last token is scored, if any."""
        count = len(piece.tokens)
        filled = replace(piece, tokens=np.pad(piece.tokens, (0, CHUNK - count)), scored=False)
        scored = [count - 1] if piece.scored else []
        step = self._fixed([filled], Draft.empty(0, self.device), cache, CHUNK, scored, piece.start + count)
        return _Forward(step, {piece.row: range(count)}, {piece.row: range(1)} if piece.scored else {})

    def _decode(self, group: Sequence[Segment], draft: Draft, b: Sequence[int], cache: SlotCache) -> _Forward:
        """Rows `b` of the draft, each filled up as if it had drafted LONGEST_DRAFT tokens; all cells are scored."""
        lengths = [draft.lengths[row] for row in b]
        tokens = pad(draft.tokens[b], (0, LONGEST_DRAFT - draft.tokens.shape[1]))
        filled = Draft(tokens, [LONGEST_DRAFT] * len(b))
        end = max(piece.start + 1 + length for piece, length in zip(group, lengths, strict=True))
        step = self._fixed(group, filled, cache, TOKENS, range(TOKENS), end)
        real = {
            piece.row: range(step.first[piece.row], step.first[piece.row] + 1 + length)
            for piece, length in zip(group, lengths, strict=True)
        }
        return _Forward(step, real, real)

    def _fixed(
        self,
        segments: Sequence[Segment],
        draft: Draft,
        cache: SlotCache,
        length: int,
        scored: Sequence[int],
        end: int,
    ) -> Step:
        """The step of filled segments, filled up to `length` packed tokens; `end` is past every real position."""
        step = pack(segments, draft, cache, self.device, one_grid=True, bucket=SLOTS, apart=True)
        missing = (0, length - step.input_ids.shape[1])
        return replace(
            step,
            input_ids=pad(step.input_ids, missing),
            # No position may be past the real ones: some models' rotary frequencies depend on the greatest.
            position_ids=pad(step.position_ids, missing).clamp(max=end - 1),
            token_places=pad(step.token_places, missing),
            token_slots=pad(step.token_slots, missing, value=cache.capacity),  # the trash slot
            keep=torch.tensor(scored, dtype=torch.long).to(self.device, non_blocking=True),
        )

    def forward(
        self, step: FixedStep | Step, cache: SlotCache, hidden: HiddenContract | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Run a step, see `Target.forward`; the states [M, D] are those of the real tokens."""
        if not self.fixed:
            return super().forward(step, cache, hidden)
        results = [Target.forward(self, each, cache, hidden) for each in step.forwards]
        logits = torch.cat([logits for logits, _ in results]).index_select(0, step.keep)
        if hidden is None:
            return logits, None
        return logits, torch.cat([states for _, states in results]).index_select(0, step.tokens)


def target_for(model: PreTrainedModel, invariant: bool) -> Target:
    """The engine's target for a call with this `invariant`."""
    return InvariantTarget(model) if invariant else Target(model)


def check_fits(draft_length: int | None) -> None:
    """ValueError for a draft length, if one is given, that does not fit a forward of fixed width."""
    if draft_length is not None and draft_length > LONGEST_DRAFT:
        raise ValueError(f"draft_length is {draft_length}: in invariant mode give at most {LONGEST_DRAFT}")


def refuse_mixing(model: PreTrainedModel) -> None:
    """NotImplementedError, with the reason, for models in which a fixed shape does not make a token independent."""
    reason, config = None, model.config.get_text_config(decoder=True)
    if not getattr(model, "_supports_attention_backend", False):
        reason = "has no packed forward, whose length could be fixed"
    elif any("expert" in name for name, _ in model.named_modules()):
        reason = "multiplies an expert's weights with as many tokens as the whole step sends there"
    elif getattr(model, "is_quantized", False):
        reason = "is quantised, which may scale a token by others of its step"
    elif getattr(config, "attn_logit_softcapping", None) is not None:
        reason = "caps attention scores, which torch's blockwise attention cannot do"
    if reason is not None:
        raise NotImplementedError(f"{type(model).__name__} {reason}: leave invariant (--invariant) out")


@dataclass(frozen=True, eq=False)
class _Forward:
    """tokens, nodes: row id -> its real packed tokens, and of the scored logits its draft's nodes."""

    step: Step
    tokens: dict[int, range]
    nodes: dict[int, range]


def _pieces(segment: Segment) -> Iterator[Segment]:
    """A segment cut at multiples of CHUNK from its row's start."""
    count = len(segment.tokens)
    assert count == 1 or segment.start % CHUNK == 0, f"row {segment.row}: a chunk starts at {segment.start}"
    for first in range(0, count, CHUNK):
        tokens = segment.tokens[first : first + CHUNK]
        last = first + CHUNK >= count
        yield replace(segment, tokens=tokens, start=segment.start + first, scored=segment.scored and last)


def _counted_through(
    forwards: Sequence[_Forward], segments: Sequence[Segment], N: int, device: torch.device
) -> FixedStep:
    tokens: dict[int, list[int]] = {segment.row: [] for segment in segments}
    nodes: dict[int, list[int]] = {segment.row: [] for segment in segments if segment.scored}
    M = R = 0
    for forward in forwards:
        for row, own in forward.tokens.items():
            tokens[row] += [M + token for token in own]
        for row, own in forward.nodes.items():
            nodes[row] += [R + node for node in own]
        M, R = M + forward.step.input_ids.shape[1], R + len(forward.step.keep)
    first, index, kept = {}, [], 0
    for row in tokens:
        first[row] = sum(len(tokens[earlier]) for earlier in first)
    for own in nodes.values():
        index += [kept + (node if node < len(own) else 0) for node in range(N + 1)]
        kept += len(own)
    flat = [sum(nodes.values(), []), index, sum(tokens.values(), [])]
    keep, index, real = (torch.tensor(ids, dtype=torch.long).to(device, non_blocking=True) for ids in flat)
    return FixedStep([forward.step for forward in forwards], keep, index.view(-1, N + 1), real, first)
