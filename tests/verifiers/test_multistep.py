"""Several consecutive steps with the production streams on a toy model: the joint law of the first tokens.

One step cannot show that a number was used twice; the joint law over steps does.
"""

import pytest
import torch
from scipy import stats

from specdec.contracts import Draft, Scores
from specdec.draws import FreshDraws
from verifiers.block import BlockVerifier
from verifiers.rejection import RejectionVerifier
from verifiers.traversal import TraversalVerifier
from verifiers.tree_rejection import TreeRejectionVerifier

V, TOKENS, ROWS = 3, 4, 30_000
CHAIN, TREE = (-1, 0), (-1, -1, 0, 1)  # parents; the tree's siblings are drawn without replacement
# Order-1 models: row = last token. p > q at two tokens of each row, so that what is left after a rejection is random.
P = torch.tensor([[0.2, 0.5, 0.3], [0.4, 0.1, 0.5], [0.35, 0.35, 0.3]])
Q = torch.tensor([[0.7, 0.1, 0.2], [0.2, 0.5, 0.3], [0.1, 0.3, 0.6]])


class KeyedByPosition(FreshDraws):
    """The broken control: every number belongs to its token's absolute position, whichever step asks for it."""

    def sample(self, logits, depth, rows=None, index=0):
        return FreshDraws(self.seed, self.requests_B, self.steps_B + depth, self.warp, self.device).sample(logits, 0)

    def uniform(self, count):
        at = [FreshDraws(self.seed, self.requests_B, self.steps_B + i, self.warp, self.device) for i in range(count)]
        return torch.cat([draws.uniform(1) for draws in at], dim=1)


class SiblingsShareNumbers(FreshDraws):
    """The broken control: siblings and cousins are drawn with the same number."""

    def sample(self, logits, depth, rows=None, index=0):
        return super().sample(logits, depth, rows)


def draft_from(draws: FreshDraws, last: torch.Tensor, parents: tuple[int, ...]) -> tuple[Draft, torch.Tensor]:
    """A draft of this shape below the last tokens [B], and the token at each node [B, N + 1]."""
    nodes, depths, q_logits, q_logz = [last], [0], [], []
    for j, parent in enumerate(parents):
        logits = Q[nodes[parent + 1]].log()
        for sibling in range(j):
            if parents[sibling] == parent:
                logits = logits.scatter(1, nodes[sibling + 1][:, None], -torch.inf)
        depth = depths[parent + 1]
        token, logits, logz = draws.sample(logits, depth, index=depths[1:].count(depth + 1))
        nodes.append(token), depths.append(depth + 1), q_logits.append(logits), q_logz.append(logz)
    tokens = torch.stack(nodes, 1)
    tree = None if parents == CHAIN else torch.tensor(parents).expand(len(last), -1)
    lengths = [len(parents)] * len(last)
    q = torch.stack(q_logits, 1), torch.stack(q_logz, 1)
    return Draft(tokens[:, 1:], lengths, tree, q_logits=q[0], q_logz=q[1]), tokens


def generate(verifier, parents: tuple[int, ...], kind=FreshDraws) -> torch.Tensor:
    """[ROWS, TOKENS] tokens after a first token 0."""
    emitted = torch.zeros(ROWS, 2 + TOKENS + len(parents), dtype=torch.long)
    lengths = torch.ones(ROWS, dtype=torch.long)
    rows = torch.arange(ROWS)
    step = 0
    while lengths.min() < 1 + TOKENS:
        keys = lengths.tolist() if kind is KeyedByPosition else [step] * ROWS
        draws = kind(0, range(ROWS), keys, lambda x: x, "cpu")
        draft, nodes = draft_from(draws, emitted[rows, lengths - 1], parents)
        logits = P[nodes].log().flatten(0, 1)
        verdict = verifier.verify(draft, Scores(logits, torch.arange(len(logits)).view(ROWS, -1)), draws)
        block = torch.cat([draft.tokens.gather(1, verdict.path.clamp(min=0)), verdict.next_token[:, None]], 1)
        block[rows, verdict.n_accepted] = verdict.next_token
        live = lengths < 1 + TOKENS
        for i in range(block.shape[1]):
            write = live & (i <= verdict.n_accepted)
            emitted[rows[write], lengths[write] + i] = block[write, i]
        lengths = lengths + live * (verdict.n_accepted + 1)
        step += 1
    return emitted[:, 1 : 1 + TOKENS]


def p_value(tokens: torch.Tensor) -> float:
    """Chi-square of the joint law of TOKENS tokens against the target's."""
    law, last = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.long)
    for _ in range(TOKENS):
        law = (law[:, None] * P[last].double()).flatten()
        last = torch.arange(V).repeat(len(last))
    cells = tokens @ (V ** torch.arange(TOKENS - 1, -1, -1))
    return stats.chisquare(torch.bincount(cells, minlength=V**TOKENS), len(tokens) * law / law.sum()).pvalue


@pytest.mark.parametrize(
    ("verifier", "parents"),
    [
        (RejectionVerifier(), CHAIN),
        (BlockVerifier(), CHAIN),
        (TreeRejectionVerifier(), TREE),
        (TraversalVerifier(), TREE),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_the_joint_law_over_steps_is_the_targets(verifier, parents):
    assert p_value(generate(verifier, parents)) > 1e-3


@pytest.mark.parametrize(
    ("verifier", "parents", "kind", "bug"),
    [
        (BlockVerifier(), CHAIN, KeyedByPosition, "noise keyed by position"),
        (TraversalVerifier(), TREE, KeyedByPosition, "noise keyed by position"),
        (TreeRejectionVerifier(), TREE, SiblingsShareNumbers, "siblings share a number"),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_broken_controls_are_caught(verifier, parents, kind, bug, controls):
    assert p_value(generate(verifier, parents, kind)) < 1e-6
    controls(f"{verifier.name}: {bug}", f"joint law of {TOKENS} tokens off by chi-square, p < 1e-6")
