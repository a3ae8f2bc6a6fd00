"""One stage of an MTP head over a slot cache: which of its entries are made when, and which of them stay.

In the cache of the stage of depth k, slot t holds chain t's entry (`heads.mtp` says what a chain is). It was made from
token t + k and from what chain t had at depth k - 1, the target's state h_t for k = 1, and its position is t + k - 1.

With the text x_0..x_n the target has states h_0..h_{n-1}, so chains 0..n - 1 have entries in every stage, of which
those of the last k - 1 chains rest on drafted tokens. What rests on drafted tokens is forgotten before the verdict, by
length: once it is known, the chains that it completes are entered over the same slots, with the target's true states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from heads.mtp import MTPHead
from specdec.contracts import Draft
from specdec.step import Segment, pack
from specdec.target import Target

CHUNK = 512  # entries per forward and row while a prompt is read in
TOGETHER = 32  # rows with no more new entries than this attend in one grid; longer ones, as prompts do, one by one


class CachedStage:
    """The stage of `depth`, counted from 1.

    inputs: row id -> [c, D] what the chains from slot `cache.lengths[row]` on had at the depth before. After `settle`
        these are the chains that have no entry yet although their token is known, and in stages after the first also
        the last one before them, from which this step's entries go on.
    """

    def __init__(self, head: MTPHead, depth: int):
        self.head, self.depth, self.stage = head, depth, head.stage(depth)
        self.model = Target(self.stage.block)
        self.cache = self.model.new_cache()
        self.inputs: dict[int, Tensor] = {}

    def release(self, ids: Sequence[int]) -> None:
        self.cache.release(ids)
        for row in ids:
            self.inputs.pop(row, None)

    def extend(self, row: int, states: Tensor) -> None:
        """Take in what the row's next chains had at the depth before."""
        before = self.inputs.get(row)
        self.inputs[row] = states if before is None else torch.cat([before, states])

    def enter(
        self, ids: Sequence[int], texts: Sequence[np.ndarray], drafted: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Make the entries of all chains in `inputs` of the rows `ids`.

        texts: the rows' committed tokens. drafted: [b, depth - 1] the tokens after them, None for depth 1.
        Returns the last chains' logits [b, Vd] and, per row, the states [c, D] of all chains that were entered."""
        entries = [self._tokens(row, text) for row, text in zip(ids, texts, strict=True)]
        outs: list[list[Tensor]] = [[] for _ in ids]
        for spans, is_last in forwards([len(tokens) for tokens in entries], unknown=self.depth - 1):
            segments = [
                Segment(ids[b], entries[b][first:end], self.cache.lengths[ids[b]] + first, scored=is_last)
                for b, (first, end) in spans.items()
            ]
            states = torch.cat([self.inputs[ids[b]][first:end] for b, (first, end) in spans.items()])
            logits, out = self._run(segments, states, drafted if is_last else None)
            for b, part in zip(spans, out.split([end - first for first, end in spans.values()]), strict=True):
                outs[b].append(part)
        return logits, [torch.cat(parts) for parts in outs]

    def go_on(self, ids: Sequence[int], slots: Sequence[int], tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """One more entry of each row's last chain, at its slot, from the token drafted last [b, 1] and the chain's
        state [b, D]: recursion. Returns logits [b, Vd] and states [b, D]."""
        unknown = np.zeros(1, dtype=np.int64)
        segments = [Segment(row, unknown, slot, scored=True) for row, slot in zip(ids, slots, strict=True)]
        return self._run(segments, states, tokens)

    def run_tree(
        self, ids: Sequence[int], texts: Sequence[np.ndarray], states: Tensor, nodes: Draft, last: int
    ) -> tuple[Tensor, Tensor]:
        """Make the last chains' entries again, with a tree of m `nodes` [b, m] hanging off each.

        states: [b, 1 + m, D] what goes into the entry and the nodes.
        Returns logits [b, last, Vd] of each row's `last` nodes and the states [b, 1 + m, D] of all."""
        segments = [Segment(row, text[-1:], len(text) - 2, scored=True) for row, text in zip(ids, texts, strict=True)]
        logits, out = self._run(segments, states.flatten(0, 1), nodes=nodes, last=last)
        return logits.unflatten(0, (len(ids), last)), out.view_as(states)

    def settle(self, row: int, length: int, has_run: bool) -> None:
        """Forget what does not rest on the row's `length` committed tokens alone."""
        start = self.cache.lengths[row]
        if has_run:
            self.cache.lengths[row] = max(start, length - self.depth)
        known = max(start, length - self.depth + 1)
        self.inputs[row] = self.inputs[row][self.cache.lengths[row] - start : known - start]

    def _tokens(self, row: int, text: np.ndarray) -> np.ndarray:
        """[c] tokens of the entries to be made from the row's inputs: the text's, then 0 for those only drafted."""
        tokens = np.zeros(len(self.inputs[row]), dtype=np.int64)
        known = text[self.cache.lengths[row] + self.depth :]
        tokens[: len(known)] = known
        return tokens

    def _run(
        self,
        segments: list[Segment],
        states: Tensor,
        drafted: Tensor | None = None,
        nodes: Draft | None = None,
        last: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """One forward of the stage's block.

        states:  [c, D] per entry: segment after segment, a segment's nodes after its own tokens.
        drafted: [b, d] the last d tokens of every segment (of a shorter one, of it all), which only the device knows.
        nodes:   a tree after the only token of each segment.
        last:    how many of a scored segment's last entries to score.
        Returns logits [b * last, Vd] and the states that go on to the next depth [c, D], both in the order above."""
        draft = Draft.empty(sum(segment.scored for segment in segments), self.model.device) if nodes is None else nodes
        short = max(len(segment.tokens) for segment in segments) <= TOGETHER
        step = pack(segments, draft, self.cache, self.model.device, one_grid=short or self.model.padded)
        step.keep = step.keep[step.index[:, -last:].flatten()]
        step.position_ids += self.depth - 1
        counts = np.array([len(segment.tokens) for segment in segments]) + draft.tokens.shape[1]
        packed = [np.arange(count) + step.first[s.row] for s, count in zip(segments, counts, strict=True)]
        at = self._sent(np.concatenate(packed))
        tokens = step.input_ids[0, at]
        if drafted is not None:
            back = np.arange(-drafted.shape[1], 0)
            own = np.flatnonzero(back >= -counts[:, None])
            places = (counts.cumsum()[:, None] + back).flatten()[own]
            tokens[self._sent(places)] = drafted.flatten()[self._sent(own)]
        inputs = self.stage.inputs(self.head.embed(tokens), states, step.position_ids[0, at])
        embeds = torch.empty_like(inputs).index_copy_(0, at, inputs)
        logits, out = self.model.forward(step, self.cache, self.head.config.recycled, embeds)
        return logits, out[at]

    def _sent(self, index: np.ndarray) -> Tensor:
        """A host index on the device, without waiting for it."""
        return torch.from_numpy(index).to(self.model.device, non_blocking=True)


def forwards(counts: Sequence[int], unknown: int) -> Iterator[tuple[dict[int, tuple[int, int]], bool]]:
    """Split rows of counts[b] entries into forwards of at most about CHUNK entries each: row -> (first, end), and
    whether this is the last one, which has every row and all of each row's last `unknown` + 1 entries."""
    chunks = [max(0, count - 1 - unknown) // CHUNK for count in counts]
    for chunk in range(max(chunks)):
        yield {b: (chunk * CHUNK, (chunk + 1) * CHUNK) for b, many in enumerate(chunks) if chunk < many}, False
    yield {b: (many * CHUNK, count) for b, (many, count) in enumerate(zip(chunks, counts, strict=True))}, True
