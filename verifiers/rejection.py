"""Token rejection (Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318, algorithm 2), for chains.

Accept drafted token d with probability min(1, p(d) / q(d)); at the first rejection draw from norm((p - q)+); if all
are accepted draw one more token from p. A one-hot q gives: accept with probability p(d), else draw from p without d.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.contracts import Draft, Draws, Scores, Verdict
from verifiers.chains import check_chain, drafted_probs, has_kernel, q_at
from verifiers.paths import chain_path, within_lengths


class RejectionVerifier:
    """Chains with q, one-hot chains, and batches of both."""

    name = "rejection"
    lossless = True
    draws = "fresh"

    def verify(self, draft: Draft, p: Scores, draws: Draws) -> Verdict:
        check_chain(draft, self.name)
        N, V = draft.tokens.shape[1], p.logits.shape[-1]
        if has_kernel(draft, p):
            from verifiers.kernels.rejection import rejection  # Triton is slow to import, and not everywhere

            return rejection(draft, p, draws.uniform(N), draws.pick_uniform())
        valid_BN = within_lengths(draft)
        tokens_BN = draft.tokens.masked_fill(~valid_BN, 0)
        p_BN, q_BN = p.log_prob(tokens_BN).exp(), drafted_probs(draft, tokens_BN, V)
        accept_BN = accepted(p_BN, q_BN, draws.uniform(N)) & valid_BN
        n_accepted = accept_BN.long().cumprod(1).sum(1)
        weights = residual(p.probs(n_accepted), q_at(draft, tokens_BN, n_accepted, V))
        accept_prob = acceptance(p_BN, q_BN).masked_fill(~valid_BN, torch.nan)
        return Verdict(chain_path(n_accepted, N), n_accepted, draws.pick(weights), accept_prob)


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p(d) / q(d)) from the drafted tokens' probabilities under target and draft, elementwise; 0 where p is."""
    return torch.where(p > 0, (p / q).clamp(max=1), p)


def accepted(p: Tensor, q: Tensor, u: Tensor) -> Tensor:
    """u < p(d) / q(d), elementwise. Strict and without the division, so that u = 0 never accepts a token of p = 0."""
    return u * q < p


def residual(p: Tensor, q: Tensor) -> Tensor:
    """[B, V] unnormalised (p - q)+; p itself in a row where that has no mass (p <= q everywhere, through rounding).

    With q = 0, the place after the last drafted token, it is p."""
    rest = (p - q).clamp(min=0)
    return torch.where(rest.sum(-1, keepdim=True) == 0, p, rest)
