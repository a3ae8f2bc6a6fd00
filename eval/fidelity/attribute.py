"""Why a request's output differs from its control's, told at the first token that does.

Tested in the order state, rule, batch, precision; what none of them explains is "unexplained", and is listed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drafters.ngram import NGramDrafter
from eval.divergence import first_difference
from eval.fidelity.ladder import BATCHED, CONTROL, PLAIN, PLAIN_BATCHED, REFERENCE, SPECULATIVE, Job, Ladder
from eval.fidelity.recorder import KeptStep
from eval.fidelity.replay import TOLERANCE, choice_scores, replay
from eval.fidelity.results import Result
from eval.fidelity.state import Envelope

CAUSES = ("state", "rule", "batch", "precision", "unexplained")


@dataclass(frozen=True)
class Evidence:
    """What was measured at a difference. Scores are processed ones, with coupled noise where the rule adds it.

    margin:     the control's top score minus its second.
    difference: how much the score of one of the two tokens differs between the two runs, the larger of both.
    width:      how much some score of the control moves when its tokens are scored at verification width.
    violation:  of the step's verdict, or the control's, replayed in float64; None without a reference of the rule.
    vanishes:   whether the whole output equals plain decoding's in the reference precision; None where that is not
                higher than the one that serves.
    reproduced: whether a second run of both batches emitted the same tokens there.
    note:       what else decided.
    """

    margin: float | None = None
    difference: float | None = None
    width: float | None = None
    violation: float | None = None
    vanishes: bool | None = None
    reproduced: bool | None = None
    note: str = ""


@dataclass(frozen=True)
class Difference:
    """position: index of the first output token that differs; token, control_token: None where that output ended."""

    rung: int
    id: str
    number: int
    position: int
    token: int | None
    control_token: int | None
    cause: str
    evidence: Evidence


def differences(ladder: Ladder, results: Sequence[Result], envelope: Envelope) -> list[Difference]:
    """The first difference of every speculative request from its control, each with its cause.

    Empty for rules that draw otherwise than plain decoding: their outputs differ by design."""
    if not ladder.compares_tokens:
        return []
    by_rung = {(r.rung, r.number): r for r in results if r.sample == 0 and r.error is None}
    pairs = []
    for (rung, number), result in by_rung.items():
        control = by_rung.get((CONTROL.get(rung), number))
        if control is not None and (place := first_difference(result.tokens, control.tokens)) is not None:
            pairs.append((result, control, place))
    kept = _kept_steps(ladder, pairs)
    attribution = _Attribution(ladder, by_rung, kept, envelope)
    return [attribution.of(result, control, place) for result, control, place in pairs]


def _kept_steps(ladder: Ladder, pairs: Sequence[tuple[Result, Result, int]]) -> dict[tuple[int, int, int], KeptStep]:
    """The steps of both sides at each difference in full, by (rung, number, step), from one more run of each batch."""
    jobs: dict[tuple[int, int, int], Job] = {job.key: job for job in ladder.jobs()}
    wanted: dict[tuple[int, int, int], set[tuple[int, int]]] = defaultdict(set)
    for *both, place in pairs:
        for result in both:
            if place < len(result.tokens):
                row = [prompt.number for prompt in jobs[result.job].prompts].index(result.number)
                wanted[result.job].add((row, result.step_of(place)[0]))
    return {
        (key[0], jobs[key].prompts[row].number, step): kept
        for key, places in wanted.items()
        for (row, step), kept in ladder.again(jobs[key], places).items()
    }


class _Attribution:
    """by_rung: results by (rung, request number)."""

    def __init__(self, ladder: Ladder, by_rung: dict, kept: dict[tuple[int, int, int], KeptStep], envelope: Envelope):
        self.ladder, self.by_rung, self.kept, self.envelope = ladder, by_rung, kept, envelope
        self.prompts = {prompt.number: prompt for prompt in ladder.prompts}

    def of(self, result: Result, control: Result, place: int) -> Difference:
        token, other = (r.tokens[place] if place < len(r.tokens) else None for r in (result, control))
        evidence = self.evidence(result, control, place)
        cause = self.cause(result, control, place, evidence)
        return Difference(result.rung, result.id, result.number, place, token, other, cause, evidence)

    def evidence(self, result: Result, control: Result, place: int) -> Evidence:
        if place >= min(len(result.tokens), len(control.tokens)):
            return Evidence(note="one of the two outputs ends here, after the same tokens")
        note = self._moved(result, place)
        sides = [self._side(r, place) for r in (result, control)]
        if not all(sides):
            return Evidence(reproduced=False, note=note)
        (step, scores, _), (control_step, control_scores, control_raw) = sides
        both = [result.tokens[place], control.tokens[place]]
        violations = [self._violation(step, result), self._violation(control_step, control)]
        prompt = self.prompts[result.number]
        wide = self.ladder.scores_at_width(prompt, control.tokens[: place + 1])[place].double().cpu()
        top = control_scores.topk(2).values
        return Evidence(
            margin=float(top[0] - top[1]),
            difference=float((scores - control_scores)[both].abs().max()),
            width=float((wide - control_raw).nan_to_num(0, 0, 0).abs().max()),
            violation=max((v for v in violations if v is not None), default=None),
            vanishes=self._vanishes(result.number),
            reproduced=True,
            note=note,
        )

    def cause(self, result: Result, control: Result, place: int, evidence: Evidence) -> str:
        if evidence.note:  # of the state: moved logits, or an end that only one side has
            return "state"
        if not evidence.reproduced:
            return "unexplained"
        outside = {int(position): gap for position, gap in result.outside}
        if (evidence.violation or 0) > TOLERANCE or outside.get(place, 0) > self.envelope.limit:
            return "rule"
        narrow = evidence.margin <= 2 * (evidence.difference + TOLERANCE)
        if not narrow or evidence.vanishes is False:  # the same scores, or high precision too: no rounding did this
            return "unexplained"
        if result.rung == BATCHED.number and self._batch_alone(result.number, control, place):
            return "batch"
        return "precision" if evidence.width > 0 else "unexplained"

    def _moved(self, result: Result, place: int) -> str:
        """What the state did to the scores up to `place`, or nothing."""
        moved = self.envelope.first_outside(result)
        if moved is None or moved > place:
            return ""
        shift = abs(result.shifts[moved])
        return f"score at token {moved} off by {shift:.3g}; plain runs: {self.envelope.plain:.3g}"

    def _side(self, result: Result, place: int) -> tuple[KeptStep, torch.Tensor, torch.Tensor] | None:
        """The kept step, the scores that chose the token at `place`, and those without noise; None if the second run
        emitted another one."""
        step, within = result.step_of(place)
        kept = self.kept.get((result.rung, result.number, step))
        if kept is None or within >= len(kept.outcome) or kept.outcome[within][1] != result.tokens[place]:
            return None
        node, position = kept.outcome[within][0], result.prompt_tokens + place
        scores = choice_scores(kept, node, self.ladder.seed, result.number, position)
        return kept, scores, kept.scores[node].double()

    def _violation(self, kept: KeptStep, result: Result) -> float | None:
        found = replay(kept, self.ladder.seed, result.number, result.prompt_tokens)
        return None if found is None else found.violation

    def _vanishes(self, number: int) -> bool | None:
        """Drafted by n-grams: under these rules no drafter may change the output, and this one fits any model."""
        plain = self.by_rung.get((REFERENCE.number, number))
        if plain is None or not self.ladder.reference_is_wider:
            return None
        prompts, drafter = [self.prompts[number]], NGramDrafter(min_n=1)
        found = self.ladder.decode(self.ladder.reference, prompts, drafter, lambda row, step: False, self.ladder.seed)
        return found.recorder.rows[0].tokens == plain.tokens

    def _batch_alone(self, number: int, control: Result, place: int) -> bool:
        """Plain decoding differs between the batch sizes up to there, or one by one there is no difference."""
        plain, batched, one_by_one = (
            self.by_rung.get((rung.number, number)) for rung in (PLAIN, PLAIN_BATCHED, SPECULATIVE)
        )
        upto = slice(place + 1)
        differs = plain is not None and plain.tokens[upto] != batched.tokens[upto]
        return differs or (one_by_one is not None and one_by_one.tokens[upto] == control.tokens[upto])
