"""What every chain rule must hold: the exact law by enumeration, ragged and mixed batches, undefined rows."""

import pytest
import torch

from specdec.contracts import Draft, Scores
from specdec.draws import make_draws
from tests.verifiers import reference
from tests.verifiers.harness import GivenDraws, chain_batch, distance, production_law
from tests.verifiers.reference import KINDS, emitted_law, model_pair, one_hot, sequence_law
from verifiers.block import BlockVerifier
from verifiers.rejection import RejectionVerifier

RULES = {
    "rejection": (RejectionVerifier(), reference.rejection, reference.rejection_thresholds),
    "block": (BlockVerifier(), reference.block, reference.block_thresholds),
}
SIZES = [(2, 3), (3, 2), (4, 1), (4, 3)]

every_rule = pytest.mark.parametrize(("verifier", "outcomes", "thresholds"), RULES.values(), ids=RULES)
every_kind = pytest.mark.parametrize("kind", KINDS)


def as_one_hot(thresholds):
    """The thresholds of a rule that is told that each drafted token was certain."""

    def told(p, q, draft):
        return thresholds(p, {draft[:i]: one_hot(x, len(p[()])) for i, x in enumerate(draft)}, draft)

    return told


@every_rule
@every_kind
@pytest.mark.parametrize(("V", "gamma"), SIZES)
def test_reference_law_equals_the_targets(verifier, outcomes, thresholds, kind, V, gamma):
    p, q = model_pair(kind, V, gamma, seed=0)
    assert emitted_law(outcomes, p, q, gamma) == sequence_law(p, gamma + 1)


@every_rule
@every_kind
@pytest.mark.parametrize(("V", "gamma"), SIZES)
def test_production_law_equals_the_targets_over_ragged_drafts(verifier, outcomes, thresholds, kind, V, gamma):
    p, q = model_pair(kind, V, gamma, seed=1)
    law = production_law(verifier, thresholds, p, q, list(range(gamma + 1)))
    assert distance(law, sequence_law(p, gamma + 1)) < 1e-12


@every_rule
@every_kind
def test_drafts_told_as_one_hot_are_exact_whether_sampled_or_not(verifier, outcomes, thresholds, kind):
    p, q = model_pair(kind, 3, 2, seed=2)
    law = production_law(verifier, as_one_hot(thresholds), p, q, [0, 1, 2], hide_q=True)
    assert distance(law, sequence_law(p, 3)) < 1e-12


@every_rule
def test_one_batch_mixes_sampled_and_one_hot_rows(verifier, outcomes, thresholds):
    """Each half of a mixed batch gets the verdicts and the weights that it gets in a batch of its own kind."""
    p, q = model_pair("dense", 3, 2, seed=6)
    drafts = [(0, 1), (2,), (1, 1), (2, 0)]
    sampled, scores = chain_batch(drafts * 2, p, q)
    hidden, _ = chain_batch(drafts * 2, p, None)
    u = torch.rand(8, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    told = torch.arange(8) >= 4
    mixed = Draft(sampled.tokens, sampled.lengths, q_logits=sampled.q_logits, q_logz=sampled.q_logz, one_hot=told)
    results = []
    for draft in (sampled, hidden, mixed):
        draws = GivenDraws(u)
        verdict = verifier.verify(draft, scores, draws)
        results.append((verdict.n_accepted, draws.weights / draws.weights.sum(1, keepdim=True)))
    for part in (0, 1):
        assert torch.equal(results[2][part][:4], results[0][part][:4])
        assert torch.equal(results[2][part][4:], results[1][part][4:])
    assert not torch.allclose(results[0][1], results[1][1])


@every_rule
def test_reduced_draft_vocabulary(verifier, outcomes, thresholds):
    """q over target ids [3, 1] only: the same verdict as the same q spread over the whole vocabulary."""
    g = torch.Generator().manual_seed(0)
    q_ids, tokens = torch.tensor([3, 1]), torch.tensor([[1, 3], [3, 3], [1, 1]])
    q_logits = torch.randn(3, 2, 2, generator=g)
    wide = torch.full((3, 2, 5), -torch.inf).index_copy_(2, q_ids, q_logits)
    scores = Scores(torch.randn(9, 5, generator=g), torch.arange(9).view(3, 3))
    logz = q_logits.logsumexp(-1)
    u = torch.rand(3, 2, generator=g, dtype=torch.float64)
    narrow_draws, wide_draws = GivenDraws(u), GivenDraws(u)
    a = verifier.verify(Draft(tokens, [2, 2, 1], None, q_logits, logz, q_ids), scores, narrow_draws)
    b = verifier.verify(Draft(tokens, [2, 2, 1], None, wide, logz), scores, wide_draws)
    assert a.n_accepted.tolist() == b.n_accepted.tolist() and 0 < a.n_accepted.sum() < 5
    assert torch.equal(narrow_draws.weights, wide_draws.weights)


@every_rule
@pytest.mark.parametrize("where", ["p at the root", "p after an accepted token", "q"])
def test_nan_yields_no_token(verifier, outcomes, thresholds, where):
    p, q = model_pair("equal", 3, 1, seed=0)
    draft, scores = chain_batch([(0,), (0,)], p, q)
    if where == "q":
        draft.q_logits[0, 0, 1] = draft.q_logz[0, 0] = torch.nan
    else:
        scores.logits[int(where != "p at the root"), 2] = torch.nan
    draws = make_draws("fresh", 0, [0, 1], [0, 0], [0, 0], lambda x: x, "cpu")
    assert (verifier.verify(draft, scores, draws).next_token == -1).tolist() == [True, False]


@every_rule
def test_a_rows_verdict_is_the_same_alone_and_in_any_batch(verifier, outcomes, thresholds):
    g = torch.Generator().manual_seed(1)
    B, N, V = 6, 3, 50
    lengths = [3, 0, 2, 1, 3, 2]
    p_logits, q_logits = torch.randn(B, N + 1, V, generator=g), torch.randn(B, N, V, generator=g)
    tokens = torch.randint(0, V, (B, N), generator=g)

    def verdict(rows):
        ids, steps = [10 + r for r in rows], [r % 3 for r in rows]
        draws = make_draws("fresh", 5, ids, steps, [0] * len(rows), lambda x: x, "cpu")
        index = torch.arange(len(rows) * (N + 1)).view(len(rows), N + 1)
        q = q_logits[rows]
        draft = Draft(tokens[rows], [lengths[r] for r in rows], q_logits=q, q_logz=q.logsumexp(-1))
        v = verifier.verify(draft, Scores(p_logits[rows].flatten(0, 1), index), draws)
        return list(zip(v.n_accepted.tolist(), v.next_token.tolist(), strict=True))

    together = verdict(list(range(B)))
    assert verdict([4, 1, 5, 2]) == [together[r] for r in (4, 1, 5, 2)]
    assert [verdict([r])[0] for r in range(B)] == together


@every_rule
def test_a_batch_of_no_rows_and_a_step_without_drafts(verifier, outcomes, thresholds):
    empty = verifier.verify(
        Draft.empty(0), Scores(torch.zeros(0, 4), torch.zeros(0, 1, dtype=torch.long)), GivenDraws(torch.zeros(0, 0))
    )
    assert empty.next_token.shape == (0,) and empty.path.shape == (0, 0)
    plain = verifier.verify(
        Draft.empty(2), Scores(torch.eye(2) * 9, torch.tensor([[1], [0]])), GivenDraws(torch.zeros(2, 0))
    )
    assert plain.next_token.tolist() == [1, 0]


@every_rule
def test_a_tree_is_refused(verifier, outcomes, thresholds):
    draft = Draft(torch.zeros(1, 2, dtype=torch.long), [2], parents=torch.tensor([[-1, -1]]))
    with pytest.raises(ValueError, match=f"'{verifier.name}' takes chain drafts"):
        verifier.verify(draft, Scores(torch.zeros(3, 4), torch.arange(3)[None]), None)
