"""Token rejection: its pure functions, its statistics and its broken controls (the law: test_chain_rules)."""

from fractions import Fraction

import pytest
import torch

import verifiers.rejection
from tests.verifiers.harness import GivenDraws, chain_batch, distance, production_law
from tests.verifiers.reference import KINDS, model_pair, one_hot, rejection_thresholds, sequence_law
from verifiers.rejection import RejectionVerifier, acceptance, residual


@pytest.mark.parametrize("kind", KINDS)
def test_pure_functions_equal_the_reference(kind):
    p, q = model_pair(kind, 4, 0, seed=3)
    p_V, q_V = (torch.tensor([[float(x) for x in m[()]]], dtype=torch.float64) for m in (p, q))
    drafted = [x for x in range(4) if q[()][x]]
    want = [float(min(Fraction(1), p[()][x] / q[()][x])) for x in drafted]
    assert acceptance(p_V, q_V)[0, drafted].tolist() == pytest.approx(want, abs=1e-12)
    rest = [max(a - b, Fraction(0)) for a, b in zip(p[()], q[()], strict=True)]
    if sum(rest):
        assert residual(p_V, q_V)[0].tolist() == pytest.approx([float(x) for x in rest], abs=1e-12)
    else:
        assert residual(p_V, q_V)[0].tolist() == p_V[0].tolist()


def test_accept_prob_is_reported_for_drafted_tokens_only():
    p, q = model_pair("dense", 3, 2, seed=4)
    draft, scores = chain_batch([(2, 1), (0,), ()], p, q)
    verdict = RejectionVerifier().verify(draft, scores, GivenDraws(torch.zeros(3, 2, dtype=torch.float64)))
    want = [rejection_thresholds(p, q, x) for x in ((2, 1), (0,), ())]
    assert verdict.accept_prob[0].tolist() == pytest.approx([float(x) for x in want[0]], abs=1e-12)
    assert verdict.accept_prob[1, 0].item() == pytest.approx(float(want[1][0]), abs=1e-12)
    assert verdict.accept_prob.isnan().tolist() == [[False, False], [False, True], [True, True]]


def test_zero_u_never_accepts_a_token_the_target_excludes(controls, monkeypatch):
    p = {(): (Fraction(0), Fraction(1)), (0,): (Fraction(1, 2),) * 2}
    q = {(): (Fraction(1, 2), Fraction(1, 2))}
    draft, scores = chain_batch([(0,)], p, q)

    def accepted_at_zero():
        draws = GivenDraws(torch.zeros(1, 1, dtype=torch.float64))
        return RejectionVerifier().verify(draft, scores, draws).n_accepted.item()

    assert accepted_at_zero() == 0
    monkeypatch.setattr(verifiers.rejection, "accepted", lambda p, q, u: u * q <= p)
    assert accepted_at_zero() == 1
    controls("rejection: <= instead of <", "a token with p = 0 is accepted at u = 0")


def test_residual_without_mass_falls_back_to_p():
    p = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    q = torch.tensor([[0.25, 0.75], [0.5, 0.25]])
    assert residual(p, q).tolist() == [[0.25, 0.75], [0.0, 0.25]]


# Broken controls: the law test must catch each.


class AcceptsOneTooMany(RejectionVerifier):
    def verify(self, draft, p, draws):
        v = super().verify(draft, p, draws)
        n = (v.n_accepted + 1).minimum(torch.tensor(draft.lengths))
        return type(v)(verifiers.rejection.chain_path(n, draft.tokens.shape[1]), n, v.next_token, v.accept_prob)


def test_broken_controls_are_caught(controls, monkeypatch):
    p, q = model_pair("dense", 3, 2, seed=5)
    law = sequence_law(p, 3)
    off_by_one = production_law(AcceptsOneTooMany(), rejection_thresholds, p, q, [2])
    first = max(range(3), key=q[()].__getitem__)
    greedy = {(first, max(range(3), key=q[(first,)].__getitem__)): Fraction(1)}
    argmax_draft = production_law(RejectionVerifier(), rejection_thresholds, p, q, [2], draft_law=greedy)
    raw = {x: p[x] if len(x) < 2 else one_hot(0, 3) for x in p}  # the bonus position's logits before processors
    bonus = production_law(RejectionVerifier(), rejection_thresholds, p, q, [2], scored=raw)
    with monkeypatch.context() as patch:
        patch.setattr(verifiers.rejection, "residual", lambda p, q: p)
        resampled = production_law(RejectionVerifier(), rejection_thresholds, p, q, [2])
    monkeypatch.setattr(verifiers.rejection, "accepted", lambda p, q, u: u * q < p * (1 - 1e-9))
    rounded = production_law(RejectionVerifier(), rejection_thresholds, p, q, [2])
    for name, broken in {
        "off-by-one in the accepted prefix": off_by_one,
        "greedy draft with softmax q": argmax_draft,
        "bonus token without processors": bonus,
        "resample from p instead of the residual": resampled,
        "acceptance too low by one in 10**9": rounded,
    }.items():
        assert distance(broken, law) > 0.01, name
        controls(
            f"rejection: {name}", f"enumerated law of 3 tokens off by {distance(broken, law):.3f} (total variation)"
        )
