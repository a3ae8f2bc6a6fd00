"""Trees of drafted tokens: fixed ones for Medusa (Cai et al. 2401.10774, section 2.3.3 and appendix C), and ones that
follow the head's confidence (EAGLE-2, Li et al. 2406.16858).

Nodes are ordered best first, so that any prefix is a tree, and the best of its size.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tree:
    """A fixed tree over the candidates of every depth.

    paths: one node each, the ranks (0 = most probable) of the candidates on the way to it. A node comes after its
        parent. Example: ((0,), (1,), (0, 0)) tries the two most probable first tokens, and one second token after
        the first of them.
    """

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self):
        if not self.paths:
            raise ValueError("a tree without nodes drafts nothing: list every node once, as a tuple of ranks")
        known: set[tuple[int, ...]] = {()}
        for path in self.paths:
            if not path or min(path) < 0 or path in known or path[:-1] not in known:
                raise ValueError(
                    f"tree node {path} is empty, negative, listed twice or comes before its parent: list every node "
                    f"once, as a tuple of ranks, after the tuple without its last rank"
                )
            known.add(path)

    @staticmethod
    def chain(depth: int) -> Tree:
        """The most probable candidate of each of `depth` depths."""
        return Tree(tuple((0,) * (d + 1) for d in range(depth)))

    @property
    def is_chain(self) -> bool:
        """Whether every node hangs off the one before it."""
        return self.parents == list(range(-1, len(self.paths) - 1))

    @cached_property
    def parents(self) -> list[int]:
        """Per node the index of its parent, -1 = the root."""
        index = {path: node for node, path in enumerate(self.paths)}
        return [index.get(path[:-1], -1) for path in self.paths]

    @property
    def depths(self) -> list[int]:
        """Per node its depth below the root, less 1: which head proposes it."""
        return [len(path) - 1 for path in self.paths]

    @property
    def ranks(self) -> list[int]:
        """Per node which of its head's candidates it is."""
        return [path[-1] for path in self.paths]


def best_first(accuracies: Sequence[Sequence[float]], nodes: int) -> Tree:
    """The tree of at most `nodes` nodes that accepts most tokens in expectation, and best first.

    accuracies: per depth and rank, how often that candidate is the token, given that its depth is reached.

    As in Medusa, depths count as independent: a node is accepted with the product of the accuracies on its path, and
    the expected accepted length is the sum over the nodes. A child is never worth more than its parent, so taking the
    most valuable node next is optimal at every size. Nodes of no value are left out.
    """
    if nodes < 1:
        raise ValueError(f"a tree of {nodes} nodes drafts nothing: give 1 or more")
    if not all(0 <= a <= 1 for ranks in accuracies for a in ranks):
        raise ValueError(f"accuracies must be shares between 0 and 1, not {accuracies}: take those of a trained head")
    paths: list[tuple[int, ...]] = []
    waiting: list[tuple[float, int, tuple[int, ...]]] = [(-1.0, 0, ())]  # of equals, the shallower and then the first
    while waiting and len(paths) <= nodes:
        value, depth, path = heapq.heappop(waiting)
        paths.append(path)
        for rank, accuracy in enumerate(accuracies[depth] if depth < len(accuracies) else ()):
            if value * accuracy < 0:
                heapq.heappush(waiting, (value * accuracy, depth + 1, (*path, rank)))
    return Tree(tuple(paths[1:]))  # without the root


class BeamTree:
    """A tree grown level by level for each of b rows from the head's own probabilities, all on the device.

    Every level, the `top_k` nodes of the last one with the highest probability of their whole path are expanded, each
    into its `top_k` most probable children (EAGLE-2, section 4.1); `best` then picks among all nodes ever made.

    log_p: [b, Vd] log-probabilities of the first drafted token.   ids: [Vd] target id of each column, None = the same.
    """

    def __init__(self, top_k: int, log_p: Tensor, ids: Tensor | None = None):
        self.top_k, self.ids = top_k, ids
        none = torch.zeros(len(log_p), 0, dtype=torch.long, device=log_p.device)
        self.tokens, self.parents, self.scores = none, none, log_p[:, :0]  # [b, C] all candidates; parents among them
        self.frontier = none.new_full((len(log_p), 1), -1)  # [b, w] the candidates to expand next; -1 = the root
        self.frontier_scores = log_p.new_zeros(len(log_p), 1)
        self.expanded = none  # [b, m] all candidates that were ever in the frontier, level after level
        self.expanded_parents = none  # [b, m] their parents' places in `expanded`
        self.grow(log_p[:, None])

    def grow(self, log_p: Tensor) -> None:
        """Expand the frontier's w nodes, given log_p [b, w, Vd] of the token after each of them."""
        k, made = self.top_k, self.tokens.shape[1]
        best, columns = log_p.topk(k)
        scores = (self.frontier_scores[..., None] + best.clamp(max=0)).flatten(1)  # a child is never above its parent
        tokens = columns.flatten(1) if self.ids is None else self.ids[columns.flatten(1)]
        self.tokens = torch.cat([self.tokens, tokens], dim=1)
        self.parents = torch.cat([self.parents, self.frontier.repeat_interleave(k, dim=1)], dim=1)
        self.scores = torch.cat([self.scores, scores], dim=1)
        self.frontier_scores, chosen = scores.topk(k)
        self.frontier = made + chosen
        first = self.expanded.shape[1] - k if made else -1  # where the nodes just expanded lie in `expanded`
        self.expanded = torch.cat([self.expanded, self.frontier], dim=1)
        self.expanded_parents = torch.cat([self.expanded_parents, first + chosen // k], dim=1)

    def to_run(self) -> tuple[Tensor, Tensor]:
        """Tokens and parents [b, m] of the expanded nodes and the frontier, whose top_k nodes come last: what the head
        must run to grow the tree."""
        return self.tokens.gather(1, self.expanded), self.expanded_parents

    def size(self, levels: int) -> int:
        """How many nodes a tree of `levels` levels can pick from."""
        return 0 if levels == 0 else self.top_k + (levels - 1) * self.top_k**2

    def best(self, nodes: int, levels: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Tokens and parents [b, N] of each row's N = min(nodes, candidates) most probable nodes of its first
        levels[b] levels, best first; what comes after the row's `size` is to be ignored."""
        candidates = torch.arange(self.scores.shape[1], device=self.scores.device)
        sizes = torch.tensor([self.size(most) for most in levels]).to(self.scores.device, non_blocking=True)
        scores = self.scores.masked_fill(candidates >= sizes[:, None], -torch.inf)
        order = scores.sort(dim=1, descending=True, stable=True).indices  # a parent is made before its children
        place, chosen = order.argsort(dim=1), order[:, :nodes]
        parents = self.parents.gather(1, chosen)
        return self.tokens.gather(1, chosen), torch.where(parents < 0, -1, place.gather(1, parents.clamp(min=0)))
