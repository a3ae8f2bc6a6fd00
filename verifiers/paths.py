"""Tree geometry of a draft: parents, depths, and from matched tokens to the accepted path; no loop over rows.

Nodes: 0 is the root, j + 1 the place after drafted token j.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.contracts import Draft


def within_lengths(draft: Draft) -> Tensor:
    """[B, N] bool: entries of `draft.tokens` that are drafted tokens and not padding."""
    return torch.arange(draft.tokens.shape[1], device=draft.tokens.device) < draft.lengths_B[:, None]


def parent_nodes(draft: Draft) -> Tensor:
    """[B, N] node that each drafted token hangs off; the root for padding."""
    if draft.parents is None:
        parents = torch.arange(draft.tokens.shape[1], device=draft.tokens.device).expand_as(draft.tokens)
    else:
        parents = draft.parents + 1
    return parents.where(within_lengths(draft), 0)


def node_depths(draft: Draft) -> Tensor:
    """[B, N + 1] how many drafted tokens stand between the root and each node; 0 past a row's draft."""
    depth = pad(within_lengths(draft).long(), (1, 0))
    for up in _ancestors(draft):
        depth = depth + depth.gather(1, up)
    return depth


def chain_path(n_accepted: Tensor, N: int) -> Tensor:
    """[B, N] path of a chain whose first n_accepted [B] tokens are accepted: 0, 1, ..., then -1."""
    index = torch.arange(N, device=n_accepted.device)
    return torch.where(index < n_accepted[:, None], index, -1)


def path_to(draft: Draft, node: Tensor) -> tuple[Tensor, Tensor]:
    """Path [B, N] from the root to one node [B] per row, drafted-token indices and then -1, and its length [B]."""
    N = draft.tokens.shape[1]
    on_path = torch.zeros(len(node), N + 1, dtype=torch.long, device=node.device).scatter_(1, node[:, None], 1)
    for up in _ancestors(draft):
        on_path = on_path.scatter_reduce(1, up, on_path, "amax")
    # A parent precedes its children, so the order of the indices is the order of the path.
    index = torch.arange(N, device=node.device)
    path = torch.where(on_path[:, 1:] > 0, index, N).sort(1).values
    return path.masked_fill(path == N, -1), (path < N).sum(1)


def matched_path(draft: Draft, match: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The longest path from the root on which every drafted token matches.

    match: [B, N] bool. Returns path [B, N], n_accepted [B] and the last accepted node [B] (0 = none).
    Example: parents [[-1, -1, 1]], match [[F, T, T]]: path [[1, 2, -1]], n_accepted [2], last node [3].
    """
    match = match & within_lengths(draft)
    if draft.parents is None:
        n_accepted = match.long().cumprod(1).sum(1)
        return chain_path(n_accepted, match.shape[1]), n_accepted, n_accepted
    alive = pad(match, (1, 0), value=True)
    for up in _ancestors(draft):
        alive = alive & alive.gather(1, up)
    last = torch.where(alive, node_depths(draft), -1).argmax(1)
    return *path_to(draft, last), last


def _ancestors(draft: Draft) -> Iterator[Tensor]:
    """[B, N + 1] every node's 1st, 2nd, 4th, 8th, ... ancestor (the root's is the root).

    What is combined with its value at each of them in turn has been combined over the whole path to the root."""
    up = pad(parent_nodes(draft), (1, 0))
    for _ in range(draft.tokens.shape[1].bit_length()):
        yield up
        up = up.gather(1, up)
