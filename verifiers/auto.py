"""`verifier="auto"`: for every draft the lossless rule that accepts most among those that fit it."""

from __future__ import annotations

from specdec.contracts import Draft, Draws, Scores, Verdict
from verifiers.block import BlockVerifier
from verifiers.greedy import GreedyVerifier
from verifiers.rejection import RejectionVerifier
from verifiers.tree_rejection import TreeRejectionVerifier


class AutoVerifier:
    """Greedy without sampling; else block for chains with a q, rejection for one-hot chains, tree_rejection for trees.

    Block verification accepts at least what rejection does, and the same without q, where rejection is cheaper.
    `name` is the rule that judged the last draft.
    """

    lossless = True

    def __init__(self, sampling: bool):
        self.draws = "fresh" if sampling else "argmax"
        self._rule = RejectionVerifier() if sampling else GreedyVerifier()

    @property
    def name(self) -> str:
        return self._rule.name

    def verify(self, draft: Draft, p: Scores, draws: Draws) -> Verdict:
        if self.draws == "fresh" and any(draft.lengths):
            self._rule = choose(draft)
        return self._rule.verify(draft, p, draws)


def choose(draft: Draft) -> RejectionVerifier | BlockVerifier | TreeRejectionVerifier:
    """The rule for a draft under sampling."""
    if draft.parents is not None:
        return TreeRejectionVerifier()
    return RejectionVerifier() if draft.q_logits is None else BlockVerifier()
