"""All that was found about a ladder's results, and the one line that it comes to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from eval.fidelity.attribute import Difference, differences
from eval.fidelity.distribution import Statistic, all_tests, corrected
from eval.fidelity.joint import NARROW, joint_law, vocabulary
from eval.fidelity.ladder import BATCHED, RUNGS, SPECULATIVE, Ladder
from eval.fidelity.replay import TOLERANCE
from eval.fidelity.results import Result
from eval.fidelity.settings import CONFIDENCE, NOT_LOSSLESS
from eval.fidelity.state import Envelope

JOINT_ROWS = 4000


@dataclass(frozen=True)
class Finding:
    """Something that a lossless method does not do. kind: failed, lossy, stop, state, zero, replay, test, or the cause
    of a difference: state, rule, unexplained."""

    kind: str
    text: str


@dataclass(frozen=True)
class Examination:
    """tests: by what was tested, Holm-corrected over all of them.   complete: False after an interrupted run, whose
    differences were not looked for."""

    envelope: Envelope
    differences: list[Difference]
    tests: dict[str, list[Statistic]]
    findings: list[Finding]
    complete: bool = True

    @property
    def causes(self) -> Counter[str]:
        return Counter(found.cause for found in self.differences)


def examine(ladder: Ladder, results: Sequence[Result], complete: bool = True) -> Examination:
    """Everything about the speculative results; those of the plain rungs are what they are held against.

    complete: False leaves out what would decode anew, after an interrupted run."""
    envelope = Envelope.of(results, ladder.model.dtype)
    found = differences(ladder, results, envelope) if complete else []
    groups = {rung.name: _samples(results, rung.number) for rung in (SPECULATIVE, BATCHED)}
    tests = {name: all_tests(samples) for name, samples in groups.items() if samples}
    if complete and tests and vocabulary(ladder) <= NARROW:
        tests["first tokens"] = [joint_law(ladder, JOINT_ROWS)]
    tests = holm(tests)
    findings = [
        *(Finding("failed", f"request {r.id} on rung {r.rung}: {_last_line(r.error)}") for r in results if r.error),
        *single_findings(ladder, results, envelope),
        *failed_tests(tests),
        *(Finding(d.cause, _where(d)) for d in found if d.cause in ("state", "rule", "unexplained")),
    ]
    return Examination(envelope, found, tests, findings, complete)


def verdict(ladder: Ladder, results: Sequence[Result], examination: Examination) -> str:
    """`lossless within ...`, `differs: precision only ...` or `NOT lossless: ...`; `interrupted: ...` where not known.

    Of the bounds that of the most tokens is given, and not the smallest, which would hold less often than stated."""
    if examination.findings:
        kinds = Counter(finding.kind for finding in examination.findings)
        counts = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
        return f"{NOT_LOSSLESS}: {counts}; the first: {examination.findings[0].text}"
    requests = sum(RUNGS[r.rung].speculative and r.sample == 0 for r in results)
    if not examination.complete:
        return f"interrupted: nothing wrong so far in {requests} requests, whose differences were not looked for"
    if causes := examination.causes:
        return (
            f"differs: precision only, in {sum(causes.values())} of {requests} requests (batch size {causes['batch']}, "
            f"width of the forward {causes['precision']})"
        )
    within = [f"0 differing tokens in {requests} requests"] if ladder.compares_tokens else []
    bounded = [test for found in examination.tests.values() for test in found if test.bound is not None]
    if bounded:
        most = max(bounded, key=lambda test: test.tokens)
        within.append(f"{most.bound:.3g} ({CONFIDENCE:.0%} bound, {most.name} of {most.tokens} tokens)")
    return f"lossless within {' and '.join(within)}"


def single_findings(ladder: Ladder, results: Sequence[Result], envelope: Envelope) -> list[Finding]:
    """What speculative results show one by one, without a control."""
    found = []
    for result in results:
        if result.error is not None or not RUNGS[result.rung].speculative:
            continue
        where = f"request {result.id} on rung {result.rung}"
        if not result.lossless:
            found.append(Finding("lossy", f"{where}: rule {result.verifier!r} does not follow the target by design"))
        if wrong := _wrong_end(ladder, result):
            found.append(Finding("stop", f"{where} {wrong}"))
        if (place := envelope.first_outside(result)) is not None:
            text = f"score at token {place} off by {abs(result.shifts[place]):.3g}, in plain runs {envelope.plain:.3g}"
            found.append(Finding("state", f"{where}: {text} at most"))
        for place, gap in result.outside:
            if gap > envelope.limit:
                found.append(Finding("zero", f"{where}: token {int(place)} has no probability, by {gap:.3g}"))
        for step, rule, violation in result.replays:
            if violation > TOLERANCE:
                found.append(Finding("replay", f"{where}, step {step}: not what {rule} decides, by {violation:.3g}"))
    return found


def holm(tests: dict[str, list[Statistic]]) -> dict[str, list[Statistic]]:
    """The same, corrected over all of them together. Rungs are not pooled: with one seed they draw the same numbers."""
    flat = iter(corrected([test for found in tests.values() for test in found]))
    return {name: [next(flat) for _ in found] for name, found in tests.items()}


def failed_tests(tests: dict[str, list[Statistic]]) -> list[Finding]:
    """The tests that fail."""
    return [
        Finding("test", f"{test.name} of {name}, {test.tokens} tokens: p = {test.p_holm:.1g} (Holm)")
        for name, found in tests.items()
        for test in found
        if test.failed
    ]


def _samples(results: Sequence[Result], rung: int) -> list:
    return [r.samples for r in results if r.rung == rung and r.samples]


def _wrong_end(ladder: Ladder, result: Result) -> str | None:
    """What is wrong with where the output ends, or None."""
    stop = next((place for place, token in enumerate(result.tokens) if token in ladder.stops), None)
    end = ladder.max_new_tokens if stop is None else min(ladder.max_new_tokens, stop + 1)
    if len(result.tokens) > end:
        return f"goes on {len(result.tokens) - end} tokens past its end"
    return f"ends {end - len(result.tokens)} tokens early" if len(result.tokens) < end else None


def _where(found: Difference) -> str:
    return f"request {found.id} on rung {found.rung} differs at token {found.position}: {found.cause}"


def _last_line(error: str) -> str:
    return error.strip().splitlines()[-1]
