"""Raw logits and processed scores of every emitted token, kept as the loop goes on, for those who asked for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.requests import Request


class ScoreRecorder:
    """Per request, by its index in the batch, float32 tensors [n, V] whose rows belong to the emitted tokens.

    scores, logits: whether to keep the processed scores and the raw logits; what is not asked for is not copied."""

    def __init__(self, requests: Sequence[Request], scores: bool, logits: bool):
        self.scores: list[list[Tensor]] | None = [[] for _ in requests] if scores else None
        self.logits: list[list[Tensor]] | None = [[] for _ in requests] if logits else None
        self._count = [0] * len(requests)

    def add(self, scored: Sequence[Request], path: Tensor, index: Tensor, logits: Tensor, scores: Tensor) -> None:
        """After a commit: the nodes of `path` [B, P] at which each row's new tokens were emitted.

        index: [B, N + 1], see `Scores`.   logits, scores: [R, V] before and after the processors."""
        for b, request in enumerate(scored):
            new = len(request.emitted) - self._count[request.index]
            nodes = torch.cat([path.new_zeros(1), path[b, : new - 1] + 1])
            self.take(request, index[b, nodes], logits, scores)

    def take(self, request: Request, rows: Tensor, logits: Tensor, scores: Tensor) -> None:
        """The next tokens of a request were emitted at `rows` [n] of logits and scores [R, V]."""
        self._count[request.index] += len(rows)
        for kept, source in ((self.logits, logits), (self.scores, scores)):
            if kept is not None:
                kept[request.index].append(source[rows].float())

    def columns(self, kept: list[list[Tensor]] | None, count: int) -> tuple[Tensor, ...] | None:
        """What `generate` returns: one tensor [B, V] for each of the `count` emitted columns, or None."""
        if kept is None:
            return None
        return tuple(torch.stack([torch.cat(parts)[:count] for parts in kept], dim=1))
