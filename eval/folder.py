"""The folder of one run: its configuration, results line by line, and what is written at the end."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eval.runner import Record, job_key


class Folder:
    """`config.json`, `results.jsonl`, `summary.json` and `report.md` under `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results = path / "results.jsonl"
        self._config = path / "config.json"

    def check(self, config: dict[str, Any], resume: bool) -> None:
        """Refuse to mix runs, before any work and without writing.

        Raises FileExistsError where the folder holds results and `resume` was not asked for, and ValueError where it
        was but the run that it holds is not one of `config`."""
        if not self._holds_results():
            return
        if not resume:
            raise FileExistsError(
                f"{self.path} holds another run's results: choose another folder with --out, or continue that run "
                f"with --resume"
            )
        before = json.loads(self._config.read_text())
        for key in sorted(before.keys() | config.keys()):
            if before.get(key) != config.get(key):
                raise ValueError(
                    f"{self.path} holds a run with {key}={before.get(key)!r}, not {config.get(key)!r}: give the same "
                    f"settings to --resume it, or another --out"
                )

    def start(self, config: dict[str, Any]) -> list[Record]:
        """Make the folder ready and return the finished records that it holds."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._config.write_text(json.dumps(config, indent=2) + "\n")
        return self._finished() if self._holds_results() else []

    def append(self, records: list[Record]) -> None:
        """Add one finished job's records at once, so that a kill leaves whole jobs but for the last one's tail."""
        with self.results.open("a") as file:
            file.write(_lines(records))

    def write_summary(self, summary: dict[str, Any], report: str) -> None:
        (self.path / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        (self.path / "report.md").write_text(report)

    def _holds_results(self) -> bool:
        return self.results.exists() and self.results.stat().st_size > 0

    def _finished(self) -> list[Record]:
        """Records of jobs with all their rows; what a kill left of an unfinished one is dropped from the file."""
        lines = self.results.read_text().splitlines(keepends=True)
        if not lines[-1].endswith("\n"):
            lines.pop()
        records = [Record(**json.loads(line)) for line in lines]
        found = Counter(map(_job_of, records))
        finished = [record for record in records if found[_job_of(record)] == record.rows]
        kept = self.results.with_suffix(".kept")
        kept.write_text(_lines(finished))
        kept.replace(self.results)  # at once: a kill here loses nothing
        return finished


def _lines(records: list[Record]) -> str:
    return "".join(json.dumps(asdict(record)) + "\n" for record in records)


def _job_of(record: Record) -> tuple[str, int, int, int]:
    return job_key(record.method, record.batch_size, record.batch, record.repeat)
