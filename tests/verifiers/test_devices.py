"""No rule reads the device: each runs on the meta device, where a value that the host asks for is an error."""

import pytest
import torch

from specdec.contracts import Draft, Scores
from specdec.draws import make_draws
from verifiers.block import BlockVerifier
from verifiers.coupled import CoupledVerifier
from verifiers.greedy import GreedyVerifier
from verifiers.rejection import RejectionVerifier
from verifiers.traversal import TraversalVerifier
from verifiers.tree_rejection import TreeRejectionVerifier
from verifiers.typical import TypicalVerifier

CHAIN = [RejectionVerifier(), BlockVerifier()]
TREE = [GreedyVerifier(), CoupledVerifier(), TreeRejectionVerifier(), TraversalVerifier(), TypicalVerifier()]
B, N, V = 3, 4, 700


def draft_of(kind: str, tree: bool) -> Draft:
    q_logits = None if kind == "one-hot" else torch.zeros(B, N, 500 if kind == "reduced" else V, device="meta")
    return Draft(
        tokens=torch.zeros(B, N, dtype=torch.long, device="meta"),
        lengths=[4, 0, 2],
        parents=torch.zeros(B, N, dtype=torch.long, device="meta") if tree else None,
        q_logits=q_logits,
        q_logz=None if q_logits is None else q_logits.logsumexp(-1),
        q_ids=torch.zeros(500, dtype=torch.long, device="meta") if kind == "reduced" else None,
        one_hot=torch.zeros(B, dtype=torch.bool, device="meta") if kind == "mixed" else None,
    )


@pytest.mark.parametrize("kind", ["one-hot", "q", "mixed", "reduced"])
@pytest.mark.parametrize(
    ("verifier", "tree"),
    [(v, False) for v in CHAIN + TREE] + [(v, True) for v in TREE],
    ids=lambda x: x.name if hasattr(x, "name") else ("tree" if x else "chain"),
)
def test_no_rule_reads_the_device(verifier, tree, kind):
    draws = make_draws(verifier.draws, 0, [0, 1, 2], [0, 0, 0], [1, 1, 1], lambda x: x, "meta")
    index = torch.zeros(B, N + 1, dtype=torch.long, device="meta")
    verdict = verifier.verify(draft_of(kind, tree), Scores(torch.zeros(9, V, device="meta"), index), draws)
    assert verdict.path.shape == (B, N) and verdict.n_accepted.shape == verdict.next_token.shape == (B,)
    assert verdict.accept_prob.shape == (B, N)
    with pytest.raises(RuntimeError):  # broken control: a read is an error here
        verdict.next_token.tolist()


@pytest.mark.parametrize("kind", ["argmax", "fresh", "coupled"])
def test_draws_do_not_read_the_device(kind):
    draws = make_draws(kind, 0, [0, 1, 2], [0, 0, 0], [1, 1, 1], lambda x: x, "meta")
    assert draws.sample(torch.zeros(2, V, device="meta"), 1, rows=[2, 0])[0].shape == (2,)
