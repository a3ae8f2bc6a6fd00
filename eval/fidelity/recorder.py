"""Watches a verifier from outside: each emitted token with the score it was chosen by and the q that stood before it.

To the loop a `Recorder` is the verifier that it wraps. `verify` is called once per step, and then `on_commit`, which is
handed to `specdec.generate` beside it, for each of the step's rows in order: the two together see every token with its
row, its step and its distributions. Per token a score and a float16 row of log q are held until the batch has been
analysed; p and q in full only for the steps that `keep` names.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.contracts import Draft, Draws, Scores, Verdict, Verifier

Guess = int | Tensor | None
Keep = Callable[[int, int], bool]


@dataclass(frozen=True, eq=False)
class KeptStep:
    """One row's step in full. N drafted tokens, V vocabulary; tensors on the CPU.

    step:     the row's own count of verdicts.   emitted: tokens it had emitted before.   rule: the verifier's name.
    tokens:   [N] drafted.   parents: [N] index of each one's parent, -1 for a child of the root.
    q_logits: [N, V] and q_logz: [N], or None where the tokens were chosen deterministically.
    scores:   [N + 1, V] the target's processed scores at every node, the root first.
    path, next_token: the verdict, before any cut at a stop.
    """

    row: int
    step: int
    emitted: int
    rule: str
    tokens: list[int]
    parents: list[int]
    q_logits: Tensor | None
    q_logz: Tensor | None
    scores: Tensor
    path: list[int]
    next_token: int

    @property
    def outcome(self) -> list[tuple[int, int]]:
        """(node, token emitted after it) along the accepted path."""
        nodes = [0, *(j + 1 for j in self.path)]
        return list(zip(nodes, [*(self.tokens[j] for j in self.path), self.next_token], strict=True))


@dataclass
class RowLog:
    """What one row did. Lists with one entry per emitted token, but for `steps`, `drafted` and `kept`.

    scores:  the processed score of the token at the node where it was emitted.
    guesses: the drafter's distribution at that node: log q [V] in float16, the drafted id where q is one-hot, None
             where nothing was drafted there.
    steps:   tokens emitted by each verdict of the row.   drafted: tokens drafted for it.
    """

    tokens: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    guesses: list[Guess] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    kept: list[KeptStep] = field(default_factory=list)


class Recorder:
    """The verifier `inner`, watched. rows: rows of the batch; keep(row, step): whether to keep a step in full.

    `seconds` is the host time that watching took.
    """

    def __init__(self, inner: Verifier, rows: int, keep: Keep):
        self.inner, self.keep = inner, keep
        self.lossless, self.draws = inner.lossless, inner.draws
        self.rows = [RowLog() for _ in range(rows)]
        self.seconds = 0.0
        self._step: _Step | None = None

    @property
    def name(self) -> str:
        return self.inner.name

    def verify(self, draft: Draft, p: Scores, draws: Draws) -> Verdict:
        verdict = self.inner.verify(draft, p, draws)
        started = time.perf_counter()
        self._step = _Step(draft, p, verdict, self.inner.name, guesses=self.draws == "fresh")
        self.seconds += time.perf_counter() - started
        return verdict

    def on_commit(self, row: int, tokens: list[int], drafted: int) -> None:
        """The loop committed `tokens` in batch row `row`: the next row of the step in flight."""
        started = time.perf_counter()
        b, log = self._step.next_row(), self.rows[row]
        if self.keep(row, len(log.steps)):
            log.kept.append(self._step.kept(b, row, len(log.steps), len(log.tokens)))
        nodes = self._step.nodes(b)[: len(tokens)]
        log.scores.extend(self._step.scores_of(b, nodes, tokens))
        log.guesses.extend(self._step.guesses_at(b, nodes))
        log.tokens.extend(tokens)
        log.steps.append(len(tokens))
        log.drafted.append(self._step.draft.lengths[b])
        self.seconds += time.perf_counter() - started


class _Step:
    """A step between its verdict and its commits. Reading paths waits for the device, as the loop itself then does.

    guesses: whether the drafter's distribution is of use: under coupled noise a draft shares its noise with the token
    that is emitted there, so that no function of the draft may enter a test, and greedy decoding has no test."""

    def __init__(self, draft: Draft, p: Scores, verdict: Verdict, rule: str, guesses: bool):
        self.draft, self.p, self.rule, self.with_guesses = draft, p, rule, guesses
        self.paths = [path[:n] for path, n in zip(verdict.path.tolist(), verdict.n_accepted.tolist(), strict=True)]
        self.next_tokens = verdict.next_token
        self.index = p.index.tolist()
        self.parents = None if draft.parents is None else draft.parents.tolist()
        self._rows_seen = 0

    def next_row(self) -> int:
        self._rows_seen += 1
        return self._rows_seen - 1

    def nodes(self, b: int) -> list[int]:
        """Where each token of the verdict was emitted: the root, then the accepted nodes."""
        return [0, *(j + 1 for j in self.paths[b])]

    def scores_of(self, b: int, nodes: list[int], tokens: list[int]) -> list[float]:
        return self.p.logits[[self.index[b][node] for node in nodes], tokens].tolist()

    def guesses_at(self, b: int, nodes: list[int]) -> list[Guess]:
        """Of each node, the distribution of its first child: a function of the prefix alone, as a test needs it."""
        children = [self._first_child(b, node) for node in nodes]
        drafted = [j for j in children if j is not None]
        if not self.with_guesses or not drafted:
            return [None] * len(nodes)
        if self._is_one_hot(b):
            found = iter(self.draft.tokens[b, drafted].tolist())
        else:
            log_q = self.draft.q_logits[b, drafted] - self.draft.q_logz[b, drafted, None]
            found = iter(self._over_vocabulary(log_q).half().cpu())
        return [None if j is None else next(found) for j in children]

    def kept(self, b: int, row: int, step: int, emitted: int) -> KeptStep:
        n, one_hot = self.draft.lengths[b], self._is_one_hot(b)
        return KeptStep(
            row=row,
            step=step,
            emitted=emitted,
            rule=self.rule,
            tokens=self.draft.tokens[b, :n].tolist(),
            parents=list(range(-1, n - 1)) if self.parents is None else self.parents[b][:n],
            q_logits=None if one_hot else self._over_vocabulary(self.draft.q_logits[b, :n]).cpu().clone(),
            q_logz=None if one_hot else self.draft.q_logz[b, :n].cpu().clone(),
            scores=self.p.logits[self.index[b][: n + 1]].cpu(),
            path=self.paths[b],
            next_token=int(self.next_tokens[b]),
        )

    def _first_child(self, b: int, node: int) -> int | None:
        n = self.draft.lengths[b]
        if self.parents is None:
            return node if node < n else None
        return next((j for j in range(n) if self.parents[b][j] == node - 1), None)

    def _is_one_hot(self, b: int) -> bool:
        return self.draft.q_logits is None or (self.draft.one_hot is not None and bool(self.draft.one_hot[b]))

    def _over_vocabulary(self, q: Tensor) -> Tensor:
        """[n, V] of q's columns [n, Vd]; ids that the drafter lacks get -inf."""
        if self.draft.q_ids is None:
            return q
        wide = q.new_full((len(q), self.p.logits.shape[-1]), -torch.inf)
        return wide.index_copy_(1, self.draft.q_ids, q)
