"""What a trained head is worth where it counts: its acceptance in the real engine, on prompts that were held out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import specdec
from eval.methods import EncodedPrompt, Method, Request, check_room, engine_method
from eval.runner import Record, records, schedule
from eval.summary import rows
from specdec.cli_options import sampling_arguments
from specdec.contracts import Drafter
from specdec.models import LoadedModel
from train.data import TrainPrompt

ACCEPTANCE_FILE = "acceptance.jsonl"
OF_SUMMARY = (  # what is kept of a row of `specdec eval`; not its speeds, since nothing is timed against a control here
    "verifier",
    "batch_size",
    "temperature",
    "dtype",
    "mean_accepted_length",
    "acceptance_rate",
    "tokens",
    "requests",
)


def evaluate_acceptance(
    loaded: LoadedModel,
    drafters: Mapping[str, tuple[Drafter, int]],
    prompts: Sequence[TrainPrompt],
    max_new_tokens: int,
    batch_sizes: Sequence[int],
    temperatures: Sequence[float],
    out: Path,
) -> list[dict[str, Any]]:
    """One row per temperature, drafter and batch size; each goes to `out`/acceptance.jsonl as soon as it is known.

    drafters: by the name that reports give them, each with its draft length.   temperatures: 0 is greedy decoding.
    A row has `drafter`, `draft_length`, `max_new_tokens`, what OF_SUMMARY lists, and `conditional_acceptance` by
    position, as `eval.acceptance.by_position` defines it.
    Raises ValueError for a prompt that leaves no room to answer, before anything is run.
    """
    check_room(loaded.model, prompts, max_new_tokens)
    numbered = [EncodedPrompt(number, prompt.id, "", prompt.tokens) for number, prompt in enumerate(prompts)]
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    found = []
    with (out / ACCEPTANCE_FILE).open("w") as file:
        for temperature, (name, (drafter, length)), size in product(temperatures, drafters.items(), batch_sizes):
            request = Request.of(loaded.model, sampling_arguments(temperature, None, None), seed=0)
            method = engine_method(name, loaded.model, request, drafter, length, "auto", specdec.generate)
            done = _answered(method, numbered, size, max_new_tokens)
            [summary] = rows(done, [name], temperature, dtype, compared=())
            row = {"drafter": name, "draft_length": length, "max_new_tokens": max_new_tokens}
            row |= {key: summary[key] for key in OF_SUMMARY}
            row["conditional_acceptance"] = [at["conditional"] for at in summary["acceptance_by_position"]]
            file.write(json.dumps(row) + "\n")
            file.flush()
            found.append(row)
    return found


def _answered(method: Method, prompts: Sequence[EncodedPrompt], batch_size: int, max_new_tokens: int) -> list[Record]:
    found: list[Record] = []
    for job in schedule(prompts, [method], [batch_size], repeats=1):
        found += records(job, method.generate(job.prompts, max_new_tokens))
    return found
