"""What drafters that run a model token by token share: ragged depths, the chain they build up, where it must end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.contracts import Draft, Draws, Rows
from specdec.target import Target


class Depths:
    """B rows that draft to different depths, of which only those that still go on are run.

    lengths: depth of each row, 0 or more.   longest: the greatest of them.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device):
        self.lengths, self.device = list(lengths), device
        self.longest = max(self.lengths)

    def active(self, depth: int) -> list[int]:
        """The rows that go further than `depth`."""
        return [b for b, length in enumerate(self.lengths) if length > depth]

    def at(self, active: Sequence[int]) -> Tensor | slice:
        """What picks the rows `active` out of a tensor of B rows."""
        if len(active) == len(self.lengths):
            return slice(None)
        return torch.tensor(active).to(self.device, non_blocking=True)

    def spread(self, values: Tensor, active: Sequence[int]) -> Tensor:
        """[B, ...] with `values` [b, ...] at the rows `active` and 0 elsewhere."""
        if len(active) == len(self.lengths):
            return values
        return values.new_zeros(len(self.lengths), *values.shape[1:]).index_copy_(0, self.at(active), values)


class SampledChain(Depths):
    """The chains of B rows, drawn one depth at a time, with the exact q of every token.

    tokens: [B, N] what has been drawn so far; 0 where nothing has.
    """

    def __init__(self, rows: Rows, lengths: Sequence[int], draws: Draws):
        super().__init__(lengths, rows.device)
        self.draws, self.vocab_size = draws, rows.vocab_size
        self.tokens = torch.zeros(len(self.lengths), self.longest, dtype=torch.long, device=rows.device)
        self._q: list[tuple[Tensor, Tensor]] = []

    def draw(self, depth: int, active: Sequence[int], logits: Tensor, ids: Tensor | None = None) -> None:
        """Draw the active rows' token at `depth` (0 = the first) from logits [b, Vd] over the target's ids, or over
        `ids` [Vd] of them."""
        drawn, q_logits, q_logz = self.draws.sample(fit_vocabulary(logits, self.vocab_size, ids), depth, active)
        self.tokens[self.at(active), depth] = drawn
        if q_logits is not None:
            self._q.append((self.spread(q_logits, active), self.spread(q_logz, active)))

    def draft(self) -> Draft:
        """All that was drawn; one-hot where the draws are deterministic."""
        if not self._q:
            return Draft(self.tokens, self.lengths)
        q_logits, q_logz = (torch.stack(parts, dim=1) for parts in zip(*self._q, strict=True))
        return Draft(self.tokens, self.lengths, q_logits=q_logits, q_logz=q_logz)


def fit_vocabulary(logits: Tensor, V: int, ids: Tensor | None = None) -> Tensor:
    """[b, V] logits over the target's ids, -inf at those that the drafter does not have.

    ids: [Vd] the id of each column. None: column i is id i, and columns that the target lacks (padding) are cut."""
    if ids is not None:
        return logits.new_full((len(logits), V), -torch.inf).index_copy_(1, ids, logits)
    if logits.shape[-1] >= V:
        return logits[:, :V]
    return torch.nn.functional.pad(logits, (0, V - logits.shape[-1]), value=-torch.inf)


def within_positions(budget: Sequence[int], rows: Rows, model: Target, lag: int = 0) -> list[int]:
    """`budget`, less where the drafting model's table of positions, if it has one, ends before the target's does.

    lag: positions between a row's last token and the one at which the model reads it to draft the next."""
    if not model.positions_are_a_table or model.max_positions is None:
        return list(budget)
    room = [max(0, model.max_positions - len(text) + 1 + lag) for text in rows.tokens]
    return [min(pair) for pair in zip(budget, room, strict=True)]
