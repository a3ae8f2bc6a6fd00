"""Block verification: the textbook pair, never worse than rejection, pure functions and broken controls."""

from fractions import Fraction

import pytest
import torch

import verifiers.block
from tests.verifiers.harness import GivenDraws, chain_batch, distance, production_law
from tests.verifiers.reference import (
    KINDS,
    block,
    block_thresholds,
    block_weights,
    contexts,
    expected_accepted,
    model_pair,
    rejection,
    sequence_law,
)
from verifiers.block import BlockVerifier, acceptance, prefix_weights, reach_ratio, residual_mass
from verifiers.rejection import residual


def test_the_papers_two_token_example():
    """p = (1/3, 2/3), q = (2/3, 1/3), two drafted tokens: 10/9 accepted by rejection, 11/9 by block."""
    p = {c: (Fraction(1, 3), Fraction(2, 3)) for c in contexts(2, 2)}
    q = {c: (Fraction(2, 3), Fraction(1, 3)) for c in contexts(2, 2)}
    assert expected_accepted(rejection, p, q, 2) == Fraction(10, 9)
    assert expected_accepted(block, p, q, 2) == Fraction(11, 9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_never_accepts_less_than_rejection_and_the_same_for_one_hot_drafts(kind, seed):
    p, q = model_pair(kind, 3, 3, seed)
    more, fewer = expected_accepted(block, p, q, 3), expected_accepted(rejection, p, q, 3)
    assert more >= fewer
    if kind == "one-hot q":
        assert more == fewer


@pytest.mark.parametrize("kind", KINDS)
def test_pure_functions_equal_the_reference(kind):
    p, q = model_pair(kind, 3, 3, seed=7)
    for draft in sequence_law(q, 3):
        drafted = [
            torch.tensor([[float(m[draft[:i]][x]) for i, x in enumerate(draft)]], dtype=torch.float64) for m in (p, q)
        ]
        P = prefix_weights(*drafted)
        assert P[0].tolist() == pytest.approx([float(w) for w in block_weights(p, q, draft)], abs=1e-12)
        for i in (1, 2):
            rows = [torch.tensor([[float(x) for x in m[draft[:i]]]], dtype=torch.float64) for m in (p, q)]
            h = acceptance(P[:, i], residual_mass(P[:, i], *rows))
            assert h.item() == pytest.approx(float(block_thresholds(p, q, draft)[i - 1]), abs=1e-12)


def test_acceptance_is_one_where_p_equals_q():
    assert acceptance(torch.tensor([1.0, 1.0, 0.5, 0.5]), torch.tensor([0.0, 0.1, 0.0, 0.25])).tolist() == [
        1,
        1,
        0,
        pytest.approx(1 / 3),
    ]


def test_accept_prob_is_the_chance_to_go_one_token_further():
    """h = (1/2, 1/4): at least one token with 1 - 1/2 * 3/4 = 5/8, two with 1/4, so 2/5 of those that reach one."""
    assert reach_ratio(torch.tensor([[0.5, 0.25]])).tolist() == [pytest.approx([5 / 8, 2 / 5])]
    assert reach_ratio(torch.tensor([[0.5, 0.0], [0.0, 0.0]])).tolist() == [[0.5, 0.0], [0.0, 0.0]]


def test_a_longer_prefix_may_pass_where_a_shorter_one_failed():
    p, q = model_pair("dense", 3, 2, seed=5)
    for drafted in sequence_law(q, 2):
        h = [float(x) for x in block_thresholds(p, q, drafted)]
        if h[0] < 1:
            break
    draft, scores = chain_batch([drafted], p, q)
    u = torch.tensor([[(1 + h[0]) / 2, h[1] / 2]], dtype=torch.float64)
    assert h[0] < 1 and h[1] > 0
    assert BlockVerifier().verify(draft, scores, GivenDraws(u)).n_accepted.item() == 2


def test_broken_controls_are_caught(controls, monkeypatch):
    p, q = model_pair("dense", 3, 2, seed=5)
    law = sequence_law(p, 3)
    broken = {}
    with monkeypatch.context() as patch:
        patch.setattr(verifiers.block, "residual", lambda p, q: p)
        broken["resample from p instead of the residual"] = production_law(BlockVerifier(), block_thresholds, p, q, [2])
    with monkeypatch.context() as patch:
        patch.setattr(verifiers.block, "residual", lambda p, q: residual(p / p.sum(1, keepdim=True), q))
        broken["residual of p instead of P p"] = production_law(BlockVerifier(), block_thresholds, p, q, [2])
    for name, wrong in broken.items():
        assert distance(wrong, law) > 0.001, name
        controls(f"block: {name}", f"enumerated law of 3 tokens off by {distance(wrong, law):.3f} (total variation)")
