"""Each verification rule as conditions on one verdict, in float64: how far is it from what the rule decides?

Written from the papers, one row at a time, without the production rules: replaying a verdict with them would repeat
their mistakes. A condition compares a uniform to a threshold. Its *violation* is by how much probability mass it
fails (for the arg-max rules: by how much of a logit), 0 where it holds. Rounding leaves about 1e-6, a wrong rule 0.1.

Nodes: 0 is the root, j + 1 the place after drafted token j.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Case:
    """One row's step in float64. N drafted tokens, V vocabulary.

    p: [N + 1, V] at every node.   q: [N, V] what each token was drawn from (one-hot where chosen).
    u: [N] acceptance uniforms.   u_pick: the last token's.   path, next_token: the verdict.
    choice: [N + 1, V] scores whose arg-max each node's token is, for the rules that choose (noise included).
    """

    tokens: list[int]
    parents: list[int]
    p: np.ndarray
    q: np.ndarray
    u: np.ndarray
    u_pick: float
    path: list[int]
    next_token: int
    choice: np.ndarray | None = None

    @property
    def last_node(self) -> int:
        return self.path[-1] + 1 if self.path else 0

    def children(self, node: int) -> list[int]:
        return [j for j, parent in enumerate(self.parents) if parent == node - 1]


def chosen(case: Case) -> Iterator[float]:
    """Greedy and coupled: every emitted token is the arg-max of its node's scores."""
    nodes = [0, *(j + 1 for j in case.path)]
    for node, token in zip(nodes, [*(case.tokens[j] for j in case.path), case.next_token], strict=True):
        yield case.choice[node].max() - case.choice[node, token]


def rejection(case: Case) -> Iterator[float]:
    """Leviathan et al. 2211.17192, algorithm 1: u_i q(d) < p(d) for what was accepted, not for what came next."""
    n = len(case.path)
    for i, token in enumerate(case.tokens[: n + 1]):
        yield should(i < n, case.u[i] * case.q[i, token], case.p[i, token])
    yield picked(case.p[n] - case.q[n] if n < len(case.tokens) else case.p[n], case.p[n], case)


def block(case: Case) -> Iterator[float]:
    """Sun et al. 2403.10444, algorithm 2: the longest prefix i with u_i < S_i / (S_i + 1 - P_i)."""
    n, N = len(case.path), len(case.tokens)
    P = [1.0]
    for i, token in enumerate(case.tokens):
        P.append(min(1.0, ratio(P[i] * case.p[i, token], case.q[i, token])))
    for i in range(max(n, 1), N + 1):
        S = positive(P[i] * case.p[i] - case.q[i]).sum() if i < N else P[N]
        room = S + 1 - P[i] if i < N else 1.0
        yield should(i == n, case.u[i - 1] * room, S) if P[i] < 1 else float(i != n)
    yield picked(P[n] * case.p[n] - case.q[n] if n < N else case.p[n], case.p[n], case)


def tree_rejection(case: Case) -> Iterator[float]:
    """SpecInfer 2305.09781: at each node the children in turn, r <- norm((r - q)+) after each that is rejected."""
    for node in [0, *(j + 1 for j in case.path)]:
        r, accepted = case.p[node], False
        for j in case.children(node):
            accepted = j in case.path
            yield should(accepted, case.u[j] * case.q[j, case.tokens[j]], r[case.tokens[j]])
            if accepted:
                break
            r = normalised(r - case.q[j], r)
    yield picked(r, r, case)


def traversal(case: Case) -> Iterator[float]:
    """2505.12398: nodes in post-order; each is accepted with its P, which every rejected child has lowered."""
    yield from _traverse(case, 0, 1.0)


def _traverse(case: Case, node: int, P: float) -> Iterator[float]:
    """Conditions of the nodes below `node` and its own; returns True once one of them was the accepted one."""
    r = case.p[node]
    for j in case.children(node):
        token = case.tokens[j]
        if (yield from _traverse(case, j + 1, min(1.0, ratio(P * r[token], case.q[j, token])))):
            return True
        rest = P * r - case.q[j]
        S = positive(rest).sum()
        P, r = (1.0 if P >= 1 else S / (S + 1 - P)), normalised(rest, r)
    accepted = node == case.last_node
    if node:
        yield should(accepted, case.u[node - 1], P)
    if accepted:
        yield picked(r, r, case)
    return accepted


RULES = {
    "greedy": chosen,
    "coupled": chosen,
    "rejection": rejection,
    "block": block,
    "tree_rejection": tree_rejection,
    "traversal": traversal,
}


def should(accept: bool, left: float, right: float) -> float:
    """Violation of left < right where the token was accepted, of left >= right where it was not."""
    return max(0.0, left - right if accept else right - left)


def picked(weights: np.ndarray, p: np.ndarray, case: Case) -> float:
    """Violation of "u_pick lies in the next token's part of the weights' cumulative sum", in mass of `weights`.

    weights: [V], negative parts count as 0; without any mass, p."""
    weights = positive(weights) if positive(weights).sum() > 0 else p
    cdf = weights.cumsum()
    u, x = case.u_pick * cdf[-1], case.next_token
    return max(0.0, cdf[x] - weights[x] - u, u - cdf[x])


def positive(values: np.ndarray) -> np.ndarray:
    return np.maximum(values, 0)


def normalised(rest: np.ndarray, r: np.ndarray) -> np.ndarray:
    """norm(rest+), or r where nothing is left."""
    mass = positive(rest).sum()
    return positive(rest) / mass if mass > 0 else r


def ratio(a: float, b: float) -> float:
    """a / b, 0 where a is."""
    return a / b if a > 0 else 0.0
