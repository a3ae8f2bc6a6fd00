"""Accepted length, acceptance and its positions, from steps that can be counted by hand."""

import numpy as np
import pytest

from eval.acceptance import acceptance, by_position
from eval.bootstrap import ratio_interval
from tests.eval.samples import record

STEPS = {"drafted": [2, 2, 1, 0], "accepted": [2, 0, 1, 0], "accept_prob": [[0.9, 0.5], [0.3], [0.7], []]}


def test_lengths_rates_and_noise_free_acceptance():
    found = acceptance([record("ngram", id="a", **STEPS), record("ngram", id="b", **STEPS)])
    assert found["mean_accepted_length"] == 1 + 3 / 4  # the step without a draft counts
    assert found["acceptance_rate"] == 3 / 5
    assert found["noise_free_acceptance"] == pytest.approx((0.9 + 0.5 + 0.3 + 0.7) / 4)
    assert found["drafted_per_step"] == 5 / 4
    assert found["mean_accepted_length_interval"] == [1.75, 1.75]  # both chats are the same


def test_nothing_drafted_is_none_and_not_zero():
    found = acceptance([record("plain")])
    assert found["mean_accepted_length"] == 1 and found["acceptance_rate"] is None
    assert found["noise_free_acceptance"] is None and found["noise_free_acceptance_interval"] is None
    assert acceptance([record("hf")])["mean_accepted_length"] is None
    assert acceptance([])["drafted_per_step"] is None and by_position([record("plain")]) == []


def test_positions_are_conditional_and_unconditional():
    """Position 1 was drafted and reached in 3 steps; position 2 drafted in 2 and reached in 1."""
    first, second = by_position([record("ngram", **STEPS)])
    assert first == {
        "drafted": 3,
        "conditional": 2 / 3,
        "unconditional": 2 / 3,
        "noise_free": pytest.approx((0.9 + 0.3 + 0.7) / 3),
    }
    assert second == {"drafted": 2, "conditional": 1.0, "unconditional": 0.5, "noise_free": 0.5}


def test_a_path_that_ends_at_a_leaf_counts_as_rejected_there():
    """Two steps with trees of 7 nodes: one accepted path ended at depth 2, the other at depth 1."""
    found = by_position([record("medusa", drafted=[7, 7], accepted=[2, 1])])
    assert [position["conditional"] for position in found] == [1.0, 0.5, 0.0]


def test_a_position_that_no_step_reached_is_left_out():
    assert len(by_position([record("x", drafted=[3], accepted=[0], accept_prob=[[0.1]])])) == 1


def test_rules_without_probabilities_have_no_noise_free_acceptance():
    unknown = record("x", drafted=[2], accepted=[1], accept_prob=[[None, None]])
    for found in (unknown, record("x", drafted=[2], accepted=[1], accept_prob=None)):
        assert by_position([found])[0]["noise_free"] is None
        assert acceptance([found])["noise_free_acceptance"] is None
        assert acceptance([found])["acceptance_rate"] == 0.5


@pytest.mark.slow
def test_interval_covers_a_ratio_as_often_as_it_says():
    """Prompts of very different lengths and acceptance, whose tokens are not independent: 400 sets of 40 prompts."""
    rng = np.random.default_rng(1)
    truth, covered, naive = 0.5, 0, 0
    for _ in range(400):
        steps = rng.integers(5, 60, 40)
        shares = rng.beta(1.5, 1.5, 40)  # of each prompt; mean 0.5, far from binomial
        accepted = rng.binomial(steps, shares)
        low, high = ratio_interval(accepted, steps)
        covered += low <= truth <= high
        rate = accepted.sum() / steps.sum()
        half = 1.96 * (rate * (1 - rate) / steps.sum()) ** 0.5  # the broken control: as if tokens were independent
        naive += abs(rate - truth) <= half
    assert 0.90 <= covered / 400 <= 0.98
    assert naive / 400 < 0.6


def test_interval_resamples_chats_and_not_their_turns():
    """Two turns of one chat count as one: with a single chat there is no interval, however many turns."""
    turns = [record("ngram", id=f"a, turn {n}", conversation="a", **STEPS) for n in range(5)]
    assert acceptance(turns)["acceptance_rate_interval"] is None
    other = record("ngram", id="b", drafted=[2], accepted=[0], accept_prob=[[0.1]])
    low, high = acceptance([*turns, other])["acceptance_rate_interval"]
    assert (low, high) == (0, 3 / 5)  # of {a, a}, {a, b} and {b, b}


def test_prompts_that_drafted_nothing_do_not_break_the_interval():
    assert ratio_interval([1, 0, 2], [2, 0, 4]) == [0.5, 0.5]
    assert ratio_interval([1, 0], [2, 0]) is None
