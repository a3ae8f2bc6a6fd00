"""Raw logits and processed scores of every emitted token, kept as the loop goes on, for those who asked for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.requests import Request


class ScoreRecorder:
    """Per request, by its index in the batch, a float32 [V] for each emitted token.

    scores, logits: whether to keep the processed scores and the raw logits; what is not asked for is not copied."""

    def __init__(self, requests: Sequence[Request], scores: bool, logits: bool):
        self.scores: list[list[Tensor]] | None = [[] for _ in requests] if scores else None
        self.logits: list[list[Tensor]] | None = [[] for _ in requests] if logits else None
        self._kept = [kept for kept in (self.scores, self.logits) if kept is not None]

    def add(self, scored: Sequence[Request], path: Tensor, index: Tensor, logits: Tensor, scores: Tensor) -> None:
        """After a commit: the nodes of `path` [B, P] at which each row's new tokens were emitted.

        index: [B, N + 1], see `Scores`.   logits, scores: [R, V] before and after the processors."""
        for b, request in enumerate(scored):
            new = len(request.emitted) - len(self._kept[0][request.index])
            nodes = torch.cat([path.new_zeros(1), path[b, : new - 1] + 1])
            self.take(request, index[b, nodes], logits, scores)

    def take(self, request: Request, rows: Tensor, logits: Tensor, scores: Tensor) -> None:
        """The next tokens of a request were emitted at `rows` [n] of logits and scores [R, V]."""
        for kept, source in ((self.logits, logits), (self.scores, scores)):
            if kept is not None:
                kept[request.index].extend(source[rows].float().unbind())

    def cut(self, request: Request) -> None:
        """Some of what the request had emitted was taken back."""
        for kept in self._kept:
            del kept[request.index][len(request.emitted) :]

    def columns(self, kept: list[list[Tensor]] | None, count: int) -> tuple[Tensor, ...] | None:
        """What `generate` returns: one tensor [B, V] for each of the `count` emitted columns, or None."""
        if kept is None:
            return None
        return tuple(torch.stack([rows[column] for rows in kept]) for column in range(count))
