"""Combinations of settings such that every two levels of any two factors meet in one of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence

Levels = Mapping[str, Sequence[str]]  # by factor, the default first
Combination = dict[str, str]  # factor -> level


def pairs(levels: Combination) -> set[frozenset]:
    """Every two (factor, level) of a combination."""
    return {frozenset(pair) for pair in itertools.combinations(levels.items(), 2)}


def pairwise(factors: Levels, possible: Callable[[Combination], bool], tries: int = 10) -> list[Combination]:
    """Combinations that cover all possible pairs, greedily: each is the best of `tries` that are built around a pair
    not yet covered, level by level, to meet most new pairs. The same ones for the same factors.

    possible: False for what must not be together; asked of incomplete combinations too."""
    choice = random.Random(0)
    couples = itertools.combinations([(f, level) for f in factors for level in factors[f]], 2)
    missing = {frozenset(pair) for pair in couples if pair[0][0] != pair[1][0] and possible(dict(pair))}
    found = []
    while missing:
        wanted = sorted(map(sorted, missing))
        tried = [_around(dict(choice.choice(wanted)), factors, missing, possible, choice) for _ in range(tries)]
        found.append(max(tried, key=lambda combination: len(pairs(combination) & missing)))
        missing -= pairs(found[-1])
    return found


def filled(
    found: list[Combination],
    factors: Levels,
    possible: Callable[[Combination], bool],
    count: int,
    default: float,
) -> list[Combination]:
    """`found` and random others up to `count`, in which a factor keeps its default with probability `default`."""
    choice = random.Random(1)
    found = list(found)
    while len(found) < count:
        drawn = {f: levels[0] if choice.random() < default else choice.choice(levels) for f, levels in factors.items()}
        if possible(drawn) and drawn not in found:
            found.append(drawn)
    return found


def _around(
    combination: Combination,
    factors: Levels,
    missing: set[frozenset],
    possible: Callable[[Combination], bool],
    choice: random.Random,
) -> Combination:
    for factor in choice.sample(list(factors), len(factors)):
        if factor not in combination:
            options = [level for level in factors[factor] if possible(combination | {factor: level})]
            gains = {level: _gain((factor, level), combination, missing) for level in options}
            best = max(gains.values())
            combination[factor] = choice.choice([level for level in options if gains[level] == best])
    return combination


def _gain(new: tuple[str, str], combination: Combination, missing: set[frozenset]) -> int:
    return sum(frozenset((new, other)) in missing for other in combination.items())
