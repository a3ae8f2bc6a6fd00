"""`specdec eval`: every method on the same prompts, a table, and a folder with all that was measured."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PreTrainedModel

from eval.conversations import ANSWERS, all_turns, first_turns
from eval.divergence import Margins, divergences
from eval.environment import described
from eval.folder import Folder, Result
from eval.grid import Speculation, first_ngram, methods_at, speculations
from eval.memory import measure
from eval.methods import EncodedPrompt, check_room
from eval.processes import Processes
from eval.publish import publish, show
from eval.runner import Failure, Job, Record, execute, schedule
from eval.runs import CONTROL, sound
from eval.settings import Settings
from eval.sources import load_sources
from eval.trace import trace
from eval.vllm.rows import Engine, engines
from specdec.drafter_spec import DrafterSpec
from specdec.models import LoadedModel, load_target
from specdec.prompts import Prompt

FAILED = 1  # exit status of a run in which a row failed
INTERRUPTED = 130  # exit status of a process that Ctrl-C ended


def run(
    *,
    out: Path,
    resume: bool = False,
    as_json: bool = False,
    memory: int | None = None,
    traces: int = 0,
    to_wandb: bool = False,
    **settings: Any,
) -> None:
    """Evaluate as `settings` (fields of `Settings`) say and write everything to the folder `out`.

    memory: tokens of context to measure tensor bytes at, for the largest batch size; None leaves that out.
    traces: the first so many prompts, whose steps the report shows.
    Raises ValueError, FileNotFoundError or FileExistsError, in one sentence, before anything is written; a full disk
    raises ValueError too."""
    chosen = Settings(**settings)
    for text in chosen.drafters:
        DrafterSpec.parse(text)
    sources = load_sources(chosen.prompts, chosen.column, chosen.split, chosen.limit, chosen.skip_bad)
    config = chosen.config(hashlib.sha256(repr(sources).encode()).hexdigest())
    processes = Processes.here(chosen.device)
    folder = Folder(out, processes.share)
    folder.check(config, resume)
    processes.wait()  # before the first one writes anything that another would take for an earlier run's
    evaluation = Evaluation(chosen, sources, folder, processes, memory, traces)
    complete = evaluation.run(config)
    if not processes.is_first:
        return
    summary = publish(folder, complete, to_wandb)
    show(summary, as_json)
    if not complete:
        print(f"specdec: interrupted; {out} keeps what was finished, --resume continues it", file=sys.stderr)
        sys.exit(INTERRUPTED)
    if failed := sum(row["error"] is not None for row in summary["rows"]):
        print(f"specdec: {failed} row(s) failed; {out / 'report.md'} has their tracebacks", file=sys.stderr)
        sys.exit(FAILED)


class Evaluation:
    """A run: dtype by dtype, since one model is in memory at a time, and temperature by temperature."""

    def __init__(
        self,
        settings: Settings,
        sources: Sequence[Prompt],
        folder: Folder,
        processes: Processes,
        memory: int | None,
        traces: int,
    ) -> None:
        self.settings, self.sources, self.folder, self.processes = settings, sources, folder, processes
        self.memory, self.traces = memory, traces
        self.prompts: list[EncodedPrompt] = []
        self.results: list[Result] = []
        self.measured: dict[str, list[Any]] = {"divergences": [], "memory": [], "traces": []}

    def run(self, config: dict[str, Any]) -> bool:
        """Everything but the report; False where Ctrl-C ended it early, after the prompts were ready."""
        try:
            for dtype in self.settings.dtypes:
                self._run_dtype(dtype, config)
        except KeyboardInterrupt:
            if not self.prompts:
                raise
            self._finish({"memory": self.measured["memory"]})
            return False
        self._finish(self.measured)
        return True

    def _run_dtype(self, dtype: str, config: dict[str, Any]) -> None:
        """The part of the grid that has this dtype, and all else that needs its model."""
        loaded = load_target(self.settings.target, dtype, self.processes.device)
        print(f"target: {loaded.description}", file=sys.stderr)
        if self.settings.ignore_eos:
            loaded.model.generation_config.eos_token_id = None
        drafted = speculations(loaded, self.settings)
        if not self.prompts:
            firsts = first_turns(self.sources, loaded, self.settings.raw)
            check_prompts(firsts, self.settings.max_new_tokens, loaded.model)
            self.measured["memory"] = self._memory(loaded, drafted)
            self._start(config, loaded, drafted)
        with self._vllm(loaded, drafted) as engines:
            for temperature in self.settings.temperatures:
                methods = methods_at(temperature, loaded, drafted, self.settings, engines)
                jobs = list(schedule(self.prompts, methods, self.settings.batch_sizes, self.settings.repeats))
                self._execute(self.processes.of(jobs))
        self.processes.wait()
        if self.processes.is_first:
            self._examine(loaded, drafted)

    def _vllm(self, loaded: LoadedModel, drafted: Sequence[Speculation]) -> AbstractContextManager[dict[str, Engine]]:
        """vLLM's engines, if they are to be compared; its n-grams beside the first n-gram drafter."""
        if self.settings.vllm is None:
            return nullcontext({})
        return engines(self.settings.vllm, loaded.model, first_ngram(drafted), self.folder.path / "vllm.log")

    def _start(self, config: dict[str, Any], loaded: LoadedModel, drafted: Sequence[Speculation]) -> None:
        """The first process readies the folder and the turns' answers; then all hold the same prompts and results."""
        if self.processes.is_first:
            about = described(loaded, {one.text: one.drafter for one in drafted})
            if self.folder.start(config):
                self.folder.check_weights(about)
            else:
                (self.folder.path / ANSWERS).unlink(missing_ok=True)  # of a run that never came to a result
            self.folder.write_json("environment.json", about | {"processes": self.processes.count})
            if later := sum(len(source.later_turns) for source in self.sources):
                print(f"answering {later} earlier turn(s), once for every method", file=sys.stderr)
            all_turns(self.sources, loaded, self.settings, self.folder)
        self.processes.wait()
        self.results = self.folder.read()
        prompts = all_turns(self.sources, loaded, self.settings, self.folder)
        check_prompts(prompts, self.settings.max_new_tokens, loaded.model)
        self.prompts = prompts

    def _execute(self, jobs: Sequence[Job]) -> None:
        """Run what the results do not hold yet, adding to them and to the folder."""
        done = {result.job for result in self.results if isinstance(result, Record)}
        failed = {result.row for result in self.results if isinstance(result, Failure)}
        left = [job for job in jobs if job.key not in done]
        with _progress() as progress:
            task = progress.add_task("requests", total=_requests(jobs), completed=_requests(jobs) - _requests(left))

            def write(finished: Sequence[Result]) -> None:
                self.folder.append(finished)
                self.results.extend(finished)
                last = finished[0]
                progress.update(task, advance=len(finished), description=f"{last.method}, B={last.batch_size}")

            execute(left, self.settings.max_new_tokens, write, failed)

    def _examine(self, loaded: LoadedModel, drafted: Sequence[Speculation]) -> None:
        """Where all processes' outputs part from plain decoding's, and the steps of the traced requests."""
        dtype = str(loaded.model.dtype).removeprefix("torch.")
        ours = [record for record in sound(self.folder.read()) if record.dtype == dtype]
        encoded = {prompt.id: prompt.tokens for prompt in self.prompts}
        found = divergences(ours, Margins(loaded.model, encoded))
        self.measured["divergences"] += [divergence.as_row() for divergence in found]
        for temperature in self.settings.temperatures:
            chosen = self.prompts[: self.traces]
            self.measured["traces"] += trace(temperature, loaded, drafted, chosen, self.settings)

    def _memory(self, loaded: LoadedModel, drafted: Sequence[Speculation]) -> list[dict[str, Any]]:
        """Tensor bytes of plain decoding and of each drafter at the largest batch size."""
        if self.memory is None or not self.processes.is_first:
            return []
        rows = max(self.settings.batch_sizes)
        found = [measure(CONTROL, loaded.model, None, 0, rows, self.memory)]
        for one in drafted:
            found.append(measure(one.text, loaded.model, one.drafter, one.longest, rows, self.memory))
        return [asdict(memory) | {"share": memory.share} for memory in found]

    def _finish(self, measured: dict[str, list[Any]]) -> None:
        """Results of all processes in one file, and what was measured beside them, for the report."""
        if self.processes.is_first:
            self.folder.merge()
            for name, content in measured.items():
                self.folder.write_json(f"{name}.json", content)


def check_prompts(prompts: Sequence[EncodedPrompt], max_new_tokens: int, model: PreTrainedModel) -> None:
    """Refuse, before hours of work, what would end them: repeated ids and prompts that leave no room to generate.

    Raises ValueError that names the prompt."""
    ids = Counter(prompt.id for prompt in prompts)
    if repeated := [id for id, count in ids.items() if count > 1]:
        raise ValueError(f"two prompts have the id {repeated[0]!r}: give each its own")
    check_room(model, prompts, max_new_tokens)


def _requests(jobs: Sequence[Job]) -> int:
    return sum(len(job.prompts) for job in jobs)


def _progress() -> Progress:
    """On standard error, so that --json has standard output for itself."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
