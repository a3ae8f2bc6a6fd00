"""Coupled, drafter-invariant sampling (Daliri, Musco, Suresh 2408.07978), for chains and trees.

The token emitted at a position is argmax(log p + g) with Gumbel noise g keyed by (seed, request, absolute position);
the drafter proposes argmax(log q + g) with the same g. So the output is the very sequence of sampling without
speculation with that seed, whatever the drafter, the draft length or the batch. A draft is met with probability at
least (1 - TV) / (1 + TV) of the total variation TV between p and q.
"""

from __future__ import annotations

import torch

from specdec.contracts import Draft, Draws, Scores, Verdict
from verifiers.chains import has_kernel
from verifiers.greedy import follow
from verifiers.paths import node_depths


class CoupledVerifier:
    """Chains and trees; never reads q."""

    name = "coupled"
    lossless = True
    draws = "coupled"

    def verify(self, draft: Draft, p: Scores, draws: Draws) -> Verdict:
        if has_kernel(draft, p):
            from verifiers.kernels.choice import coupled  # as in `verifiers.rejection`

            return coupled(draft, p, draws.seed, draws.requests_B, draws.positions_B)
        # Row and depth of every scored position; entries past a row's draft repeat its root, with depth 0.
        depths_BN = node_depths(draft)
        rows_BN = torch.arange(len(p.index), device=p.index.device)[:, None].expand_as(p.index)
        rows_R, depths_R = (
            p.index.new_zeros(len(p.logits)).scatter_(0, p.index.flatten(), values.flatten())
            for values in (rows_BN, depths_BN)
        )
        return follow(draft, draws.choose(p.logits, rows_R, depths_R)[p.index])
