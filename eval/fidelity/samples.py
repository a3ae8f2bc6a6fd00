"""What a test needs of one emitted token x, given its prefix: a few numbers in place of two distributions.

For any function f of the token that its prefix determines, f(x) - E_p f has mean 0 under a lossless rule, whatever the
model. So per token and function: that excess, and f's variance and third central moment under p. And the randomised
probability-integral transform of x under p, uniform on [0, 1), with the vocabulary in the order of falling q: a rule
that favours drafted tokens moves it to 0, one that shuns them to 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eval.fidelity.recorder import Guess

FUNCTIONS = ("log p", "q", "log q")
FLOOR = float(np.log(1e-4))  # logs are cut here, or tokens met once in a long run would decide their test

Samples = dict[str, list[Any]]


def samples(scores_TV: Tensor, tokens: Sequence[int], guesses: Sequence[Guess], rng: np.random.Generator) -> Samples:
    """Lists of one entry per token: under each of FUNCTIONS [excess, variance, third moment], and "pit".

    scores_TV: softmax(scores) = p before each token. guesses: q there, see `eval.fidelity.recorder.RowLog`. An entry is
    None where it is not defined: no q, or a token outside p's support, which is reported on its own."""
    found: Samples = {name: [] for name in (*FUNCTIONS, "pit")}
    for scores_V, token, guess, v in zip(scores_TV, tokens, guesses, rng.random(len(tokens)), strict=True):
        log_p = scores_V.double().log_softmax(-1)
        entry = {} if log_p[token] == -torch.inf else _of_token(log_p, token, guess, v)
        for name, values in found.items():
            values.append(entry.get(name))
    return found


def _of_token(log_p: Tensor, token: int, guess: Guess, v: float) -> dict[str, Any]:
    p, q, entry = log_p.exp(), None, {}
    functions = {"log p": log_p.clamp(min=FLOOR)}
    if isinstance(guess, int):
        functions["q"] = q = torch.zeros_like(p).index_fill_(0, torch.tensor(guess, device=p.device), 1)
    elif guess is not None:
        log_q = guess.to(p)
        functions |= {"q": (q := log_q.exp()), "log q": log_q.clamp(min=FLOOR)}
    for name, f in functions.items():
        entry[name] = moments(f, p, token)
    entry["pit"] = transform(p, q, token, v)
    return entry


def moments(f: Tensor, p: Tensor, token: int) -> list[float]:
    """[f(token) - E_p f, Var_p f, third central moment of f under p]; f, p: [V]."""
    centred = f - (p * f).sum()
    return torch.stack([centred[token], (p * centred**2).sum(), (p * centred**3).sum()]).tolist()


def transform(p: Tensor, q: Tensor | None, token: int, v: float) -> float:
    """F(x-) + v p(x): the mass of p before x plus a share v in [0, 1) of its own, tokens in the order of falling q and
    then p; tokens that are equal in both count as one."""
    before = p > p[token]
    same = p == p[token]
    if q is not None:
        tied = q == q[token]
        before, same = (q > q[token]) | (tied & before), tied & same
    return float((p * before).sum() + v * (p * same).sum())
