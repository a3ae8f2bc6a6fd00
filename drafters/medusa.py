"""Drafting with Medusa heads (Cai et al. 2401.10774): every depth is proposed at once from one state of the target."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafters.trees import Tree, best_first
from heads.medusa import MedusaHeads
from heads.saved import shipped
from specdec.contracts import BaseDrafter, Draft, Draws, Rows, Verdict
from specdec.models import LoadedModel


class MedusaDrafter(BaseDrafter):
    """Heads on the target's state of the last token that it has run. With the text x_0..x_n that is token n - 1, so
    head i, counted from 0, proposes token n + 1 + i.

    tree: which candidates of the heads to draft, see `drafters.trees`; None = a chain of each head's arg-max. Rows
        with a smaller budget than the tree has nodes draft its first nodes.

    A depth's candidates do not depend on the drafted tokens before it. Drafts are deterministic, so one-hot.
    """

    name = "medusa"

    def __init__(self, heads: MedusaHeads, tree: Tree | None = None):
        self.heads = heads
        self.tree = Tree.chain(heads.config.heads) if tree is None else tree
        self.needs_hidden = heads.config.hidden_contract
        self._states: dict[int, Tensor] = {}  # row id -> [D] the target's state of the last token that it has run
        candidates = heads.config.draft_vocab_size or heads.config.vocab_size
        if max(self.tree.depths, default=0) >= heads.config.heads or max(self.tree.ranks, default=0) >= candidates:
            raise ValueError(
                f"the tree reaches depth {max(self.tree.depths) + 1} and rank {max(self.tree.ranks)}, where there are "
                f"{heads.config.heads} heads of {candidates} candidates: give a smaller tree"
            )

    def admit(self, ids: Sequence[int]) -> None:
        self.release(ids)

    def release(self, ids: Sequence[int]) -> None:
        for row in ids:
            self._states.pop(row, None)

    def propose(self, rows: Rows, budget: Sequence[int], draws: Draws) -> Draft:
        lengths = [min(limit, len(self.tree.paths)) for limit in budget]
        B, N = len(lengths), max(lengths)
        tokens = torch.zeros(B, N, dtype=torch.long, device=rows.device)
        active = [b for b in range(B) if lengths[b]]
        if active:
            states = torch.stack([self._states[rows.ids[b]] for b in active])
            at = torch.tensor(active).to(rows.device, non_blocking=True)
            tokens[at] = self._candidates(states, N)
        if self.tree.is_chain:
            return Draft(tokens, lengths)
        parents = torch.tensor(self.tree.parents[:N]).to(rows.device, non_blocking=True)
        return Draft(tokens, lengths, parents.expand(B, N))

    def observe(self, rows: Rows, verdict: Verdict, hidden: Sequence[Tensor] | None) -> None:
        last = torch.stack([states[-1] for states in hidden])
        self._states |= zip(rows.ids, last, strict=True)

    def _candidates(self, states: Tensor, N: int) -> Tensor:
        """[b, N] tokens of the tree's first N nodes, given the states [b, D]."""
        depths, ranks = self.tree.depths[:N], self.tree.ranks[:N]
        logits = torch.stack([self.heads.head(i, states) for i in range(max(depths) + 1)])
        top = logits.topk(max(ranks) + 1).indices  # [K, b, candidates]
        columns = top[depths, :, ranks].T
        return columns if self.heads.draft_ids is None else self.heads.draft_ids[columns]


def build(target: LoadedModel, head: str | None = None, nodes: int | None = None) -> MedusaDrafter:
    """The drafter that `medusa[:head=FOLDER][,nodes=N]` names: without a folder, the heads that come with specdec for
    this target; with nodes, the best tree of at most N nodes by the accuracies measured when the heads were trained,
    to be drafted with a draft length of N."""
    folder = shipped("medusa", target.model) if head is None else head
    heads = MedusaHeads.from_pretrained(folder, target.model)
    if nodes is None:
        return MedusaDrafter(heads)
    if not isinstance(nodes, int) or nodes < 1:
        raise ValueError(f"medusa:nodes={nodes} is not a number of tree nodes: give 1 or more")
    accuracies = heads.about.get("accuracies")
    if accuracies is None:
        raise ValueError(
            f"medusa:nodes={nodes} needs the heads' measured accuracies, which {folder} does not record: leave nodes "
            f"out for a chain, or train the heads with `specdec train medusa`"
        )
    return MedusaDrafter(heads, best_first(accuracies, nodes))
