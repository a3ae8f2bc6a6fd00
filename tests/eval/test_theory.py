"""Closed forms against values worked out by hand, and against enumeration of every outcome of a step."""

import itertools
import math

import pytest

from eval.theory import expected_length, ideal_speedup, leviathan_speedup, oracle_speedup


def enumerated_length(acceptances: list[float]) -> float:
    """Over all 2^depth ways to accept or reject each token; what follows a rejection does not count."""
    mean = 0.0
    for outcome in itertools.product([True, False], repeat=len(acceptances)):
        probability = math.prod(a if ok else 1 - a for a, ok in zip(acceptances, outcome, strict=True))
        accepted = len(list(itertools.takewhile(bool, outcome)))
        mean += probability * (accepted + 1)
    return mean


@pytest.mark.parametrize(
    ("acceptances", "length"),
    [([], 1), ([0.5, 0.5], 1.75), ([1, 1, 1], 4), ([0, 1, 1], 1), ([0.9, 0.5, 0.2], 1 + 0.9 + 0.45 + 0.09)],
)
def test_expected_length(acceptances, length):
    assert expected_length(acceptances) == pytest.approx(length, rel=1e-12)
    assert enumerated_length(acceptances) == pytest.approx(length, rel=1e-12)


def test_the_length_without_a_bonus_token_is_caught():
    """Broken control of the test above: the last token of a fully accepted draft forgotten."""
    acceptances = [0.9, 0.5, 0.2]
    without_bonus = expected_length(acceptances) - math.prod(acceptances)
    assert enumerated_length(acceptances) != pytest.approx(without_bonus, rel=1e-3)


@pytest.mark.parametrize(("alpha", "gamma", "c"), [(0.8, 4, 0.1), (0.3, 1, 0.0), (0.95, 10, 0.5), (0.0, 3, 0.2)])
def test_leviathan_is_the_papers_formula(alpha, gamma, c):
    formula = (1 - alpha ** (gamma + 1)) / ((1 - alpha) * (gamma * c + 1))
    assert leviathan_speedup(alpha, gamma, c) == pytest.approx(formula, rel=1e-12)


def test_leviathan_by_hand():
    assert leviathan_speedup(0.8, 4, 0.1) == pytest.approx(3.3616 / 1.4)
    assert leviathan_speedup(1.0, 4, 0.25) == pytest.approx(5 / 2)  # the formula's limit, where it divides 0 by 0
    assert leviathan_speedup(0.8, 0, 0.1) == 1


def test_ideal_is_leviathans_where_its_assumptions_hold():
    """Equal acceptance at each depth, a verification that costs a plain step, drafting that costs c each."""
    alpha, gamma, c, step = 0.7, 5, 0.05, 3.0
    AL = expected_length([alpha] * gamma)
    ideal = ideal_speedup(AL, t_plain=step, t_draft=gamma * c * step, t_verify=step, t_sample=0)
    assert ideal == pytest.approx(leviathan_speedup(alpha, gamma, c))


def test_ideal_by_hand():
    assert ideal_speedup(3, t_plain=10, t_draft=2, t_verify=12, t_sample=1) == 2


def test_oracle_by_hand():
    """5 drafted, 2 accepted: the step costs 15 instead of 10, the oracle drafts 2 of 5 and pays 2/5 of the 5 more."""
    parts = {"t_plain": 10, "t_draft": 2, "t_verify": 12, "t_sample": 1}
    assert oracle_speedup(3, 5, **parts) == pytest.approx(3 * 10 / 12)
    assert oracle_speedup(6, 5, **parts) == pytest.approx(ideal_speedup(6, **parts))  # nothing rejected, nothing wasted
    free = {"t_plain": 10, "t_draft": 0, "t_verify": 10, "t_sample": 0}
    assert oracle_speedup(3, 5, **free) == pytest.approx(ideal_speedup(3, **free))  # rejected drafts cost nothing


def test_oracle_is_never_below_ideal():
    for accepted, drafted, verify in itertools.product([0, 0.5, 2, 4], [4, 5, 8], [10, 12, 40]):
        parts = {"t_plain": 10, "t_draft": 1, "t_verify": verify, "t_sample": 0.5}
        assert oracle_speedup(1 + accepted, drafted, **parts) >= ideal_speedup(1 + accepted, **parts) - 1e-12


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: expected_length([0.5, 1.2]), "an acceptance is 1.2"),
        (lambda: expected_length([float("nan")]), "an acceptance is nan"),
        (lambda: leviathan_speedup(-0.1, 4, 0.1), "alpha is -0.1"),
        (lambda: leviathan_speedup(0.5, -1, 0.1), "gamma is -1"),
        (lambda: ideal_speedup(0.5, 1, 1, 1, 1), "AL is 0.5"),
        (lambda: ideal_speedup(2, 0, 1, 1, 1), "times are 0"),
        (lambda: ideal_speedup(2, 1, -1, 1, 1), "times are 1"),
        (lambda: oracle_speedup(4, 2, 1, 1, 1, 1), "2 drafted tokens per step cannot give an accepted length of 4"),
    ],
)
def test_impossible_values_are_named(call, said):
    with pytest.raises(ValueError, match=said):
        call()
