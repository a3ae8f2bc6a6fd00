"""Every draft of a run is looked over for what would silently, or not so silently, make its numbers meaningless.

The engine refuses a token outside the vocabulary without saying whose it was, and takes a q as it is. Here both are
flagged where they are, on the device, and read once when the batch is done: no step waits for it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from specdec.contracts import BaseDrafter, Draft, Drafter, Draws, Rows
from specdec.draft_checks import check_draft

MASS_TOLERANCE = 1e-3  # of log sum q: far above float32 rounding, below what a test of the output could notice


@contextmanager
def audited(drafter: Drafter | None, ids: Sequence[str]) -> Iterator[AuditedDrafter | None]:
    """`drafter` for one batch of the prompts `ids`, watched; None for None.

    Raises ValueError at the end, also in place of what the engine raised meanwhile, where a draft was wrong."""
    if drafter is None:
        yield None
        return
    watched = AuditedDrafter(drafter, ids)
    try:
        yield watched
    except Exception:
        watched.check()
        raise
    watched.check()


class AuditedDrafter(BaseDrafter):
    """`drafter`, with its drafts flagged as they pass through. `trees`: whether one of them was a tree; `seconds`: host
    time that the flags took."""

    def __init__(self, drafter: Drafter, ids: Sequence[str]):
        self.__wrapped__, self.ids, self.trees, self.seconds = drafter, ids, False, 0.0
        self.name, self.needs_hidden = drafter.name, drafter.needs_hidden
        self.trimmable = getattr(drafter, "trimmable", False)
        self.observe, self.admit, self.release = drafter.observe, drafter.admit, drafter.release
        self._drafts: Counter[int] = Counter()  # per row, how often it has drafted
        self._seen: list[tuple[int, int]] = []  # (row, which of its drafts it was), one per column of _flags
        self._flags: list[Tensor] = []  # [2, B] each: a token outside the vocabulary, a q that is no distribution

    def compile(self, on: bool) -> None:
        if isinstance(self.__wrapped__, BaseDrafter):
            self.__wrapped__.compile(on)

    def propose(self, rows: Rows, budget: Sequence[int], draws: Draws) -> Draft:
        draft = self.__wrapped__.propose(rows, budget, draws)
        started = time.perf_counter()
        self._flag(draft, rows, budget)
        self.seconds += time.perf_counter() - started
        return draft

    def _flag(self, draft: Draft, rows: Rows, budget: Sequence[int]) -> None:
        check_draft(draft, budget, self.name, rows.vocab_size, rows.device)
        if not any(draft.lengths):
            return
        self.trees |= draft.parents is not None
        for row, length in zip(rows.ids, draft.lengths, strict=True):
            self._drafts[row] += length > 0
            self._seen.append((row, self._drafts[row]))
        self._flags.append(torch.stack([_outside(draft, rows.vocab_size), _no_distribution(draft)]))

    def check(self) -> None:
        """Raises ValueError that names the first wrong draft by prompt and step."""
        if not self._flags:
            return
        outside, no_distribution = torch.cat(self._flags, dim=1).tolist()
        for place, (row, count) in enumerate(self._seen):
            where = f"for row {row} (prompt {self.ids[row]!r}) in the row's drafting step {count}"
            if outside[place]:
                raise ValueError(
                    f"drafter {self.name!r} proposed a token outside the target's vocabulary {where}: it must propose "
                    f"target token ids"
                )
            if no_distribution[place]:
                raise ValueError(
                    f"drafter {self.name!r} gave a q that does not sum to 1 {where}: q_logz must be the log-sum-exp of "
                    f"q_logits, as draws.sample returns them"
                )


def _outside(draft: Draft, V: int) -> Tensor:
    """[B] bool: a drafted token is no id of the target's."""
    return (((draft.tokens < 0) | (draft.tokens >= V)) & _drafted(draft)).any(1)


def _no_distribution(draft: Draft) -> Tensor:
    """[B] bool: a drafted token's q does not sum to 1, or holds a NaN. Never for one-hot drafts."""
    if draft.q_logits is None:
        return torch.zeros(len(draft.lengths), dtype=torch.bool, device=draft.tokens.device)
    missing_BN = draft.q_logits.float().logsumexp(-1) - draft.q_logz.float()
    wrong_BN = ~(missing_BN.abs() < MASS_TOLERANCE) & _drafted(draft)
    return wrong_BN.any(1) if draft.one_hot is None else wrong_BN.any(1) & ~draft.one_hot


def _drafted(draft: Draft) -> Tensor:
    """[B, N] bool: entries that are drafted tokens and not padding."""
    return torch.arange(draft.tokens.shape[1], device=draft.tokens.device) < draft.lengths_B[:, None]
