"""`specdec plan measure`, `predict`, `check` and `split`: what each reads, writes and prints."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from eval.plan import plots, show, split
from eval.plan.check import TOLERANCE, check_batches, compare, within
from eval.plan.costs import Costs
from eval.plan.predict import MeasuredCost, Planner, table
from eval.plan.setup import planner_of
from eval.plan.workload import Workload, check_positive
from eval.report import plain_console
from specdec.contracts import Drafter
from specdec.drafter_spec import DrafterSpec, build_drafter
from specdec.models import LoadedModel

SHORT_CONTEXT = 64  # the shorter of the two contexts that `check` measures forwards at


def measure(
    *,
    out: Path,
    drafters: Sequence[str],
    draft_length: int,
    batch_sizes: Sequence[int],
    contexts: Sequence[int],
    as_json: bool,
    **workload: Any,
) -> None:
    """Measure a target's step costs, and those of `drafters` on prompts, and write `out`/costs.json.

    workload: fields of `Workload`. Raises ValueError, in one sentence, before anything is measured."""
    work = Workload(**workload)
    specs = [DrafterSpec.parse(text) for text in drafters]
    lengths = {spec.text: draft_length if spec.length is None else spec.length for spec in specs}
    check_positive("draft lengths", [draft_length, *lengths.values()])
    make_folder(out)
    loaded, texts = work.load()
    built = {spec.text: (build_drafter(spec, loaded), lengths[spec.text]) for spec in specs}
    costs = work.measured(loaded, texts, built, batch_sizes, contexts)
    with writing(out):
        costs.write(out / "costs.json")
    say(asdict(costs), as_json, show.fitted_line(costs))


def predict(*, out: Path, batch_sizes: Sequence[int], contexts: Sequence[int], as_json: bool, **given: Any) -> None:
    """Predict speed-ups and write `out`/prediction.json and .png. `given`: arguments of `setup.planner_of`."""
    check_positive("batch sizes", batch_sizes)
    check_positive("contexts", contexts)
    planner, shape, described = planner_of(**given)
    make_folder(out)
    rows = table(planner, shape, batch_sizes, contexts)
    paying = {context: planner.paying(context) for context in contexts}
    found = {
        "plan": described,
        "acceptance": asdict(planner.acceptance),
        "rows": rows,
        "paying": paying,
        "stops_paying": {context: show.stops_paying(runs) for context, runs in paying.items()},
    }
    with writing(out):
        write_json(found, out / "prediction.json")
        plots.plot_prediction(rows, described, out / "prediction.png")
    verdicts = [show.verdict(context, runs) for context, runs in paying.items()]
    say(found, as_json, described, show.as_table(rows, show.PREDICTION, "context"), *verdicts)


def check(
    *,
    out: Path,
    drafter: str,
    batch_sizes: Sequence[int],
    draft_lengths: Sequence[int],
    as_json: bool,
    **workload: Any,
) -> None:
    """Measure costs, predict every batch size and draft length from them, measure those too, and exit with status 1
    where the two are further apart than TOLERANCE. Writes `out`/costs.json, check.json and check.png.

    workload: fields of `Workload`. Raises ValueError, in one sentence, before anything is measured."""
    work = Workload(**workload)
    spec = DrafterSpec.parse(drafter)
    check_positive("draft lengths", draft_lengths)
    make_folder(out)
    loaded, texts = work.load()
    costs, rows = checked(work, loaded, texts, spec.text, build_drafter(spec, loaded), batch_sizes, draft_lengths)
    found = {"environment": costs.environment, "tolerance": TOLERANCE, "rows": rows}
    with writing(out):
        costs.write(out / "costs.json")
        write_json(found, out / "check.json")
        plots.plot_check(rows, TOLERANCE, out / "check.png")
    largest = f"largest error {max(abs(row['error']) for row in rows):.0%}; at most {TOLERANCE:.0%} is asked for"
    say(found, as_json, show.as_table(rows, show.CHECK, "batch_size"), largest)
    if not within(rows):
        sys.exit(1)


def checked(
    work: Workload,
    loaded: LoadedModel,
    texts: list[list[int]],
    name: str,
    drafter: Drafter,
    batch_sizes: Sequence[int],
    draft_lengths: Sequence[int],
) -> tuple[Costs, list[dict[str, Any]]]:
    """Costs, and the rows of `check.compare` that they predict; acceptance is known of the longest draft alone."""
    check_batches(texts, batch_sizes)
    contexts = sorted({SHORT_CONTEXT, max(map(len, texts)) + 2 * work.steps})
    costs = work.measured(loaded, texts, {name: (drafter, max(draft_lengths))}, batch_sizes, contexts)
    found = costs.drafter(name)
    planner = Planner(costs.curve(), costs.rest, MeasuredCost(found.draft), found.acceptance)
    return costs, compare(planner, loaded.model, drafter, texts, batch_sizes, draft_lengths, work.steps)


def split_phases(
    *, out: Path, prefill_rate: float, decode_rate: float, devices: int, decode_speedup: float, as_json: bool
) -> None:
    """Best splits of up to `devices` devices; writes `out`/split.json and .png."""
    rates = split.Rates(prefill_rate, decode_rate)
    rows = split.plan(rates, decode_speedup, devices)
    make_folder(out)
    limits = {"plain": rates.balanced, "speculative": rates.with_speculation(decode_speedup).balanced}
    found = {"rates": asdict(rates), "decode_speedup": decode_speedup, "limit_per_device": limits, "rows": rows}
    with writing(out):
        write_json(found, out / "split.json")
        plots.plot_split(rows, limits, out / "split.png")
    say(found, as_json, show.as_table(rows, show.SPLIT, "devices"), show.limits_line(limits, decode_speedup))


def make_folder(out: Path) -> None:
    """Make `out` ready to be written to. Raises ValueError where it cannot be."""
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Goes around what writes to the folder. Raises ValueError where the system refuses it."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{out} cannot be written to ({error.strerror}): make room or give another --out") from None


def write_json(found: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(found, indent=2) + "\n")


def say(found: dict[str, Any], as_json: bool, *parts: str | Table) -> None:
    """Print `found` as JSON, or else the lines and tables."""
    if as_json:
        print(json.dumps(found, indent=2))
        return
    console = plain_console()
    for part in parts:
        print(part) if isinstance(part, str) else console.print(part)
