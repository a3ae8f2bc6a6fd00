"""The numbers kept per token, against values worked out by hand."""

import math

import numpy as np
import pytest
import torch

from eval.fidelity.samples import FLOOR, moments, samples, transform

P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)


def test_moments_by_hand():
    f = torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64)  # mean 0.9, E f^2 = 1.3
    excess, variance, third = moments(f, P, 2)
    assert excess == pytest.approx(1.1) and variance == pytest.approx(1.3 - 0.81)
    assert third == pytest.approx(0.5 * 0.1**3 + 0.3 * (-0.9) ** 3 + 0.2 * 1.1**3)


@pytest.mark.parametrize(
    ("q", "token", "first", "last"),
    [
        (None, 0, 0.0, 0.5),  # in the order of p
        (None, 2, 0.8, 1.0),
        ([0.1, 0.2, 0.7], 2, 0.0, 0.2),  # in the order of q
        ([0.1, 0.2, 0.7], 0, 0.5, 1.0),
        ([0.0, 1.0, 0.0], 0, 0.3, 0.8),  # ties of q in the order of p
    ],
)
def test_transform_takes_the_mass_before_the_token_and_a_share_of_its_own(q, token, first, last):
    q = None if q is None else torch.tensor(q, dtype=torch.float64)
    assert transform(P, q, token, 0.0) == pytest.approx(first)
    assert transform(P, q, token, 0.5) == pytest.approx((first + last) / 2)


def test_tokens_equal_in_both_count_as_one():
    p = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)
    assert transform(p, None, 0, 0.5) == transform(p, None, 1, 0.5) == pytest.approx(0.75)


def test_what_is_not_defined_is_left_out():
    scores = P.log().repeat(4, 1)
    scores[3, 1] = -torch.inf
    log_q = torch.tensor([0.6, 0.4, 0.0]).log().half()
    found = samples(scores, [0, 1, 0, 1], [None, 1, log_q, None], np.random.default_rng(0))
    assert [entry is not None for entry in found["log p"]] == [True, True, True, False]
    assert [entry is not None for entry in found["q"]] == [False, True, True, False]
    assert [entry is not None for entry in found["log q"]] == [False, False, True, False]
    assert [entry is not None for entry in found["pit"]] == [True, True, True, False]
    assert found["q"][1][:2] == pytest.approx([0.7, 0.3 * 0.7])  # one-hot at token 1
    q = [0.6, 0.4, 0.0]
    mean = 0.5 * math.log(0.6) + 0.3 * math.log(0.4) + 0.2 * FLOOR
    assert found["log q"][2][0] == pytest.approx(math.log(q[0]) - mean, abs=2e-3)  # float16


def test_the_transform_of_tokens_from_p_is_uniform_and_of_others_not():
    """The exact law of the transform, by enumeration over tokens and a grid of shares."""
    q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    shares = (np.arange(200) + 0.5) / 200

    def law(weights):
        u = [transform(P, q, token, v) for token in range(3) for v in shares]
        counts = np.histogram(u, bins=20, range=(0, 1), weights=np.repeat(weights, 200) / 200)[0]
        return np.abs(counts - 1 / 20).max()

    assert law(P.numpy()) < 2e-3
    assert law(np.array([0.3, 0.3, 0.4])) > 1e-2
