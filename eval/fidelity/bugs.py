"""Known bugs of speculative decoding, to be injected on purpose: a test that cannot fail proves nothing.

Each is a context manager: from a correct ladder to one with the bug, which is gone again afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

import specdec.loop
from eval.fidelity.ladder import BATCHED, Ladder
from eval.fidelity.recorder import RowLog
from specdec.contracts import BaseDrafter, Draft, Drafter, Draws, Rows, Scores, Verdict
from specdec.draws import FreshDraws
from specdec.loop import Batch
from specdec.processors import Processors
from specdec.stopping import Stops
from specdec.target import Target
from verifiers.paths import chain_path
from verifiers.rejection import RejectionVerifier


@dataclass(frozen=True)
class Bug:
    """caught_by: the kind of finding (see `eval.fidelity.verdict.Finding`) that is expected to show it."""

    name: str
    caught_by: str
    inject: Callable[[Ladder], AbstractContextManager[Ladder]]


@contextmanager
def none(ladder: Ladder) -> Iterator[Ladder]:
    """No bug at all, which must raise no alarm."""
    yield ladder


# Rules


@contextmanager
def greedy_draft(ladder: Ladder) -> Iterator[Ladder]:
    """The draft is an arg-max, but the verifier is told that it was sampled from the softmax."""
    yield replace(ladder, drafter=_ArgmaxDrafts(ladder.drafter))


@contextmanager
def resample_from_p(ladder: Ladder) -> Iterator[Ladder]:
    """After a rejection the token is drawn from p and not from norm((p - q)+)."""
    yield replace(ladder, verifier=_ResamplesFromP)


@contextmanager
def one_too_many(ladder: Ladder) -> Iterator[Ladder]:
    """The first rejected token is accepted as well."""
    yield replace(ladder, verifier=_OneTooMany)


@contextmanager
def unprocessed_bonus(ladder: Ladder) -> Iterator[Ladder]:
    """The token after a wholly accepted draft is drawn from the raw logits."""
    correct = Processors.apply

    def apply(self, logits_RV, prefixes):
        scores_RV = correct(self, logits_RV, prefixes)
        lengths = np.asarray(prefixes.draft.lengths)
        last_nodes = torch.from_numpy(((lengths + 1).cumsum() - 1)[lengths > 0]).to(logits_RV.device)
        return scores_RV.index_copy(0, last_nodes, logits_RV[last_nodes].float())

    with patch.object(Processors, "apply", apply):
        yield ladder


@contextmanager
def keyed_by_position(ladder: Ladder) -> Iterator[Ladder]:
    """Every number belongs to its token's position, so that a later step meets it again."""

    def make_draws(kind, seed, request_ids, steps, positions, warp, device):
        return _KeyedByPosition(seed, request_ids, positions, warp, device)

    with patch.object(specdec.loop, "make_draws", make_draws):
        yield ladder


# State


@contextmanager
def stale_slot(ladder: Ladder) -> Iterator[Ladder]:
    """After a rejection the cache is rolled back one token too few: the first rejected one stays visible."""
    schedule, commit = Batch.schedule, Batch.commit

    def late_schedule(self):
        stale = self.__dict__.setdefault("stale", Counter())
        return [replace(segment, start=segment.start + stale[segment.row]) for segment in schedule(self)]

    def late_commit(self, segments, scored, draft, verdict, read):
        commit(self, segments, scored, draft, verdict, read)
        for b, request in enumerate(scored):
            self.stale[request.row] += read.n_accepted[b] < draft.lengths[b]

    with patch.object(Batch, "schedule", late_schedule), patch.object(Batch, "commit", late_commit):
        yield ladder


@contextmanager
def shifted_positions(ladder: Ladder) -> Iterator[Ladder]:
    """The positions of the batch's first row are one too high after its prompt."""
    pack = Target.pack

    def pack_shifted(self, segments, draft, cache):
        step = pack(self, segments, draft, cache)
        scored = [segment for segment in segments if segment.scored]
        for segment, drafted in zip(scored, draft.lengths, strict=True):
            if self.model is ladder.model and segment.row == 0 and segment.start > 0:
                first = step.first[0]
                step.position_ids[0, first : first + len(segment.tokens) + drafted] += 1
        return step

    with patch.object(Target, "pack", pack_shifted):
        yield ladder


@contextmanager
def late_stop(ladder: Ladder) -> Iterator[Ladder]:
    """A block is cut one token after its stop. The stop is a token that most often comes first within a block."""
    job = next(job for job in ladder.jobs() if job.rung is BATCHED)
    logs = ladder.watch(job, lambda row, step: False).recorder.rows
    within = Counter(token for log in logs for token in _first_within_blocks(log))
    if not within:
        raise ValueError(
            "no accepted draft brought a new token, so no stop can be cut late: give --max-new-tokens more"
        )
    stop = max(within, key=within.get)
    correct = Stops.cut

    def cut(self, request, tokens):
        kept, done = correct(self, request, tokens)
        late = done and kept[-1] in self.eos
        return tokens[: len(kept) + late], done

    with patch.object(Stops, "cut", cut):
        yield replace(ladder, sampling={**ladder.sampling, "eos_token_id": stop}, stops=frozenset({stop}))


@contextmanager
def less_or_equal(ladder: Ladder) -> Iterator[Ladder]:
    """`u q <= p` in place of `u q < p`, with a planted u = 0 that meets a drafted token of p = 0."""
    with patch("verifiers.rejection.accepted", lambda p, q, u: u * q <= p):
        yield ladder


MODEL_BUGS = (
    Bug("greedy draft, softmax q", "test", greedy_draft),
    Bug("resample from p, not the residual", "test", resample_from_p),
    Bug("accepted prefix one too long", "test", one_too_many),
    Bug("bonus token without processors", "zero", unprocessed_bonus),
    Bug("cache rolled back one token too few", "state", stale_slot),
    Bug("positions off by one in one row", "state", shifted_positions),
    Bug("stop cut one token late", "stop", late_stop),
)


def _first_within_blocks(log: RowLog) -> Iterator[int]:
    """Tokens that the row had not emitted before, where another token follows in the same block."""
    ends = set(accumulate(log.steps))
    for place, token in enumerate(log.tokens):
        if place + 1 not in ends and token not in log.tokens[:place]:
            yield token


class _ArgmaxDrafts(BaseDrafter):
    """`drafter` with every sampled token replaced by the most probable one."""

    def __init__(self, drafter: Drafter):
        self.name, self.drafter = drafter.name, drafter
        self.observe, self.admit, self.release = drafter.observe, drafter.admit, drafter.release

    def propose(self, rows: Rows, budget: list[int], draws: Draws) -> Draft:
        return self.drafter.propose(rows, budget, _ArgmaxSamples(draws))


class _ArgmaxSamples:
    def __init__(self, draws: Draws):
        self.draws = draws

    def sample(self, *arguments: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        _, q_logits, q_logz = self.draws.sample(*arguments)
        return q_logits.argmax(-1), q_logits, q_logz


class _ResamplesFromP(RejectionVerifier):
    def verify(self, draft: Draft, p: Scores, draws: Draws) -> Verdict:
        verdict = super().verify(draft, p, draws)
        rejected = verdict.n_accepted < draft.lengths_B
        from_p = draws.pick(p.probs(verdict.n_accepted))
        return replace(verdict, next_token=torch.where(rejected, from_p, verdict.next_token))


class _OneTooMany(RejectionVerifier):
    def verify(self, draft: Draft, p: Scores, draws: Draws) -> Verdict:
        verdict = super().verify(draft, p, draws)
        n = torch.minimum(verdict.n_accepted + 1, draft.lengths_B)
        return replace(verdict, path=chain_path(n, draft.tokens.shape[1]), n_accepted=n)


class _KeyedByPosition(FreshDraws):
    def sample(self, logits, depth, rows=None, index=0):
        return self._at(depth).sample(logits, 0, rows, index) if depth else super().sample(logits, 0, rows, index)

    def uniform(self, count: int) -> Tensor:
        columns = [FreshDraws.uniform(self._at(i), 1) for i in range(count)]
        return torch.cat(columns, dim=1) if columns else super().uniform(0)

    def _at(self, depth: int) -> FreshDraws:
        """The draws of the position `depth` tokens on."""
        return FreshDraws(self.seed, self.requests_B, self.steps_B + depth, self.warp, self.device)
