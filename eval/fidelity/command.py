"""`specdec fidelity`: is the output still the target model's, and where it is not, why?"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from eval.conversations import first_turns
from eval.environment import described
from eval.fidelity.ladder import Job, Ladder
from eval.fidelity.observe import observe
from eval.fidelity.report import markdown, summary
from eval.fidelity.results import Result
from eval.fidelity.selfcheck import self_check
from eval.fidelity.settings import NOT_LOSSLESS, Settings
from eval.fidelity.verdict import examine, verdict
from eval.folder import Folder
from eval.methods import EncodedPrompt, Request, check_room
from specdec.call_checks import fitting_verifier
from specdec.cli_options import sampling_arguments
from specdec.drafter_spec import DrafterSpec, build_drafter
from specdec.invariant import check_fits, refuse_mixing
from specdec.models import LoadedModel, load_target
from specdec.prompts import load_prompts
from specdec.registry import VERIFIERS, known

FAILED = 1  # exit status of a run that found the output not to be the target's
INTERRUPTED = 130  # of one that Ctrl-C ended


def run(
    *,
    out: Path,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    resume: bool,
    self_checked: bool,
    as_json: bool,
    **settings: Any,
) -> None:
    """Run the ladder as the sampling options and `settings` (the other fields of `Settings`) say, and write everything
    to the folder `out`.

    self_checked: hold the tests to known bugs instead. Exits with FAILED where the output is not the target's, or the
    tests miss a bug. Raises ValueError, FileNotFoundError or FileExistsError before anything is written."""
    chosen = Settings(sampling=sampling_arguments(temperature, top_k, top_p), **settings)
    spec = DrafterSpec.parse(chosen.drafter)
    if chosen.invariant:
        check_fits(spec.length)
    if self_checked and (chosen.invariant or chosen.compile):
        raise ValueError("--self-check injects its bugs into the default mode: leave --invariant and --compile out")
    sources = load_prompts(chosen.prompts, chosen.limit, chosen.skip_bad)
    config = chosen.config(hashlib.sha256(repr(sources).encode()).hexdigest())
    folder = Folder(out, result=lambda fields: Result(**fields))
    folder.check(config, resume)
    loaded = load_target(chosen.target, chosen.dtype, chosen.device)
    print(f"target: {loaded.description}", file=sys.stderr)
    ladder = build_ladder(loaded, first_turns(sources, loaded, chosen.raw), spec, chosen)
    about = described(loaded, {chosen.drafter: ladder.drafter})
    results = folder.start(config)
    if results:
        folder.check_weights(about)
    folder.write_json("environment.json", about)
    if self_checked:
        sys.exit(self_check(ladder, folder, as_json))
    try:
        climb(ladder, list(ladder.jobs()), folder, results)
        examination = examine(ladder, results)
    except KeyboardInterrupt:
        examination = examine(ladder, results, complete=False)
    line = verdict(ladder, results, examination)
    found = summary(ladder, results, examination, line, about)
    folder.write_json("fidelity.json", found)
    folder.write_text("fidelity.md", markdown(found))
    print(json.dumps(found, indent=2) if as_json else line)
    if not examination.complete:
        print(f"specdec: interrupted; {out} keeps what was finished, --resume continues it", file=sys.stderr)
        sys.exit(INTERRUPTED)
    if line.startswith(NOT_LOSSLESS):
        sys.exit(FAILED)


def build_ladder(
    loaded: LoadedModel, prompts: Sequence[EncodedPrompt], spec: DrafterSpec, settings: Settings
) -> Ladder:
    """Raises ValueError for a prompt that leaves no room to generate, and for a drafter that cannot be built;
    NotImplementedError for a model that has no invariant mode, where that is asked for."""
    if settings.invariant:
        refuse_mixing(loaded.model)
    check_room(loaded.model, prompts, settings.max_new_tokens)
    request = Request.of(loaded.model, settings.sampling, settings.seed)
    return Ladder(
        model=loaded.model,
        prompts=prompts,
        drafter=build_drafter(spec, loaded),
        verifier=lambda: fitting_verifier(
            known(VERIFIERS, settings.verifier, "verifier"), settings.sampling["do_sample"]
        ),
        draft_length=settings.draft_length if spec.length is None else spec.length,
        batch_size=settings.batch_size,
        max_new_tokens=settings.max_new_tokens,
        sampling=settings.sampling,
        stops=request.stops,
        pad=request.pad,
        seed=settings.seed,
        samples=settings.samples,
        invariant=settings.invariant,
        compile=settings.compile,
    )


def climb(ladder: Ladder, jobs: Sequence[Job], folder: Folder, results: list[Result]) -> None:
    """Run the jobs that `results` lacks, adding to it and to the folder."""
    done = {result.job for result in results}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("batches", total=len(jobs))
        for job in jobs:
            progress.update(task, description=job.rung.name)
            if job.key not in done:
                found = observe(ladder, job, results)
                folder.append(found)
                results.extend(found)
            progress.advance(task)
