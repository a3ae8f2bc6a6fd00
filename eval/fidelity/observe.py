"""A job of the ladder run, and what is to be known of each of its tokens: numbers, not distributions."""

from __future__ import annotations

import time
import traceback
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eval.fidelity.ladder import PLAIN, WIDTH, Job, Ladder, Watched
from eval.fidelity.replay import replay
from eval.fidelity.rescore import processed, teacher_forced
from eval.fidelity.results import Result
from eval.fidelity.samples import samples
from eval.methods import EncodedPrompt

REPLAY_EVERY = 8  # of a row's steps, one in so many is kept in full and replayed


def observe(ladder: Ladder, job: Job, found: Collection[Result]) -> list[Result]:
    """The job's results, one per row. found: those of the rungs before it.

    What the job raises is recorded in its results and not raised: one bad batch must not end hours of work."""
    try:
        return [_teacher_forced(ladder, job, found)] if job.rung is WIDTH else _decoded(ladder, job)
    except Exception:
        error = traceback.format_exc()
        return [Result(**_who(ladder, job, prompt), error=error) for prompt in job.prompts]


def _decoded(ladder: Ladder, job: Job) -> list[Result]:
    watched = ladder.watch(job, lambda row, step: step % REPLAY_EVERY == 1)  # a row's first verdict, 0, has no draft
    columns = ladder.columns(job.prompts)[0].tolist()
    model = ladder.reference if job.rung.reference else ladder.model
    results = []
    for row, prompt in enumerate(job.prompts):
        tokens = watched.recorder.rows[row].tokens
        raw_TV = teacher_forced(model, prompt.tokens, tokens)
        scores_TV = processed(ladder.processors(job.prompts, row), columns[row], tokens, raw_TV)
        results.append(_result(ladder, job, watched, row, raw_TV, scores_TV))
    return results


def _result(ladder: Ladder, job: Job, watched: Watched, row: int, raw_TV: Tensor, scores_TV: Tensor) -> Result:
    log, prompt, seed = watched.recorder.rows[row], job.prompts[row], ladder.seed + job.sample
    tested = job.rung.speculative and ladder.sampling["do_sample"]
    rng = np.random.default_rng([seed % 2**64, prompt.number])  # as in the streams, any int is a seed
    replays = [replay(kept, seed, prompt.number, len(prompt.tokens)) for kept in log.kept]
    return Result(
        **_who(ladder, job, prompt),
        tokens=log.tokens,
        steps=log.steps,
        drafted=log.drafted,
        scores=log.scores,
        shifts=_shifts(log.scores, scores_TV, log.tokens),
        outside=_outside(raw_TV, scores_TV, log.tokens),
        samples=samples(scores_TV, log.tokens, log.guesses, rng) if tested else {},
        replays=[[found.step, found.rule, found.violation] for found in replays if found is not None],
        verifier=watched.stats.verifier,
        lossless=watched.stats.lossless,
        seconds=watched.seconds,
        collecting=watched.recorder.seconds,
    )


def _teacher_forced(ladder: Ladder, job: Job, found: Collection[Result]) -> Result:
    """Rung 3, of the tokens that rung 1 emitted."""
    [prompt] = job.prompts
    tokens = next(r.tokens for r in found if r.rung == PLAIN.number and r.number == prompt.number)
    started = time.perf_counter()
    scores = ladder.scores_at_width(prompt, tokens)[range(len(tokens)), tokens].tolist()
    seconds = time.perf_counter() - started
    raw_TV = teacher_forced(ladder.model, prompt.tokens, tokens)
    scores_TV = processed(ladder.processors(job.prompts), prompt.tokens, tokens, raw_TV)
    shifts = _shifts(scores, scores_TV, tokens)
    return Result(**_who(ladder, job, prompt), tokens=tokens, scores=scores, shifts=shifts, seconds=seconds)


def _who(ladder: Ladder, job: Job, prompt: EncodedPrompt) -> dict[str, Any]:
    return {
        "rung": job.rung.number,
        "sample": job.sample,
        "batch": job.batch,
        "rows": len(job.prompts),
        "seed": ladder.seed + job.sample,
        "id": prompt.id,
        "number": prompt.number,
        "prompt_tokens": len(prompt.tokens),
    }


def _shifts(scores: Sequence[float], scores_TV: Tensor, tokens: Sequence[int]) -> list[float | None]:
    """The engine's score of each token minus teacher forcing's, None where that is -inf."""
    plain = scores_TV[range(len(tokens)), tokens].tolist()
    return [None if there == float("-inf") else here - there for here, there in zip(scores, plain, strict=True)]


def _outside(raw_TV: Tensor, scores_TV: Tensor, tokens: Sequence[int]) -> list[list[float]]:
    """[position, logit below the lowest kept one] of the tokens that the processors leave no probability."""
    found = []
    for position, (raw_V, scores_V, token) in enumerate(zip(raw_TV, scores_TV, tokens, strict=True)):
        if scores_V[token] == -torch.inf:
            found.append([position, float(raw_V[scores_V > -torch.inf].min() - raw_V[token])])
    return found
