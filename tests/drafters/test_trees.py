"""Fixed trees against a search of all trees; grown trees against explicit lists; both cut anywhere."""

from itertools import combinations, product

import pytest
import torch

from drafters.trees import BeamTree, Tree, best_first

# Ranks need not be in order of their accuracies, and a sum may be below 1.
ACCURACIES = {
    "rising": [[0.2, 0.5, 0.1], [0.1, 0.3]],
    "steep": [[0.9, 0.05], [0.8, 0.1], [0.7, 0.2]],
    "flat": [[0.3, 0.29, 0.28], [0.05, 0.04]],
    "zeros": [[0.6, 0.0], [0.5, 0.3]],
}


def expected_length(paths, accuracies) -> float:
    """Accepted tokens that a tree gives on average: every node adds the probability of its whole path."""
    total = 0.0
    for path in paths:
        value = 1.0
        for depth, rank in enumerate(path):
            value *= accuracies[depth][rank]
        total += value
    return total


def all_trees(accuracies, nodes):
    """Every set of `nodes` paths that holds the parent of each of them."""
    every = [
        path for depth in range(len(accuracies)) for path in product(*(range(len(a)) for a in accuracies[: depth + 1]))
    ]
    for chosen in combinations(every, nodes):
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen):
            yield chosen


def check_best(build, accuracies):
    for nodes in range(1, 6):
        paths = build(accuracies, nodes).paths
        most = max(expected_length(tree, accuracies) for tree in all_trees(accuracies, nodes))
        assert expected_length(paths, accuracies) == pytest.approx(most, abs=1e-12)


@pytest.mark.parametrize("name", ACCURACIES)
def test_no_tree_of_the_same_size_accepts_more(name):
    check_best(best_first, ACCURACIES[name])


def breadth_first(accuracies, nodes):
    every = [path for depth in range(2) for path in product(*(range(len(a)) for a in accuracies[: depth + 1]))]
    return Tree(tuple(every[:nodes]))


def by_own_accuracy(accuracies, nodes):
    """Takes a node's own accuracy for its value, not its path's."""
    every = [path for depth in range(2) for path in product(*(range(len(a)) for a in accuracies[: depth + 1]))]
    chosen = []
    while len(chosen) < nodes:
        ready = [path for path in every if path not in chosen and (len(path) == 1 or path[:-1] in chosen)]
        chosen.append(max(ready, key=lambda path: accuracies[len(path) - 1][path[-1]]))
    return Tree(tuple(chosen))


@pytest.mark.parametrize(("broken", "name"), [(breadth_first, "steep"), (by_own_accuracy, "rising")])
def test_the_search_catches_another_order(broken, name):
    with pytest.raises(AssertionError):
        check_best(broken, ACCURACIES[name])


@pytest.mark.parametrize("name", ACCURACIES)
def test_a_prefix_is_the_best_tree_of_its_size(name):
    tree = best_first(ACCURACIES[name], 7)
    for nodes in range(1, len(tree.paths)):
        assert Tree(tree.paths[:nodes]) == best_first(ACCURACIES[name], nodes)


def test_by_hand():
    tree = best_first([[0.5, 0.3], [0.4, 0.1]], 5)
    assert tree.paths == ((0,), (1,), (0, 0), (1, 0), (0, 1))  # .5, .3, .2, .12, .05
    assert (tree.parents, tree.depths, tree.ranks) == ([-1, -1, 0, 1, 0], [0, 0, 1, 1, 1], [0, 1, 0, 0, 1])
    assert not tree.is_chain and Tree.chain(3).is_chain and Tree.chain(3).paths == ((0,), (0, 0), (0, 0, 0))
    assert best_first([[0.5, 0.0], [0.4]], 9).paths == ((0,), (0, 0))  # what is never right is left out


@pytest.mark.parametrize("paths", [(), ((0,), ()), ((0, 0), (0,)), ((0,), (0,)), ((-1,),), ((0,), (1, 0))], ids=str)
def test_what_is_no_tree_is_refused(paths):
    with pytest.raises(ValueError, match="list every node once"):
        Tree(paths)


def test_what_makes_no_tree_is_refused():
    with pytest.raises(ValueError, match="0 nodes drafts nothing"):
        best_first([[0.5]], 0)
    with pytest.raises(ValueError, match=r"between 0 and 1, not \[\[50\]\]"):
        best_first([[50]], 3)


B, V = 3, 11
LOG_P = torch.randn(V, V, generator=torch.Generator().manual_seed(0)).log_softmax(-1)


def after(row, path):
    """[V] log-probabilities after a path of tokens in a row, some function of them all."""
    return LOG_P[(7 * row + sum((3 + i) * token for i, token in enumerate(path))) % V]


def grown(top_k, levels, ids=None, make=BeamTree):
    """A BeamTree of B rows under `after`, whose frontier is taken from `to_run` as the drafter does."""
    columns = list(range(V)) if ids is None else ids.tolist()
    tree = make(top_k, torch.stack([after(row, []) for row in range(B)]), ids)
    for _ in range(levels - 1):
        tokens, parents = tree.to_run()
        log_p = torch.zeros(B, top_k, V)
        for row in range(B):
            known = []
            for token, parent in zip(tokens[row].tolist(), parents[row].tolist(), strict=True):
                known.append([*(known[parent] if parent >= 0 else []), columns.index(token)])
            for place, path in enumerate(known[-top_k:]):
                log_p[row, place] = after(row, path)
        tree.grow(log_p)
    return tree


def expected_paths(row, top_k, levels, nodes):
    """The rule of EAGLE-2, one path at a time."""
    made, frontier = [], [(0.0, [])]
    for _ in range(levels):
        children = []
        for score, path in frontier:
            log_p = after(row, path)
            best = sorted(range(V), key=lambda token, log_p=log_p: -log_p[token])[:top_k]
            children += [(score + log_p[token].item(), [*path, token]) for token in best]
        made += children
        frontier = sorted(children, key=lambda child: -child[0])[:top_k]
    return [path for _, path in sorted(made, key=lambda node: -node[0])[:nodes]]


def best_paths(tree, nodes, levels):
    tokens, parents = tree.best(nodes, levels)
    rows = []
    for row in range(B):
        paths = []
        for node, (token, parent) in enumerate(zip(tokens[row].tolist(), parents[row].tolist(), strict=True)):
            if node == tree.size(levels[row]):
                break
            assert parent < node  # so that every prefix is a tree
            paths.append([*(paths[parent] if parent >= 0 else []), token])
        rows.append(paths)
    return rows


def check_grown(top_k, levels, nodes, make=BeamTree):
    for fewer in (0, 1):  # in the last rows
        each = [levels, *[max(0, levels - fewer)] * (B - 1)]
        for row, paths in enumerate(best_paths(grown(top_k, levels, make=make), nodes, each)):
            assert paths == expected_paths(row, top_k, each[row], nodes)


@pytest.mark.parametrize(("top_k", "levels", "nodes"), [(1, 4, 4), (2, 1, 2), (2, 4, 7), (3, 3, 9), (4, 3, 12)])
def test_grown_trees_equal_explicit_lists(top_k, levels, nodes):
    check_grown(top_k, levels, nodes)


class OwnProbability(BeamTree):
    """Broken control: a node counts by its own probability, not by its path's."""

    def grow(self, log_p):
        self.frontier_scores = torch.zeros_like(self.frontier_scores)
        super().grow(log_p)


def test_the_lists_catch_another_order():
    with pytest.raises(AssertionError):
        check_grown(3, 3, 9, OwnProbability)


def test_grown_trees_name_target_ids():
    ids = torch.arange(V) * 5 + 2
    plain, named = (best_paths(grown(3, 3, given), 9, [3] * B) for given in (None, ids))
    assert named == [[[5 * token + 2 for token in path] for path in paths] for paths in plain]


def test_more_nodes_than_there_are_give_all():
    tokens, parents = grown(2, 2).best(50, [2] * B)
    assert tokens.shape == parents.shape == (B, 2 + 4)
