"""Coupled sampling emits the sequence of plain sampling, whatever is drafted; that sequence follows the target."""

import itertools

import pytest
import torch

from specdec.contracts import Draft, Scores
from specdec.draws import make_draws
from tests.verifiers.test_multistep import TOKENS, P, Q, V, p_value
from verifiers.coupled import CoupledVerifier

ROWS = 4000


def draws_at(lengths, rows, key="position"):
    positions = lengths if key == "position" else [0] * len(rows)
    return make_draws("coupled", 3, rows, [0] * len(rows), positions, lambda x: x, "cpu")


def no_draft(rows, last, draws):
    return Draft.empty(len(rows))


def chain(q, gamma):
    """Drafts gamma tokens from the order-1 model q with the step's own draws."""

    def propose(rows, last, draws):
        tokens = []
        for depth in range(gamma):
            last = draws.sample(q[last].log(), depth)[0]
            tokens.append(last)
        lengths = [(r + int(t)) % (gamma + 1) for r, t in zip(rows, tokens[0], strict=True)]  # ragged
        return Draft(torch.stack(tokens, 1), lengths)

    return propose


def binary_tree(rows, last, draws):
    """Tokens 0 and 1 below the root, and all three tokens below each of them: any target path fits somewhere."""
    tokens = torch.tensor([0, 1, 0, 1, 2, 2, 1, 0]).expand(len(rows), -1)
    parents = torch.tensor([-1, -1, 0, 0, 0, 1, 1, 1]).expand(len(rows), -1)
    return Draft(tokens, [8] * len(rows), parents)


def scores_of(draft, last):
    """Packed log p at every node of every row, computed node by node."""
    index, packed = torch.zeros(len(last), draft.tokens.shape[1] + 1, dtype=torch.long), []
    for b, length in enumerate(draft.lengths):
        index[b] = len(packed)
        for node in range(length + 1):
            index[b, node] = len(packed)
            packed.append(draft.tokens[b, node - 1] if node else last[b])
    return Scores(P[torch.stack(packed)].log(), index)


def generate(propose, requests, key="position"):
    """Token lists of `requests` after a first token 0, and how many drafted tokens were accepted in all."""
    texts, accepted = {r: [0] for r in requests}, 0
    while rows := [r for r in requests if len(texts[r]) < 1 + TOKENS]:
        last = torch.tensor([texts[r][-1] for r in rows])
        draws = draws_at([len(texts[r]) for r in rows], rows, key)
        draft = propose(rows, last, draws)
        verdict = CoupledVerifier().verify(draft, scores_of(draft, last), draws)
        for b, r in enumerate(rows):
            path = verdict.path[b, : verdict.n_accepted[b]]
            texts[r] += [*draft.tokens[b, path].tolist(), verdict.next_token[b].item()]
            accepted += len(path)
    return [texts[r][1 : 1 + TOKENS] for r in requests], accepted


PROPOSERS = {"good chain": chain(P, 3), "poor chain": chain(Q, 2), "tree": binary_tree}


@pytest.mark.parametrize("propose", PROPOSERS.values(), ids=PROPOSERS)
def test_any_drafter_emits_the_sequence_of_plain_sampling(propose):
    plain, _ = generate(no_draft, range(200))
    drafted, accepted = generate(propose, range(200))
    assert drafted == plain
    assert accepted > 100
    assert generate(propose, [7, 150])[0] == [plain[7], plain[150]]


def test_plain_coupled_sampling_follows_the_target():
    tokens = torch.tensor(generate(no_draft, range(ROWS))[0])
    assert p_value(tokens) > 1e-3


def test_broken_control_noise_keyed_by_depth_alone_is_caught(controls):
    plain, _ = generate(no_draft, range(200), key="step")
    drafted, _ = generate(chain(P, 3), range(200), key="step")
    assert drafted != plain
    assert p_value(torch.tensor(generate(no_draft, range(ROWS), key="step")[0])) < 1e-9
    controls("coupled: noise not keyed by position", "output depends on the drafter; chi-square p < 1e-9")


@pytest.mark.parametrize(("a", "b"), list(itertools.product(range(V), repeat=2)))
def test_drafts_match_at_least_as_often_as_the_bound_says(a, b):
    n = 4000
    draws = draws_at([5] * n, list(range(n)))
    rows, depths = torch.arange(n), torch.zeros(n, dtype=torch.long)
    match = draws.choose(P[a].log().expand(n, V), rows, depths) == draws.sample(Q[b].log().expand(n, V), 0)[0]
    tv = 0.5 * (P[a] - Q[b]).abs().sum().item()
    assert match.double().mean().item() >= (1 - tv) / (1 + tv) - 4 * 0.5 / n**0.5


def test_an_undefined_row_yields_no_token():
    logits = torch.tensor([[0.0, torch.nan], [0.0, 1.0], [-torch.inf, -torch.inf]])
    draws = draws_at([1, 1, 1], [0, 1, 2])
    verdict = CoupledVerifier().verify(Draft.empty(3), Scores(logits, torch.arange(3)[:, None]), draws)
    assert (verdict.next_token == -1).tolist() == [True, False, True]
