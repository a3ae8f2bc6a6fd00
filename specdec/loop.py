"""The decode loop: draft, score, verify, commit, for rows that prefill, decode and finish independently."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from specdec.budget import Budget, Drafted
from specdec.columns import Columns
from specdec.contracts import Draft, Drafter, Draws, Rows, Scores, Verdict, Verifier
from specdec.draft_checks import check_draft, check_trimmable, claimed, made_safe
from specdec.draws import make_draws, raise_if_undefined
from specdec.hidden_states import HiddenStates
from specdec.processors import Prefixes, Processors
from specdec.prompt_reader import PromptReader
from specdec.read import Read, read_verdict
from specdec.requests import Request
from specdec.score_recorder import ScoreRecorder
from specdec.stats import Clock, Stats
from specdec.step import Segment, Step
from specdec.stopping import Stops
from specdec.target import Target

CHUNK = 512  # prompt tokens per step, over all rows

OnCommit = Callable[[int, list[int], int], None]


@dataclass
class Batch:
    """Everything a generation needs. Made once per call; `run` empties it.

    drafter: None for plain decoding.   draft_length: most drafted tokens per row and step.
    budget:  chooses each row's draft length, up to that, as it learns what pays; None always drafts all of it. For
             chains: where a drafter hands over trees, it is given the whole length from then on.
    on_commit: called per row and step with (index, emitted tokens, how many of the first of them were drafted).
    max_rows:  most requests in work at a time, None = all. The others wait, and the first of them takes a place as soon
               as one is free.
    chunk:     most prompt tokens per step, over all rows: bounds the wait of the rows that decode beside them.
    reader:    in place of the target in the first step, which then takes all prompts whole.
    recorder:  keeps the scores of emitted tokens.   columns: asks criteria and streams for all rows together.
    keeps_cache: finished rows keep their keys and values, for who made the batch to read.
    """

    target: Target
    drafter: Drafter | None
    verifier: Verifier
    processors: Processors
    stops: Stops
    requests: list[Request]
    seed: int
    draft_length: int
    budget: Budget | None = None
    on_commit: OnCommit | None = None
    max_rows: int | None = None
    chunk: int = CHUNK
    reader: PromptReader | None = None
    recorder: ScoreRecorder | None = None
    columns: Columns | None = None
    keeps_cache: bool = False
    stats: Stats = field(init=False)

    def __post_init__(self):
        name = "none" if self.drafter is None else getattr(self.drafter, "name", type(self.drafter).__name__)
        self.stats = Stats(name, self.verifier.name, self.verifier.lossless, [r.stats for r in self.requests])
        self.waiting = deque(self.requests)
        self.live: dict[int, Request] = {}
        self.cache = self.target.new_cache()
        self.needs_hidden = getattr(self.drafter, "needs_hidden", None)
        self.limits: list[int] = []  # what each row of the step could draft,
        self.grades: list[int] = []  # and of which grade
        self.trims = getattr(self.drafter, "trimmable", False)
        self.hidden = HiddenStates()
        self.device, self.vocab_size = self.target.device, self.target.vocab_size
        self._clock = Clock(self.stats)

    def run(self) -> None:
        """Decode until every request is done."""
        for _ in self.finished():
            pass

    def finished(self) -> Iterator[Request]:
        """Decode, and yield each request as it finishes. A drafter is released of all rows even when something raises,
        or when the caller stops asking."""
        with claimed(self.drafter, self.stats.drafter):
            try:
                while self.live or self.waiting:
                    yield from self.step()
            finally:
                if self.drafter is not None and self.live:
                    self.drafter.release(list(self.live))

    @torch.no_grad()
    def step(self) -> list[Request]:
        """One packed forward and one verdict. Returns the requests that it finished."""
        self._clock.start()
        self.admit()
        segments = self.schedule()
        scored = [self.live[s.row] for s in segments if s.scored]
        self._clock.prefill = any(self.live[s.row].steps == 0 for s in segments)
        draws = self.draws(scored)
        self._clock.lap("loop")
        draft, invalid = self.propose(scored, draws)
        self._clock.lap("draft")
        target = self.target if self.stats.forwards else self.reader or self.target
        step = target.pack(segments, draft, self.cache)
        self._clock.lap("loop")
        logits, hidden = target.forward(step, self.cache, self.needs_hidden)
        self._clock.lap("forward")
        scores = self.processed(scored, draft, Scores(logits, step.index))
        verdict = self.verify(scored, draft, scores, draws)
        read = read_verdict(draft, verdict, invalid)
        self.stats.syncs += 1
        self._clock.lap("verify")
        self.commit(segments, scored, draft, verdict, read)
        if self.recorder is not None:
            self.recorder.add(scored, verdict.path, step.index, logits, scores.logits)
        self._clock.lap("loop")
        self.observe(segments, scored, step, verdict, hidden)
        self._clock.lap("draft")
        if self.columns is not None:
            self.columns.advance()
        finished = [request for request in self.live.values() if request.done]
        self.retire(finished)
        self.count(step)
        self._clock.lap("loop")
        self.learn(scored, draft, read)
        self._clock.lap("loop")
        return finished

    def admit(self) -> None:
        """Give waiting requests the free places."""
        free = len(self.waiting) if self.max_rows is None else self.max_rows - len(self.live)
        entering = [self.waiting.popleft() for _ in range(min(free, len(self.waiting)))]
        if not entering:
            return
        rows = [request.row for request in entering]
        if self.drafter is not None:
            self.drafter.admit(rows)  # before they are live: where it raises, there is nothing to release
        self.live |= zip(rows, entering, strict=True)
        self.cache.admit(rows)

    def schedule(self) -> list[Segment]:
        """Every decoding row's last token, and prompt chunks of at most `chunk` tokens in all."""
        segments, left = [], self.chunk
        for row, request in self.live.items():
            cached, tokens = self.cache.lengths[row], request.tokens
            count = request.slots - cached
            if request.steps == 0:
                count = min(count, left - left % self.target.chunk)
                left -= count
            else:
                assert count == 1, f"row {row}: {cached} tokens cached of {request.slots} committed"
            if count:
                first = max(0, cached - request.before)
                ids = tokens[first : cached + count - request.before]
                segments.append(Segment(row, ids, cached, cached + count == request.slots, request.shift))
        return segments

    def draws(self, scored: Sequence[Request]) -> Draws:
        """This step's random numbers for the scored rows."""
        return make_draws(
            self.verifier.draws,
            self.seed,
            [r.request_id for r in scored],
            [r.steps for r in scored],
            [len(r.tokens) for r in scored],
            self.processors.warp,
            self.device,
        )

    def rows(self, scored: Sequence[Request]) -> Rows:
        """What the drafter sees of the scored rows now."""
        return Rows([r.row for r in scored], [r.tokens for r in scored], self.device, self.vocab_size)

    def propose(self, scored: Sequence[Request], draws: Draws) -> tuple[Draft, Tensor]:
        """The draft, with ids and parents made safe to index with, and [B] whether a row's draft held an invalid one.

        Nothing is drafted in the step that ends a row's prompt, nor past its last token (one more token always
        follows the accepted ones)."""
        self.limits = [min(self.draft_length, r.room - 1) if r.steps else 0 for r in scored]
        self.grades = [0] * len(scored)
        given = self.limits if self.trims else self.worthwhile(scored)
        if self.drafter is None or not any(given):
            return self.nothing(len(scored))
        draft = self.drafter.propose(self.rows(scored), given, draws)
        check_draft(draft, given, self.stats.drafter, self.vocab_size, self.device)
        if self.trims:
            check_trimmable(draft, self.stats.drafter)
            self.limits, self.grades = list(draft.lengths), list(draft.grades or self.grades)
            draft = replace(draft, lengths=self.worthwhile(scored))
        return made_safe(draft, self.vocab_size) if any(draft.lengths) else self.nothing(len(scored))

    def nothing(self, rows: int) -> tuple[Draft, Tensor]:
        """What `propose` returns where no row drafts."""
        return Draft.empty(rows, self.device), torch.zeros(rows, dtype=torch.bool, device=self.device)

    def worthwhile(self, scored: Sequence[Request]) -> list[int]:
        """As much of the step's `limits` as the budget finds worth drafting."""
        if self.budget is None or not any(self.limits):
            return self.limits
        rooms = None if self.waiting else [r.room for r in scored]
        return self.budget.lengths([r.row for r in scored], self.limits, self.grades, rooms)

    def processed(self, scored: Sequence[Request], draft: Draft, scores: Scores) -> Scores:
        """p at every node, from the target's logits there."""
        if not scored:
            return scores
        if not self.processors.is_identity:
            parents = None
            if draft.parents is not None:
                parents = draft.parents.cpu().numpy()  # a second read, only for trees under prefix-dependent processors
            texts, unseen = [r.text for r in scored], [r.unseen for r in scored]
            prefixes = Prefixes(texts, [r.index for r in scored], draft, parents, unseen)
            return replace(scores, logits=self.processors.apply(scores.logits, prefixes))
        return scores if self.verifier.draws == "argmax" else replace(scores, logits=scores.logits.float())

    def verify(self, scored: Sequence[Request], draft: Draft, scores: Scores, draws: Draws) -> Verdict:
        """The rule's verdict. It never meets a step that scores no row (one of prompt chunks only)."""
        return self.verifier.verify(draft, scores, draws) if scored else Verdict.empty(self.device)

    def commit(
        self, segments: Sequence[Segment], scored: Sequence[Request], draft: Draft, verdict: Verdict, read: Read
    ) -> None:
        """Append what was accepted, cut at stops; move lengths. For a chain nothing is copied."""
        if read.invalid:
            raise ValueError(
                f"drafter {self.stats.drafter!r} proposed a token outside the target's vocabulary of "
                f"{self.vocab_size}, or a tree in which a parent does not come before its child: it must "
                f"propose target token ids, and parents as indices of earlier tokens or -1"
            )
        if draft.parents is not None:
            self.cache.keep_path([(r.row, r.slots - 1) for r in scored], verdict.path)
        for segment in segments:
            self.cache.lengths[segment.row] = segment.start + len(segment.tokens)
        for b, request in enumerate(scored):
            n = read.n_accepted[b]
            block = [*read.accepted[b][:n], read.next_token[b]]
            tokens, request.done = self.stops.cut(request, [token for token in block if token >= 0])
            if not request.done:  # past a stop the processors may leave no token, and need not
                raise_if_undefined(block[-1], b, request.request_id, request.steps)
            request.append(tokens)
            self.cache.lengths[request.row] = request.slots - 1
            if request.steps:
                request.stats.record(draft.lengths[b], n, read.accept_prob[b])
            request.steps += 1
            if self.on_commit is not None:
                self.on_commit(request.index, tokens, min(n, len(tokens)))

    def observe(
        self,
        segments: Sequence[Segment],
        scored: Sequence[Request],
        step: Step,
        verdict: Verdict,
        hidden: Tensor | None,
    ) -> None:
        """Tell the drafter, with the states [n, D] of the tokens that stayed if it asked for them."""
        if self.drafter is None:
            return
        if hidden is not None:
            self.hidden.add(segments, scored, step, verdict, hidden, self.cache.lengths)
        if scored:
            rows = self.rows(scored)
            self.drafter.observe(rows, verdict, None if hidden is None else self.hidden.take(rows.ids))

    def retire(self, finished: Sequence[Request]) -> None:
        """Free what finished rows hold."""
        rows = [request.row for request in finished]
        for row in rows:
            del self.live[row]
            self.hidden.forget(row)
        if not self.keeps_cache:
            self.cache.release(rows)
        if self.drafter is not None and rows:
            self.drafter.release(rows)

    def learn(self, scored: Sequence[Request], draft: Draft, read: Read) -> None:
        """What this step tells about the draft lengths that pay."""
        if draft.parents is not None:
            self.budget = None
        if self.budget is None:
            return
        steps = zip(scored, draft.lengths, read.n_accepted, self.grades, self.limits, strict=True)
        could = [Drafted(request.row, *of) for request, *of, limit in steps if limit]
        self.budget.acceptance.record(could)
        graph = self.target.graph
        if not self._clock.prefill and (graph is None or graph.settled):
            drafting, seconds = self._clock.step["draft"], sum(self._clock.step.values())
            spent = 0.0 if self.trims else drafting  # what is spent anyway decides nothing
            self.budget.time(len(scored), draft.lengths, seconds - drafting, spent)
        for request in scored:
            if request.done:
                self.budget.acceptance.forget(request.row)

    def count(self, step: Step) -> None:
        """Counted work: what regressions are measured by."""
        self.stats.forwards += len(step.packed)
        self.stats.decode_forwards += not self._clock.prefill
        self.stats.verifier = self.verifier.name  # "auto" knows which rule it took only now
        self.stats.packed_tokens += sum(step.packed)
