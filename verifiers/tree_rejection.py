"""Recursive rejection for trees (SpecInfer 2305.09781; without replacement: Sequoia 2402.12374).

At a node, the children are tried in the order in which they were drawn: x is accepted with min(1, r(x) / q(x)), else
r <- norm((r - q)+), where r starts as p at that node and q is the distribution that this very child was drawn from.
So children drawn without replacement need no rule of their own: the draft says q with the earlier siblings left out.
If no child is accepted, the next token is drawn from r.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.contracts import Draft, Draws, Scores, Verdict
from verifiers.chains import drafted_probs, q_at
from verifiers.paths import matched_path, parent_nodes, within_lengths
from verifiers.rejection import acceptance, accepted


class TreeRejectionVerifier:
    """Trees and chains, with q, one-hot, or both in one batch."""

    name = "tree_rejection"
    lossless = True
    draws = "fresh"

    def verify(self, draft: Draft, p: Scores, draws: Draws) -> Verdict:
        (B, N), V = draft.tokens.shape, p.logits.shape[-1]
        valid_BN, parent_BN = within_lengths(draft), parent_nodes(draft)
        tokens_BN = draft.tokens.masked_fill(~valid_BN, 0)
        q_BN, u_BN = drafted_probs(draft, tokens_BN, V), draws.uniform(N)
        accept_BN = torch.zeros_like(valid_BN)
        accept_prob = q_BN.new_full((B, N), torch.nan)
        here_B = torch.zeros(B, dtype=torch.long, device=tokens_BN.device)
        r_BV = p.probs(here_B)
        for j in range(N):  # a parent precedes its children, so one pass in index order walks down the tree
            tried_B = valid_BN[:, j] & (parent_BN[:, j] == here_B)
            r_B, q_B = r_BV.gather(1, tokens_BN[:, j, None])[:, 0], q_BN[:, j]
            accept_BN[:, j] = tried_B & accepted(r_B, q_B, u_BN[:, j])
            accept_prob[:, j] = torch.where(tried_B, acceptance(r_B, q_B), torch.nan)
            here_B = torch.where(accept_BN[:, j], j + 1, here_B)
            rejected_BV = after_rejection(r_BV, q_at(draft, tokens_BN, torch.full_like(here_B, j), V))
            r_BV = torch.where((tried_B & ~accept_BN[:, j])[:, None], rejected_BV, r_BV)
            r_BV = torch.where(accept_BN[:, j, None], p.probs(here_B), r_BV)
        path, n_accepted, _ = matched_path(draft, accept_BN)
        return Verdict(path, n_accepted, draws.pick(r_BV), accept_prob)


def after_rejection(r: Tensor, q: Tensor, P: Tensor | float = 1.0) -> Tensor:
    """[B, V] norm((P r - q)+), what the next child or token is compared to once one was rejected; r without mass.

    r, q: [B, V]. P: [B, 1], traversal's; 1 in recursive rejection.
    """
    rest = (P * r - q).clamp(min=0)
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass == 0, r, rest / mass)
