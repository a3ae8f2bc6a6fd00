"""Traversal verification (2505.12398) for trees: from the leaves to the root, sequences instead of single tokens.

Every node carries P, the root's is 1: at a child x drawn from q, P_x = min(1, P r(x) / q(x)), with P and r of its
parent, r at first being p there. Nodes are tested in post-order, children in the order of their draw: a node with
no untested child is accepted with probability P, and with it the whole path to it; then a token is drawn from its r.
Where child x is rejected its parent becomes, with S = sum_y (P r(y) - q(y))+,

    r <- norm((P r - q)+),  P <- S / (S + 1 - P)

On a chain this is block verification. As there, numbers must be new at every step. q is the distribution that this
very child was drawn from, so that siblings without replacement need no rule of their own.

Each of the 2 N rounds costs a few passes over [B, V], and r is kept at every node, [B, N + 1, V].
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.contracts import Draft, Draws, Scores, Verdict
from verifiers.block import acceptance, residual_mass
from verifiers.chains import drafted_probs, q_at
from verifiers.paths import parent_nodes, path_to, within_lengths
from verifiers.tree_rejection import after_rejection


class TraversalVerifier:
    """Trees and chains, with q, one-hot, or both in one batch. Defines no acceptance probability per token."""

    name = "traversal"
    lossless = True
    draws = "fresh"

    def verify(self, draft: Draft, p: Scores, draws: Draws) -> Verdict:
        walk = _Walk(draft, p, draws.uniform(draft.tokens.shape[1]))
        for _ in range(2 * draft.tokens.shape[1]):  # each token is entered and tested once; the root always passes
            walk.round()
        path, n_accepted = path_to(draft, walk.here)
        weights = walk.at_here(walk.r).masked_fill(walk.undefined[:, None], torch.nan)
        accept_prob = walk.q.new_full(draft.tokens.shape, torch.nan)
        return Verdict(path, n_accepted, draws.pick(weights), accept_prob)


class _Walk:
    """All rows' walks in lockstep. here: [B] node; P: [B, N + 1]; r: [B, N + 1, V]; entered: [B, N]; done: [B]."""

    def __init__(self, draft: Draft, p: Scores, u: Tensor):
        self.draft, self.V = draft, p.logits.shape[-1]
        self.parent = parent_nodes(draft)
        self.entered = ~within_lengths(draft)
        self.tokens = draft.tokens.masked_fill(self.entered, 0)
        self.q = drafted_probs(draft, self.tokens, self.V)
        self.r = p.all_probs()
        self.u = torch.nn.functional.pad(u, (1, 0), value=0)  # the root, P = 1, is accepted when it is reached
        self.P = torch.ones(self.r.shape[:2], dtype=self.r.dtype, device=self.r.device)
        self.rows = torch.arange(len(self.r), device=self.r.device)
        self.here = torch.zeros_like(self.rows)
        self.done = torch.zeros_like(self.rows, dtype=torch.bool)
        self.undefined = torch.zeros_like(self.done)

    def at_here(self, values: Tensor) -> Tensor:
        """[B, ...] the values of each row's current node."""
        return values[self.rows, self.here]

    def round(self) -> None:
        """Every live row enters its node's next child, or tests its node where there is none left."""
        self.undefined |= self.at_here(self.P).isnan()
        waiting = (self.parent == self.here[:, None]) & ~self.entered
        descend = waiting.any(1) & ~self.done
        test = ~descend & ~self.done
        self.done |= test & (self.at_here(self.u) < self.at_here(self.P))
        self._ascend(test & ~self.done)
        self._descend(descend, waiting.long().argmax(1))

    def _descend(self, moving: Tensor, child: Tensor) -> None:
        token, q = self.tokens[self.rows, child], self.q[self.rows, child]
        grown = self.at_here(self.P) * self.r[self.rows, self.here, token]
        P = torch.where(grown == 0, grown, grown / q).clamp(max=1)
        self.P[self.rows, child + 1] = torch.where(moving, P, self.P[self.rows, child + 1])
        self.entered[self.rows, child] |= moving
        self.here = torch.where(moving, child + 1, self.here)

    def _ascend(self, moving: Tensor) -> None:
        child = (self.here - 1).clamp(min=0)
        parent = self.parent[self.rows, child]
        P, r, q = self.P[self.rows, parent], self.r[self.rows, parent], q_at(self.draft, self.tokens, child, self.V)
        self.r[self.rows, parent] = torch.where(moving[:, None], after_rejection(r, q, P[:, None]), r)
        self.P[self.rows, parent] = torch.where(moving, acceptance(P, residual_mass(P, r, q)), P)
        self.here = torch.where(moving, parent, self.here)
