"""The folder of one run: its configuration, results line by line, and what is written at the end."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eval.runner import Record, job_key
from specdec.disk import writing


class Folder:
    """`config.json`, `results.jsonl`, `summary.json` and `report.md` under `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results = path / "results.jsonl"
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
        try:
            before = json.loads(self._config.read_bytes())
        except (OSError, ValueError):  # missing, not UTF-8, not JSON
            before = None
        if not isinstance(before, dict):
            raise ValueError(
                f"{self._config} is missing or damaged, so the run cannot be continued: give another --out"
            )
        for key in sorted(before.keys() | config.keys()):
            if before.get(key) != config.get(key):
                raise ValueError(
                    f"{self.path} holds a run with {key}={before.get(key)!r}, not {config.get(key)!r}: give the same "
                    f"settings to --resume it, or another --out"
                )

    def start(self, config: dict[str, Any]) -> list[Record]:
        """Make the folder ready and return the finished records that it holds."""
        if self._holds_results():
            return self._finished()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{self.path} cannot be made a folder ({error.strerror}): give another --out") from None
        with writing(self._config):
            self._config.write_text(json.dumps(config, indent=2) + "\n")
        return []

    def append(self, records: list[Record]) -> None:
        """Add one finished job's records at once, so that a kill leaves whole jobs but for the last one's tail."""
        with writing(self.results), self.results.open("a") as file:
            file.write(_lines(records))

    def write_summary(self, summary: dict[str, Any], report: str) -> None:
        for name, text in {"summary.json": json.dumps(summary, indent=2) + "\n", "report.md": report}.items():
            with writing(self.path / name):
                (self.path / name).write_text(text)

    def _holds_results(self) -> bool:
        return self.results.exists() and self.results.stat().st_size > 0

    def _finished(self) -> list[Record]:
        """Records of jobs with all their rows; what a kill left of an unfinished one is dropped from the file."""
        lines = self.results.read_bytes().splitlines(keepends=True)
        if not lines[-1].endswith(b"\n"):
            lines.pop()
        records = [self._record(number, line) for number, line in enumerate(lines, 1)]
        found = Counter(map(_job_of, records))
        finished = [record for record in records if found[_job_of(record)] == record.rows]
        kept = self.results.with_suffix(".kept")
        with writing(kept):
            kept.write_text(_lines(finished))
        kept.replace(self.results)  # at once: a kill here loses nothing
        return finished

    def _record(self, number: int, line: bytes) -> Record:
        try:
            return Record(**json.loads(line))
        except (ValueError, TypeError):  # not UTF-8 or not JSON; not an object of these fields
            raise ValueError(
                f"{self.results}, line {number}, is not a result: remove the line to continue the run without it"
            ) from None


def _lines(records: list[Record]) -> str:
    return "".join(json.dumps(asdict(record)) + "\n" for record in records)


def _job_of(record: Record) -> tuple[str, int, int, int]:
    return job_key(record.method, record.batch_size, record.batch, record.repeat)
