"""What a report says, section by section, for report.md and report.html alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from eval.cells import ACCEPTANCE, CATEGORY, MAIN, NONE, SPEED, cells, label, memory_line, phases_line
from eval.divergence import TIE
from eval.fidelity.settings import NOT_LOSSLESS

Row = dict[str, Any]

MAIN_TERMS = [
    ("method", "hf is Hugging Face generate, also with its own prompt lookup or assistant model; plain is this engine "
     "without a drafter; vllm is vLLM, the others are drafters."),
    ("accepted length", "accepted drafted tokens + 1 per decode step and row, prefill excluded, before any cut at a "
     "stop."),
    ("acceptance", "accepted / drafted tokens."),
    ("tokens/s", "emitted tokens (stop token included) / seconds, prefill included; median over a batch's repeats."),
    ("vs plain, vs HF", "ratio of tokens/s on the same batch, timed in turns; median over batches and repeats "
     "[quartiles]. vs vLLM is against the faster, at that batch size, of vLLM without and with its own n-grams."),
    ("same as plain", "requests whose tokens all equal plain decoding's at the same batch size; - for plain itself and "
     "where sampled outputs differ by design."),
    ("differ", "requests that do not, in the first pass; each is listed below."),
]  # fmt: skip
ACCEPTANCE_TERMS = [
    ("noise-free", "mean, over drafted positions that were reached, of the probability with which the rule accepts the "
     "token: it estimates the sum of min(p, q) without the luck of the draw. For greedy and coupled rules 0 or 1."),
    ("drafted", "drafted tokens per decode step and row."),
    ("by position", "share of drafted tokens accepted at position 1, 2, ... among those whose position was reached."),
    ("of drafted", "the same share among all tokens that were drafted at that position."),
    ("intervals", "95%, by bootstrap over prompts (the turns of one chat together)."),
]  # fmt: skip
SPEED_TERMS = [
    ("prefill", "from the call until every row has its first token; decode is the rest and the tokens emitted in it."),
    ("step", "a decode step of the batch, all phases."),
    ("ideal", "accepted length x plain step / (draft + forward + verify): what a loop without overhead would reach."),
    ("achieved / ideal", "decode vs plain / ideal: what the loop, and rows that finish early, leave of it."),
    ("ideal / oracle", "what is left where rejected drafts cost time; the oracle drafts only what will be accepted."),
    ("predicted", "Leviathan's closed form for independent acceptance, from the noise-free acceptance, the draft "
     "length and the time of a drafted token; every step is taken to draft its full length."),
    ("spread", "(slowest - fastest) / median over the repeats of a batch, median over batches."),
]  # fmt: skip

PHASES_MEAN = (
    "Share of draft (propose, observe), forward (the target), verify (processors and rule) and loop (the rest)."
)


@dataclass(frozen=True)
class Section:
    """terms: pairs of a word and its meaning. code: pairs of a heading and preformatted text."""

    title: str
    text: str = ""
    header: list[str] = field(default_factory=list)
    cells: list[list[str]] = field(default_factory=list)
    terms: list[tuple[str, str]] = field(default_factory=list)
    items: list[str] = field(default_factory=list)
    code: list[tuple[str, str]] = field(default_factory=list)


def warnings(summary: dict[str, Any]) -> list[str]:
    """What must be read before any number."""
    found = []
    lossy = sorted(
        {f"{row['method']} (verifier {row['verifier']})" for row in summary["rows"] if row["lossless"] is False}
    )
    if lossy:
        found.append(f"LOSSY: the output of {', '.join(lossy)} does not follow the target model.")
    if not summary["complete"]:
        found.append("Interrupted: the numbers below are of the batches that were finished.")
    wrong = [run for run in summary["fidelity"] if run["verdict"].startswith(NOT_LOSSLESS)]
    found += [f"{run['run']}: {run['verdict']}" for run in wrong]
    failed = [label(row, summary["rows"]) for row in summary["rows"] if row["error"] is not None]
    if failed:
        found.append(f"Failed: {'; '.join(failed)}. The tracebacks are at the end.")
    return found


def sections(summary: dict[str, Any]) -> list[Section]:
    """From the content of summary.json, in the order of reading; sections without content are left out."""
    rows = summary["rows"]
    drafted = [row for row in rows if row["mean_accepted_length"] is not None and row["drafted_per_step"]]
    found = [
        _fidelity(summary["fidelity"]) if summary["fidelity"] else None,
        Section("Results", "", *cells(rows, MAIN), terms=MAIN_TERMS),
        Section("Acceptance", "", *cells(drafted, ACCEPTANCE), terms=ACCEPTANCE_TERMS) if drafted else None,
        _speed([row for row in rows if row["error"] is None], summary["compile_seconds"]),
        _categories([row for row in summary["categories"] if row["drafted_per_step"]]),
        Section(
            "Where decode steps spend their time",
            PHASES_MEAN,
            items=[phases_line(row, rows) for row in rows if row["phase_shares"]],
        ),
        _divergences(summary),
        Section("Memory", items=[memory_line(memory) for memory in summary["memory"]]) if summary["memory"] else None,
        _failures(rows),
        Section("Environment", items=list(_environment(summary["environment"]))),
    ]
    return [section for section in found if section is not None]


def by_cause(runs: Sequence[Row]) -> dict[str, int]:
    """The divergences of several runs of `specdec fidelity`, as the summary lists them, added up."""
    return {cause: sum(run["causes"][cause] for run in runs) for cause in runs[0]["causes"]}


def _fidelity(runs: Sequence[Row]) -> Section:
    total = Counter(by_cause(runs))
    share = f", {total['unexplained'] / total.total():.1%}" if total.total() else ""
    text = (
        f"Is the output still the target model's? Each run of specdec fidelity is a folder beside this report, with "
        f"the evidence in its fidelity.md. First divergences by cause: {total.total()} in all, of which unexplained "
        f"{total['unexplained']}{share}."
    )
    lines = [[run["run"], run["verdict"], *map(str, run["causes"].values())] for run in runs]
    return Section("Fidelity", text, ["run", "verdict", *total], lines)


def _speed(rows: Sequence[Row], compile_seconds: float) -> Section:
    text = f"Compiling took {compile_seconds:.0f} s, which is in no figure." if compile_seconds else ""
    return Section("Speed", text, *cells(rows, SPEED), terms=SPEED_TERMS)


def _categories(rows: Sequence[Row]) -> Section | None:
    if not rows:
        return None
    text = (
        "Of drafters alone; the rows above are the totals. vs plain is of the batches that hold a single category, so "
        "of all at batch size 1."
    )
    return Section("Categories", text, *cells(rows, CATEGORY))


def _divergences(summary: dict[str, Any]) -> Section:
    found, across = summary["divergences"], [_across(one) for one in summary["plain_across_batch_sizes"]]
    title = "First divergences from plain decoding"
    if not found:
        return Section(title, "None.", items=across)
    measured = [divergence for divergence in found if divergence["gap"] is not None]
    ties = sum(divergence["tie"] for divergence in measured)
    text = (
        f"{len(found)} in all. Margin is the target's top logit minus its second after the shared prefix, gap its top "
        f"logit minus that of the less probable of the two tokens, both from one forward without a cache. In float32 a "
        f"gap below {TIE:g} is a tie: {ties} of the {len(measured)} measured."
    )
    names = ["method", "batch", "T", "dtype", "request", "position", "token", "plain's token", "margin", "gap"]
    keys = ("method", "batch_size", "temperature", "dtype", "id", "position", "token", "control_token")
    lines = [[*(str(one[key]) for key in keys), _small(one["margin"]), _small(one["gap"])] for one in found]
    return Section(title, text, names, lines, items=across)


def _across(found: dict[str, Any]) -> str:
    return (
        f"For comparison, the batch size alone: plain decoding at batch {found['batch_size']} differs from plain "
        f"decoding at batch {found['reference_batch_size']} in {found['different']} of {found['requests']} requests "
        f"({found['dtype']}, temperature {found['temperature']:g})."
    )


def _failures(rows: Sequence[Row]) -> Section | None:
    failed = [row for row in rows if row["error"] is not None]
    if not failed:
        return None
    code = [(f"{label(row, rows)}: {row['error']}", row["traceback"]) for row in failed]
    return Section("Failures", "A row with a failure has no numbers, and what was left of it was not run.", code=code)


def _environment(environment: dict[str, Any]) -> Iterator[str]:
    for key, value in environment.items():
        if key != "command":
            yield f"{key}: {value}"


def _small(value: float | None) -> str:
    return NONE if value is None else f"{value:.2g}"
