"""`verifier="auto"` takes the rule that the README names for each kind of draft."""

import pytest
import torch

from specdec.contracts import Draft, Scores
from specdec.draws import make_draws
from verifiers.auto import AutoVerifier

TOKENS = torch.tensor([[1, 2]])
Q = {"q_logits": torch.zeros(1, 2, 5), "q_logz": torch.full((1, 2), 5.0).log()}
SCORES = Scores(torch.zeros(3, 5), torch.tensor([[0, 1, 2]]))


def rule(draft, sampling):
    verifier = AutoVerifier(sampling)
    draws = make_draws(verifier.draws, 0, [0], [1], [4], lambda logits: logits, "cpu")
    verifier.verify(draft, SCORES, draws)
    nothing = Draft.empty(1)  # a step without drafts does not change what is reported
    verifier.verify(nothing, Scores(torch.zeros(1, 5), torch.tensor([[0]])), draws)
    return verifier.name


@pytest.mark.parametrize(
    ("draft", "sampling", "name"),
    [
        (Draft(TOKENS, [2]), False, "greedy"),
        (Draft(TOKENS, [2]), True, "rejection"),
        (Draft(TOKENS, [2], **Q), True, "block"),
        (Draft(TOKENS, [2], parents=torch.tensor([[-1, -1]]), **Q), True, "tree_rejection"),
    ],
)
def test_auto_takes_the_rule_that_fits(draft, sampling, name):
    assert rule(draft, sampling) == name
