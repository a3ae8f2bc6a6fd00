"""`specdec fidelity --self-check`: every known bug is injected, and must be caught; without one, nothing may be.

Bugs that show on the model itself get at most TOKENS tokens. Those that need joint laws run on a toy of three tokens,
where many are cheap, and a comparison that only u = 0 tells apart on an input planted for it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import count

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from drafters.draft_model import DraftModelDrafter
from eval.fidelity.bugs import MODEL_BUGS, Bug, keyed_by_position, less_or_equal, none
from eval.fidelity.distribution import Statistic, all_tests
from eval.fidelity.joint import joint_laws
from eval.fidelity.ladder import BATCHED, PLAIN_BATCHED, Job, Ladder
from eval.fidelity.observe import observe
from eval.fidelity.recorder import Recorder
from eval.fidelity.replay import replay
from eval.fidelity.results import Result
from eval.fidelity.state import Envelope
from eval.fidelity.toy import TREE, TableDrafter, toy_ladder
from eval.fidelity.verdict import Finding, failed_tests, holm, single_findings
from eval.folder import Folder
from heads.submodel import layers_of, submodel
from specdec.contracts import Draft, Scores
from specdec.draws import FreshDraws
from verifiers.block import BlockVerifier
from verifiers.rejection import RejectionVerifier
from verifiers.tree_rejection import TreeRejectionVerifier

TOKENS = 4000  # emitted by the model for one bug, at most
TOY_ROWS = 40_000  # requests of the toy for one bug, at most; 5 tokens each
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 1.0}


@dataclass(frozen=True)
class Check:
    """One injected bug, or none. caught_by: kind of the finding that was looked for, "" where it did not come.

    tokens: emitted until then, all where nothing came.   others: kinds found by then as well.
    smallest: the bias that the test would have found at that number of tokens; None where no test was to find it.
    """

    bug: str
    on: str
    caught_by: str
    evidence: str
    tokens: int
    others: list[str]
    smallest: float | None = None

    @property
    def right(self) -> bool:
        """Caught if there was something to catch, silent if not."""
        return bool(self.caught_by) != (self.bug == "none")


def self_check(ladder: Ladder, folder: Folder, as_json: bool) -> int:
    """Run all checks, print the table and write self-check.json; the exit status, 1 where a check went wrong."""
    table = Table()
    for column in ("bug", "on", "caught by", "tokens", "also by", "smallest bias seen", "evidence", ""):
        table.add_column(column)
    checks = []
    for check in all_checks(ladder):
        checks.append(check)
        smallest = "-" if check.smallest is None else f"{check.smallest:.2g}"
        cells = (check.caught_by or "-", str(check.tokens), ", ".join(check.others), smallest, check.evidence)
        table.add_row(check.bug, check.on, *cells, "as it should be" if check.right else "WRONG")
        print(f"{check.bug}, {check.on}: {check.caught_by or 'nothing found'}", file=sys.stderr)
    rows = [asdict(check) | {"right": check.right} for check in checks]
    folder.write_json("self-check.json", rows)
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        Console(markup=False, highlight=False, width=200).print(table)
    return 0 if all(check.right for check in checks) else 1


def all_checks(ladder: Ladder) -> Iterator[Check]:
    """ladder: the user's, of which model, prompts, batch size and lengths are taken."""
    base = sampled(ladder)
    envelope = plain_envelope(base)
    for bug in (Bug("none", "", none), *MODEL_BUGS):
        yield on_model(bug, base, envelope)
    chain = toy_ladder(TableDrafter(), BlockVerifier, ladder.seed)
    tree = toy_ladder(TableDrafter(TREE), TreeRejectionVerifier, ladder.seed)
    unmodified = replace(tree, drafter=TableDrafter(TREE, says="unmodified"))
    yield on_toy("none", chain)
    yield on_toy("none", tree)
    with keyed_by_position(chain) as broken:
        yield on_toy("noise keyed by position, block verification", broken)
    yield on_toy("drawn without replacement, verified with the unmodified q", unmodified)
    yield planted("none")
    with less_or_equal(chain):
        yield planted("u q <= p in place of u q < p")


def sampled(ladder: Ladder) -> Ladder:
    """The ladder with sampling and a drafter whose q is near p, but is not p: it is both accepted and rejected."""
    drafter = DraftModelDrafter(without_middle(ladder.model))
    return replace(ladder, drafter=drafter, verifier=RejectionVerifier, sampling=SAMPLING)


def without_middle(model: PreTrainedModel) -> PreTrainedModel:
    """The target without the middle tenth of its layers, at least one (Draft & Verify, Zhang et al. 2309.08168).

    Raises ValueError for a model of one layer."""
    total = len(layers_of(model))
    if total == 1:
        raise ValueError(
            "--self-check drafts with the target's layers but the middle ones: give a target of two or more"
        )
    left_out = max(1, total // 10)
    first = (total - left_out + 1) // 2
    return submodel(model, [*range(first), *range(first + left_out, total)], share=True)


def plain_envelope(ladder: Ladder) -> Envelope:
    """From plain decoding of the prompts in batches."""
    jobs = [job for job in ladder.jobs() if job.rung is PLAIN_BATCHED]
    return Envelope.of([result for job in jobs for result in observe(ladder, job, [])], ladder.model.dtype)


def on_model(bug: Bug, base: Ladder, envelope: Envelope, most: int = TOKENS) -> Check:
    """Speculate with the bug, batch after batch with new seeds, until it is caught or `most` tokens are emitted."""
    with bug.inject(base) as ladder:
        results: list[Result] = []
        for job in _endless(ladder):
            results += observe(ladder, job, [])
            if error := next((result.error for result in results if result.error), None):
                raise RuntimeError(f"self-check {bug.name!r} could not run:\n{error}")
            tokens = sum(len(result.tokens) for result in results)
            tests = holm({BATCHED.name: all_tests(result.samples for result in results)})
            findings = [*single_findings(ladder, results, envelope), *failed_tests(tests)]
            kinds = sorted({finding.kind for finding in findings})
            if bug.caught_by in kinds or tokens >= most:
                return _check(bug, findings, tests[BATCHED.name], tokens)


def on_toy(bug: str, ladder: Ladder, rows: int = TOY_ROWS) -> Check:
    """The joint law of the toy's first tokens, looked at once: after `rows` requests."""
    test = next(test for done, test in joint_laws(ladder) if done >= rows)
    [test] = holm({"toy": [test]})["toy"]
    caught = "test" if test.failed else ""
    evidence = f"joint law: chi-square {test.value:.4g}, p = {test.p_holm:.1g}"
    return Check(bug, f"toy, {ladder.verifier.name}", caught, evidence, test.tokens, [], test.smallest)


def planted(bug: str) -> Check:
    """One verdict of the rejection rule where u = 0 meets a drafted token of p = 0, replayed."""
    logits = torch.tensor([[0.0, -torch.inf, 0.0], [0.0, 0.0, 0.0]])
    uniform_q = torch.zeros(1, 1, 3)
    draft = Draft(torch.tensor([[1]]), [1], q_logits=uniform_q, q_logz=uniform_q.logsumexp(-1))
    recorder = Recorder(RejectionVerifier(), 1, lambda row, step: True)
    draws = _ZeroUniforms(0, [0], [0], lambda logits: logits, "cpu")
    verdict = recorder.verify(draft, Scores(logits, torch.tensor([[0, 1]])), draws)
    recorder.on_commit(0, [int(verdict.next_token[0])], 0)
    found = replay(recorder.rows[0].kept[0], seed=0, request=0, prompt_tokens=1)
    caught = "replay" if found.failed else ""
    return Check(bug, "planted, rejection", caught, f"violation {found.violation:.3g}", 1, [])


class _ZeroUniforms(FreshDraws):
    def uniform(self, count: int) -> torch.Tensor:
        return torch.zeros(len(self.requests_B), count, dtype=torch.float64)


def _endless(ladder: Ladder) -> Iterator[Job]:
    """The last rung's batches, over and over with new seeds."""
    for sample in count():
        yield from (replace(job, sample=sample) for job in ladder.jobs() if job.rung is BATCHED and job.sample == 0)


def _check(bug: Bug, findings: list[Finding], tests: list[Statistic], tokens: int) -> Check:
    kinds = sorted({finding.kind for finding in findings})
    looked_for = [kind for kind in kinds if kind == bug.caught_by or bug.name == "none"]
    evidence = next((finding.text for finding in findings if finding.kind in looked_for), "")
    failed = min((test for test in tests if test.failed), key=lambda test: test.p_holm, default=None)
    smallest = failed.smallest if failed is not None and bug.caught_by == "test" else None
    others = [kind for kind in kinds if kind not in looked_for]
    return Check(bug.name, "model", ", ".join(looked_for), evidence, tokens, others, smallest)
