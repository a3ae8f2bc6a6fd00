"""`specdec bench schedule`: many requests through a few rows, against Hugging Face's `generate` in static batches.

The same prompts, in the same order. `generate` pads each batch on the left and goes on until its last row ends;
`specdec.stream_batch` refills a row as soon as it is free and lets the new prompt enter in chunks beside the others.
Timed in turns: tokens per second; and, while prompts are arriving, how evenly the rows that decode beside them go on.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

import specdec
from eval.ahead import compile_ahead, with_seconds
from eval.environment import described
from eval.hf import hf_method
from eval.methods import EncodedPrompt, Request, check_room
from eval.plan.show import Columns, as_table
from eval.report import plain_console
from eval.runner import WARM_UP_TOKENS
from specdec.contracts import BaseDrafter, Draft, Drafter, Draws, Rows, Verdict
from specdec.drafter_spec import DrafterSpec, build_drafter
from specdec.models import load_target
from specdec.prompts import encode, load_prompts

STATIC = "HF, static batches"
FASTER, STEADY = 1.5, 2.0  # what is to be reached: tokens/s against static batches, p95 over median between emissions
COLUMNS: Columns = {
    "method": lambda row: row["method"],
    "tokens": lambda row: str(row["tokens"]),
    "tokens/s": lambda row: _shown(row["tokens_per_second"], 1),
    "vs static": lambda row: _shown(row["vs_static"], 2),
    "same output": lambda row: f"{row['same']} of {row['requests']}",
    "between emissions, ms": lambda row: _shown(row["gap_ms"], 0),
    "p95 / median": lambda row: _shown(row["gap_p95_of_median"], 2),
}


@dataclass(frozen=True)
class Outcome:
    """One run. tokens: per request, through its stop.   gaps: seconds between two emissions of a row while prompts were
    arriving; empty for static batches."""

    tokens: list[list[int]]
    seconds: float
    gaps: list[float]


def run(
    *,
    target: str,
    drafter: str,
    dtype: str,
    device: str,
    prompts: str | None,
    limit: int,
    raw: bool,
    max_batch: int,
    max_new_tokens: int,
    chunk: int,
    repeats: int,
    compile: bool,
    as_json: bool,
) -> None:
    """Run and print a table, or with `as_json` one JSON object and nothing else.

    prompts: JSONL file, None = the built-in ones.   limit: how many requests; where there are fewer prompts they start
    over.   chunk: most prompt tokens per step of `stream_batch`.   compile: forwards of `stream_batch` are compiled.
    Raises ValueError for sizes below 1 and for requests that do not fit the target's positions, and NotImplementedError
    for a target that cannot be compiled."""
    if min(limit, max_batch, chunk, repeats) < 1:
        raise ValueError(
            f"--limit, --max-batch, --chunk and --repeats are {limit}, {max_batch}, {chunk} and {repeats}: give at "
            f"least 1"
        )
    spec = DrafterSpec.parse(drafter)
    if spec.length == 0:
        raise ValueError(f"drafter {drafter!r} drafts nothing, and plain decoding runs beside it: give another length")
    given = load_prompts(prompts, limit)
    loaded = load_target(target, dtype, device)
    model = loaded.model
    texts = itertools.cycle(encode(given, loaded.tokenizer, raw))
    requests = [EncodedPrompt(n, str(n), "", tokens) for n, tokens in zip(range(limit), texts, strict=False)]
    check_room(model, requests, max_new_tokens)
    drafts = build_drafter(spec, loaded)
    compile_seconds = compile_ahead(model, drafts, compile)

    def streamed(drafter: Drafter, length: int | None) -> Callable[[Sequence[EncodedPrompt], int], Outcome]:
        return lambda some, tokens: stream(model, some, max_batch, tokens, chunk, drafter, length, compile)

    methods = {
        STATIC: lambda some, tokens: static(model, some, max_batch, tokens),
        "stream, plain": streamed(NoDrafts(), 1),
        f"stream, {drafter}": streamed(drafts, spec.length),
    }
    for method in methods.values():  # to be warm
        method(requests[:max_batch], min(WARM_UP_TOKENS, max_new_tokens))
    calls = {name: partial(method, requests, max_new_tokens) for name, method in methods.items()}
    rows = summaries(in_turns(calls, repeats))
    if as_json:
        settings = {"max_batch": max_batch, "max_new_tokens": max_new_tokens, "chunk": chunk, "repeats": repeats}
        settings |= {"compile": compile, "compile_seconds": compile_seconds}
        print(json.dumps({"environment": described(loaded, {drafter: drafts}), **settings, "rows": rows}, indent=2))
        return
    named = with_seconds(loaded.description, compile_seconds)
    print(f"{named}: {limit} requests, {max_batch} rows, up to {max_new_tokens} tokens, chunks of {chunk}")
    plain_console().print(as_table(rows, COLUMNS, section="requests"))
    print(f"to be reached: {FASTER} of static batches, p95 / median at most {STEADY}")


def in_turns(methods: Mapping[str, Callable[[], Outcome]], repeats: int) -> dict[str, list[Outcome]]:
    """Every method once per round; another one is the first in each."""
    names, found = list(methods), {name: [] for name in methods}
    for number in range(repeats):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            found[name].append(methods[name]())
    return found


def static(model: PreTrainedModel, requests: Sequence[EncodedPrompt], rows: int, max_new_tokens: int) -> Outcome:
    """HF's own `generate`, `rows` requests at a time in the order given."""
    generate = hf_method(model, Request.of(model, {"do_sample": False}, 0)).generate
    started, tokens = time.perf_counter(), []
    for first in range(0, len(requests), rows):
        tokens += generate(list(requests[first : first + rows]), max_new_tokens).tokens
    return Outcome(tokens, time.perf_counter() - started, [])


def stream(
    model: PreTrainedModel,
    requests: Sequence[EncodedPrompt],
    rows: int,
    max_new_tokens: int,
    chunk: int,
    drafter: Drafter,
    draft_length: int | None,
    compile: bool = False,
) -> Outcome:
    """`specdec.stream_batch`, watched."""
    watched = Watched(drafter)
    started, tokens = time.perf_counter(), {}
    for done in specdec.stream_batch(
        model,
        [request.tokens for request in requests],
        max_batch=rows,
        drafter=watched,
        draft_length=draft_length,
        max_new_tokens=max_new_tokens,
        prefill_chunk_size=chunk,
        compile=compile,
        do_sample=False,
    ):
        tokens[done.index] = done.tokens.tolist()
    seconds = time.perf_counter() - started
    return Outcome([tokens[index] for index in range(len(requests))], seconds, list(gaps(watched.emitted)))


def gaps(emitted: Mapping[int, Sequence[float]]) -> Iterator[float]:
    """Seconds between two emissions of a row, up to when the last request to arrive emitted its first token.

    emitted: per row the times of its steps. gaps({0: [1, 2, 4, 9], 1: [4, 5]}) gives 1 and 2."""
    last_arrival = max(times[0] for times in emitted.values())
    for times in emitted.values():
        for before, after in itertools.pairwise(times):
            if after <= last_arrival:
                yield after - before


class Watched(BaseDrafter):
    """`drafter`, with the times at which each row emitted."""

    def __init__(self, drafter: Drafter):
        self.__wrapped__, self.name, self.needs_hidden = drafter, drafter.name, drafter.needs_hidden
        self.trimmable = getattr(drafter, "trimmable", False)
        self.propose, self.admit, self.release = drafter.propose, drafter.admit, drafter.release
        self.emitted: dict[int, list[float]] = {}

    def observe(self, rows: Rows, verdict: Verdict, hidden: Sequence[Tensor] | None) -> None:
        now = time.perf_counter()
        for row in rows.ids:
            self.emitted.setdefault(row, []).append(now)
        self.__wrapped__.observe(rows, verdict, hidden)


class NoDrafts(BaseDrafter):
    """Plain decoding."""

    name = "none"

    def propose(self, rows: Rows, budget: Sequence[int], draws: Draws) -> Draft:
        return Draft.empty(len(rows.ids), rows.device)


def summaries(runs: Mapping[str, Sequence[Outcome]]) -> list[dict[str, Any]]:
    """A row per method; ratios to the static batches of the same round. `[median, lowest, highest]` over the rounds."""
    rows = []
    for method, found in runs.items():
        speeds = [speed(outcome) for outcome in found]
        ratios = [ours / speed(base) for ours, base in zip(speeds, runs[STATIC], strict=True)]
        medians = [1e3 * float(np.median(outcome.gaps)) for outcome in found if outcome.gaps]
        p95 = [float(np.quantile(o.gaps, 0.95) / np.median(o.gaps)) for o in found if o.gaps]
        rows.append(
            {
                "method": method,
                "requests": len(found[0].tokens),
                "tokens": sum(map(len, found[0].tokens)),
                "same": sum(a == b for a, b in zip(found[0].tokens, runs[STATIC][0].tokens, strict=True)),
                "tokens_per_second": _spread(speeds),
                "vs_static": _spread(ratios),
                "gap_ms": _spread(medians),
                "gap_p95_of_median": _spread(p95),
            }
        )
    return rows


def speed(outcome: Outcome) -> float:
    """Tokens per second."""
    return sum(map(len, outcome.tokens)) / outcome.seconds


def _spread(values: Sequence[float]) -> list[float] | None:
    return [float(np.median(values)), min(values), max(values)] if values else None


def _shown(found: Sequence[float] | None, places: int) -> str:
    if found is None:
        return "-"
    median, lowest, highest = (f"{value:.{places}f}" for value in found)
    return f"{median} ({lowest} - {highest})"
