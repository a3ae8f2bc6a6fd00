"""fidelity.md and fidelity.json: the verdict first, then everything that it rests on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from eval.divergence import first_difference
from eval.fidelity.attribute import CAUSES
from eval.fidelity.ladder import BATCHED, CONTROL, PLAIN, PLAIN_BATCHED, REFERENCE, RUNGS, SPECULATIVE, Ladder
from eval.fidelity.results import Result
from eval.fidelity.settings import ALPHA, CONFIDENCE, POWER
from eval.fidelity.verdict import Examination
from eval.report import markdown_table

COMPARED = (
    (REFERENCE, PLAIN),
    (PLAIN, PLAIN_BATCHED),
    (PLAIN, SPECULATIVE),
    (PLAIN_BATCHED, BATCHED),
    (SPECULATIVE, BATCHED),
)
TESTS = f"""\
Of every emitted token x, given its prefix: f(x) minus its mean under p, summed and divided by the root of the summed
variances (z); and the transform of x under p, uniform if x follows p ("pit", Kolmogorov-Smirnov). p comes from plain
teacher forcing and Hugging Face's processors. A correct method fails any of these with probability {ALPHA:g} at most
(Holm); "smallest" is the bias of the mean, or the distance, that would have been found with probability {POWER:g};
"bound" holds with {CONFIDENCE:.0%} confidence for the distance."""


def summary(
    ladder: Ladder, results: Sequence[Result], examination: Examination, line: str, environment: dict[str, Any]
) -> dict[str, Any]:
    """fidelity.json's content; numbers that JSON lacks (infinity) are null."""
    found = {
        "verdict": line,
        "findings": [asdict(finding) for finding in examination.findings],
        "rungs": [_rung(rung.number, results) for rung in RUNGS],
        "agreement": [_agreement(a.number, b.number, results) for a, b in COMPARED],
        "exact_match": {rung.name: _exact(ladder, rung.number, results) for rung in (SPECULATIVE, BATCHED)},
        "causes": {cause: examination.causes[cause] for cause in CAUSES},
        "differences": [asdict(difference) for difference in examination.differences],
        "tests": {rung: [asdict(test) for test in tests] for rung, tests in examination.tests.items()},
        "envelope": asdict(examination.envelope),
        "replays": _replays(results),
        "collecting_share": _share(results),
        "environment": environment,
    }
    return _finite(found)


def markdown(found: dict[str, Any]) -> str:
    """fidelity.md from fidelity.json's content."""
    parts = [
        f"# Fidelity\n\n**{found['verdict']}**",
        _section("Findings", [f"- {finding['kind']}: {finding['text']}" for finding in found["findings"]]),
        _section("The ladder", [_table(RUNG_COLUMNS, found["rungs"])]),
        _section("Which rungs agree", [_table(AGREEMENT_COLUMNS, found["agreement"]), _AGREEMENT]),
        _section("Differences from plain decoding", _differences(found)),
        _section("Distribution tests", _tests(found["tests"])),
        _section("State and rule", [_state(found)]),
        _section("Environment", [f"- {key}: {value}" for key, value in found["environment"].items()]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


_AGREEMENT = """\

Plain against plain is what precision and batch size do without any speculation. Where each run draws in its own way
(sampling without the coupled rule), plain and speculative outputs differ by design."""
RUNG_COLUMNS = ("rung", "name", "requests", "failed", "tokens", "largest_shift", "tokens_per_step", "seconds")
AGREEMENT_COLUMNS = ("rung", "other", "requests", "different", "earliest")
DIFFERENCE_COLUMNS = ("rung", "id", "position", "token", "control_token", "cause")
EVIDENCE_COLUMNS = ("margin", "difference", "width", "violation", "vanishes", "note")
TEST_COLUMNS = ("name", "tokens", "value", "p_value", "p_holm", "smallest", "bound")


def _differences(found: dict[str, Any]) -> list[str]:
    total = len(found["differences"])
    lines = [", ".join(f"{cause} {count}" for cause, count in found["causes"].items()) + f"; {total} in all."]
    if total:
        rows = [{**d, **d["evidence"]} for d in found["differences"]]
        lines += ["", _table((*DIFFERENCE_COLUMNS, *EVIDENCE_COLUMNS), rows), "", _EVIDENCE]
    return lines


_EVIDENCE = """\
margin: the control's top score minus its second. difference: how much the two runs' scores of the two tokens differ,
the larger. width: how much scores move at the width of a verification alone. violation: of the step replayed in
float64. vanishes: no difference in the reference precision."""


def _tests(tests: dict[str, list[dict[str, Any]]]) -> list[str]:
    if not tests:
        return ["Greedy decoding samples nothing: equality with plain decoding is the test."]
    lines = [TESTS]
    for rung, rows in tests.items():
        lines += ["", f"{rung}:", "", _table(TEST_COLUMNS, rows)]
    return lines


def _state(found: dict[str, Any]) -> str:
    replays, envelope = found["replays"], found["envelope"]
    share = "-" if found["collecting_share"] is None else f"{found['collecting_share']:.1%}"
    return (
        f"Scores of emitted tokens lie at most {envelope['plain']:.3g} from teacher forcing's in plain runs; more than "
        f"{envelope['limit']:.3g} is a corrupted state. {replays['steps']} steps were replayed in float64, largest "
        f"violation {_cell(replays['largest'])}. Watching took {share} of the speculative rungs."
    )


def _rung(number: int, results: Sequence[Result]) -> dict[str, Any]:
    mine = [r for r in results if r.rung == number]
    shifts = [abs(shift) for r in mine for shift in r.shifts if shift is not None]
    steps = sum(len(r.steps) - 1 for r in mine if r.steps)
    return {
        "rung": number,
        "name": RUNGS[number].name,
        "requests": len(mine),
        "failed": sum(r.error is not None for r in mine),
        "tokens": sum(len(r.tokens) for r in mine),
        "largest_shift": max(shifts, default=None),
        "tokens_per_step": sum(sum(r.steps[1:]) for r in mine) / steps if steps else None,
        "seconds": _seconds(mine),
    }


def _agreement(rung: int, other: int, results: Sequence[Result]) -> dict[str, Any]:
    tokens = {(r.rung, r.number): r.tokens for r in results if r.sample == 0 and r.error is None}
    numbers = sorted({number for _, number in tokens if (rung, number) in tokens and (other, number) in tokens})
    places = [first_difference(tokens[rung, n], tokens[other, n]) for n in numbers]
    parted = [place for place in places if place is not None]
    return {
        "rung": RUNGS[rung].name,
        "other": RUNGS[other].name,
        "requests": len(numbers),
        "different": len(parted),
        "earliest": min(parted, default=None),
    }


def _exact(ladder: Ladder, rung: int, results: Sequence[Result]) -> float | None:
    """Share of requests that equal their control, of those where neither failed; None where they are not meant to."""
    compared = _agreement(CONTROL[rung], rung, results)
    if not ladder.compares_tokens or not compared["requests"]:
        return None
    return 1 - compared["different"] / compared["requests"]


def _replays(results: Sequence[Result]) -> dict[str, Any]:
    violations = [violation for r in results if RUNGS[r.rung].speculative for *_, violation in r.replays]
    return {"steps": len(violations), "largest": max(violations, default=None)}


def _share(results: Sequence[Result]) -> float | None:
    """Of the speculative rungs' time, what watching took."""
    first = {r.job: r for r in results if RUNGS[r.rung].speculative and r.error is None}.values()
    total = sum(r.seconds for r in first)
    return sum(r.collecting for r in first) / total if total else None


def _seconds(results: Sequence[Result]) -> float:
    return sum({r.job: r.seconds for r in results}.values())


def _section(title: str, lines: list[str]) -> str:
    return f"## {title}\n\n" + "\n".join(lines) if lines else ""


def _table(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    header = [column.replace("_", " ") for column in columns]
    return markdown_table(header, [[_cell(row[column]) for column in columns] for row in rows])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
