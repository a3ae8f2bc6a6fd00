"""What a drafter hands over is checked where the host can see it, and made safe where only the device can; and that
it works for one generation at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from specdec.contracts import Draft, Drafter

_at_work: set[int] = set()  # ids of the drafters of running generations, which hold them, so that no id is reused


@contextmanager
def claimed(drafter: Drafter | None, name: str) -> Iterator[None]:
    """`drafter` works for this generation alone. Row ids begin at 0 in each, so that a second one would mix its rows
    with the first's: ValueError."""
    if id(drafter) in _at_work:
        raise ValueError(
            f"drafter {name!r} is in use by another generation: let that one end (close the iterator of stream_batch), "
            f"or give each generation a drafter of its own"
        )
    if drafter is None:
        yield
        return
    _at_work.add(id(drafter))
    try:
        yield
    finally:
        _at_work.remove(id(drafter))


def check_trimmable(draft: Draft, drafter: str) -> None:
    """ValueError for a draft that is not to be cut once it is known."""
    if draft.parents is not None or draft.q_logits is not None:
        kind = "a tree" if draft.parents is not None else "a draft with q_logits"
        raise ValueError(f"drafter {drafter!r} is trimmable but returned {kind}: draft one-hot chains, or unset that")


def check_draft(draft: Draft, budget: Sequence[int], drafter: str, V: int, device: torch.device) -> None:
    """ValueError, naming the drafter, where its draft does not fit the step's len(budget) rows."""
    if not isinstance(draft, Draft):
        raise ValueError(f"drafter {drafter!r} returned a {type(draft).__name__}: propose must return a specdec.Draft")
    B = len(budget)
    tokens = draft.tokens
    if not isinstance(tokens, Tensor) or tokens.dtype != torch.long or tokens.ndim != 2 or len(tokens) != B:
        given = f"{tokens.dtype} {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(f"drafter {drafter!r} returned tokens of {given} for {B} rows: give an int64 tensor [{B}, N]")
    if tokens.device != device:
        raise ValueError(f"drafter {drafter!r} returned tokens on {tokens.device}: make them on rows.device, {device}")
    if not isinstance(draft.lengths, Sequence) or len(draft.lengths) != B:
        raise ValueError(
            f"drafter {drafter!r} returned lengths {draft.lengths!r} for {B} rows: give a list of {B} ints"
        )
    for b, (length, limit) in enumerate(zip(draft.lengths, budget, strict=True)):
        if not 0 <= length <= min(limit, tokens.shape[1]):
            raise ValueError(
                f"drafter {drafter!r} drafted {length} tokens in row {b}, where the budget is {limit} and the tokens "
                f"tensor has {tokens.shape[1]} columns: draft no more than budget[b]"
            )
    grades = draft.grades
    if grades is not None and not (isinstance(grades, Sequence) and [type(grade) for grade in grades] == [int] * B):
        raise ValueError(
            f"drafter {drafter!r} returned grades {grades!r} for {B} rows: give a list of {B} ints, or None"
        )
    parents = draft.parents
    if parents is not None and (parents.dtype != torch.long or parents.shape != tokens.shape):
        raise ValueError(
            f"drafter {drafter!r} returned parents of {parents.dtype} {tuple(parents.shape)}: give an int64 tensor "
            f"{tuple(tokens.shape)}"
        )
    if draft.q_logits is not None:
        _check_q(draft, drafter, V if draft.q_ids is None else len(draft.q_ids))


def _check_q(draft: Draft, drafter: str, width: int) -> None:
    expected = (*draft.tokens.shape, width)
    if draft.q_logits.shape != expected:
        raise ValueError(
            f"drafter {drafter!r} returned q_logits {tuple(draft.q_logits.shape)}: give {expected}, one column per "
            f"token of the target's vocabulary or of q_ids"
        )
    if draft.q_logz is None or draft.q_logz.shape != expected[:2]:
        raise ValueError(f"drafter {drafter!r} returned q_logits without q_logz {expected[:2]}: hand over both")


def made_safe(draft: Draft, V: int) -> tuple[Draft, Tensor]:
    """The draft cut to its longest row, with every id and parent in range, also past the lengths; and [B] whether a
    row's own tokens or parents had to be changed for that (an error, which the loop raises after its one read)."""
    width = max(draft.lengths, default=0)
    used_BN = torch.arange(width, device=draft.tokens.device) < draft.lengths_B[:, None]
    given = draft.tokens[:, :width]
    tokens = given.clamp(0, V - 1)
    invalid_BN = tokens != given
    safe = {"tokens": tokens}
    if draft.parents is not None:
        earlier = torch.arange(-1, width - 1, device=tokens.device)  # the token before: the last allowed parent
        parents = torch.minimum(draft.parents[:, :width], earlier).clamp(min=-1)
        invalid_BN = invalid_BN | (parents != draft.parents[:, :width])
        safe["parents"] = parents
    if draft.q_logits is not None:
        safe |= {"q_logits": draft.q_logits[:, :width], "q_logz": draft.q_logz[:, :width]}
    return replace(draft, **safe), (invalid_BN & used_BN).any(1)
