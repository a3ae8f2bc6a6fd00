"""The folder of one run: its configuration, results line by line, and what is written at the end."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eval.runner import Failure, Record
from specdec.disk import make_folder, writing

Result = Record | Failure


def result_of(fields: dict[str, Any]) -> Result:
    """A line of an evaluation's results.jsonl."""
    return Failure(**fields) if "traceback" in fields else Record(**fields)


class Folder:
    """`config.json`, `results.jsonl` and what else a run writes, under `path`.

    share:  this process's number where several work on the run. Each then writes a results file of its own, which
            `merge` puts together; None for a process alone.
    result: makes a result of a line's fields: a dataclass with `job`, `id` and the job's number of `rows`.
    """

    def __init__(
        self, path: Path, share: int | None = None, result: Callable[[dict[str, Any]], Any] = result_of
    ) -> None:
        self.path, self._result_of = path, result
        self.results = path / "results.jsonl"
        self._mine = self.results if share is None else path / f"results-{share}.jsonl"
        self._config = path / "config.json"

    def check(self, config: dict[str, Any], resume: bool) -> None:
        """Refuse to mix runs, before any work and without writing.

        Raises FileExistsError where the folder holds results and `resume` was not asked for, and ValueError where it
        was but the run that it holds is not one of `config` or cannot be read, or where nothing can be written."""
        existing = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            raise ValueError(f"{existing} is not a folder that can be written to: give another --out")
        if not self._holds_results():
            return
        if not resume:
            raise FileExistsError(
                f"{self.path} holds another run's results: choose another folder with --out, or continue that run "
                f"with --resume"
            )
        before = self.read_json("config.json")
        for key in sorted(before.keys() | config.keys()):
            if before.get(key) != config.get(key):
                raise ValueError(
                    f"{self.path} holds a run with {key}={before.get(key)!r}, not {config.get(key)!r}: give the same "
                    f"settings to --resume it, or another --out"
                )

    def start(self, config: dict[str, Any]) -> list[Result]:
        """Make the folder ready and return what it holds of finished jobs. For one process of several."""
        if self._holds_results():
            return self.merge()
        make_folder(self.path)
        self.write_json("config.json", config)
        return []

    def check_weights(self, about: dict[str, Any]) -> None:
        """Refuse to go on with other weights than those that the folder's results come from.

        about: `eval.environment.described` of what is loaded. Raises ValueError that names whose weights changed."""
        before = self.read_json("environment.json", {})
        for key in about:
            if key.startswith("weights") and before.get(key, about[key]) != about[key]:
                raise ValueError(
                    f"{self.path} holds a run with other {key} ({before[key]}, now {about[key]}): give another --out"
                )

    def append(self, results: Sequence[Result]) -> None:
        """Add what one job gave at once, so that a kill leaves whole jobs but for the last one's tail."""
        with writing(self._mine), self._mine.open("a") as file:
            file.write(_lines(results))

    def read(self) -> list[Result]:
        """All results of finished jobs, those of every process, leaving the files as they are."""
        return _finished([result for path in self._files() for result in self._read(path)])

    def merge(self) -> list[Result]:
        """What `read` gives, which `results.jsonl` alone holds from now on: what a kill left of a job is dropped."""
        finished = self.read()
        self.write_text(self.results.name, _lines(finished))  # a kill after it leaves lines twice, which are read once
        for file in self._files():
            if file != self.results:
                file.unlink()
        return finished

    def write_text(self, name: str, text: str) -> None:
        """Write a file at once: a kill or a full disk leaves the one that was there before, or none."""
        part = self.path / f"{name}.part"
        with writing(self.path / name):
            part.write_text(text, encoding="utf-8")
            part.replace(self.path / name)

    def write_json(self, name: str, content: Any) -> None:
        self.write_text(name, json.dumps(content, indent=2) + "\n")

    def read_json(self, name: str, default: Any = None) -> Any:
        """The content of one of the folder's JSON files; `default`, if one is given, where there is no such file.

        Raises ValueError for a damaged file, and for a missing one without a default."""
        path = self.path / name
        if default is not None and not path.exists():
            return default
        try:
            content = json.loads(path.read_bytes())
        except (OSError, ValueError):  # missing, not UTF-8, not JSON
            content = None
        if not isinstance(content, dict if default is None else type(default)):
            raise ValueError(
                f"{path} is missing or damaged, so the run in {self.path} cannot be continued or reported: give "
                f"another folder"
            )
        return content

    def _holds_results(self) -> bool:
        return any(file.stat().st_size > 0 for file in self._files())

    def _files(self) -> list[Path]:
        """Those results files that are there."""
        return [file for file in (self.results, *sorted(self.path.glob("results-*.jsonl"))) if file.exists()]

    def _read(self, path: Path) -> Iterator[Result]:
        """A results file's lines; a last line without its end, which a kill leaves, is left out."""
        for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
            try:
                yield self._result_of(json.loads(line))
            except (ValueError, TypeError):  # not UTF-8 or not JSON; not an object of these fields
                raise ValueError(
                    f"{path}, line {number}, is not a result of this version of specdec: remove the line to continue "
                    f"the run without it, or give another folder"
                ) from None


def _finished(results: Sequence[Result]) -> list[Result]:
    """Failures, and results of jobs with all their rows, each once."""
    once = {result.row if isinstance(result, Failure) else (result.job, result.id): result for result in results}
    rows = Counter(result.job for result in once.values() if not isinstance(result, Failure))
    return [result for result in once.values() if isinstance(result, Failure) or rows[result.job] == result.rows]


def _lines(results: Sequence[Result]) -> str:
    return "".join(json.dumps(asdict(result)) + "\n" for result in results)
