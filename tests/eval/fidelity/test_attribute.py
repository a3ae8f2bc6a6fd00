"""Each cause of a difference, planted: it is named, and by its evidence."""

from dataclasses import replace

import pytest
import torch

from drafters.draft_model import DraftModelDrafter
from eval.fidelity.attribute import differences
from eval.fidelity.bugs import late_stop, shifted_positions, stale_slot
from eval.fidelity.distribution import Statistic
from eval.fidelity.ladder import PLAIN_BATCHED, SPECULATIVE
from eval.fidelity.state import Envelope
from eval.fidelity.verdict import Examination, examine, verdict
from tests.eval.fidelity.ladders import SAMPLED, climbed, ladder_of, rounding_model
from tests.tiny_models import tiny
from verifiers.greedy import GreedyVerifier


class SecondBest(GreedyVerifier):
    """A wrong rule: takes the second best token wherever a draft was rejected."""

    def verify(self, draft, p, draws):
        verdict = super().verify(draft, p, draws)
        second = p.logits[p.index.gather(1, verdict.n_accepted[:, None])[:, 0]].topk(2).indices[:, 1]
        rejected = (verdict.n_accepted < draft.lengths_B) & (draft.lengths_B > 0)
        return replace(verdict, next_token=torch.where(rejected, second, verdict.next_token))


class WrongInBatches(SecondBest):
    """The same without a reference to replay it by, and right about one row."""

    name = "third party's"

    def verify(self, draft, p, draws):
        return (SecondBest if len(draft.lengths) > 1 else GreedyVerifier).verify(self, draft, p, draws)


def examined(ladder, *rungs):
    results = climbed(ladder, *rungs)
    return results, examine(ladder, results)


@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "coupled"])
def test_a_correct_run_has_nothing_to_explain(sampling):
    ladder = ladder_of() if sampling is None else ladder_of(verifier="coupled", sampling=sampling)
    results, found = examined(ladder)
    assert found.differences == [] and found.findings == []
    assert verdict(ladder, results, found).startswith("lossless within 0 differing tokens in 6 requests")


@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "coupled"])
def test_rounding_is_called_precision_or_batch_size(sampling):
    changes = {"verifier": "coupled", "sampling": sampling} if sampling else {}
    ladder = ladder_of(rounding_model(), max_new_tokens=40, **changes)
    results, found = examined(ladder)
    assert found.differences and found.findings == []
    assert found.causes.keys() <= {"precision", "batch"}
    assert verdict(ladder, results, found).startswith("differs: precision only")
    for difference in found.differences:
        evidence = difference.evidence
        assert evidence.reproduced and evidence.margin <= 2 * evidence.difference and evidence.violation < 1e-4


def test_a_wrong_rule_is_called_a_rule():
    ladder = ladder_of(verifier="greedy")
    ladder = replace(ladder, verifier=SecondBest)
    results, found = examined(ladder, 2, 5)
    assert found.causes.keys() == {"rule"}
    for difference in found.differences:
        assert difference.evidence.violation == pytest.approx(difference.evidence.margin)
    assert verdict(ladder, results, found).startswith("NOT lossless")


def test_a_wrong_rule_that_only_batches_show_is_not_called_batch_size():
    ladder = replace(ladder_of(verifier="greedy"), verifier=WrongInBatches)
    _, found = examined(ladder, 1, 2, 4, 5)
    assert found.causes.keys() == {"unexplained"}
    assert all(d.evidence.violation is None and d.evidence.margin > 1e-3 for d in found.differences)


@pytest.mark.parametrize(("bug", "dtype"), [(stale_slot, torch.float64), (shifted_positions, torch.bfloat16)])
def test_a_corrupted_state_is_called_state(bug, dtype):
    ladder = ladder_of(tiny("llama", dtype=dtype))
    plain = climbed(ladder, 2)
    with bug(ladder) as broken:
        results = [*plain, *climbed(broken, 5)]
        found = examine(broken, results)
    assert found.causes["state"] > 0 and found.causes.keys() <= {"state", "precision", "batch"}
    assert verdict(broken, results, found).startswith("NOT lossless")


def test_a_late_stop_is_found():
    ladder = ladder_of(drafter=DraftModelDrafter(tiny("llama", dtype=torch.float64)))  # accepts whole drafts
    with late_stop(ladder) as broken:
        results = climbed(broken, 2, 5)
        found = examine(broken, results)
    assert any(finding.kind == "stop" and "past its end" in finding.text for finding in found.findings)
    assert found.causes.keys() == {"state"}


def test_a_difference_that_no_measurement_explains_is_unexplained():
    """A result that the engine never gave: a second run does not reproduce it."""
    ladder = ladder_of()
    results = climbed(ladder, 1, 4)
    place = next(i for i, r in enumerate(results) if r.rung == SPECULATIVE.number)
    tokens = list(results[place].tokens)
    tokens[5] = (tokens[5] + 1) % 97
    results[place] = replace(results[place], tokens=tokens)
    found = examine(ladder, results)
    [difference] = found.differences
    assert (difference.position, difference.cause) == (5, "unexplained")
    assert difference.evidence.reproduced is False
    assert verdict(ladder, results, found).startswith("NOT lossless: 1 x unexplained")


def test_a_difference_is_the_batchs_where_one_by_one_there_is_none():
    ladder = ladder_of(rounding_model(), max_new_tokens=40)
    results = climbed(ladder, 0, 2, 5)
    envelope = Envelope.of(results, torch.bfloat16)
    assert {found.cause for found in differences(ladder, results, envelope)} == {"precision"}
    one_by_one = [replace(r, rung=SPECULATIVE.number) for r in results if r.rung == PLAIN_BATCHED.number]
    assert {found.cause for found in differences(ladder, [*results, *one_by_one], envelope)} == {"batch"}


def test_the_bound_of_the_most_tokens_is_given():
    tests = {"few": [Statistic("pit", 100, 0, 1, 0, 0.1)], "many": [Statistic("pit", 200, 0, 1, 0, 0.2)]}
    line = verdict(ladder_of(sampling=SAMPLED), [], Examination(Envelope(0, 1), [], tests, []))
    assert line == "lossless within 0.2 (95% bound, pit of 200 tokens)"


def test_rules_that_draw_anew_are_not_compared():
    ladder = ladder_of(sampling=SAMPLED)
    assert differences(ladder, climbed(ladder, 2, 5), Envelope(0, 1)) == []


def test_the_envelope_is_the_plain_runs():
    results = climbed(ladder_of(rounding_model()), 1, 2)
    envelope = Envelope.of(results, torch.bfloat16)
    plain = [abs(x) for r in results if r.rung in (1, 2) for x in r.shifts]
    assert envelope.plain == max(plain) > 0 and envelope.limit >= 4 * envelope.plain
    moved = replace(results[-1], shifts=[0.0, -2 * envelope.limit, None])
    assert envelope.first_outside(moved) == 1
    assert all(envelope.first_outside(result) is None for result in results)
