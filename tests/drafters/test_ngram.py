"""The n-gram drafter against a brute-force search of the definition, on histories small enough to read."""

import time

import numpy as np
import pytest
import torch

from drafters.ngram import HistoryIndex, NGramDrafter
from specdec.contracts import Drafter, Rows


def rows_of(histories: dict[int, list[int] | np.ndarray]) -> Rows:
    tokens = [np.asanyarray(history, dtype=np.int64) for history in histories.values()]
    return Rows(list(histories), tokens, torch.device("cpu"), vocab_size=50_000)


def proposed(drafter: NGramDrafter, histories: dict[int, list[int]], budget: list[int]) -> list[list[int]]:
    draft = drafter.propose(rows_of(histories), budget, draws=None)
    assert draft.tokens.dtype == torch.long and draft.q_logits is None and draft.parents is None
    return [row[:length].tolist() for row, length in zip(draft.tokens, draft.lengths, strict=True)]


def brute_force(tokens: list[int], limit: int, max_n: int, min_n: int) -> list[int]:
    """Every suffix from long to short, every earlier place from right to left, the copy one token at a time."""
    for n in range(min(max_n, len(tokens)), min_n - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                copy = list(tokens)
                for j in range(limit):
                    copy.append(copy[end + j])
                return copy[len(tokens) :]
    return []


def replay(drafter: NGramDrafter, steps: int = 400) -> None:
    """A ragged batch that grows by accepted tokens while rows leave, return under the same id, and sit steps out."""
    rng = np.random.default_rng(0)
    histories: dict[int, list[int]] = {}
    for _ in range(steps):
        for row in range(4):
            if row not in histories:
                drafter.admit([row])
                histories[row] = rng.integers(0, 3, rng.integers(1, 9)).tolist()
            elif rng.random() < 0.05:
                drafter.release([row])
                del histories[row]
        present = {row: tokens for row, tokens in histories.items() if rng.random() < 0.8}
        budget = rng.integers(0, 7, len(present)).tolist()
        expected = [
            brute_force(tokens, limit, drafter.max_n, drafter.min_n)
            for tokens, limit in zip(present.values(), budget, strict=True)
        ]
        assert proposed(drafter, present, budget) == expected
        for tokens in present.values():
            tokens.extend(rng.integers(0, 3, rng.integers(1, 5)).tolist())


@pytest.mark.parametrize(("max_n", "min_n"), [(4, 1), (3, 2), (1, 1), (6, 6)])
def test_equals_brute_force_over_growing_ragged_batches(max_n, min_n):
    replay(NGramDrafter(max_n=max_n, min_n=min_n))


def keep_oldest(index: HistoryIndex, history: np.ndarray, sizes: range) -> None:
    before = dict(index.ends)
    TRUE_EXTEND(index, history, sizes)
    index.ends.update(before)


def forget_overlap(index: HistoryIndex, history: np.ndarray, sizes: range) -> None:
    fresh = HistoryIndex()
    TRUE_EXTEND(fresh, history[index.indexed :], sizes)  # loses n-grams that straddle two steps
    index.ends.update({ngram: end + index.indexed for ngram, end in fresh.ends.items()})
    index.indexed = max(index.indexed, len(history) - 1)


TRUE_EXTEND = HistoryIndex.extend


@pytest.mark.parametrize("broken", [keep_oldest, forget_overlap])
def test_replay_catches_a_broken_index(monkeypatch, broken):
    monkeypatch.setattr(HistoryIndex, "extend", broken)
    with pytest.raises(AssertionError):
        replay(NGramDrafter())


def test_replay_catches_a_row_that_is_not_forgotten(monkeypatch):
    monkeypatch.setattr(NGramDrafter, "release", lambda self, ids: None)
    with pytest.raises((AssertionError, IndexError, ZeroDivisionError)):
        replay(NGramDrafter())


def test_by_hand():
    drafter = NGramDrafter(max_n=3, min_n=2)
    histories = {
        7: [1, 2, 3, 9, 1, 2, 4, 5, 1, 2],  # "1 2" was last followed by "4 5 1"
        3: [5, 1, 2, 3, 6, 8, 2, 3, 7, 1, 2, 3],  # "1 2 3" wins over the more recent "2 3"
        4: [1, 2, 3, 1, 2],  # the copy runs past the end of the history
        9: [1, 2, 3, 4],  # no match
        5: [6],
    }
    expected = [[4, 5, 1], [6, 8], [3, 1, 2, 3, 1], [], []]
    assert proposed(drafter, histories, [3, 2, 5, 4, 4]) == expected
    rows = Rows(list(histories), [np.array(tokens) for tokens in histories.values()], torch.device("cpu"), 10)
    assert drafter.propose(rows, [3, 2, 5, 4, 4], None).grades == [2, 3, 2, 0, 0]  # tokens that match


def test_no_rows_and_no_budget():
    drafter = NGramDrafter()
    assert proposed(drafter, {}, []) == []
    assert proposed(drafter, {0: [1, 1, 1]}, [0]) == [[]]
    assert proposed(drafter, {0: [1, 1, 1]}, [2]) == [[1, 1]]


def test_satisfies_the_contract_and_validates():
    assert isinstance(NGramDrafter(), Drafter)
    with pytest.raises(ValueError, match="min_n=3 and max_n=2"):
        NGramDrafter(max_n=2, min_n=3)
    with pytest.raises(ValueError, match="min_n=0"):
        NGramDrafter(min_n=0)


class CountingArray(np.ndarray):
    """A history that counts how many of its tokens are read out."""

    read = 0

    def tolist(self):
        CountingArray.read += self.size
        return super().tolist()


def test_a_step_does_not_read_the_history_again():
    history = np.random.default_rng(1).integers(0, 50_000, 32_100).view(CountingArray)
    drafter = NGramDrafter()
    drafter.propose(rows_of({0: history[:32_000]}), [5], None)
    CountingArray.read = 0
    started = time.perf_counter()
    for length in range(32_002, 32_102, 2):
        drafter.propose(rows_of({0: history[:length]}), [5], None)
    per_step = (time.perf_counter() - started) / 50
    assert CountingArray.read <= 50 * 3 * drafter.max_n
    assert per_step < 0.002  # the bound; about 0.03 ms on an idle core
