"""One request from its prompt to its last token, on the host."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from specdec.stats import RowStats


@dataclass
class Request:
    """A row's text and progress.

    row:        the row id that the cache and the drafter know it by.
    request_id: names its random streams.
    index:      its row in the batch the user passed.
    columns:    its prompt in HF's column layout, left pads included, int64.
    pads:       how many of `columns` are padding; the rest are the real tokens.
    limit:      most tokens to emit.
    unseen:     left pads of HF's layout that `columns` does without; only processors of lengths count them.
    before:     slots of its prompt less the real tokens in `columns`: more where a cache that was passed in or
                embeddings stand for tokens that nobody named.
    shift:      what its positions are ahead of its slots by.
    """

    row: int
    request_id: int
    index: int
    columns: np.ndarray
    pads: int
    limit: int
    unseen: int = 0
    before: int = 0
    shift: int = 0
    steps: int = 0  # verdicts so far
    done: bool = False
    stats: RowStats = field(init=False)

    def __post_init__(self):
        self._length = self.prompt_columns = len(self.columns)
        self.stats = RowStats(self.request_id, self._length - self.pads)

    def leave_pads(self) -> None:
        """Take the pads off `columns`, so that nothing that reads the text meets them."""
        self.columns, self.unseen, self.pads = self.columns[self.pads :], self.pads, 0
        self._length = self.prompt_columns = len(self.columns)

    @property
    def text(self) -> np.ndarray:
        """All columns so far: pads, prompt, emitted tokens. A view."""
        return self.columns[: self._length]

    @property
    def tokens(self) -> np.ndarray:
        """The real tokens so far: prompt and emitted. A view."""
        return self.columns[self.pads : self._length]

    @property
    def slots(self) -> int:
        """Slots that its text takes in the cache."""
        return self._length - self.pads + self.before

    @property
    def emitted(self) -> np.ndarray:
        """The emitted tokens. A view."""
        return self.columns[self.prompt_columns : self._length]

    @property
    def room(self) -> int:
        """Tokens that may still be emitted."""
        return self.limit - (self._length - self.prompt_columns)

    def cut(self, count: int) -> None:
        """Take back what was emitted beyond `count` tokens."""
        self.stats.emitted = min(self.stats.emitted, count)
        self._length = self.prompt_columns + self.stats.emitted

    def append(self, tokens: list[int]) -> None:
        """Commit `tokens`; the buffer doubles when it is full."""
        end = self._length + len(tokens)
        if end > len(self.columns):
            grown = np.empty(max(end, 2 * len(self.columns)), dtype=np.int64)
            grown[: self._length] = self.text
            self.columns = grown
        self.columns[self._length : end] = tokens
        self._length = end
        self.stats.emitted += len(tokens)
