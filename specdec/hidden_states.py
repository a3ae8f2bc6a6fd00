"""The target's states of committed tokens, for drafters that ask for them.

They are gathered over prompt chunks and handed over once a row is scored.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specdec.contracts import Verdict
from specdec.requests import Request
from specdec.step import Segment, Step


class HiddenStates:
    """By row, what has been run and kept but not been handed over yet: tensors [n, D]."""

    def __init__(self) -> None:
        self._parts: dict[int, list[Tensor]] = defaultdict(list)

    def add(
        self,
        segments: Sequence[Segment],
        scored: Sequence[Request],
        step: Step,
        verdict: Verdict,
        hidden: Tensor,
        lengths: Mapping[int, int],
    ) -> None:
        """After a commit: of the step's states `hidden` [M, D], those that stayed. lengths: row -> cached tokens."""
        order = {request.row: b for b, request in enumerate(scored)}
        for segment in segments:
            first, known = step.first[segment.row], len(segment.tokens)
            kept = lengths[segment.row] - segment.start - known
            self._parts[segment.row].append(hidden[first : first + known])
            if kept > 0:
                path = verdict.path[order[segment.row], :kept]
                self._parts[segment.row].append(hidden[first + known + path])

    def take(self, rows: Sequence[int]) -> list[Tensor]:
        """Per row, all that is new; it is forgotten here."""
        return [torch.cat(self._parts.pop(row)) for row in rows]

    def forget(self, row: int) -> None:
        self._parts.pop(row, None)
