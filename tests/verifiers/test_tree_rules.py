"""Tree rules: exact by enumeration, children drawn with and without replacement, ragged trees, chains as trees."""

from dataclasses import replace

import pytest
import torch

from specdec.contracts import Draft, Scores
from specdec.draws import make_draws
from tests.verifiers import reference
from tests.verifiers.harness import GivenDraws, chain_batch, distance, tree_batch, tree_production_law
from tests.verifiers.reference import KINDS, model_pair, sequence_law, tree_emitted_law, tree_law
from verifiers.block import BlockVerifier
from verifiers.rejection import RejectionVerifier
from verifiers.traversal import TraversalVerifier
from verifiers.tree_rejection import TreeRejectionVerifier

RULES = {
    "tree_rejection": (TreeRejectionVerifier(), reference.tree_rejection, reference.tree_rejection_thresholds),
    "traversal": (TraversalVerifier(), reference.traversal, reference.traversal_thresholds),
}
SHAPES = {  # parents
    "two children": (-1, -1),
    "three children": (-1, -1, -1),
    "depth first": (-1, 0, 0, -1),
    "breadth first": (-1, -1, 0, 1),
    "chain": (-1, 0, 1),
}
every_rule = pytest.mark.parametrize(("verifier", "outcomes", "thresholds"), RULES.values(), ids=RULES)
every_kind = pytest.mark.parametrize("kind", KINDS)
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
either_draw = pytest.mark.parametrize("replacement", [True, False], ids=["with replacement", "without replacement"])
DEPTH = 3


@every_rule
@every_kind
@every_shape
@either_draw
def test_reference_law_equals_the_targets(verifier, outcomes, thresholds, kind, shape, replacement):
    p, q = model_pair(kind, 3, DEPTH, seed=0)
    assert tree_emitted_law(outcomes, p, tree_law(q, shape, replacement), DEPTH) == sequence_law(p, DEPTH)


@every_rule
@every_kind
@every_shape
@either_draw
def test_production_law_equals_the_targets(verifier, outcomes, thresholds, kind, shape, replacement):
    p, q = model_pair(kind, 3, DEPTH, seed=1)
    law, _ = tree_production_law(verifier, thresholds, p, tree_law(q, shape, replacement), DEPTH)
    assert distance(law, sequence_law(p, DEPTH)) < 1e-12


@every_rule
def test_a_batch_of_ragged_trees_gives_each_the_verdict_it_gets_alone(verifier, outcomes, thresholds):
    p, q = model_pair("dense", 3, DEPTH, seed=2)
    trees = [tree for shape in SHAPES.values() for _, tree in tree_law(q, shape, False)[:5]] + [((), (), ())]
    u = torch.rand(len(trees), 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    draft, scores = tree_batch(trees, p)
    together = GivenDraws(u)
    verdict = verifier.verify(draft, scores, together)
    assert verdict.n_accepted.unique().numel() > 2
    for b, tree in enumerate(trees):
        alone = GivenDraws(u[b : b + 1])
        one = verifier.verify(*tree_batch([tree], p), alone)
        n = one.n_accepted.item()
        assert verdict.n_accepted[b] == n
        assert verdict.path[b, :n].tolist() == one.path[0, :n].tolist()
        assert torch.equal(together.weights[b], alone.weights[0])


@every_rule
@pytest.mark.parametrize("told", ["no q", "one_hot rows"])
def test_one_hot_trees_follow_the_target(verifier, outcomes, thresholds, told):
    """Distinct deterministic children, as Medusa's top-k: the law of the emitted tokens is still the target's."""
    p, _ = model_pair("dense", 3, DEPTH, seed=3)
    tokens, parents = (0, 2, 1, 0), (-1, -1, 0, 0)
    tree = (tokens, parents, tuple(reference.one_hot(x, 3) for x in tokens))
    assert tree_emitted_law(outcomes, p, [(1, tree)], DEPTH) == sequence_law(p, DEPTH)

    class Hidden(type(verifier)):
        def verify(self, draft, p, draws):
            if told == "no q":
                return super().verify(replace(draft, q_logits=None, q_logz=None), p, draws)
            junk = torch.zeros_like(draft.q_logits)
            one_hot = torch.ones(len(draft.lengths), dtype=torch.bool)
            return super().verify(replace(draft, q_logits=junk, q_logz=junk[..., 0], one_hot=one_hot), p, draws)

    law, _ = tree_production_law(Hidden(), thresholds, p, [(1, tree)], DEPTH)
    assert distance(law, sequence_law(p, DEPTH)) < 1e-12


@every_rule
@pytest.mark.parametrize("node", ["root", "accepted", "q"])
def test_nan_yields_no_token(verifier, outcomes, thresholds, node):
    p, q = model_pair("equal", 3, DEPTH, seed=0)
    trees = [((0, 1), (-1, -1), (q[()], q[()]))] * 2
    draft, scores = tree_batch(trees, p)
    if node == "q":
        draft.q_logits[0, 0, 1] = draft.q_logz[0, 0] = torch.nan
    else:
        scores.logits[int(node == "accepted"), 2] = torch.nan
    draws = make_draws("fresh", 0, [0, 1], [0, 0], [0, 0], lambda x: x, "cpu")
    assert (verifier.verify(draft, scores, draws).next_token == -1).tolist() == [True, False]


@every_rule
def test_broken_control_unmodified_q_without_replacement_is_caught(verifier, outcomes, thresholds, controls):
    """It also accepts more: acceptance is no sign of health."""
    p, q = model_pair("dense", 3, 2, seed=2)
    trees, law = tree_law(q, (-1, -1), False), sequence_law(p, 2)
    right, accepted = tree_production_law(verifier, thresholds, p, trees, 2)
    wrong, accepted_wrong = tree_production_law(verifier, thresholds, p, trees, 2, unmodified=q)
    assert distance(right, law) < 1e-12 < 0.01 < distance(wrong, law)
    off = f"law of 2 tokens off by {distance(wrong, law):.3f}, accepts {accepted_wrong - accepted:+.3f} tokens"
    controls(f"{verifier.name}: without replacement, told unmodified q", off)


def test_tree_rejection_of_a_chain_is_token_rejection():
    p, q = model_pair("dense", 3, 2, seed=5)
    drafts = list(sequence_law(q, 2))
    draft, scores = chain_batch(drafts, p, q)
    u = torch.rand(len(drafts), 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    a, b = GivenDraws(u), GivenDraws(u)
    tree = TreeRejectionVerifier().verify(replace(draft, parents=torch.tensor([[-1, 0]] * len(drafts))), scores, a)
    chain = RejectionVerifier().verify(draft, scores, b)
    assert torch.equal(tree.n_accepted, chain.n_accepted) and torch.equal(tree.path, chain.path)
    assert torch.allclose(a.weights, b.weights / b.weights.sum(1, keepdim=True))


def test_traversal_of_a_chain_is_block_verification():
    p, q = model_pair("dense", 3, 3, seed=5)
    drafts = list(sequence_law(q, 3))
    draft, scores = chain_batch(drafts, p, q)
    u = torch.rand(len(drafts), 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    a, b = GivenDraws(u), GivenDraws(u)
    traversed = TraversalVerifier().verify(draft, scores, a)
    block = BlockVerifier().verify(draft, scores, b)
    assert torch.equal(traversed.n_accepted, block.n_accepted) and torch.equal(traversed.path, block.path)
    assert torch.allclose(a.weights, b.weights / b.weights.sum(1, keepdim=True))


@every_shape
@pytest.mark.parametrize("replacement", [True, False])
def test_traversal_never_accepts_less_than_recursive_rejection(shape, replacement):
    p, q = model_pair("dense", 3, DEPTH, seed=6)
    trees = tree_law(q, shape, replacement)
    accepted = [
        sum(w * prob * (len(emitted) - 1) for w, tree in trees for prob, emitted in rule(p, tree))
        for rule in (reference.traversal, reference.tree_rejection)
    ]
    assert accepted[0] >= accepted[1]
    if max(shape) >= 0:
        assert accepted[0] > accepted[1]


@every_rule
def test_no_rows_and_no_drafts(verifier, outcomes, thresholds):
    none = Scores(torch.zeros(0, 4), torch.zeros(0, 1, dtype=torch.long))
    assert verifier.verify(Draft.empty(0), none, GivenDraws(torch.zeros(0, 0))).next_token.shape == (0,)
    one = Scores(torch.eye(2) * 9, torch.tensor([[1], [0]]))
    assert verifier.verify(Draft.empty(2), one, GivenDraws(torch.zeros(2, 0))).next_token.tolist() == [1, 0]
