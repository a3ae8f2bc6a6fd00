"""Greedy verification: the output is the target's arg-max sequence, whatever was drafted.

A drafted token is accepted while it equals the arg-max of p at its parent; the next token is the arg-max where that
ends. In a tree, the child that equals the arg-max is followed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.contracts import Draft, Draws, Scores, Verdict
from specdec.draws import defined_argmax
from verifiers.chains import has_kernel
from verifiers.paths import matched_path, parent_nodes, within_lengths


class GreedyVerifier:
    """Chains and trees; never reads q, never draws."""

    name = "greedy"
    lossless = True
    draws = "argmax"

    def verify(self, draft: Draft, p: Scores, draws: Draws) -> Verdict:
        if has_kernel(draft, p):
            from verifiers.kernels.choice import greedy  # as in `verifiers.rejection`

            return greedy(draft, p)
        return follow(draft, defined_argmax(p.logits)[p.index])


def follow(draft: Draft, choice: Tensor) -> Verdict:
    """The verdict where the target's token at every node is already decided.

    choice: [B, N + 1] the token at each node, -1 where p is undefined there.
    Example: tokens [[4, 5]], choice [[4, 6, 9]]: path [[0, -1]], n_accepted [1], next_token [6].
    """
    if draft.tokens.shape[1] == 0:
        return Verdict.undrafted(choice[:, 0])
    match = draft.tokens == choice.gather(1, parent_nodes(draft))
    path, n_accepted, last_node = matched_path(draft, match)
    next_token = choice.gather(1, last_node[:, None])[:, 0]
    return Verdict(path, n_accepted, next_token, match.float().masked_fill(~within_lengths(draft), torch.nan))
