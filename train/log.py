"""What a run reports: a line of metrics.jsonl per step and evaluation, a progress bar, and Weights & Biases if asked.

A line is {"step": updates done, "split": "train" or "held_out", "loss": ..., ...}; a list has one value per depth.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from train.settings import TrainSettings

METRICS_FILE = "metrics.jsonl"
Values = dict[str, float | list[float]]


class Log:
    """Use as a context. Only the main process reports; the others' calls do nothing.

    done:  steps that the resumed run has behind it, whose lines are kept. total: steps of the whole run.
    """

    def __init__(self, settings: TrainSettings, main: bool, done: int, total: int):
        self.settings, self.main, self.done, self.total = settings, main, done, total

    def __enter__(self) -> Log:
        if self.main:
            self._file = _reopened(Path(self.settings.out) / METRICS_FILE, self.done)
            self._wandb = _wandb_run(self.settings) if self.settings.wandb else None
            self._progress = _progress()
            self._progress.start()
            fields = {"completed": self.done, "total": self.total, "loss": float("nan"), "speed": 0.0}
            self._task = self._progress.add_task("training", **fields)
        self._since = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        if self.main:
            self._progress.stop()
            self._file.close()
            if self._wandb is not None:
                self._wandb.finish(exit_code=int(error[0] is not None))

    def step(self, step: int, values: Values) -> None:
        """After update number `step`, to which the time since the last call belongs."""
        now = time.perf_counter()
        speed, self._since = values["tokens"] / (now - self._since), now
        self._write(step, "train", {**values, "tokens_per_second": speed})
        if self.main:
            self._progress.update(self._task, completed=step, loss=values["loss"], speed=speed)

    def held_out(self, step: int, values: Values) -> None:
        """After an evaluation. Its time counts as no step's."""
        self._write(step, "held_out", values)
        self._since = time.perf_counter()

    def _write(self, step: int, split: str, values: Values) -> None:
        if not self.main:
            return
        self._file.write(json.dumps({"step": step, "split": split, **values}) + "\n")
        self._file.flush()  # handed to the system, so that a killed process loses no line
        if self._wandb is not None:
            self._wandb.log(_flat(split, values), step=step)


def _reopened(path: Path, done: int) -> TextIO:
    """The file at `path` for further lines, cut after those of step `done`: what a killed run wrote after its last
    checkpoint comes again, and the line that it was writing may be half a line."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    kept = [line for number, line in enumerate(lines, 1) if line.endswith(b"\n") and _step(path, number, line) <= done]
    made = path.with_name(f".{path.name}")
    made.write_bytes(b"".join(kept))
    os.replace(made, path)
    return path.open("a")


def _step(path: Path, number: int, line: bytes) -> int:
    """The step of a line. Raises ValueError that names the line where it holds none."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # not UTF-8 or not JSON; not an object with a step
        raise ValueError(f"{path}, line {number}, is damaged: remove the line to go on without it") from None


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    numbers = TextColumn("loss {task.fields[loss]:.3f}, {task.fields[speed]:.0f} tokens/s")
    return Progress(*columns, numbers, console=Console(stderr=True))


def _wandb_run(settings: TrainSettings):
    """A new run in the group of OUT: a resumed training continues the step numbers in a run of its own."""
    import wandb  # takes a second, which runs without it need not wait

    return wandb.init(project="specdec", group=Path(settings.out).name, dir=settings.out, config=asdict(settings))


def _flat(split: str, values: Values) -> dict[str, float]:
    """{"top1": [.5, .3]} -> {"train/top1/1": .5, "train/top1/2": .3}: wandb draws a curve per number."""
    flat = {}
    for name, value in values.items():
        if isinstance(value, list):
            flat |= {f"{split}/{name}/{depth}": one for depth, one in enumerate(value, start=1)}
        else:
            flat[f"{split}/{name}"] = value
    return flat
