"""From records to one row per method and batch size. Every number here is a function of results.jsonl alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from eval.runner import Record
from specdec.stats import PHASES

CONTROL = "plain"


@dataclass(frozen=True)
class Run:
    """One timed call: the records of one method's pass over one batch."""

    records: list[Record]

    @property
    def seconds(self) -> float:
        return self.records[0].batch_seconds

    @property
    def tokens(self) -> int:
        return sum(len(record.tokens) for record in self.records)

    @property
    def speed(self) -> float:
        """Tokens per second, prefill included."""
        return self.tokens / self.seconds


Runs = dict[tuple[int, int], Run]  # by batch and repeat


def grouped(records: Iterable[Record]) -> dict[int, dict[str, Runs]]:
    """Runs by batch size and method, in the order of their first record."""
    found: dict[int, dict[str, dict[tuple[int, int], list[Record]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for record in records:
        found[record.batch_size][record.method][record.batch, record.repeat].append(record)
    return {
        size: {method: {key: Run(rows) for key, rows in runs.items()} for method, runs in methods.items()}
        for size, methods in found.items()
    }


def rows(
    records: Iterable[Record], methods: Sequence[str], temperature: float, dtype: str, compared: Collection[str]
) -> list[dict[str, Any]]:
    """summary.json's `rows`: one per batch size and method that has results, methods in the order given.

    compared: methods whose outputs should equal plain decoding's token by token; exact_match_rate is None for others.
    """
    return [
        {"method": method, "batch_size": size, "temperature": temperature, "dtype": dtype}
        | _row(found[method], found.get("hf", {}), found.get(CONTROL, {}), method in compared)
        for size, found in grouped(records).items()
        for method in methods
        if method in found
    ]


def _row(runs: Runs, hf: Runs, control: Runs, compare: bool) -> dict[str, Any]:
    first = next(iter(runs.values())).records[0]
    passes = [run for (_, repeat), run in runs.items() if repeat == 0]
    tokens = sum(run.tokens for run in passes)
    matches = [pair[0].tokens == pair[1].tokens for pair in paired(runs, control)] if compare else []
    vs_plain, vs_hf = _speedups(runs, control), _speedups(runs, hf)
    return {
        "drafter": first.drafter,
        "verifier": first.verifier,
        "lossless": first.lossless,
        **_acceptance([record for run in passes for record in run.records]),
        "tokens_per_second": tokens / _seconds_of_a_pass(runs),
        "decode_step_ms": _decode_step_ms(runs.values()),
        "speedup_vs_plain": _median(vs_plain),
        "speedup_vs_plain_quartiles": _quartiles(vs_plain),
        "speedup_vs_hf": _median(vs_hf),
        "speedup_vs_hf_quartiles": _quartiles(vs_hf),
        "exact_match_rate": sum(matches) / len(matches) if matches else None,
        "divergences": len(matches) - sum(matches) if matches else None,
        "target_forwards": sum(run.records[0].batch_forwards for run in passes),
        "tokens": tokens,
        "requests": sum(len(run.records) for run in passes),
        "timed_batches": len(runs),
        "rows_per_batch": sum(len(run.records) for run in passes) / len(passes),
        "phase_shares": _phase_shares(runs.values()),
    }


def paired(runs: Runs, control: Runs) -> list[tuple[Record, Record]]:
    """Each request of the first pass with the same request of the control's."""
    return [
        pair
        for key, run in runs.items()
        if key[1] == 0 and key in control
        for pair in zip(run.records, control[key].records, strict=True)
    ]


def plain_across_batch_sizes(records: Iterable[Record]) -> list[dict[str, int]]:
    """How many requests of plain decoding differ from plain decoding at the first batch size, for each other one.

    What the batch size alone changes, to be read beside what a drafter changes."""
    outputs: dict[int, dict[str, list[int]]] = defaultdict(dict)
    for record in records:
        if record.method == CONTROL and record.repeat == 0:
            outputs[record.batch_size][record.id] = record.tokens
    reference, *others = outputs or [None]
    return [
        {
            "batch_size": size,
            "reference_batch_size": reference,
            "requests": len(outputs[size].keys() & outputs[reference].keys()),
            "different": sum(outputs[reference].get(id, tokens) != tokens for id, tokens in outputs[size].items()),
        }
        for size in others
    ]


def _acceptance(records: list[Record]) -> dict[str, float | None]:
    """Mean accepted length and acceptance rate as `specdec.stats` defines them; None where nothing was counted."""
    steps = sum(len(record.accepted or ()) for record in records)
    drafted = sum(sum(record.drafted or ()) for record in records)
    accepted = sum(sum(record.accepted or ()) for record in records)
    return {
        "mean_accepted_length": 1 + accepted / steps if steps else None,
        "acceptance_rate": accepted / drafted if drafted else None,
    }


def _seconds_of_a_pass(runs: Runs) -> float:
    """Sum over batches of the median over repeats."""
    by_batch: dict[int, list[float]] = defaultdict(list)
    for (batch, _), run in runs.items():
        by_batch[batch].append(run.seconds)
    return sum(map(median, by_batch.values()))


def _decode_step_ms(runs: Iterable[Run]) -> float | None:
    """Milliseconds per step without prompt tokens, all phases; None for HF, and where no such step ran."""
    first = [run.records[0] for run in runs if run.records[0].batch_phases is not None]
    steps = sum(record.batch_decode_forwards for record in first)
    return 1e3 * sum(record.batch_phases[phase] for record in first for phase in PHASES) / steps if steps else None


def _phase_shares(runs: Iterable[Run]) -> dict[str, float] | None:
    """Share of each phase in the time of the decode steps; None for HF, and where no decode step ran."""
    phases = [run.records[0].batch_phases for run in runs if run.records[0].batch_phases is not None]
    seconds = {phase: sum(times[phase] for times in phases) for phase in PHASES}
    total = sum(seconds.values())
    return {phase: seconds[phase] / total for phase in PHASES} if total else None


def _speedups(runs: Runs, other: Runs) -> list[float]:
    """Ratio of speeds for each batch and repeat: the two were timed right after one another."""
    return [run.speed / other[key].speed for key, run in runs.items() if key in other]


def _median(values: list[float]) -> float | None:
    return median(values) if values else None


def _quartiles(values: list[float]) -> list[float] | None:
    return np.quantile(values, [0.25, 0.75]).tolist() if values else None
