"""What a row of the table took: speeds and speed-ups of the same batches, prefill and decode apart, and what was ideal.

Times come from calls that were made in turns; a pass is every batch once, with its median over the repeats.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import numpy as np

from eval.runs import Run, Runs
from eval.theory import ideal_speedup, leviathan_speedup, oracle_speedup
from specdec.stats import PHASES


def speeds(runs: Runs, control: Runs, hf: Runs, vllm: Runs) -> dict[str, Any]:
    """Tokens per second and ratios to the others on the same batch and repeat, medians and quartiles."""
    tokens = sum(run.tokens for run in first_pass(runs))
    prompt_tokens = sum(record.prompt_tokens for run in first_pass(runs) for record in run.records)
    prefill = _of_a_pass(runs, lambda run: run.records[0].batch_prefill_seconds)
    whole = _of_a_pass(runs, lambda run: run.seconds)
    decoded = tokens - sum(run.records[0].batch_prefill_tokens for run in first_pass(runs))
    return {
        "tokens_per_second": tokens / whole if whole else None,
        "prefill_tokens_per_second": prompt_tokens / prefill if prefill else None,
        "decode_tokens_per_second": decoded / (whole - prefill) if decoded and whole > prefill else None,
        "decode_step_ms": decode_step_ms(runs),
        **_ratios("speedup_vs_plain", runs, control, lambda run: run.speed),
        **_ratios("decode_speedup_vs_plain", runs, control, lambda run: run.decode_speed),
        **_ratios("speedup_vs_hf", runs, hf, lambda run: run.speed),
        **_ratios("speedup_vs_vllm", runs, vllm, lambda run: run.speed),
        "spread": _spread(runs),
        "phase_shares": phase_shares(runs),
        "audit_share": audit_share(runs),
    }


def limits(row: dict[str, Any], runs: Runs, control: Runs, draft_length: int | None) -> dict[str, float | None]:
    """What the measured step times would allow, beside what was achieved, for a row with drafts; else all None.

    ideal_speedup:      AL x T_plain / (T_draft + T_verify + T_sample), times per decode step of the batch.
    achieved_of_ideal:  decode_speedup_vs_plain / ideal: below 1 by what the loop wastes, and by finished rows.
    oracle_speedup:     the same step with such drafts only as will be accepted; ideal_of_oracle: what others cost.
    predicted_speedup:  Leviathan's closed form from the noise-free acceptance (None without, as for trees) and the time
                        of a drafted token, for a fixed draft length; it takes every step to draft its full length.
    """
    found = dict.fromkeys(
        ("ideal_speedup", "achieved_of_ideal", "oracle_speedup", "ideal_of_oracle", "predicted_speedup")
    )
    step, plain = step_seconds(runs), step_seconds(control)
    AL, drafted = row["mean_accepted_length"], row["drafted_per_step"]
    if step is None or plain is None or AL is None or not drafted:
        return found
    t_plain = sum(plain.values())
    parts = (step["draft"], step["forward"], step["verify"])
    found["ideal_speedup"] = ideal_speedup(AL, t_plain, *parts)
    found["oracle_speedup"] = oracle_speedup(AL, drafted, t_plain, *parts)
    found["ideal_of_oracle"] = found["ideal_speedup"] / found["oracle_speedup"]
    if row["decode_speedup_vs_plain"] is not None:
        found["achieved_of_ideal"] = row["decode_speedup_vs_plain"] / found["ideal_speedup"]
    if draft_length and (alpha := row["noise_free_acceptance"]) is not None:
        found["predicted_speedup"] = leviathan_speedup(alpha, draft_length, step["draft"] / draft_length / t_plain)
    return found


def step_seconds(runs: Runs) -> dict[str, float] | None:
    """Mean seconds of a decode step (one without prompt tokens) by phase; None for HF, and where no such step ran."""
    first = [run.records[0] for run in runs.values() if run.records[0].batch_phases is not None]
    steps = sum(record.batch_decode_forwards for record in first)
    return {phase: sum(r.batch_phases[phase] for r in first) / steps for phase in PHASES} if steps else None


def decode_step_ms(runs: Runs) -> float | None:
    """Milliseconds of a decode step, all phases."""
    step = step_seconds(runs)
    return step and 1e3 * sum(step.values())


def phase_shares(runs: Runs) -> dict[str, float] | None:
    """Share of each phase in the time of the decode steps; None for HF, and where no decode step ran."""
    step = step_seconds(runs)
    total = sum(step.values()) if step else 0
    return {phase: seconds / total for phase, seconds in step.items()} if total else None


def audit_share(runs: Runs) -> float | None:
    """Share of the calls' time in which the evaluation looked over drafts; None without a drafter."""
    timed = [(run.records[0].batch_audit_seconds, run.seconds) for run in runs.values()]
    watched = [(audit, seconds) for audit, seconds in timed if audit is not None]
    return sum(audit for audit, _ in watched) / sum(seconds for _, seconds in watched) if watched else None


def first_pass(runs: Runs) -> list[Run]:
    """Every batch once."""
    return [run for (_, repeat), run in runs.items() if repeat == 0]


def speedups(runs: Runs, other: Runs, speed: Callable[[Run], float | None]) -> list[float]:
    """Ratio of speeds for each batch and repeat that both have: they were timed right after one another."""
    pairs = [(speed(run), speed(other[key])) for key, run in runs.items() if key in other]
    return [ours / theirs for ours, theirs in pairs if ours is not None and theirs]


def median_or_none(values: list[float]) -> float | None:
    return median(values) if values else None


def _ratios(name: str, runs: Runs, other: Runs, speed: Callable[[Run], float | None]) -> dict[str, Any]:
    values = speedups(runs, other, speed)
    quartiles = np.quantile(values, [0.25, 0.75]).tolist() if values else None
    return {name: median_or_none(values), f"{name}_quartiles": quartiles}


def _of_a_pass(runs: Runs, value: Callable[[Run], float]) -> float:
    """Sum over batches of the median over repeats."""
    return sum(median(values) for values in _by_batch(runs, value))


def _spread(runs: Runs) -> float | None:
    """Median over batches of (slowest - fastest) / median over the repeats of one; None without repeats."""
    repeated = [values for values in _by_batch(runs, lambda run: run.seconds) if len(values) > 1]
    return median_or_none([(max(values) - min(values)) / median(values) for values in repeated])


def _by_batch(runs: Runs, value: Callable[[Run], float]) -> Iterable[list[float]]:
    found: dict[int, list[float]] = defaultdict(list)
    for (batch, _), run in runs.items():
        found[batch].append(value(run))
    return found.values()
