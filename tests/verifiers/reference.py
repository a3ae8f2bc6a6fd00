"""Verification rules in rational arithmetic, written from the papers without looking at the production code.

A model is a function of the context: a dict from a prefix (tuple of tokens) to its next-token distribution (tuple of
`Fraction`). A rule's outcome list says what is emitted for one draft: pairs (probability, emitted tokens). Averaged
over drafts and continued by the target, the emitted tokens must follow the target's law, to equality.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from fractions import Fraction

Dist = tuple[Fraction, ...]
Model = dict[tuple[int, ...], Dist]
Law = dict[tuple[int, ...], Fraction]
Outcomes = list[tuple[Fraction, tuple[int, ...]]]


def contexts(V: int, depth: int) -> Iterator[tuple[int, ...]]:
    """All prefixes of 0..depth tokens."""
    for length in range(depth + 1):
        yield from itertools.product(range(V), repeat=length)


def random_dist(rng: random.Random, V: int, zeros: bool) -> Dist:
    """A random distribution of small rationals; with `zeros`, about half of its entries are 0."""
    while True:
        weights = [rng.randint(1, 9) * (not zeros or rng.random() < 0.5) for _ in range(V)]
        if sum(weights):
            return tuple(Fraction(w, sum(weights)) for w in weights)


def one_hot(token: int, V: int) -> Dist:
    return tuple(Fraction(int(x == token)) for x in range(V))


def model_pair(kind: str, V: int, depth: int, seed: int) -> tuple[Model, Model]:
    """Target and draft of one of the KINDS, for every context of up to `depth` tokens."""
    rng = random.Random(f"{kind} {V} {depth} {seed}")
    p: Model = {}
    q: Model = {}
    for context in contexts(V, depth):
        p[context] = random_dist(rng, V, zeros=kind == "zeros")
        q[context] = random_dist(rng, V, zeros=kind == "zeros")
        if kind == "equal":
            q[context] = p[context]
        elif kind == "one-hot q":
            q[context] = one_hot(rng.randrange(V), V)
        elif kind == "one-hot p":
            p[context] = one_hot(rng.randrange(V), V)
        elif kind == "disjoint":
            cut = rng.randrange(1, V)
            p[context] = random_dist(rng, cut, False) + (Fraction(0),) * (V - cut)
            q[context] = (Fraction(0),) * cut + random_dist(rng, V - cut, False)
    return p, q


KINDS = ("dense", "zeros", "equal", "one-hot q", "one-hot p", "disjoint")


def sequence_law(model: Model, n: int) -> Law:
    """The law of a model's first n tokens."""
    law: Law = {(): Fraction(1)}
    for _ in range(n):
        law = {(*x, y): w * prob for x, w in law.items() for y, prob in enumerate(model[x]) if prob}
    return law


def completed(law: Law, p: Model, n: int) -> Law:
    """Continue every emitted sequence by the target to n tokens (or cut it there)."""
    total: Law = defaultdict(Fraction)
    for emitted, weight in law.items():
        tails = [(emitted, weight)]
        while tails and len(tails[0][0]) < n:
            tails = [((*x, y), w * prob) for x, w in tails for y, prob in enumerate(p[x]) if prob]
        for x, w in tails:
            total[x[:n]] += w
    return {x: w for x, w in total.items() if w}


def emitted_law(rule: Callable[[Model, Model, tuple[int, ...]], Outcomes], p: Model, q: Model, gamma: int) -> Law:
    """The law of gamma + 1 tokens under a chain rule with drafts of gamma tokens from q."""
    law: Law = defaultdict(Fraction)
    for draft, weight in sequence_law(q, gamma).items():
        for prob, emitted in rule(p, q, draft):
            law[emitted] += weight * prob
    return completed(law, p, gamma + 1)


def normalised(weights: list[Fraction]) -> Dist:
    return tuple(w / sum(weights) for w in weights)


def positive_part(p: Dist, q: Dist, scale: Fraction = Fraction(1)) -> list[Fraction]:
    """(scale * p - q)+"""
    return [max(scale * a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]


def then(prob: Fraction, emitted: tuple[int, ...], dist: Dist) -> Outcomes:
    return [(prob * w, (*emitted, y)) for y, w in enumerate(dist) if prob * w]


# Token rejection


def rejection_thresholds(p: Model, q: Model, draft: tuple[int, ...]) -> list[Fraction]:
    """min(1, p(x_i) / q(x_i)) for every drafted token."""
    return [min(Fraction(1), p[draft[:i]][x] / q[draft[:i]][x]) for i, x in enumerate(draft)]


def rejection(p: Model, q: Model, draft: tuple[int, ...]) -> Outcomes:
    """Leviathan et al., algorithm 1."""
    outcomes: Outcomes = []
    reached = Fraction(1)
    for i, accept in enumerate(rejection_thresholds(p, q, draft)):
        if accept < 1:
            prefix = draft[:i]
            outcomes += then(reached * (1 - accept), prefix, normalised(positive_part(p[prefix], q[prefix])))
        reached *= accept
    return outcomes + then(reached, draft, p[draft])


# Block verification


def block_weights(p: Model, q: Model, draft: tuple[int, ...]) -> list[Fraction]:
    """P_0, ..., P_gamma."""
    weights = [Fraction(1)]
    for i, x in enumerate(draft):
        weights.append(min(Fraction(1), weights[-1] * p[draft[:i]][x] / q[draft[:i]][x]))
    return weights


def block_thresholds(p: Model, q: Model, draft: tuple[int, ...]) -> list[Fraction]:
    """h_1, ..., h_gamma."""
    P = block_weights(p, q, draft)
    h = []
    for i in range(1, len(draft)):
        S = sum(positive_part(p[draft[:i]], q[draft[:i]], P[i]))
        h.append(Fraction(1) if S == 0 and P[i] == 1 else S / (S + 1 - P[i]))
    return h + P[-1:] * bool(draft)


def block(p: Model, q: Model, draft: tuple[int, ...]) -> Outcomes:
    """Sun et al., algorithm 2: the longest prefix i with u_i < h_i."""
    P, h = block_weights(p, q, draft), block_thresholds(p, q, draft)
    outcomes: Outcomes = []
    longer_fail = Fraction(1)
    for tau in range(len(draft), -1, -1):
        accept = h[tau - 1] if tau else Fraction(1)
        if accept and longer_fail:
            prefix = draft[:tau]
            whole = tau == len(draft)
            dist = p[prefix] if whole else normalised(positive_part(p[prefix], q[prefix], P[tau]))
            outcomes += then(longer_fail * accept, prefix, dist)
        longer_fail *= 1 - accept
    return outcomes


def expected_accepted(rule: Callable[[Model, Model, tuple[int, ...]], Outcomes], p: Model, q: Model, gamma: int):
    """Expected number of accepted drafted tokens."""
    return sum(
        weight * prob * (len(emitted) - 1)
        for draft, weight in sequence_law(q, gamma).items()
        for prob, emitted in rule(p, q, draft)
    )


# Trees: a drafted tree is (tokens, parents, q of each node), nodes in index order, parent -1 = the root.

Tree = tuple[tuple[int, ...], tuple[int, ...], tuple[Dist, ...]]


def without(dist: Dist, tokens: list[int]) -> Dist | None:
    """A distribution with some tokens left out; None if nothing is left."""
    weights = [Fraction(0) if x in tokens else w for x, w in enumerate(dist)]
    return normalised(weights) if sum(weights) else None


def prefix_of(tokens: tuple[int, ...], parents: tuple[int, ...], node: int) -> tuple[int, ...]:
    """Tokens on the path to drafted node `node` (-1: the root)."""
    return () if node < 0 else (*prefix_of(tokens, parents, parents[node]), tokens[node])


def tree_law(q: Model, shape: tuple[int, ...], replacement: bool) -> list[tuple[Fraction, Tree]]:
    """Every drafted tree of a shape (the parents) with its probability; a branch ends where q has nothing left."""
    trees = [(Fraction(1), (), (), (), {-1: -1})]  # probability, tokens, parents, qs, node of each place of the shape
    for place, parent_place in enumerate(shape):
        grown = []
        for weight, tokens, parents, qs, nodes in trees:
            if parent_place not in nodes:
                grown.append((weight, tokens, parents, qs, nodes))
                continue
            parent = nodes[parent_place]
            siblings = [x for x, other in zip(tokens, parents, strict=True) if other == parent]
            dist = q[prefix_of(tokens, parents, parent)]
            dist = dist if replacement else without(dist, siblings)
            if dist is None:
                grown.append((weight, tokens, parents, qs, nodes))
                continue
            for x, w in enumerate(dist):
                if w:
                    placed = {**nodes, place: len(tokens)}
                    grown.append((weight * w, (*tokens, x), (*parents, parent), (*qs, dist), placed))
        trees = grown
    return [(weight, (tokens, parents, qs)) for weight, tokens, parents, qs, _ in trees]


def tree_emitted_law(rule: Callable[[Model, Tree], Outcomes], p: Model, trees: list[tuple[Fraction, Tree]], n: int):
    law: Law = defaultdict(Fraction)
    for weight, tree in trees:
        for prob, emitted in rule(p, tree):
            law[emitted] += weight * prob
    return completed(law, p, n)


def tree_rejection(p: Model, tree: Tree, node: int = -1, reached: Fraction = Fraction(1)) -> Outcomes:
    """SpecInfer's recursive rejection below `node`."""
    tokens, parents, qs = tree
    prefix = prefix_of(tokens, parents, node)
    r, outcomes = p[prefix], []
    for child in [j for j, parent in enumerate(parents) if parent == node]:
        x = tokens[child]
        accept = min(Fraction(1), r[x] / qs[child][x])
        if accept:
            outcomes += tree_rejection(p, tree, child, reached * accept)
        reached *= 1 - accept
        if not reached:
            return outcomes
        r = normalised(positive_part(r, qs[child]))
    return outcomes + then(reached, prefix, r)


def tree_rejection_thresholds(p: Model, tree: Tree) -> list[Fraction]:
    """Per node, the probability to accept it once it is tried (1/2 where it never is)."""
    tokens, parents, qs = tree
    thresholds = [Fraction(1, 2)] * len(tokens)
    for node in range(-1, len(tokens)):
        r = p[prefix_of(tokens, parents, node)]
        for child in [j for j, parent in enumerate(parents) if parent == node]:
            x = tokens[child]
            thresholds[child] = min(Fraction(1), r[x] / qs[child][x])
            if thresholds[child] == 1:
                break
            r = normalised(positive_part(r, qs[child]))
    return thresholds


def traversal(p: Model, tree: Tree) -> Outcomes:
    """Traversal verification: leaves to root."""
    return _traverse(p, tree, -1, Fraction(1), Fraction(1))[0]


def _traverse(p: Model, tree: Tree, node: int, P: Fraction, reached: Fraction) -> tuple[Outcomes, Fraction]:
    """Outcomes that accept a sequence through `node`, and the probability that all of them were rejected."""
    tokens, parents, qs = tree
    prefix = prefix_of(tokens, parents, node)
    r, outcomes = p[prefix], []
    for child in [j for j, parent in enumerate(parents) if parent == node]:
        below, reached = _traverse(
            p, tree, child, min(Fraction(1), P * r[tokens[child]] / qs[child][tokens[child]]), reached
        )
        outcomes += below
        if not reached:
            return outcomes, reached
        rest = positive_part(r, qs[child], P)
        S = sum(rest)
        P = S / (S + 1 - P)
        r = normalised(rest) if S else r
    return outcomes + then(reached * P, prefix, r), reached * (1 - P)


def traversal_thresholds(p: Model, tree: Tree) -> list[Fraction]:
    """Per node, its P once it is tested (1/2 where it never is): all rejected before it, so one pass knows them."""
    thresholds = [Fraction(1, 2)] * len(tree[0])
    _traversal_pass(p, tree, -1, Fraction(1), thresholds)
    return thresholds


def _traversal_pass(p: Model, tree: Tree, node: int, P: Fraction, thresholds: list[Fraction]) -> bool:
    """Fills in the thresholds below `node` and its own; False once one of them is 1, which ends the walk."""
    tokens, parents, qs = tree
    r = p[prefix_of(tokens, parents, node)]
    for child in [j for j, parent in enumerate(parents) if parent == node]:
        x = tokens[child]
        if not _traversal_pass(p, tree, child, min(Fraction(1), P * r[x] / qs[child][x]), thresholds):
            return False
        rest = positive_part(r, qs[child], P)
        S = sum(rest)
        P = S / (S + 1 - P)
        r = normalised(rest) if S else r
    if node >= 0:
        thresholds[node] = P
    return P < 1
