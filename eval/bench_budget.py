"""`specdec bench budget`: learned draft lengths against plain decoding, and against every fixed length in hindsight.

Greedy decoding of the built-in prompts by category, and of random tokens, which nothing foresees, at several batch
sizes; every request emits all its tokens, so that the batch stays whole. In each round all methods run on the same
prompts and take turns step by step. Counted is the speed of decoding, after every row has its first token.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import specdec
from eval.ahead import compile_ahead, with_seconds
from eval.environment import described
from eval.folder import Folder
from eval.methods import EncodedPrompt, check_room, left_padded
from eval.plan.show import Columns, as_table
from eval.report import plain_console
from eval.timing import quartiles, synchronize
from specdec.contracts import Drafter
from specdec.drafter_spec import DrafterSpec, build_drafter
from specdec.models import load_target
from specdec.prompts import encode, load_prompts
from specdec.speculation import LONGEST

RANDOM, RANDOM_TOKENS = "random tokens", 128  # per prompt
PLAIN, LEARNED = "plain", "learned"
OF_PLAIN, OF_BEST = 0.97, 0.95  # what is to be reached
METHODS: dict[str, int | None] = {PLAIN: 0, LEARNED: None, **{str(length): length for length in range(1, LONGEST + 1)}}
COLUMNS: Columns = {
    "category": lambda cell: cell["category"],
    "batch": lambda cell: str(cell["batch_size"]),
    "rounds": lambda cell: str(cell["rounds"]),
    "plain tokens/s": lambda cell: f"{cell['plain_tokens_per_second']:.1f}",
    "learned / plain": lambda cell: _shown(cell["of_plain"]),
    "best fixed": lambda cell: cell["best_length"],
    "best fixed / plain": lambda cell: f"{cell['best_of_plain']:.2f}",
    "learned / best fixed": lambda cell: _shown(cell["of_best"]),
}


@dataclass(frozen=True)
class Round:
    """A line of results.jsonl: tokens per second of every method, on the same prompts.

    compile_seconds: of compiling before this round, in no speed."""

    category: str
    batch_size: int
    round: int
    tokens_per_second: dict[str, float]
    compile_seconds: float = 0.0
    id: str = ""
    rows: int = 1  # lines of the job, for `Folder`

    @property
    def job(self) -> tuple[int, str, int]:
        return self.round, self.category, self.batch_size


def round_of(fields: dict[str, Any]) -> Round:
    """A line of results.jsonl. Raises TypeError or ValueError for other fields and other methods' speeds."""
    one = Round(**fields)
    speeds = one.tokens_per_second
    if not isinstance(speeds, dict) or speeds.keys() != METHODS.keys() or not min(speeds.values()) > 0:
        raise ValueError(f"the speeds are {speeds!r}: there must be a positive one of each method")
    return one


def run(
    *,
    target: str,
    drafter: str,
    dtype: str,
    device: str,
    batch_sizes: Sequence[int],
    max_new_tokens: int,
    repeats: int,
    raw: bool,
    compile: bool,
    out: Path,
    resume: bool,
    as_json: bool,
) -> None:
    """Run what `out` does not hold yet, a line of its results.jsonl per round, then print a table, or with `as_json`
    one JSON object and nothing else.

    repeats: rounds per category and batch size.   raw: without the chat template.   compile: as in `specdec.generate`.
    Raises ValueError for sizes below 1 or given twice, for prompts that do not fit the target's positions and as
    `eval.folder.Folder` does, and NotImplementedError for a target that cannot be compiled."""
    if min(*batch_sizes, repeats) < 1 or max_new_tokens < 2 or len(set(batch_sizes)) < len(batch_sizes):
        raise ValueError(
            f"--batch-sizes are {list(batch_sizes)}, --repeats {repeats} and --max-new-tokens {max_new_tokens}: give "
            f"positive numbers, each batch size once, and more than one token"
        )
    spec = DrafterSpec.parse(drafter)
    if spec.length is not None:
        raise ValueError(f"drafter {drafter!r} has a length of its own: leave it out, lengths are what is compared")
    settings = {
        "target": target, "drafter": drafter, "dtype": dtype, "device": device, "max_new_tokens": max_new_tokens,
        "raw": raw, "compile": compile,
    }  # fmt: skip
    folder = Folder(out, result=round_of)
    folder.check(settings, resume)
    loaded = load_target(target, dtype, device)
    texts = by_category(loaded.tokenizer, loaded.model, raw)
    prompts = [EncodedPrompt(0, category, category, tokens) for category, some in texts.items() for tokens in some]
    check_room(loaded.model, prompts, max_new_tokens)
    drafts = build_drafter(spec, loaded)
    about = described(loaded, {drafter: drafts})
    done = folder.start(settings)
    if done:
        folder.check_weights(about)
    folder.write_json("environment.json", about)
    loaded.model.generation_config.eos_token_id = None  # rows of unequal lengths would make the batch another one
    jobs = list(missing(texts, batch_sizes, repeats, done))
    compile_seconds = compile_ahead(loaded.model, drafts, compile and bool(jobs))
    for job in track(jobs, "rounds", console=Console(stderr=True)):
        one = measured(loaded.model, drafts, texts, *job, max_new_tokens, compile)
        done.append(replace(one, compile_seconds=compile_seconds))
        folder.append(done[-1:])
        compile_seconds = 0.0
    cells = summaries([one for one in done if one.batch_size in batch_sizes])
    compile_seconds = sum(one.compile_seconds for one in done)  # before a kill too
    found = {"environment": about, **settings, "compile_seconds": compile_seconds, "cells": cells}
    folder.write_json("budget.json", found)
    if as_json:
        print((out / "budget.json").read_text())
        return
    named = with_seconds(loaded.description, compile_seconds)
    print(f"{named}: drafter {drafter}, {max_new_tokens} tokens per request, medians and quartiles")
    plain_console().print(as_table(cells, COLUMNS, section="category"))
    print(worst(cells))


def by_category(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, raw: bool) -> dict[str, list[list[int]]]:
    """Token ids of the prompts of each category, random ones the last."""
    prompts = load_prompts()
    found: dict[str, list[list[int]]] = defaultdict(list)
    for prompt, tokens in zip(prompts, encode(prompts, tokenizer, raw), strict=True):
        found[prompt.category].append(tokens)
    V = model.get_input_embeddings().weight.shape[0]
    return {**found, RANDOM: np.random.default_rng(0).integers(0, V, (10, RANDOM_TOKENS)).tolist()}


def missing(
    categories: Sequence[str], batch_sizes: Sequence[int], repeats: int, done: Sequence[Round]
) -> Iterator[tuple[int, str, int]]:
    """The rounds that are still to be run: first one of every category and batch size, then the second, and so on."""
    known = {one.job for one in done}
    for job in itertools.product(range(repeats), categories, batch_sizes):
        if job not in known:
            yield job


def measured(
    model: PreTrainedModel,
    drafter: Drafter,
    texts: Mapping[str, Sequence[Sequence[int]]],
    round: int,
    category: str,
    batch_size: int,
    max_new_tokens: int,
    compile: bool,
) -> Round:
    """Every method once. Rounds begin with other prompts and other methods; the prompts of a category start over where
    the batch is larger."""
    prompts = texts[category]
    chosen = [list(prompts[(round * batch_size + row) % len(prompts)]) for row in range(batch_size)]
    runs = {
        method: Run(model, chosen, drafter, length, place * batch_size, max_new_tokens, compile)
        for place, (method, length) in enumerate(METHODS.items())
    }
    take_turns([runs[method] for method in order(round)])
    return Round(category, batch_size, round, {method: run.tokens / run.seconds for method, run in runs.items()})


def order(round: int) -> list[str]:
    """Whose turn it is first: another method's in every round."""
    first = round % len(METHODS)
    return [*METHODS][first:] + [*METHODS][:first]


def take_turns(runs: Sequence[Run]) -> None:
    """End all runs: the next step is one of the run with the fewest tokens, so that a slow spell of the machine meets
    all of them at the same place of the text."""
    while waiting := [run for run in runs if run.batch.live or run.batch.waiting]:
        min(waiting, key=lambda run: run.batch.stats.emitted).step()


class Run:
    """One method's generation, a step at a time.

    tokens, seconds: emitted, and taken, after every row has its first token.   first_row: of its row ids, which are
    others than those of runs beside it, for they share `drafter`. One that keeps a cache has the rows of all runs in
    it, and a run's eager drafting looks over those that entered before: in every round others."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: list[list[int]],
        drafter: Drafter,
        draft_length: int | None,
        first_row: int,
        max_new_tokens: int,
        compile: bool,
    ) -> None:
        self.tokens, self.seconds = 0, 0.0
        input_ids, mask = left_padded(prompts, 0, model.device)
        # `generate` gives back what its decoding function does: here the batch, ready to run.
        self.batch = model.generate(
            input_ids,
            attention_mask=mask,
            custom_generate=specdec.speculate(drafter=drafter, draft_length=draft_length, compile=compile).prepare,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        for request in self.batch.requests:
            request.row += first_row

    def step(self) -> None:
        decodes, before = all(request.steps for request in self.batch.requests), self.batch.stats.emitted
        started = time.perf_counter()
        self.batch.step()
        synchronize(self.batch.device)
        if decodes:
            self.seconds += time.perf_counter() - started
            self.tokens += self.batch.stats.emitted - before


def summaries(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """A row per category and batch size: medians over its rounds, ratios within each.

    best_length: the fixed length whose median speed is highest, as is known only afterwards."""
    cells: dict[tuple[str, int], list[dict[str, float]]] = defaultdict(list)
    for one in rounds:
        cells[one.category, one.batch_size].append(one.tokens_per_second)
    return [_summary(*cell, speeds) for cell, speeds in cells.items()]


def _summary(category: str, batch_size: int, speeds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    medians = {method: float(np.median([one[method] for one in speeds])) for method in METHODS}
    best = max((method for method in METHODS if method not in (PLAIN, LEARNED)), key=medians.__getitem__)
    return {
        "category": category,
        "batch_size": batch_size,
        "rounds": len(speeds),
        "plain_tokens_per_second": medians[PLAIN],
        "of_plain": quartiles([one[LEARNED] / one[PLAIN] for one in speeds]),
        "best_length": best,
        "best_of_plain": float(np.median([one[best] / one[PLAIN] for one in speeds])),
        "of_best": quartiles([one[LEARNED] / one[best] for one in speeds]),
    }


def worst(cells: Sequence[Mapping[str, Any]]) -> str:
    """The lowest medians, and what they should be."""
    parts = []
    for name, of, least in (("plain", "of_plain", OF_PLAIN), ("the best fixed length", "of_best", OF_BEST)):
        lowest = min(cells, key=lambda cell, of=of: cell[of][1])
        below = sum(cell[of][1] < least for cell in cells)
        parts.append(
            f"of {name} at least {lowest[of][1]:.3f} ({lowest['category']}, batch {lowest['batch_size']}), to be "
            f"{least}: {below} of {len(cells)} below"
        )
    return "learned lengths reach, " + "; ".join(parts)


def _shown(found: Sequence[float]) -> str:
    low, median, high = found
    return f"{median:.3f} ({low:.3f} - {high:.3f})"
