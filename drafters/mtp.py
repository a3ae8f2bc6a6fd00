"""Drafting with a multi-token-prediction head (DeepSeek-V3 2412.19437, FastMTP 2509.18362): a decoder layer that goes
on from the target's last state, with a cache of its own (`drafters.mtp_stage`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafters.autoregressive import Depths, SampledChain, within_positions
from drafters.mtp_stage import CachedStage
from drafters.trees import BeamTree
from heads.mtp import MTPHead
from heads.saved import shipped
from specdec.contracts import BaseDrafter, Draft, Draws, Rows, Verdict
from specdec.models import LoadedModel


class MTPDrafter(BaseDrafter):
    """With the text x_0..x_n the target has states up to h_{n-1}: what is drafted is chain n - 1 of the head.

    top_k: 1 drafts a chain, sampled with its exact q (arg-maxes without sampling). Above 1, the tree of the most
        probable paths is drafted, one-hot: the budget is its number of nodes, and it has as many levels as fill the
        budget at top_k nodes a level (see `drafters.trees.BeamTree`).
    """

    name = "mtp"

    def __init__(self, head: MTPHead, top_k: int = 1):
        config = head.config
        if not isinstance(top_k, int) or not 1 <= top_k <= (config.draft_vocab_size or config.vocab_size):
            raise ValueError(f"mtp: top_k is {top_k!r}: give 1 for a chain, or the children of a tree's nodes")
        if top_k > 1 and config.layers > 1:
            raise ValueError(f"mtp: top_k is {top_k}, but a head of {config.layers} stages drafts chains only: give 1")
        self.head, self.top_k = head, top_k
        self.needs_hidden = config.hidden_contract
        self.stages = [CachedStage(head, depth) for depth in range(1, config.layers + 1)]

    def admit(self, ids: Sequence[int]) -> None:
        for stage in self.stages:
            stage.cache.admit(ids)

    def release(self, ids: Sequence[int]) -> None:
        for stage in self.stages:
            stage.release(ids)

    def observe(self, rows: Rows, verdict: Verdict, hidden: Sequence[Tensor] | None) -> None:
        for row, states in zip(rows.ids, hidden, strict=True):
            self.stages[0].extend(row, states)

    def propose(self, rows: Rows, budget: Sequence[int], draws: Draws) -> Draft:
        return self._chain(rows, budget, draws) if self.top_k == 1 else self._tree(rows, budget)

    def _chain(self, rows: Rows, budget: Sequence[int], draws: Draws) -> Draft:
        if self.head.max_depth is not None:
            budget = [min(limit, self.head.max_depth) for limit in budget]
        chain = SampledChain(rows, self._within_positions(budget, rows), draws)
        state_BD: Tensor | None = None  # what each row's chain had at the depth before
        for depth in range(chain.longest):
            active = chain.active(depth)
            at = chain.at(active)
            if depth < len(self.stages):
                logits, state = self._first_pass(rows, active, chain.tokens[at, :depth])
            else:
                ids, slots = [rows.ids[b] for b in active], [len(rows.tokens[b]) - 2 + depth for b in active]
                logits, state = self.stages[0].go_on(ids, slots, chain.tokens[at, depth - 1 : depth], state_BD[at])
            state_BD = chain.spread(state, active)
            chain.draw(depth, active, logits, self.head.draft_ids)
        self._settle(rows, chain.lengths)
        return chain.draft()

    def _tree(self, rows: Rows, budget: Sequence[int]) -> Draft:
        """A row's levels follow from its own budget, so that its draft does not depend on the rows beside it."""
        levels = self._within_positions([-(-limit // self.top_k) for limit in budget], rows)
        if not any(levels):
            return Draft.empty(len(budget), rows.device)
        tree = self._grow(rows, Depths(levels, rows.device))
        self._settle(rows, [min(1, most) for most in levels])  # the tree's own entries all come after the first
        tokens, parents = tree.best(max(budget), levels)
        return Draft(tokens, [min(pair) for pair in zip(budget, map(tree.size, levels), strict=True)], parents)

    def _grow(self, rows: Rows, levels: Depths) -> BeamTree:
        """A tree of as many levels in each row; rows that are complete go along with numbers of no meaning."""
        active = levels.active(0)
        logits, state = self._first_pass(rows, active, drafted=None)
        tree = BeamTree(self.top_k, levels.spread(log_p(logits), active), self.head.draft_ids)
        out = levels.spread(state, active)[:, None]  # [B, 1 + m, D] states of the root and the nodes run so far
        for level in range(1, levels.longest):
            active = levels.active(level)
            at, ids = levels.at(active), [rows.ids[b] for b in active]
            tokens, parents = (of_all[at] for of_all in tree.to_run())
            nodes = Draft(tokens, [tokens.shape[1]] * len(ids), parents)
            of_root = torch.stack([self.stages[0].inputs[row][-1:] for row in ids])
            of_nodes = out[at].gather(1, (parents + 1)[..., None].expand(-1, -1, out.shape[-1]))
            texts, states = [rows.tokens[b] for b in active], torch.cat([of_root, of_nodes], dim=1)
            logits, state = self.stages[0].run_tree(ids, texts, states, nodes, last=self.top_k)
            tree.grow(levels.spread(log_p(logits), active))
            out = levels.spread(state, active)
        return tree

    def _within_positions(self, budget: Sequence[int], rows: Rows) -> list[int]:
        return within_positions(budget, rows, self.stages[0].model, lag=1)

    def _first_pass(self, rows: Rows, active: Sequence[int], drafted: Tensor | None) -> tuple[Tensor, Tensor]:
        """Logits [b, Vd] and states [b, D] of the active rows' chains in the stage after the drafted tokens [b, d]."""
        depth = 0 if drafted is None else drafted.shape[1]
        ids, texts = [rows.ids[b] for b in active], [rows.tokens[b] for b in active]
        logits, outs = self.stages[depth].enter(ids, texts, drafted if depth else None)
        if depth + 1 < len(self.stages):
            for row, out in zip(ids, outs, strict=True):
                self.stages[depth + 1].extend(row, out)
        return logits, torch.stack([out[-1] for out in outs])

    def _settle(self, rows: Rows, depths: Sequence[int]) -> None:
        """Roll back to the committed tokens, after drafts of `depths`."""
        for row, text, depth in zip(rows.ids, rows.tokens, depths, strict=True):
            reached = self.stages[: depth + 1] if depth else []  # the stage after the last has had its inputs
            for number, stage in enumerate(reached):
                stage.settle(row, len(text), has_run=number < depth)


def log_p(logits: Tensor) -> Tensor:
    """Log-probabilities over the last axis, in float32."""
    return logits.float().log_softmax(-1)


def build(target: LoadedModel, head: str | None = None, top_k: int = 1) -> MTPDrafter:
    """The drafter that `mtp[:head=FOLDER][,top_k=K]` names: without a folder, the head that comes with specdec for this
    target; with top_k above 1, trees."""
    folder = shipped("mtp", target.model) if head is None else head
    return MTPDrafter(MTPHead.from_pretrained(folder, target.model), top_k)
