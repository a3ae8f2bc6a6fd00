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
from transformers import PreTrainedModel

from eval.environment import environment
from eval.fidelity.ladder import Job, Ladder
from eval.fidelity.observe import observe
from eval.fidelity.report import markdown, summary
from eval.fidelity.results import Result, Store
from eval.fidelity.selfcheck import self_check
from eval.fidelity.settings import Settings
from eval.fidelity.verdict import NOT_LOSSLESS, examine, verdict
from eval.methods import EncodedPrompt
from specdec.call_checks import fitting_verifier
from specdec.drafter_spec import DrafterSpec, build_drafter
from specdec.models import LoadedModel, load_target
from specdec.prompts import encode, load_prompts
from specdec.registry import VERIFIERS, known

FAILED = 1  # exit status of a run that found the output not to be the target's
INTERRUPTED = 130  # of one that Ctrl-C ended


def run(*, out: Path, resume: bool = False, self_checked: bool = False, as_json: bool = False, **settings: Any) -> None:
    """Run the ladder as `settings` (fields of `Settings`) say, and write everything to the folder `out`.

    self_checked: hold the tests to known bugs instead. Exits with FAILED where the output is not the target's, or the
    tests miss a bug. Raises ValueError, FileNotFoundError or FileExistsError before anything is written."""
    chosen = Settings(**settings)
    spec = DrafterSpec.parse(chosen.drafter)
    sources = load_prompts(chosen.prompts, chosen.limit, chosen.skip_bad)
    config = chosen.config(hashlib.sha256(repr(sources).encode()).hexdigest())
    store = Store(out)
    store.check(config, resume)
    loaded = load_target(chosen.target, chosen.dtype, chosen.device)
    print(f"target: {loaded.description}", file=sys.stderr)
    prompts = [
        EncodedPrompt(number, source.id, source.category, tokens)
        for number, (source, tokens) in enumerate(
            zip(sources, encode(sources, loaded.tokenizer, chosen.raw), strict=True)
        )
    ]
    ladder = build_ladder(loaded, prompts, spec, chosen)
    results = store.start(config)
    if self_checked:
        sys.exit(self_check(ladder, store, as_json))
    jobs = list(ladder.jobs())
    complete = climb(ladder, jobs, store, results)
    line, found = report(ladder, loaded, results, complete)
    store.write("fidelity.json", json.dumps(found, indent=2) + "\n")
    store.write("fidelity.md", markdown(found))
    print(json.dumps(found, indent=2) if as_json else line)
    if not complete:
        print(f"specdec: interrupted; {out} keeps what was finished, --resume continues it", file=sys.stderr)
        sys.exit(INTERRUPTED)
    if line.startswith(NOT_LOSSLESS):
        sys.exit(FAILED)


def build_ladder(
    loaded: LoadedModel, prompts: Sequence[EncodedPrompt], spec: DrafterSpec, settings: Settings
) -> Ladder:
    """Raises ValueError for a prompt that leaves no room to generate, and for a drafter that cannot be built."""
    check_room(prompts, settings.max_new_tokens, loaded.model)
    eos = loaded.model.generation_config.eos_token_id
    stops = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    pad = loaded.model.generation_config.pad_token_id
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
        stops=frozenset(stops),
        pad=(stops or [0])[0] if pad is None else pad,
        seed=settings.seed,
        samples=settings.samples,
    )


def check_room(prompts: Sequence[EncodedPrompt], max_new_tokens: int, model: PreTrainedModel) -> None:
    """ValueError that names the first prompt which does not fit the model's positions with its output."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)  # not every family has a limit
    for prompt in prompts:
        if positions is not None and len(prompt.tokens) + max_new_tokens > positions:
            raise ValueError(
                f"prompt {prompt.id!r} has {len(prompt.tokens)} tokens, which with {max_new_tokens} new ones is more "
                f"than the model's {positions} positions: shorten it, drop it or lower --max-new-tokens"
            )


def climb(ladder: Ladder, jobs: Sequence[Job], store: Store, results: list[Result]) -> bool:
    """Run the jobs that `results` lacks, adding to it and to the store; False where Ctrl-C ended it early."""
    done = {result.job for result in results}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("batches", total=len(jobs))
        try:
            for job in jobs:
                progress.update(task, description=job.rung.name)
                if job.key not in done:
                    found = observe(ladder, job, results)
                    store.append(found)
                    results.extend(found)
                progress.advance(task)
        except KeyboardInterrupt:
            return False
    return True


def report(
    ladder: Ladder, loaded: LoadedModel, results: Sequence[Result], complete: bool
) -> tuple[str, dict[str, Any]]:
    """The verdict's line, and fidelity.json's content."""
    examination = examine(ladder, results, complete)
    line = verdict(ladder, results, examination)
    if not complete:
        line += " (interrupted: only a part was run)"
    dtype = str(ladder.model.dtype).removeprefix("torch.")
    return line, summary(
        ladder, results, examination, line, environment(loaded.description, dtype, ladder.model.device)
    )
