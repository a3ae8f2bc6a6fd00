"""Typical acceptance (Medusa 2401.10774, section 2.3.1). LOSSY: the output does not follow the target.

A drafted token is accepted if p(x) > min(epsilon, delta exp(-H(p))), H the entropy of p at its place; the longest path
on which every token is accepted is taken, then a token is drawn from p.
"""

from __future__ import annotations

import torch

from specdec.contracts import Draft, Draws, Scores, Verdict
from verifiers.paths import matched_path, parent_nodes, within_lengths


class TypicalVerifier:
    """Chains and trees; never reads q. Larger epsilon and delta accept less."""

    name = "typical"
    lossless = False
    draws = "fresh"

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3):
        for argument, value in (("epsilon", epsilon), ("delta", delta)):
            if not 0 < value <= 1:
                raise ValueError(f"{argument} of typical acceptance must be in (0, 1], not {value}")
        self.epsilon = epsilon
        self.delta = delta

    def verify(self, draft: Draft, p: Scores, draws: Draws) -> Verdict:
        valid_BN = within_lengths(draft)
        packed_BN = p.index.gather(1, parent_nodes(draft))  # row of the scores at each drafted token's parent
        tokens_BN = draft.tokens.masked_fill(~valid_BN, 0)
        p_BN = (p.logits[packed_BN, tokens_BN] - p.logz[packed_BN]).exp()
        entropy_R = torch.special.entr((p.logits - p.logz[:, None]).exp()).sum(-1)
        accept_BN = p_BN > threshold(entropy_R, self.epsilon, self.delta)[packed_BN]
        path, n_accepted, last_node = matched_path(draft, accept_BN)
        accept_prob = accept_BN.float().masked_fill(~valid_BN, torch.nan)
        return Verdict(path, n_accepted, draws.pick(p.probs(last_node)), accept_prob)


def threshold(entropy: torch.Tensor, epsilon: float, delta: float) -> torch.Tensor:
    """min(epsilon, delta exp(-H)), elementwise; entropy in nats."""
    return (delta * torch.exp(-entropy)).clamp(max=epsilon)
