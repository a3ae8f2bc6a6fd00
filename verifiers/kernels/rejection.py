"""Token rejection (rule and papers: `verifiers.rejection`): two launches.

Places after a rejection are left unread where that is known in time, and of the drafts only one row is read."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.contracts import Draft, Scores, Verdict
from specdec.draws import inverse_cdf
from verifiers.chains import drafted_probs, q_at
from verifiers.kernels.inputs import Warp, draft_arguments, packed, target_arguments
from verifiers.kernels.nodes import score_nodes
from verifiers.kernels.pick import pick
from verifiers.paths import chain_path, within_lengths
from verifiers.rejection import acceptance, accepted, residual


def rejection(draft: Draft, p: Scores, u: Tensor, pick_u: Tensor, warp: Warp | None = None) -> Verdict:
    """The verdict of `rejection_reference`, fused. u: [B, N] and pick_u: [B] float64 in [0, 1).

    `accept_prob` is NaN past the first rejected token, as in the reference."""
    target, q = target_arguments(draft, p, warp), draft_arguments(draft)
    nodes = score_nodes(target, q, packed(u))
    n_accepted, next_token = pick(target, q, nodes, pick_u)
    return _verdict(draft, n_accepted, next_token, acceptance(nodes.p, nodes.q))


def rejection_reference(draft: Draft, p: Scores, u: Tensor, pick_u: Tensor, warp: Warp | None = None) -> Verdict:
    """What `rejection` computes, by the rule's own functions on materialised probabilities."""
    V = p.logits.shape[-1]
    p = Scores((warp or Warp()).apply(p.logits), p.index)
    tokens = draft.tokens.masked_fill(~within_lengths(draft), 0)
    p_BN, q_BN = p.log_prob(tokens).exp(), drafted_probs(draft, tokens, V)
    accept_BN = accepted(p_BN, q_BN, u) & within_lengths(draft)
    n_accepted = accept_BN.long().cumprod(1).sum(1)
    next_token = inverse_cdf(residual(p.probs(n_accepted), q_at(draft, tokens, n_accepted, V)), pick_u)
    return _verdict(draft, n_accepted, next_token, acceptance(p_BN, q_BN))


def _verdict(draft: Draft, n_accepted: Tensor, next_token: Tensor, acceptance: Tensor) -> Verdict:
    N = draft.tokens.shape[1]
    place = torch.arange(N, device=n_accepted.device)
    reached = (place < draft.lengths_B[:, None]) & (place <= n_accepted[:, None])
    return Verdict(chain_path(n_accepted, N), n_accepted, next_token, acceptance.masked_fill(~reached, torch.nan))
