"""One request on one rung of the ladder, and the folder that keeps it, appended to as it finishes."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eval.fidelity.samples import Samples

JobKey = tuple[int, int, int]


@dataclass(frozen=True)
class Result:
    """One request on one rung: a line of results.jsonl.

    rung, sample, batch: the job; `seed` is the run's plus `sample`.   rows: requests of the job.
    tokens:     emitted, the stop token included.   steps, drafted: tokens emitted and drafted by each verdict.
    scores:     the processed score of each token where the engine chose it.
    shifts:     that minus the same score by plain teacher forcing; None where the latter is -inf.
    outside:    [position, how far the token's logit is below the lowest kept one] of tokens that teacher forcing gives
                no probability.
    samples:    what the distribution tests need, empty where nothing is sampled.
    replays:    [step, rule, violation] of the steps replayed in float64.
    seconds, collecting: of the whole job, and of it for watching the verifier.
    error:      traceback of what the job raised; all its rows then have no tokens.
    """

    rung: int
    sample: int
    batch: int
    rows: int
    seed: int
    id: str
    number: int
    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    shifts: list[float | None] = field(default_factory=list)
    outside: list[list[float]] = field(default_factory=list)
    samples: Samples = field(default_factory=dict)
    replays: list[list[Any]] = field(default_factory=list)
    verifier: str = ""
    lossless: bool = True
    seconds: float = 0.0
    collecting: float = 0.0
    error: str | None = None

    @property
    def job(self) -> JobKey:
        return self.rung, self.sample, self.batch

    def step_of(self, position: int) -> tuple[int, int]:
        """The verdict that emitted the token at `position`, and the token's place among those of that verdict."""
        for step, count in enumerate(self.steps):
            if position < count:
                return step, position
            position -= count
        raise IndexError(f"request {self.id} has no token at that position")


class Store:
    """`config.json`, `results.jsonl`, `fidelity.json` and `fidelity.md` under `path`."""

    def __init__(self, path: Path):
        self.path = path
        self._config, self._results = path / "config.json", path / "results.jsonl"

    def check(self, config: dict[str, Any], resume: bool) -> None:
        """Refuse to mix runs or to start one that cannot be written, before any work and without writing.

        Raises ValueError or FileExistsError that says what to do."""
        existing = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            raise ValueError(f"{existing} is not a folder that can be written to: give another --out")
        if not self._results.exists():
            return
        if not resume:
            raise FileExistsError(
                f"{self.path} holds another run's results: choose another folder with --out, or continue that run "
                f"with --resume"
            )
        before = json.loads(self._config.read_text()) if self._config.exists() else {}
        for key in sorted(before.keys() | config.keys()):
            if before.get(key) != config.get(key):
                raise ValueError(
                    f"{self.path} holds a run with {key}={before.get(key)!r}, not {config.get(key)!r}: give the same "
                    f"settings to --resume it, or another --out"
                )

    def start(self, config: dict[str, Any]) -> list[Result]:
        """Make the folder ready; the results of the finished jobs that it holds (a kill leaves parts of another)."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._config.write_text(json.dumps(config, indent=2) + "\n")
        if not self._results.exists():
            return []
        lines = self._results.read_text().splitlines(keepends=True)
        found = [self._result(number, line) for number, line in enumerate(lines, 1) if line.endswith("\n")]
        counts = Counter(result.job for result in found)
        finished = [result for result in found if counts[result.job] == result.rows]
        kept = self._results.with_suffix(".kept")
        kept.write_text("".join(map(_line, finished)))
        kept.replace(self._results)  # at once: a kill here loses nothing
        return finished

    def append(self, results: list[Result]) -> None:
        """Raises ValueError where there is no room; what was written before stays usable."""
        try:
            with self._results.open("a") as file:
                file.write("".join(map(_line, results)))
        except OSError as error:
            raise ValueError(
                f"{self._results} could not be written ({error.strerror}): make room, then continue with --resume"
            ) from error

    def write(self, name: str, text: str) -> None:
        (self.path / name).write_text(text)

    def _result(self, number: int, line: str) -> Result:
        try:
            return Result(**json.loads(line))
        except (json.JSONDecodeError, TypeError):
            raise ValueError(
                f"{self._results}, line {number}, is not a result: remove the line to continue the run without it"
            ) from None


def _line(result: Result) -> str:
    return json.dumps(asdict(result)) + "\n"
