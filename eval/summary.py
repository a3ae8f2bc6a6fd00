"""From results to one row per dtype, temperature, batch size and method, in all and by category.

Every number here is a function of results.jsonl alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from eval.acceptance import acceptance, by_position
from eval.hf import HF
from eval.runner import Failure, Record, RowKey
from eval.runs import CONTROL, Runs, compared_methods, conditions, control_of, grouped, paired, sound
from eval.speed import first_pass, limits, median_or_none, speeds, speedups
from eval.vllm.rows import VLLM

Row = dict[str, Any]


def table(results: Sequence[Record | Failure]) -> list[Row]:
    """summary.json's `rows`, for all dtypes and temperatures, all in the order in which they first appear.

    A row of which a job raised has an `error` and a `traceback` and no numbers: those of its other batches would not be
    comparable."""
    broken = {result.row: result for result in results if isinstance(result, Failure)}
    found = {row: _failed_row(failure) for row, failure in broken.items()}
    for (dtype, temperature), kept in conditions(sound(results)).items():
        methods = list(dict.fromkeys(record.method for record in kept))
        for row in rows(kept, methods, temperature, dtype, compared_methods(kept)):
            found[dtype, temperature, row["method"], row["batch_size"]] = row
    return [found[key] for key in _in_order(results) if key in found]


def rows(
    records: Iterable[Record], methods: Sequence[str], temperature: float, dtype: str, compared: Collection[str]
) -> list[Row]:
    """One row per batch size and method that has results, methods in the order given; all of one dtype and temperature.

    compared: methods whose outputs should equal plain decoding's token by token; exact_match_rate is None for others.
    """
    found = []
    for size, runs in grouped(records).items():
        for method in methods:
            if method in runs:
                first = next(iter(runs[method].values())).records[0]
                identity = {
                    "drafter": first.drafter,
                    "verifier": first.verifier,
                    "draft_length": first.draft_length,
                    "lossless": first.lossless,
                    "error": None,
                    "traceback": None,
                }
                numbers = _numbers(runs[method], runs, first.draft_length)
                matches = _matches(method, runs) if method in compared else {}
                found.append(_key(method, size, temperature, dtype) | identity | numbers | matches)
    return found


def categories(records: Iterable[Record]) -> list[Row]:
    """One row per dtype, temperature, batch size, method and category; none where all are of one category.

    A batch may mix categories: `speedup_vs_plain` is of the batches with a single one, so of all at batch size 1."""
    found = []
    for (dtype, temperature), kept in conditions(records).items():
        if len(names := list(dict.fromkeys(record.category for record in kept))) == 1:
            continue
        for size, methods in grouped(kept).items():
            for method, runs in methods.items():
                key = _key(method, size, temperature, dtype)
                found += [{"category": name} | key | _of_category(name, runs, methods) for name in names]
    return [row for row in found if row["requests"]]


def plain_across_batch_sizes(records: Iterable[Record]) -> list[dict[str, Any]]:
    """How many requests of plain decoding differ from plain decoding at the first batch size, for each other one.

    What the batch size alone changes, to be read beside what a drafter changes. A request's random numbers do not
    depend on its batch, so that this holds for samples too."""
    found = []
    for (dtype, temperature), kept in conditions(records).items():
        outputs: dict[int, dict[str, list[int]]] = defaultdict(dict)
        for record in kept:
            if record.method == CONTROL and record.repeat == 0:
                outputs[record.batch_size][record.id] = record.tokens
        reference, *others = outputs or [None]
        for size in others:
            shared = outputs[size].keys() & outputs[reference].keys()
            found.append(
                {
                    "dtype": dtype,
                    "temperature": temperature,
                    "batch_size": size,
                    "reference_batch_size": reference,
                    "requests": len(shared),
                    "different": sum(outputs[reference][id] != outputs[size][id] for id in shared),
                }
            )
    return found


def compile_seconds(results: Iterable[Record | Failure]) -> float:
    """What compiling took in all, in every process and before a kill too."""
    return sum({result.job: result.batch_compile_seconds for result in results if isinstance(result, Record)}.values())


def _key(method: str, size: int, temperature: float, dtype: str) -> Row:
    return {"method": method, "batch_size": size, "temperature": temperature, "dtype": dtype}


def _numbers(runs: Runs, found: dict[str, Runs], draft_length: int | None) -> Row:
    """Everything that is counted or timed, for the runs of one method; `found`: those of all. Works without any."""
    passes, control = first_pass(runs), found.get(CONTROL, {})
    requests = [record for run in passes for record in run.records]
    row = {
        **acceptance(requests),
        "acceptance_by_position": by_position(requests),
        **speeds(runs, control, found.get(HF, {}), _faster_vllm(found)),
        "exact_match_rate": None,
        "divergences": None,
        "target_forwards": _total(run.records[0].batch_forwards for run in passes),
        "tokens": sum(run.tokens for run in passes),
        "requests": len(requests),
        "timed_batches": len(runs),
        "rows_per_batch": len(requests) / len(passes) if passes else None,
    }
    return row | limits(row, runs, control, draft_length)


def _faster_vllm(found: dict[str, Runs]) -> Runs:
    """Those of vLLM's runs, plain or with drafts, that took less time in all; none where it was not run."""
    theirs = [runs for method, runs in found.items() if method.startswith(VLLM)]
    return min(theirs, key=lambda runs: sum(run.seconds for run in runs.values()), default={})


def _total(counts: Iterable[int | None]) -> int | None:
    """None where one is not known."""
    known = list(counts)
    return None if None in known else sum(known)


def _matches(method: str, found: dict[str, Runs]) -> Row:
    matches = [ours.tokens == theirs.tokens for ours, theirs in paired(found[method], control_of(method, found))]
    if not matches:
        return {}
    return {"exact_match_rate": sum(matches) / len(matches), "divergences": len(matches) - sum(matches)}


def _failed_row(failure: Failure) -> Row:
    identity = {
        "drafter": failure.drafter,
        "verifier": None,
        "draft_length": None,
        "lossless": None,
        "error": failure.error,
        "traceback": failure.traceback,
    }
    key = _key(failure.method, failure.batch_size, failure.temperature, failure.dtype)
    return key | identity | _numbers({}, {}, None)


def _of_category(name: str, runs: Runs, methods: dict[str, Runs]) -> Row:
    requests = [record for run in first_pass(runs) for record in run.records if record.category == name]
    pure = {key: run for key, run in runs.items() if {record.category for record in run.records} == {name}}
    return {
        "lossless": all(record.lossless for record in requests),
        **acceptance(requests),
        "speedup_vs_plain": median_or_none(speedups(pure, methods.get(CONTROL, {}), lambda run: run.speed)),
        "tokens": sum(len(record.tokens) for record in requests),
        "requests": len(requests),
    }


def _in_order(results: Sequence[Record | Failure]) -> Iterator[RowKey]:
    """Every row's key that there could be, in the order of the table."""
    for (dtype, temperature), kept in conditions(results).items():
        methods = list(dict.fromkeys(result.method for result in kept))
        for size in dict.fromkeys(result.batch_size for result in kept):
            yield from ((dtype, temperature, method, size) for method in methods)
