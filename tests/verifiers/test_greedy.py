"""Greedy verification follows the target's arg-max, in chains and trees."""

import random

import pytest
import torch

from specdec.contracts import Draft, Scores
from verifiers.greedy import GreedyVerifier, follow

V = 7


def scores_of(choices: list[list[int]]) -> Scores:
    """Logits whose arg-max at node n of row b is choices[b][n]; rows padded with their root."""
    nodes = max(map(len, choices))
    index, packed = torch.zeros(len(choices), nodes, dtype=torch.long), []
    for b, row in enumerate(choices):
        index[b] = len(packed)
        index[b, : len(row)] = torch.arange(len(row)) + len(packed)
        packed += row
    return Scores(torch.nn.functional.one_hot(torch.tensor(packed), V).float(), index)


def verify(tokens, lengths, choices, parents=None):
    parents = None if parents is None else torch.tensor(parents)
    return GreedyVerifier().verify(Draft(torch.tensor(tokens), lengths, parents), scores_of(choices), None)


def test_chains_stop_at_the_first_mismatch_and_at_their_own_length():
    verdict = verify(
        tokens=[[1, 2, 3], [1, 2, 3], [5, 2, 3], [1, 2, 0], [0, 0, 0]],
        lengths=[3, 3, 3, 2, 0],
        choices=[[1, 2, 3, 4], [1, 6, 3, 4], [1, 2, 3, 4], [1, 2, 0], [0]],
    )
    assert verdict.path.tolist() == [[0, 1, 2], [0, -1, -1], [-1, -1, -1], [0, 1, -1], [-1, -1, -1]]
    assert verdict.n_accepted.tolist() == [3, 1, 0, 2, 0]
    assert verdict.next_token.tolist() == [4, 6, 1, 0, 0]
    assert verdict.accept_prob[0].tolist() == [1, 1, 1]
    assert verdict.accept_prob[1].tolist() == [1, 0, 1]
    assert verdict.accept_prob[3, :2].tolist() == [1, 1] and verdict.accept_prob[3, 2].isnan()


def test_a_tree_follows_the_child_that_equals_the_arg_max():
    """Root's children 1 and 2; 2's children 4 (drafted index 2) and 5 (index 3); a child of index 3 (index 4)."""
    tree = dict(tokens=[[1, 2, 4, 5, 6]], lengths=[5], parents=[[-1, -1, 1, 1, 3]])
    deep = verify(**tree, choices=[[2, 0, 5, 0, 6, 3]])
    assert (deep.path.tolist(), deep.n_accepted.item(), deep.next_token.item()) == ([[1, 3, 4, -1, -1]], 3, 3)
    side = verify(**tree, choices=[[1, 6, 5, 0, 6, 3]])
    assert (side.path.tolist(), side.n_accepted.item(), side.next_token.item()) == ([[0, -1, -1, -1, -1]], 1, 6)
    none = verify(**tree, choices=[[3, 0, 5, 0, 6, 3]])
    assert (none.n_accepted.item(), none.next_token.item()) == (0, 3)


def walk(tokens, parents, count, choice):
    """The accepted path by walking down from the root."""
    path, node = [], 0
    while True:
        children = [j for j in range(count) if parents[j] == node - 1 and tokens[j] == choice[node]]
        if not children:
            return path, choice[node]
        path.append(children[0])
        node = children[0] + 1


def random_tree(rng, N):
    """A tree whose siblings hold distinct tokens, as drafters make them."""
    parents, tokens = [], []
    for j in range(N):
        parents.append(rng.randrange(-1, j))
        taken = {tokens[i] for i in range(j) if parents[i] == parents[j]}
        tokens.append(rng.choice([t for t in range(3 if len(taken) < 3 else V) if t not in taken] or [V - 1]))
    return tokens, parents


def test_random_ragged_trees_equal_a_walk(controls):
    rng = random.Random(0)
    N, B = 6, 300
    trees = [random_tree(rng, N) for _ in range(B)]
    lengths = [rng.randrange(N + 1) for _ in range(B)]
    choices = [[rng.randrange(3) for _ in range(n + 1)] for n in lengths]
    tokens, parents = [t for t, _ in trees], [p for _, p in trees]
    verdict = verify(tokens, lengths, choices, parents)
    wants = [walk(*args) for args in zip(tokens, parents, lengths, choices, strict=True)]
    got = [path[:n] for path, n in zip(verdict.path.tolist(), verdict.n_accepted.tolist(), strict=True)]
    assert got == [path for path, _ in wants]
    assert verdict.next_token.tolist() == [token for _, token in wants]
    assert max(map(len, got)) >= 3
    as_chain = verify(tokens, lengths, choices)  # broken control: the tree read as a chain
    assert as_chain.n_accepted.tolist() != verdict.n_accepted.tolist()
    controls("greedy: a tree read as a chain", "accepted lengths differ from a walk down the tree")


def test_equal_logits_take_the_first_as_torch_does():
    logits = torch.tensor([[0.0, 2.0, 2.0], [1.0, 1.0, 1.0]])
    verdict = GreedyVerifier().verify(Draft(torch.tensor([[1]]), [1]), Scores(logits, torch.tensor([[0, 1]])), None)
    assert (verdict.n_accepted.item(), verdict.next_token.item()) == (1, 0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_an_undefined_row_yields_no_token(bad):
    logits = torch.tensor([[0.0, bad, 1.0], [0.0, 1.0, 0.0]])
    draft = Draft(torch.tensor([[1]]), [1])
    assert GreedyVerifier().verify(draft, Scores(logits, torch.tensor([[0, 1]])), None).next_token.item() == -1
    assert GreedyVerifier().verify(draft, Scores(logits, torch.tensor([[1, 0]])), None).next_token.item() == -1


def test_broken_control_off_by_one_is_caught(controls):
    tokens, choice = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 6, 3, 4]])
    right = follow(Draft(tokens, [3]), choice)
    shifted = follow(Draft(tokens, [3]), choice.roll(-1, 1))
    assert (right.n_accepted.item(), right.next_token.item()) == (1, 6)
    assert (shifted.n_accepted.item(), shifted.next_token.item()) != (1, 6)
    controls("greedy: arg-max of the neighbouring node", "accepted length and next token differ")
