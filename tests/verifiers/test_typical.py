"""Typical acceptance: its threshold by hand, and that it is lossy and says so."""

from dataclasses import replace

import pytest
import torch

from specdec.contracts import Draft, Scores
from tests.verifiers.harness import GivenDraws, chain_batch, distance, production_law
from tests.verifiers.reference import model_pair, sequence_law
from verifiers.typical import TypicalVerifier, threshold


def scores(*rows):
    return torch.tensor(rows, dtype=torch.float64).log()


def test_the_threshold_is_epsilon_for_sure_places_and_falls_with_entropy():
    """exp(-H) of a uniform law over 40 tokens is 1/40: delta / 40 = 0.0075 < epsilon."""
    flat, sure = torch.log(torch.tensor(40.0)), torch.tensor(0.0)
    assert threshold(flat, 0.09, 0.3).item() == pytest.approx(0.0075)
    assert threshold(sure, 0.09, 0.3).item() == pytest.approx(0.09)


def test_tokens_are_accepted_by_p_at_their_own_place():
    """p(0) = 0.08 is too little where p is sure (threshold 0.09); 0.025 is enough where p is flat."""
    sure, flat = [0.08, 0.92] + [0.0] * 38, [0.025] * 40
    logits = scores(sure, flat, flat)
    index = torch.tensor([[0, 1, 2], [1, 0, 2]])
    draws = GivenDraws(torch.zeros(2, 2))
    verdict = TypicalVerifier().verify(Draft(torch.tensor([[0, 5], [5, 0]]), [2, 2]), Scores(logits, index), draws)
    assert verdict.n_accepted.tolist() == [0, 1]
    assert verdict.accept_prob.tolist() == [[0, 1], [1, 0]]
    assert torch.allclose(draws.weights, logits[[0, 0]].exp())  # drawn from p where the path ended


def test_in_a_tree_the_longest_accepted_path_is_taken():
    flat = [0.25] * 4
    tree = Draft(torch.tensor([[0, 1, 2]]), [3], torch.tensor([[-1, -1, 1]]))
    draws = GivenDraws(torch.zeros(1, 3))
    verdict = TypicalVerifier().verify(tree, Scores(scores(flat, flat, flat, flat), torch.arange(4)[None]), draws)
    assert verdict.path.tolist() == [[1, 2, -1]]


def test_it_is_lossy_and_says_so():
    p, q = model_pair("dense", 3, 2, seed=0)
    law = production_law(TypicalVerifier(), lambda p, q, draft: [1] * len(draft), p, q, [2])
    assert distance(law, sequence_law(p, 3)) > 0.05
    assert TypicalVerifier.lossless is False


def test_nan_yields_no_token():
    p, q = model_pair("dense", 3, 1, seed=0)
    draft, scored = chain_batch([(0,)], p, q)
    scored = replace(scored, logits=scored.logits.index_fill(0, torch.tensor([0]), torch.nan))
    draws = GivenDraws(torch.zeros(1, 1))
    assert TypicalVerifier().verify(draft, scored, draws).n_accepted.item() == 0
    assert draws.weights.isnan().all()


@pytest.mark.parametrize("bad", [{"epsilon": 0.0}, {"delta": 1.5}])
def test_bad_arguments_are_named(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        TypicalVerifier(**bad)
