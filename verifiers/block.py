"""Block verification (Sun et al. 2403.10444, algorithm 2), for chains: tests prefixes instead of single tokens.

P_0 = 1, P_i = min(1, P_{i-1} p(x_i) / q(x_i)). A prefix of i < gamma tokens passes with probability
h_i = S_i / (S_i + 1 - P_i), S_i = sum_x (P_i p(x | x^i) - q(x | x^i))+; the whole draft with h_gamma = P_gamma. The
longest prefix that passes is accepted, whether or not shorter ones did; then a token from norm((P p - q)+), or from p
after the whole draft. In expectation it never accepts less than token rejection.

The uniforms and the draft's noise must be new at every step: positions past the accepted prefix are met again, after
having been conditioned on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.contracts import Draft, Draws, Scores, Verdict
from verifiers.chains import check_chain, drafted_probs, has_kernel, q_at
from verifiers.paths import chain_path, within_lengths
from verifiers.rejection import residual


class BlockVerifier:
    """Chains with q, one-hot chains, and batches of both."""

    name = "block"
    lossless = True
    draws = "fresh"

    def verify(self, draft: Draft, p: Scores, draws: Draws) -> Verdict:
        check_chain(draft, self.name)
        N, V = draft.tokens.shape[1], p.logits.shape[-1]
        if has_kernel(draft, p):
            from verifiers.kernels.block import block  # Triton is slow to import, and not everywhere

            return block(draft, p, draws.uniform(N), draws.pick_uniform())
        valid_BN = within_lengths(draft)
        tokens_BN = draft.tokens.masked_fill(~valid_BN, 0)
        P = prefix_weights(p.log_prob(tokens_BN).exp(), drafted_probs(draft, tokens_BN, V))
        h = torch.zeros_like(P[:, 1:])
        last_B = draft.lengths_B
        for i in range(1, N + 1):
            place = last_B.clamp(max=i)  # rows whose draft ended before i: any node of theirs
            mass = residual_mass(P[:, i], p.probs(place), q_at(draft, tokens_BN, place, V)) if i < N else P[:, i]
            h[:, i - 1] = torch.where(last_B == i, P[:, i], acceptance(P[:, i], mass))
        h = h.masked_fill(~valid_BN, 0)
        passed = draws.uniform(N) < h
        n_accepted = torch.where(passed, torch.arange(1, N + 1, device=P.device), 0).amax(1) if N else last_B
        scaled = P.gather(1, n_accepted[:, None]) * p.probs(n_accepted)
        weights = residual(scaled, q_at(draft, tokens_BN, n_accepted, V))
        # A NaN anywhere on the draft is an error although a shorter prefix passed: it made longer ones fail.
        weights = weights.masked_fill(P.gather(1, last_B[:, None]).isnan(), torch.nan)
        accept_prob = reach_ratio(h).masked_fill(~valid_BN, torch.nan)
        return Verdict(chain_path(n_accepted, N), n_accepted, draws.pick(weights), accept_prob)


def prefix_weights(p: Tensor, q: Tensor) -> Tensor:
    """[B, N + 1] P_0..P_N from the drafted tokens' probabilities [B, N] under target and draft."""
    P = torch.ones(p.shape[0], p.shape[1] + 1, dtype=p.dtype, device=p.device)
    for i in range(p.shape[1]):
        grown = P[:, i] * p[:, i]
        P[:, i + 1] = torch.where(grown == 0, grown, grown / q[:, i]).clamp(max=1)
    return P


def residual_mass(P: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """[B] S = sum_x (P p(x) - q(x))+, from P [B] and p, q [B, V]."""
    return (P[:, None] * p - q).clamp(min=0).sum(-1)


def acceptance(P: Tensor, S: Tensor) -> Tensor:
    """h = S / (S + 1 - P), elementwise; 1 where P is 1, also where p = q makes it 0 / 0."""
    return torch.where(P >= 1, 1, S / (S + 1 - P))


def reach_ratio(h: Tensor) -> Tensor:
    """[B, N] probability that at least i tokens are accepted, given the draft and that at least i - 1 are."""
    none_from = (1 - h).flip(1).cumprod(1).flip(1)  # no prefix of length i or more passes
    at_least = torch.nn.functional.pad(1 - none_from, (1, 0), value=1)
    return torch.where(at_least[:, 1:] > 0, at_least[:, 1:] / at_least[:, :-1], 0)
