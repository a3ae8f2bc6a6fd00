"""Runs every method on the same batches, interleaved, and hands over one record per request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from eval.methods import EncodedPrompt, Method, Outcome

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Record:
    """One request under one method: a line of results.jsonl. What starts with `batch_` describes the whole batch.

    rows: rows of the batch, fewer than `batch_size` where the prompts ran out.
    drafted, accepted: one entry per decode step of this request; None where HF generated.
    batch_phases: seconds of the decode steps by phase and of "prefill", see `specdec.stats.Stats`.
    """

    id: str
    category: str
    method: str
    drafter: str | None
    verifier: str | None
    lossless: bool
    batch_size: int
    batch: int
    repeat: int
    prompt_tokens: int
    tokens: list[int]
    drafted: list[int] | None
    accepted: list[int] | None
    rows: int
    batch_seconds: float
    batch_phases: dict[str, float] | None
    batch_forwards: int
    batch_decode_forwards: int | None
    batch_packed_tokens: int | None
    batch_syncs: int | None


@dataclass(frozen=True)
class Job:
    """One timed call: prompts [rows] of batch number `batch` at `batch_size`."""

    method: Method
    batch_size: int
    batch: int
    repeat: int
    prompts: list[EncodedPrompt]

    @property
    def key(self) -> tuple[str, int, int, int]:
        return job_key(self.method.name, self.batch_size, self.batch, self.repeat)


def job_key(method: str, batch_size: int, batch: int, repeat: int) -> tuple[str, int, int, int]:
    """What names a job in a folder of results."""
    return method, batch_size, batch, repeat


def batches(prompts: Sequence[EncodedPrompt], batch_size: int) -> list[list[EncodedPrompt]]:
    """Prompts of similar length together, so that padding costs HF `generate` as little as possible."""
    ordered = sorted(prompts, key=lambda prompt: (len(prompt.tokens), prompt.number))
    return [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]


def schedule(
    prompts: Sequence[EncodedPrompt], methods: Sequence[Method], batch_sizes: Sequence[int], repeats: int
) -> Iterator[Job]:
    """All jobs; methods take turns on each batch and the first one changes, so that drift of the machine hits all."""
    for batch_size in batch_sizes:
        for batch, rows in enumerate(batches(prompts, batch_size)):
            for repeat in range(repeats):
                first = (batch + repeat) % len(methods)
                for method in (*methods[first:], *methods[:first]):
                    yield Job(method, batch_size, batch, repeat, rows)


def execute(jobs: Sequence[Job], max_new_tokens: int, write: Callable[[list[Record]], None]) -> None:
    """Run `jobs` in order and `write` each one's records when it is done.

    Before its first job at a batch size each method runs a few tokens of it unrecorded, to be warm."""
    warm: set[tuple[str, int]] = set()
    for job in jobs:
        if (job.method.name, job.batch_size) not in warm:
            job.method.generate(job.prompts, min(WARM_UP_TOKENS, max_new_tokens))
            warm.add((job.method.name, job.batch_size))
        write(records(job, job.method.generate(job.prompts, max_new_tokens)))


def records(job: Job, outcome: Outcome) -> list[Record]:
    """One record per row of a finished job."""
    stats = outcome.stats
    return [
        Record(
            id=prompt.id,
            category=prompt.category,
            method=job.method.name,
            drafter=job.method.drafter,
            verifier=stats and stats.verifier,
            lossless=job.method.drafter is None or stats.lossless,
            batch_size=job.batch_size,
            batch=job.batch,
            repeat=job.repeat,
            prompt_tokens=len(prompt.tokens),
            tokens=tokens,
            drafted=stats and stats.rows[row].drafted,
            accepted=stats and stats.rows[row].accepted,
            rows=len(job.prompts),
            batch_seconds=outcome.seconds,
            batch_phases=stats and stats.seconds,
            batch_forwards=outcome.target_forwards,
            batch_decode_forwards=stats and stats.decode_forwards,
            batch_packed_tokens=stats and stats.packed_tokens,
            batch_syncs=stats and stats.syncs,
        )
        for row, (prompt, tokens) in enumerate(zip(job.prompts, outcome.tokens, strict=True))
    ]
