"""N-gram drafting: what followed the last occurrence of the present context is proposed again.

Known as prompt lookup decoding (Saxena 2023) and, with a growing history, as the LLMA / n-gram drafter of serving
engines (Yang et al. 2304.04487). No parameters and no forward, so any acceptance at all is gained.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from specdec.contracts import BaseDrafter, Draft, Draws, Rows


class HistoryIndex:
    """Where each n-gram of one row's history was last seen *with a token after it*.

    `ends` maps an n-gram to the position of the token that followed it. Each propose adds only the tokens committed
    since the last one, so that a step's cost does not depend on the length of the history.
    """

    def __init__(self) -> None:
        self.ends: dict[tuple[int, ...], int] = {}
        self.indexed = 0  # n-grams that end at or before this position are in `ends`

    def extend(self, history: np.ndarray, sizes: range) -> None:
        """Add the n-grams, n in `sizes`, of the tokens that `history` [T] has gained."""
        last = len(history) - 1  # the n-gram that ends at len(history) has no continuation yet
        start = max(0, self.indexed + 1 - sizes[-1])
        window = history[start:last].tolist()
        for end in range(self.indexed + 1, last + 1):
            for n in sizes:
                if n <= end:  # later ends replace earlier ones
                    self.ends[tuple(window[end - n - start : end - start])] = end
        self.indexed = max(self.indexed, last)

    def longest_match(self, history: np.ndarray, sizes: range) -> tuple[int, int]:
        """Position of the token that followed the most recent earlier occurrence of the longest matching suffix, and
        how many tokens that suffix has; (0, 0) where none matches."""
        suffix = tuple(history[-sizes[-1] :].tolist())
        found = 0, 0
        for n in sizes:
            if n > len(suffix) or (end := self.ends.get(suffix[-n:])) is None:
                break  # nor does a longer one match, which ends with this one
            found = end, n
        return found


@dataclass(frozen=True, eq=False)
class NGramDrafter(BaseDrafter):
    """Finds the longest suffix of prompt + output, max_n down to min_n tokens, that occurred before, and drafts what
    followed its most recent occurrence. Rows without a match draft nothing.

    Where the source runs into the end of the history it goes on with the tokens just drafted, as in LZ77: for
    `a b c a b`, five tokens are drafted as `c a b c a`. A repetition is thereby drafted to the full budget although
    its most recent occurrence lies only one period back. Draft tokens are one-hot, and drafts are graded by how many
    tokens match, which tells most about what will be accepted.
    """

    max_n: int = 4
    min_n: int = 2  # one equal token says too little: most such drafts are rejected, and a rejected draft costs
    _rows: defaultdict[int, HistoryIndex] = field(
        default_factory=lambda: defaultdict(HistoryIndex), init=False, repr=False
    )

    name = "ngram"
    trimmable = True

    def __post_init__(self) -> None:
        if not (isinstance(self.max_n, int) and isinstance(self.min_n, int) and 1 <= self.min_n <= self.max_n):
            raise ValueError(
                f"ngram needs 1 <= min_n <= max_n but got min_n={self.min_n} and max_n={self.max_n}: give the "
                f"shortest and the longest suffix to look for"
            )

    def propose(self, rows: Rows, budget: Sequence[int], draws: Draws) -> Draft:
        """Draft up to budget[b] tokens per row; see the class."""
        found = [
            self._continuation(row_id, history, limit)
            for row_id, history, limit in zip(rows.ids, rows.tokens, budget, strict=True)
        ]
        lengths = [len(draft) for draft, _ in found]
        if not any(lengths):
            return Draft.empty(len(found), rows.device)
        tokens_BN = np.zeros((len(found), max(lengths)), dtype=np.int64)
        for row, (draft, _) in enumerate(found):
            tokens_BN[row, : len(draft)] = draft
        tokens = torch.from_numpy(tokens_BN).to(rows.device, non_blocking=True)
        return Draft(tokens, lengths, grades=[matched for _, matched in found])

    def admit(self, ids: Sequence[int]) -> None:
        """Forget what an earlier request left under these ids; a new one is indexed when first seen."""
        self.release(ids)

    def release(self, ids: Sequence[int]) -> None:
        for row_id in ids:
            self._rows.pop(row_id, None)

    def _continuation(self, row_id: int, history: np.ndarray, limit: int) -> tuple[np.ndarray, int]:
        """The draft of a row, and how many tokens matched."""
        if limit == 0:
            return history[:0], 0
        sizes = range(self.min_n, self.max_n + 1)
        index = self._rows[row_id]
        index.extend(history, sizes)
        source, matched = index.longest_match(history, sizes)
        if not matched:
            return history[:0], 0
        period = len(history) - source
        return history[source + np.arange(limit) % period], matched
