"""A decode loop without a target, for drafters that read hidden states: random texts with random states."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdec.contracts import Draft, Drafter, Draws, Rows
from specdec.draws import make_draws

HIDDEN = 32  # of tests.tiny_models
ROWS = 4


@dataclass
class Text:
    """tokens of a row, and the target's states [n, D] of all of them but the last."""

    tokens: list[int]
    states: Tensor


Check = Callable[[Draft, list[Text], list[int]], None]


def greedy(count: int) -> Draws:
    """Draws of a step of `count` rows without sampling."""
    return make_draws("argmax", 0, range(count), [1] * count, [1] * count, lambda logits: logits, "cpu")


def play(
    drafter: Drafter,
    check: Check,
    vocab: int = 97,
    steps: int = 12,
    longest: int = 5,
    prompt: int = 16,
    draws: Callable[[int], Draws] = greedy,
) -> None:
    """`check` every draft over a ragged batch whose rows leave, return under the same id, sit steps out, have budgets
    of 0 to `longest`, and commit a random part of what was drafted and one token more."""
    rng, torch_rng = np.random.default_rng(0), torch.Generator().manual_seed(0)
    texts: dict[int, Text] = {}

    def states(count: int) -> Tensor:
        return torch.randn(count, HIDDEN, dtype=torch.float64, generator=torch_rng)

    def rows(ids: list[int]) -> Rows:
        return Rows(ids, [np.array(texts[row].tokens) for row in ids], torch.device("cpu"), vocab)

    with torch.no_grad():
        for _ in range(steps):
            for row in range(ROWS):
                if row not in texts:
                    drafter.admit([row])
                    tokens = rng.integers(0, vocab, rng.integers(2, prompt + 1)).tolist()
                    texts[row] = Text(tokens, states(len(tokens) - 1))
                    drafter.observe(rows([row]), None, [texts[row].states])
                elif rng.random() < 0.1:
                    drafter.release([row])
                    del texts[row]
            ids = [row for row in rng.permutation(list(texts)).tolist() if rng.random() < 0.8]
            budget = rng.integers(0, longest + 1, len(ids)).tolist()
            if not any(budget):
                continue
            draft = drafter.propose(rows(ids), budget, draws(len(ids)))
            check(draft, [texts[row] for row in ids], budget)
            new = []
            for b, row in enumerate(ids):
                accepted = _path(draft, b, int(rng.integers(-1, draft.lengths[b]))) if draft.lengths[b] else []
                new.append(states(len(accepted) + 1))
                texts[row].tokens += [*accepted, int(rng.integers(0, vocab))]
                texts[row].states = torch.cat([texts[row].states, new[-1]])
            drafter.observe(rows(ids), None, new)
        drafter.release(list(texts))


def paths(draft: Draft, b: int) -> list[list[int]]:
    """Of each drafted node of row b, the tokens on the way to it."""
    return [_path(draft, b, node) for node in range(draft.lengths[b])]


def _path(draft: Draft, b: int, node: int) -> list[int]:
    """The tokens on the way to a node of row b; none to the root, -1."""
    tokens = []
    while node >= 0:
        tokens.insert(0, int(draft.tokens[b, node]))
        node = node - 1 if draft.parents is None else int(draft.parents[b, node])
    return tokens
