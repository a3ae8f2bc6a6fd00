"""Every rule in float64 against the production rule: the same verdicts, and no other verdict passes."""

from dataclasses import replace

import pytest
import torch

from eval.fidelity.recorder import KeptStep, Recorder
from eval.fidelity.replay import TOLERANCE, replay
from specdec.contracts import Draft, Scores
from specdec.draws import CoupledDraws, FreshDraws
from verifiers.block import BlockVerifier
from verifiers.coupled import CoupledVerifier
from verifiers.greedy import GreedyVerifier
from verifiers.rejection import RejectionVerifier
from verifiers.traversal import TraversalVerifier
from verifiers.tree_rejection import TreeRejectionVerifier
from verifiers.typical import TypicalVerifier

V, B, SEED = 12, 60, 3
TREE = [-1, -1, 0, 0, 1]  # parents
CASES = [
    (GreedyVerifier(), None),
    (GreedyVerifier(), TREE),
    (RejectionVerifier(), None),
    (BlockVerifier(), None),
    (TreeRejectionVerifier(), TREE),
    (TraversalVerifier(), TREE),
    (TraversalVerifier(), None),
    (CoupledVerifier(), None),
    (CoupledVerifier(), TREE),
]


def kept_steps(verifier, tree, one_hot: bool):
    """B random steps of the verifier, kept in full; drafts are of length 0 to 5."""
    rng = torch.Generator().manual_seed(0)
    N = 5
    lengths = [b % (N + 1) for b in range(B)]
    q_logits = 1.5 * torch.randn(B, N, V, generator=rng)
    draws = make_draws(verifier)
    tokens = torch.stack([torch.multinomial(q_logits[:, j].softmax(-1), 1, generator=rng)[:, 0] for j in range(N)], 1)
    index = torch.zeros(B, N + 1, dtype=torch.long)
    logits = []
    for b, length in enumerate(lengths):
        index[b] = len(logits)
        index[b, : length + 1] = torch.arange(length + 1) + len(logits)
        # p resembles the q of the same depth, so that drafts are accepted and rejected
        logits += [*(q_logits[b, :length] + torch.randn(length, V, generator=rng)), torch.randn(V, generator=rng)]
    parents = None if tree is None else torch.tensor(tree).repeat(B, 1)
    q = {} if one_hot else {"q_logits": q_logits, "q_logz": q_logits.logsumexp(-1)}
    recorder = Recorder(verifier, B, lambda row, step: True)
    verdict = recorder.verify(Draft(tokens, lengths, parents, **q), Scores(torch.stack(logits), index), draws)
    for b in range(B):
        n = int(verdict.n_accepted[b])
        path = verdict.path[b, :n].tolist()
        recorder.on_commit(b, [*tokens[b, path].tolist(), int(verdict.next_token[b])], n)
    return [log.kept[0] for log in recorder.rows]


def make_draws(verifier):
    if verifier.draws == "coupled":
        return CoupledDraws(SEED, list(range(B)), [7] * B, None, "cpu")
    return FreshDraws(SEED, list(range(B)), [0] * B, None, "cpu")


def violation(kept) -> float:
    return replay(kept, SEED, request=kept.row, prompt_tokens=7).violation


@pytest.mark.parametrize("one_hot", [False, True], ids=["q", "one-hot"])
@pytest.mark.parametrize(("verifier", "tree"), CASES, ids=lambda x: getattr(x, "name", "tree" if x else "chain"))
def test_production_verdicts_pass_and_changed_ones_do_not(verifier, tree, one_hot):
    steps = kept_steps(verifier, tree, one_hot)
    assert max(map(violation, steps)) < 1e-5
    assert 0 < sum(len(kept.path) for kept in steps) < sum(len(kept.tokens) for kept in steps)
    others = [replace(kept, next_token=(kept.next_token + 1) % V) for kept in steps]
    assert sum(violation(kept) > TOLERANCE for kept in others) == B
    shorter = [replace(kept, path=kept.path[:-1], next_token=kept.tokens[kept.path[-1]]) for kept in steps if kept.path]
    caught = sum(violation(kept) > TOLERANCE for kept in shorter)
    # Where the token itself is right (arg-max rules) giving it as "next" emits nothing wrong.
    assert caught == 0 if verifier.draws != "fresh" and verifier.name in ("greedy", "coupled") else caught > 0


def test_a_one_hot_draft_costs_no_more_than_its_p():
    V = 200_000  # squared, no machine's memory
    scores = torch.zeros(2, V)
    scores[:, 7] = 100
    kept = KeptStep(0, 0, 0, "rejection", [7], [-1], None, None, scores, [0], 7)
    assert violation(kept) == 0 and violation(replace(kept, next_token=8)) > TOLERANCE


def test_wrong_rules_are_told_apart():
    """Verdicts of one rule under another's name: rejection and block differ in what they accept."""
    steps = kept_steps(RejectionVerifier(), None, one_hot=False)
    wrong = [replace(kept, rule="block") for kept in steps]
    assert 0 < sum(violation(kept) > TOLERANCE for kept in wrong) < B


def test_another_seed_is_noticed():
    steps = kept_steps(RejectionVerifier(), None, one_hot=False)
    assert sum(replay(kept, SEED + 1, kept.row, 7).failed for kept in steps) > B // 2


def test_a_rule_without_a_reference_is_not_replayed():
    [first, *_] = kept_steps(TypicalVerifier(), None, one_hot=True)
    assert replay(first, SEED, 0, 7) is None


def test_a_q_that_does_not_sum_to_one_is_named():
    kept = next(kept for kept in kept_steps(RejectionVerifier(), None, one_hot=False) if len(kept.tokens) == 2)
    logz = kept.q_logz.clone()
    logz[1] -= 0.7
    with pytest.raises(ValueError, match=rf"row {kept.row} .*step 0.*token 1 sums to 2\.01"):
        violation(replace(kept, q_logz=logz))
