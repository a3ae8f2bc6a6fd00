"""`specdec eval`: every method on the same prompts, a table, and a folder with all that was measured."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PreTrainedModel

import specdec
from eval.divergence import divergences
from eval.environment import environment
from eval.folder import Folder
from eval.memory import measure
from eval.methods import EncodedPrompt, Method, Request, engine_method, hf_method
from eval.report import markdown, memory_line, phases_line, terminal_table
from eval.runner import Job, Record, execute, job_key, schedule
from eval.settings import Settings
from eval.summary import CONTROL, plain_across_batch_sizes, rows
from specdec.contracts import Drafter
from specdec.drafter_spec import DrafterSpec, build_drafter
from specdec.models import LoadedModel, load_target
from specdec.prompts import encode, load_prompts

INTERRUPTED = 130  # exit status of a process that Ctrl-C ended


def run(*, out: Path, resume: bool = False, as_json: bool = False, memory: int | None = None, **settings: Any) -> None:
    """Evaluate as `settings` (fields of `Settings`) say and write everything to the folder `out`.

    memory: tokens of context to measure tensor bytes at, for the largest batch size; None leaves that out.
    Raises ValueError, FileNotFoundError or FileExistsError, in one sentence, before anything is written."""
    chosen = Settings(**settings)
    specs = [DrafterSpec.parse(text) for text in chosen.drafters]
    sources = load_prompts(chosen.prompts, chosen.limit, chosen.skip_bad)
    config = chosen.config(hashlib.sha256(repr(sources).encode()).hexdigest())
    folder = Folder(out)
    folder.check(config, resume)
    loaded = load_target(chosen.target, chosen.dtype, chosen.device)
    print(f"target: {loaded.description}", file=sys.stderr)
    prompts = [
        EncodedPrompt(number, source.id, source.category, tokens)
        for number, (source, tokens) in enumerate(
            zip(sources, encode(sources, loaded.tokenizer, chosen.raw), strict=True)
        )
    ]
    check_prompts(prompts, chosen.max_new_tokens, loaded.model)
    drafters = [(spec, build_drafter(spec, loaded)) for spec in specs]
    methods = build_methods(loaded.model, drafters, chosen)
    measured = measure_memory(loaded.model, drafters, chosen, memory) if memory is not None else []
    records = folder.start(config)
    complete = evaluate(prompts, methods, chosen, folder, records)
    summary = summarise(records, prompts, [method.name for method in methods], chosen, loaded, complete)
    summary["memory"] = measured
    folder.write_summary(summary, markdown(summary))
    show(summary, as_json)
    if not complete:
        print(f"specdec: interrupted; {out} keeps what was finished, --resume continues it", file=sys.stderr)
        sys.exit(INTERRUPTED)


def build_methods(
    model: PreTrainedModel, drafters: Sequence[tuple[DrafterSpec, Drafter]], settings: Settings
) -> list[Method]:
    """HF `generate`, plain decoding with our engine, and each drafter."""
    request = Request.of(model, settings.sampling, settings.seed)

    def ours(name: str, drafter: Drafter | None, draft_length: int) -> Method:
        return engine_method(name, model, request, drafter, draft_length, settings.verifier, specdec.generate)

    drafted = [ours(spec.text, drafter, settings.length_of(spec)) for spec, drafter in drafters]
    return [hf_method(model, request), ours(CONTROL, None, 0), *drafted]


def measure_memory(
    model: PreTrainedModel, drafters: Sequence[tuple[DrafterSpec, Drafter]], settings: Settings, context: int
) -> list[dict[str, Any]]:
    """Tensor bytes of plain decoding and of each drafter at the largest batch size."""
    rows = max(settings.batch_sizes)
    found = [measure(CONTROL, model, None, 0, rows, context)]
    for spec, drafter in drafters:
        found.append(measure(spec.text, model, drafter, settings.length_of(spec), rows, context))
    return [asdict(memory) | {"share": memory.share} for memory in found]


def check_prompts(prompts: Sequence[EncodedPrompt], max_new_tokens: int, model: PreTrainedModel) -> None:
    """Refuse, before hours of work, what would end them: repeated ids and prompts that leave no room to generate.

    Raises ValueError that names the prompt."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)  # not every family has a limit
    ids: set[str] = set()
    for prompt in prompts:
        if prompt.id in ids:
            raise ValueError(f"two prompts have the id {prompt.id!r}: give each its own")
        ids.add(prompt.id)
        if positions is not None and len(prompt.tokens) + max_new_tokens > positions:
            raise ValueError(
                f"prompt {prompt.id!r} has {len(prompt.tokens)} tokens, which with {max_new_tokens} new ones is more "
                f"than the model's {positions} positions: shorten it, drop it or lower --max-new-tokens"
            )


def evaluate(
    prompts: Sequence[EncodedPrompt],
    methods: Sequence[Method],
    settings: Settings,
    folder: Folder,
    records: list[Record],
) -> bool:
    """Run what `records` does not hold yet, adding to it and to the folder; False where Ctrl-C ended it early."""
    done = {job_key(record.method, record.batch_size, record.batch, record.repeat) for record in records}
    jobs = list(schedule(prompts, methods, settings.batch_sizes, settings.repeats))
    left = [job for job in jobs if job.key not in done]
    with _progress() as progress:
        task = progress.add_task("requests", total=_requests(jobs), completed=_requests(jobs) - _requests(left))

        def write(finished: list[Record]) -> None:
            folder.append(finished)
            records.extend(finished)
            progress.update(
                task, advance=len(finished), description=f"{finished[0].method}, B={finished[0].batch_size}"
            )

        try:
            execute(left, settings.max_new_tokens, write)
        except KeyboardInterrupt:
            return False
    return True


def summarise(
    records: Sequence[Record],
    prompts: Sequence[EncodedPrompt],
    methods: Sequence[str],
    settings: Settings,
    loaded: LoadedModel,
    complete: bool,
) -> dict[str, Any]:
    """summary.json's content, but for the memory.

    The target's margins at divergences cost a forward each: they are measured for greedy runs that were not cut short.
    """
    greedy = not settings.sampling["do_sample"]
    compared = set(methods) - {CONTROL}
    if not greedy:  # HF samples with other random numbers, and every rule but the coupled one does by design
        compared = compared - {"hf"} if settings.verifier == "coupled" else set()
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    encoded = {prompt.id: prompt.tokens for prompt in prompts}
    model = loaded.model if complete and greedy else None
    found = divergences([r for r in records if r.method in {*compared, CONTROL}], encoded, model)
    return {
        "rows": rows(records, methods, settings.temperature, dtype, compared),
        "complete": complete,
        "plain_across_batch_sizes": plain_across_batch_sizes(records) if compared else [],
        "divergences": [asdict(divergence) | {"tie": divergence.tie} for divergence in found],
        "environment": environment(loaded.description, dtype, loaded.model.device),
    }


def show(summary: dict[str, Any], as_json: bool) -> None:
    """On standard output the rows as JSON, or the table and below it where decode steps spend their time and memory."""
    if as_json:
        print(json.dumps(summary["rows"], indent=2))
        return
    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 160)
    console.print(terminal_table(summary["rows"]))
    for row in summary["rows"]:
        if row["phase_shares"]:
            console.print(f"decode time of {phases_line(row)}")
    for memory in summary["memory"]:
        console.print(f"memory of {memory_line(memory)}")


def _requests(jobs: Sequence[Job]) -> int:
    return sum(len(job.prompts) for job in jobs)


def _progress() -> Progress:
    """On standard error, so that --json has standard output for itself."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
