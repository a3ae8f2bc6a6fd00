"""Self-distillation data: the target's own answers to the training prompts, decoded by this engine and kept on disk.

A folder holds `meta.json` and one JSON line per finished batch, {"batch": 3, "responses": {prompt id: token ids}}, in
`responses.jsonl`, or with several processes in one `responses-RANK.jsonl` each. Batches are fixed before the first
starts, and the answers of a batch depend on no other: so a killed run goes on after its last whole line and leaves the
file that an uninterrupted one would have left.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import specdec
from eval.methods import EncodedPrompt, Method, Request, check_room, engine_method
from heads.saved import fingerprint
from specdec.cli_options import sampling_arguments
from specdec.disk import writing
from specdec.models import LoadedModel
from train.batches import Example
from train.data import TrainPrompt
from train.provenance import claim, digest

WINDOW = 16  # batches whose prompts are sorted by length among themselves, so that any part of a run stays typical

Answers = dict[str, list[int]]  # by prompt id


@dataclass(frozen=True)
class ResponseSettings:
    """What the answers depend on besides the target and the prompts. temperature: 0 is greedy decoding."""

    temperature: float
    max_new_tokens: int
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        sampling_arguments(self.temperature, None, None)  # raises for one out of range
        if self.max_new_tokens < 1 or self.batch_size < 1:
            raise ValueError(
                f"max_new_tokens is {self.max_new_tokens} and batch_size {self.batch_size}: both must be at least 1"
            )


def respond(
    loaded: LoadedModel,
    prompts: Sequence[TrainPrompt],
    settings: ResponseSettings,
    folder: Path,
    rank: int = 0,
    world: int = 1,
) -> None:
    """Answer what `folder` lacks of this process's share of the batches, every i with i % world == rank.

    An answer ends with the model's end token, or is `max_new_tokens` long and has none. What another number of
    processes left behind counts as done. Raises ValueError, in one sentence and before anything is computed, for a
    folder made with another model, template, prompts or settings, and for a prompt that leaves no room to answer.
    """
    check_room(loaded.model, prompts, settings.max_new_tokens)
    claim(folder, made_from(loaded, prompts, settings))
    path = folder / ("responses.jsonl" if world == 1 else f"responses-{rank}.jsonl")
    _drop_cut_line(path)
    done = _finished(folder)
    batches = fixed_batches(prompts, settings.batch_size)
    share = range(rank, len(batches), world)
    left = [number for number in share if number not in done]
    method = _plain_decoding(loaded, settings)
    tokens, started = 0, time.perf_counter()
    with _progress(shown=rank == 0) as progress:
        count = {number: len(batches[number]) for number in share}
        finished = sum(count[number] for number in share if number in done)
        task = progress.add_task("responses", total=sum(count.values()), completed=finished, speed=0.0)
        for number in left:
            answers = _answer(method, batches[number], settings.max_new_tokens)
            with writing(path), path.open("a") as file:  # closed: a kill costs at most the batch it was in
                file.write(json.dumps({"batch": number, "responses": answers}) + "\n")
            tokens += sum(map(len, answers.values()))
            progress.update(task, advance=len(answers), speed=tokens / (time.perf_counter() - started))


def read(
    loaded: LoadedModel, prompts: Sequence[TrainPrompt], settings: ResponseSettings, folder: Path
) -> list[Example]:
    """Prompt and answer of every prompt in the order of the batches, whatever the number of processes was.

    Raises ValueError where `folder` was made from something else or does not hold all batches."""
    claim(folder, made_from(loaded, prompts, settings))
    batches, done = fixed_batches(prompts, settings.batch_size), _finished(folder)
    missing = [number for number in range(len(batches)) if number not in done]
    if missing:
        raise ValueError(
            f"{folder} lacks {len(missing)} of {len(batches)} batches of responses, the first of them batch "
            f"{missing[0]}: run again to make them"
        )
    vocabulary = loaded.model.get_input_embeddings().weight.shape[0]
    found = []
    for number, batch in enumerate(batches):
        for prompt in batch:
            answer = done[number].get(prompt.id)
            if answer is None or max(answer, default=0) >= vocabulary:
                raise ValueError(
                    f"{folder} has no answer in the target's tokens to prompt {prompt.id!r} in batch {number}: remove "
                    f"that batch's line"
                )
            found.append(Example(prompt.id, prompt.tokens + answer, len(prompt.tokens)))
    return found


def fixed_batches(prompts: Sequence[TrainPrompt], batch_size: int) -> list[list[TrainPrompt]]:
    """All prompts in batches of similar length, the same batches for the same prompts and `batch_size`."""
    size = WINDOW * batch_size
    windows = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    ordered = [prompt for window in windows for prompt in sorted(window, key=lambda prompt: len(prompt.tokens))]
    return [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]


def made_from(loaded: LoadedModel, prompts: Sequence[TrainPrompt], settings: ResponseSettings) -> dict[str, Any]:
    """What meta.json records. The prompts' digest covers their order too, which the batches depend on."""
    return {
        "target": fingerprint(loaded.model),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "end_tokens": sorted(Request.of(loaded.model, {}, 0).stops),
        "chat_template": digest(loaded.tokenizer.chat_template),
        "prompts": digest([(prompt.id, prompt.tokens) for prompt in prompts]),
        **asdict(settings),
    }


def _plain_decoding(loaded: LoadedModel, settings: ResponseSettings) -> Method:
    request = Request.of(loaded.model, sampling_arguments(settings.temperature, None, None), settings.seed)
    return engine_method("responses", loaded.model, request, None, 0, "auto", specdec.generate)


def _answer(method: Method, batch: Sequence[TrainPrompt], max_new_tokens: int) -> Answers:
    """One batch. A prompt's id names its random stream, so that its answer follows no other prompt's."""
    encoded = [EncodedPrompt(zlib.crc32(prompt.id.encode()), prompt.id, "", prompt.tokens) for prompt in batch]
    answers = method.generate(encoded, max_new_tokens).tokens
    return {prompt.id: answer for prompt, answer in zip(batch, answers, strict=True)}


def _drop_cut_line(path: Path) -> None:
    """Take off what a kill left of the line that it interrupted."""
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def _finished(folder: Path) -> dict[int, Answers]:
    """Every finished batch by its number, from the files of all processes."""
    found: dict[int, Answers] = {}
    for path in sorted(folder.glob("responses*.jsonl")):
        *lines, _ = path.read_bytes().split(b"\n")  # what follows the last line end is empty or was cut off by a kill
        for place, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                found[row["batch"]] = {id: list(map(_token, tokens)) for id, tokens in row["responses"].items()}
            except (ValueError, KeyError, TypeError, AttributeError):  # not UTF-8 or not JSON; not of these fields
                raise ValueError(f"{path}, line {place}, is not a batch of responses: remove the line") from None
    return found


def _token(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r} is no token id")
    return value


def _progress(shown: bool) -> Progress:
    """On standard error. Batches take long, so the time left is estimated from many of them."""
    counts = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[speed]:.0f} tokens/s"))
    return Progress(*counts, *times, console=Console(stderr=True), speed_estimate_period=600, disable=not shown)
