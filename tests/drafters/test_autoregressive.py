"""The parts that model-based drafters share, by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from drafters.autoregressive import SampledChain, fit_vocabulary, within_positions
from specdec.contracts import Rows

INF = torch.inf


def rows(*lengths, vocab=4):
    texts = [np.zeros(length, dtype=np.int64) for length in lengths]
    return Rows(list(range(len(texts))), texts, torch.device("cpu"), vocab)


def test_fit_vocabulary():
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    assert fit_vocabulary(logits, 3).tolist() == [[1, 2, 3]]
    assert fit_vocabulary(logits, 2).tolist() == [[1, 2]]  # a padded draft vocabulary
    assert fit_vocabulary(logits, 5).tolist() == [[1, 2, 3, -INF, -INF]]  # a padded target vocabulary
    assert fit_vocabulary(logits, 6, torch.tensor([0, 3, 4])).tolist() == [[1, -INF, -INF, 2, 3, -INF]]


def test_within_positions():
    table = SimpleNamespace(positions_are_a_table=True, max_positions=10)
    # the token after a text of 9 is read at position 8, so that two drafts fit, and three with a lag of one
    assert within_positions([5, 5, 1, 5], rows(9, 10, 9, 12), table) == [2, 1, 1, 0]
    assert within_positions([5, 5, 1, 5], rows(9, 10, 9, 12), table, lag=1) == [3, 2, 1, 0]
    for other in ({"positions_are_a_table": False}, {"max_positions": None}):
        assert within_positions([5], rows(12), SimpleNamespace(**vars(table) | other)) == [5]


class Scripted:
    """Draws the arg-max and calls the logits its q; remembers what it was asked."""

    def __init__(self, one_hot):
        self.one_hot, self.calls = one_hot, []

    def sample(self, logits, depth, rows):
        self.calls.append((depth, list(rows)))
        return logits.argmax(-1), *((None, None) if self.one_hot else (logits, logits.logsumexp(-1)))


@pytest.mark.parametrize("one_hot", [True, False])
def test_a_ragged_chain(one_hot):
    draws = Scripted(one_hot)
    chain = SampledChain(rows(3, 3, 3), [2, 0, 1], draws)
    first, second = torch.eye(4)[[2, 1]], torch.eye(4)[[3]]
    assert (chain.longest, chain.active(0), chain.active(1)) == (2, [0, 2], [0])
    chain.draw(0, [0, 2], first)
    chain.draw(1, [0], second)
    draft = chain.draft()
    assert draws.calls == [(0, [0, 2]), (1, [0])]
    assert draft.tokens.tolist() == [[2, 3], [0, 0], [1, 0]] and draft.lengths == [2, 0, 1] and draft.parents is None
    assert chain.spread(torch.tensor([7, 8]), [0, 2]).tolist() == [7, 0, 8]
    if one_hot:
        assert draft.q_logits is None
    else:
        assert torch.equal(draft.q_logits[[0, 2], 0], first) and torch.equal(draft.q_logits[:1, 1], second)
        assert torch.equal(draft.q_logz[0], torch.cat([first[:1], second]).logsumexp(-1))
