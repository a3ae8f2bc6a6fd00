"""Runs every method on the same batches, interleaved, and hands over one record per request."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from eval.methods import EncodedPrompt, Method, Outcome

WARM_UP_TOKENS = 8
PROBABILITY_PLACES = 6  # to which results.jsonl holds acceptance probabilities

RowKey = tuple[str, float, str, int]  # dtype, temperature, method, batch size: a row of the report's table
JobKey = tuple[str, float, str, int, int, int]  # and the batch and repeat


@dataclass(frozen=True)
class Record:
    """One request under one method: a line of results.jsonl. What starts with `batch_` describes the whole batch.

    conversation: the id that the turns of one chat share.
    draft_length: most drafted tokens per step; None where it was learned, and where another engine generated.
    rows: rows of the batch, fewer than `batch_size` where the prompts ran out.
    drafted, accepted: one entry per decode step of this request; None where another engine generated.
    accept_prob: per decode step, that of each reached position, see `specdec.stats.RowStats`; None for trees too.
    batch_prefill_seconds: from the call until every row has its first token; batch_prefill_tokens were emitted by then.
    batch_phases: seconds of the decode steps by phase and of "prefill", see `specdec.stats.Stats`.
    batch_audit_seconds: of "draft", what the evaluation itself took to look over the drafts; None without a drafter.
    batch_compile_seconds: of the warm-up before this batch, what it compiled forwards for; in none of the other times.
    """

    id: str
    conversation: str
    category: str
    method: str
    drafter: str | None
    verifier: str | None
    lossless: bool
    temperature: float
    dtype: str
    draft_length: int | None
    batch_size: int
    batch: int
    repeat: int
    prompt_tokens: int
    tokens: list[int]
    drafted: list[int] | None
    accepted: list[int] | None
    accept_prob: list[list[float | None]] | None
    rows: int
    batch_seconds: float
    batch_prefill_seconds: float
    batch_prefill_tokens: int
    batch_phases: dict[str, float] | None
    batch_audit_seconds: float | None
    batch_forwards: int | None
    batch_decode_forwards: int | None
    batch_packed_tokens: int | None
    batch_syncs: int | None
    batch_compile_seconds: float = 0.0

    @property
    def row(self) -> RowKey:
        return self.dtype, self.temperature, self.method, self.batch_size

    @property
    def job(self) -> JobKey:
        return *self.row, self.batch, self.repeat


@dataclass(frozen=True)
class Failure:
    """A job that raised: a line of results.jsonl too. Its row of the table is failed and is not run any further."""

    method: str
    drafter: str | None
    temperature: float
    dtype: str
    batch_size: int
    batch: int
    repeat: int
    error: str
    traceback: str

    @property
    def row(self) -> RowKey:
        return self.dtype, self.temperature, self.method, self.batch_size


@dataclass(frozen=True)
class Job:
    """One timed call: prompts [rows] of batch number `batch` at `batch_size`."""

    method: Method
    batch_size: int
    batch: int
    repeat: int
    prompts: list[EncodedPrompt]

    @property
    def row(self) -> RowKey:
        return self.method.dtype, self.method.temperature, self.method.name, self.batch_size

    @property
    def key(self) -> JobKey:
        """What names the job in a folder of results."""
        return *self.row, self.batch, self.repeat


def batches(prompts: Sequence[EncodedPrompt], batch_size: int) -> list[list[EncodedPrompt]]:
    """Prompts of similar length together, so that padding costs HF `generate` as little as possible."""
    ordered = sorted(prompts, key=lambda prompt: (len(prompt.tokens), prompt.number))
    return [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]


def schedule(
    prompts: Sequence[EncodedPrompt], methods: Sequence[Method], batch_sizes: Sequence[int], repeats: int
) -> Iterator[Job]:
    """All jobs; methods take turns on each batch and the first one changes, so that drift of the machine hits all.

    A method is left out at batch sizes that it cannot run."""
    for batch_size in batch_sizes:
        able = [method for method in methods if method.largest_batch is None or batch_size <= method.largest_batch]
        for batch, rows in enumerate(batches(prompts, batch_size)):
            for repeat in range(repeats):
                first = (batch + repeat) % len(able)
                for method in (*able[first:], *able[:first]):
                    yield Job(method, batch_size, batch, repeat, rows)


def execute(
    jobs: Sequence[Job],
    max_new_tokens: int,
    write: Callable[[Sequence[Record | Failure]], None],
    failed: Collection[RowKey] = (),
) -> None:
    """Run `jobs` in order and `write` each one's records when it is done, or its failure where it raised.

    Jobs of rows that failed, in this run or before it (`failed`), are left out. Before its first job in a row each
    method runs a few tokens of it unrecorded, to be warm."""
    warm, broken = set(), set(failed)
    for job in jobs:
        if job.row in broken:
            continue
        try:
            compiling = 0.0
            if job.row not in warm:
                stats = job.method.generate(job.prompts, min(WARM_UP_TOKENS, max_new_tokens)).stats
                compiling = 0.0 if stats is None else stats.compile_seconds
                warm.add(job.row)
            outcome = job.method.generate(job.prompts, max_new_tokens)
        except Exception as error:  # whatever a drafter raises ends its own row and no other
            broken.add(job.row)
            write([failure(job, error)])
        else:
            write(records(job, outcome, compiling))


def records(job: Job, outcome: Outcome, compile_seconds: float = 0.0) -> list[Record]:
    """One record per row of a finished job."""
    stats = outcome.stats
    return [
        Record(
            id=prompt.id,
            conversation=prompt.conversation or prompt.id,
            category=prompt.category,
            method=job.method.name,
            drafter=job.method.drafter,
            verifier=stats and stats.verifier,
            lossless=job.method.drafter is None or stats.lossless,
            temperature=job.method.temperature,
            dtype=job.method.dtype,
            draft_length=job.method.draft_length,
            batch_size=job.batch_size,
            batch=job.batch,
            repeat=job.repeat,
            prompt_tokens=len(prompt.tokens),
            tokens=tokens,
            drafted=stats and stats.rows[row].drafted,
            accepted=stats and stats.rows[row].accepted,
            accept_prob=None if stats is None or outcome.trees else _rounded(stats.rows[row].accept_prob),
            rows=len(job.prompts),
            batch_seconds=outcome.seconds,
            batch_prefill_seconds=outcome.prefill_seconds,
            batch_prefill_tokens=outcome.prefill_tokens,
            batch_phases=stats and stats.seconds,
            batch_audit_seconds=outcome.audit_seconds,
            batch_forwards=outcome.target_forwards,
            batch_decode_forwards=stats and stats.decode_forwards,
            batch_packed_tokens=stats and stats.packed_tokens,
            batch_syncs=stats and stats.syncs,
            batch_compile_seconds=compile_seconds,
        )
        for row, (prompt, tokens) in enumerate(zip(job.prompts, outcome.tokens, strict=True))
    ]


def failure(job: Job, error: Exception) -> Failure:
    """What is kept of a job that raised `error`."""
    method = job.method
    return Failure(
        method=method.name,
        drafter=method.drafter,
        temperature=method.temperature,
        dtype=method.dtype,
        batch_size=job.batch_size,
        batch=job.batch,
        repeat=job.repeat,
        error=f"{type(error).__name__}: {error}",
        traceback="".join(traceback.format_exception(error)),
    )


def _rounded(accept_prob: list[list[float | None]]) -> list[list[float | None]]:
    return [[None if p is None else round(p, PROBABILITY_PLACES) for p in step] for step in accept_prob]
