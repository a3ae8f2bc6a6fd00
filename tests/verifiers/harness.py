"""The exact law of a production verifier, from one batched call in float64.

A rule decides by comparing one uniform per drafted token to a threshold. So a batch with a row for every draft and
every pattern of "just below" and "just above" the (reference) thresholds, each weighted by its probability, holds
everything that the rule can do, and a threshold that is off by more than EDGE decides some row wrongly. The law of the
correction is the weights that the rule hands to `draws.pick`.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor

from specdec.contracts import Draft, Scores, Verifier
from tests.verifiers.reference import Law, Model, Tree, completed, prefix_of, sequence_law

EDGE = Fraction(1, 10**12)
Thresholds = Callable[[Model, Model, tuple[int, ...]], list[Fraction]]


@dataclass
class GivenDraws:
    """Uniforms given by the test; the weights of `pick` are kept and its tokens are the heaviest ones."""

    u: Tensor
    weights: Tensor = field(init=False)

    def uniform(self, count: int) -> Tensor:
        return self.u[:, :count]

    def pick(self, weights: Tensor) -> Tensor:
        self.weights = weights
        return weights.argmax(-1)


@dataclass
class Case:
    """One row of the batch: a draft, its uniforms, and the probability of both."""

    draft: tuple[int, ...]
    u: tuple[Fraction, ...]
    weight: Fraction


def around(h: Fraction) -> list[tuple[Fraction, Fraction]]:
    """A uniform just below a threshold and one just above, each with the probability of its side."""
    return [(max(h - EDGE, h / 2), h), (min(h + EDGE, (1 + h) / 2), 1 - h)]


def cases(thresholds: Thresholds, p: Model, q: Model, draft_law: Law) -> list[Case]:
    """Every draft of `draft_law` with every pattern of uniforms that has a probability."""
    rows = []
    for draft, weight in draft_law.items():
        cells = [around(h) for h in thresholds(p, q, draft)]
        for pattern in itertools.product(*cells):
            prob = weight
            for _, share in pattern:
                prob *= share
            if prob:
                rows.append(Case(draft, tuple(u for u, _ in pattern), prob))
    return rows


def logs(dist) -> Tensor:
    return torch.tensor([float(x) for x in dist], dtype=torch.float64).log()


def chain_batch(drafts: list[tuple[int, ...]], p: Model, q: Model | None) -> tuple[Draft, Scores]:
    """The draft (one-hot where q is None) and the packed scores of these rows, in float64, ragged and padded."""
    V, N = len(p[()]), max(map(len, drafts))
    tokens = torch.zeros(len(drafts), N, dtype=torch.long)
    q_logits = torch.full((len(drafts), N, V), torch.nan, dtype=torch.float64)  # padding must never be read
    index = torch.zeros(len(drafts), N + 1, dtype=torch.long)
    packed = []
    for b, draft in enumerate(drafts):
        index[b] = len(packed)
        for node in range(len(draft) + 1):
            index[b, node] = len(packed)
            packed.append(logs(p[draft[:node]]) + 3)  # any constant: the rules must normalise
        for i, x in enumerate(draft):
            tokens[b, i] = x
            if q is not None:
                q_logits[b, i] = logs(q[draft[:i]]) - 2
    lengths = [len(draft) for draft in drafts]
    scores = Scores(torch.stack(packed), index)
    if q is None:
        return Draft(tokens, lengths), scores
    return Draft(tokens, lengths, q_logits=q_logits, q_logz=q_logits.logsumexp(-1)), scores


def production_law(
    verifier: Verifier,
    thresholds: Thresholds,
    p: Model,
    q: Model,
    gammas: list[int],
    *,
    hide_q: bool = False,
    draft_law: Law | None = None,
    scored: Model | None = None,
) -> dict[tuple[int, ...], float]:
    """The law of max(gammas) + 1 tokens under `verifier`, drafts of each length of `gammas` equally likely.

    hide_q: present the drafts as one-hot. draft_law: draw the drafts from this law although the verifier is told q.
    scored: what the verifier is told instead of p, which then only continues what it emits.
    """
    rows = []
    for gamma in gammas:
        law = sequence_law(q, gamma) if draft_law is None else draft_law
        rows += [Case(c.draft, c.u, c.weight / len(gammas)) for c in cases(thresholds, p, q, law)]
    draft, scores = chain_batch([c.draft for c in rows], scored or p, None if hide_q else q)
    u = torch.full(draft.tokens.shape, 0.5, dtype=torch.float64)
    for b, case in enumerate(rows):
        u[b, : len(case.u)] = torch.tensor([float(x) for x in case.u], dtype=torch.float64)
    draws = GivenDraws(u)
    verdict = verifier.verify(draft, scores, draws)
    emitted = defaultdict(float)
    for b, case in enumerate(rows):
        path = verdict.path[b, : verdict.n_accepted[b]].tolist()
        prefix = tuple(case.draft[i] for i in path)
        correction = draws.weights[b] / draws.weights[b].sum()
        for y, prob in enumerate(correction.tolist()):
            emitted[(*prefix, y)] += float(case.weight) * prob
    return completed(emitted, p, max(gammas) + 1)


def distance(law: dict, other: dict) -> float:
    """Total variation distance of two laws of sequences."""
    return 0.5 * sum(abs(float(law.get(x, 0)) - float(other.get(x, 0))) for x in law.keys() | other.keys())


def tree_batch(trees: list[Tree], p: Model) -> tuple[Draft, Scores]:
    """Drafted trees, ragged and padded, and the packed scores of their nodes, in float64."""
    V, N = len(p[()]), max(len(tokens) for tokens, _, _ in trees)
    tokens_BN = torch.zeros(len(trees), N, dtype=torch.long)
    parents_BN = torch.full((len(trees), N), -1)
    q_logits = torch.full((len(trees), N, V), torch.nan, dtype=torch.float64)
    index = torch.zeros(len(trees), N + 1, dtype=torch.long)
    packed = []
    for b, (tokens, parents, qs) in enumerate(trees):
        n = len(tokens)
        index[b] = len(packed)
        index[b, : n + 1] = torch.arange(n + 1) + len(packed)
        packed += [logs(p[prefix_of(tokens, parents, node)]) + 3 for node in range(-1, n)]
        tokens_BN[b, :n], parents_BN[b, :n] = torch.tensor(tokens), torch.tensor(parents)
        for j, q in enumerate(qs):
            q_logits[b, j] = logs(q) - 2
    lengths = [len(tokens) for tokens, _, _ in trees]
    draft = Draft(tokens_BN, lengths, parents_BN, q_logits=q_logits, q_logz=q_logits.logsumexp(-1))
    return draft, Scores(torch.stack(packed), index)


def tree_production_law(
    verifier: Verifier,
    thresholds: Callable[[Model, Tree], list[Fraction]],
    p: Model,
    trees: list[tuple[Fraction, Tree]],
    n: int,
    unmodified: Model | None = None,
) -> tuple[dict[tuple[int, ...], float], float]:
    """The law of n tokens under a tree rule, and the expected number of accepted drafted tokens.

    unmodified: tell the verifier this model's q for every child, whatever it was really drawn from.
    """
    rows = []
    for weight, tree in trees:
        told = tree
        if unmodified is not None:
            tokens, parents, _ = tree
            told = (tokens, parents, tuple(unmodified[prefix_of(tokens, parents, parent)] for parent in parents))
        for pattern in itertools.product(*[around(h) for h in thresholds(p, told)]):
            prob = weight * math.prod(share for _, share in pattern)
            if prob:
                rows.append((told, [float(u) for u, _ in pattern], float(prob)))
    draft, scores = tree_batch([tree for tree, _, _ in rows], p)
    u = torch.full(draft.tokens.shape, 0.5, dtype=torch.float64)
    for b, (_, given, _) in enumerate(rows):
        u[b, : len(given)] = torch.tensor(given, dtype=torch.float64)
    draws = GivenDraws(u)
    verdict = verifier.verify(draft, scores, draws)
    emitted, accepted = defaultdict(float), 0.0
    for b, ((tokens, _, _), _, prob) in enumerate(rows):
        prefix = tuple(tokens[i] for i in verdict.path[b, : verdict.n_accepted[b]].tolist())
        accepted += prob * len(prefix)
        for y, w in enumerate((draws.weights[b] / draws.weights[b].sum()).tolist()):
            emitted[(*prefix, y)] += prob * w
    return completed(emitted, p, n), accepted
