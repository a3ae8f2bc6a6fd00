"""What the chain rules read from a draft: q of the drafted tokens and q at one place per row."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from specdec.contracts import Draft, Scores

HAS_TRITON = find_spec("triton") is not None


def has_kernel(draft: Draft, p: Scores) -> bool:
    """Whether the rule's kernel (`verifiers.kernels`) takes this step: a chain on CUDA, no float64, q over all V."""
    on_cuda = HAS_TRITON and p.logits.is_cuda and p.logits.dtype != torch.float64
    return on_cuda and draft.parents is None and draft.q_ids is None


def check_chain(draft: Draft, verifier: str) -> None:
    """Raises ValueError for a tree."""
    if draft.parents is not None:
        raise ValueError(
            f"verifier {verifier!r} takes chain drafts and was given a tree: use 'tree_rejection', 'traversal' or "
            f"'coupled' (or 'greedy' without sampling)"
        )


def drafted_probs(draft: Draft, tokens: Tensor, V: int) -> Tensor:
    """[B, N] q of each drafted token, 1 in one-hot rows; float32 without q, else in q's precision.

    tokens: [B, N] `draft.tokens` with ids of the vocabulary, of size V, past the rows' ends too.
    """
    if draft.q_logits is None:
        return torch.ones(tokens.shape, device=tokens.device)
    if draft.q_ids is not None:  # column of each target id
        order = torch.arange(len(draft.q_ids), device=tokens.device)
        tokens = order.new_zeros(V).index_copy_(0, draft.q_ids, order)[tokens]
    log_q = draft.q_logits.gather(2, tokens[..., None])[..., 0] - draft.q_logz
    return log_q.exp() if draft.one_hot is None else log_q.exp().masked_fill(draft.one_hot[:, None], 1)


def q_at(draft: Draft, tokens: Tensor, place: Tensor, V: int) -> Tensor:
    """[B, V] the distribution that token `place[b]` of each row was drawn from; 0 where the row drafted no such token.

    place: [B] int64 in 0..lengths[b]. tokens: as for `drafted_probs`.
    """
    B, N = tokens.shape
    if N == 0:
        return torch.zeros(B, V, device=place.device)
    drafted = (place < draft.lengths_B)[:, None]
    place = place.clamp(max=N - 1)
    token = tokens.gather(1, place[:, None])
    if draft.q_logits is None:
        return torch.zeros(B, V, device=place.device).scatter_(1, token, drafted.float())
    rows = torch.arange(B, device=place.device)
    q = (draft.q_logits[rows, place] - draft.q_logz[rows, place, None]).exp_()
    if draft.q_ids is not None:
        q = q.new_zeros(B, V).index_copy_(1, draft.q_ids, q)
    if draft.one_hot is not None:
        certain = torch.zeros_like(q).scatter_(1, token, 1)
        q = torch.where(draft.one_hot[:, None], certain, q)
    return q.masked_fill_(~drafted, 0)
