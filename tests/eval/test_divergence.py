"""Where outputs part, and whether the target was undecided there."""

from dataclasses import replace

import pytest
import torch

from eval.divergence import TIE, Divergence, Margins, divergences, first_difference
from eval.runs import COUPLED_CONTROL
from tests.eval.samples import record
from tests.tiny_models import tiny

PROMPTS = {"a": [11, 12, 13]}


@pytest.mark.parametrize(
    ("tokens", "control", "expected"),
    [([1, 2], [1, 2], None), ([1, 3], [1, 2], 1), ([1], [1, 2], 1), ([1, 2, 3], [1, 2], 2), ([], [], None)],
)
def test_first_difference(tokens, control, expected):
    assert first_difference(tokens, control) == expected


def test_margin_and_gap_are_of_the_shared_prefix():
    model = tiny("llama")
    with torch.no_grad():
        logits = model(torch.tensor([[11, 12, 13, 1, 2]])).logits[0, -1]
    ranked = logits.argsort(descending=True).tolist()
    [found] = divergences(
        [record("plain", tokens=[1, 2, ranked[0], 4]), record("ngram", tokens=[1, 2, ranked[3], 9])],
        Margins(model, PROMPTS),
    )
    assert (found.method, found.id, found.position) == ("ngram", "a", 2)
    assert (found.token, found.control_token) == (ranked[3], ranked[0])
    assert found.margin == pytest.approx((logits[ranked[0]] - logits[ranked[1]]).item(), abs=1e-5)
    assert found.gap == pytest.approx((logits[ranked[0]] - logits[ranked[3]]).item(), abs=1e-5)
    assert not found.tie


def test_a_tie_needs_both_tokens_at_the_top():
    """Two output columns are made equal, so that their tokens always tie; a third token there is no tie."""
    model = tiny("llama")
    with torch.no_grad():
        top = model(torch.tensor([[11, 12, 13, 1]])).logits[0, -1].argmax().item()
        twin, other = (top + 1) % 97, (top + 2) % 97
        model.lm_head.weight[twin] = model.lm_head.weight[top]
    control = record("plain", tokens=[1, top])
    for token, tie in [(twin, True), (other, False)]:
        [found] = divergences([control, record("ngram", tokens=[1, token])], Margins(model, PROMPTS))
        assert found.margin < TIE
        assert found.tie is tie


def test_an_output_that_ended_early_is_never_a_tie():
    margins = Margins(tiny("llama"), PROMPTS)
    [found] = divergences([record("plain", tokens=[1, 2]), record("hf", tokens=[1])], margins)
    assert (found.token, found.control_token, found.gap, found.tie) == (None, 2, None, False)
    assert found.margin > 0


def test_without_a_model_positions_alone():
    found = divergences([record("ngram", tokens=[1, 5]), record("plain", tokens=[1, 2])], None)
    assert found == [Divergence("float32", 0.0, "ngram", 2, "a", 1, 5, 2)]


def test_compares_within_a_batch_size():
    records = [record("plain", tokens=[1]), record("ngram", tokens=[2], batch_size=4)]
    assert divergences(records, None) == []


def test_compares_within_a_dtype_and_temperature():
    other = [record("ngram", tokens=[2], dtype="bfloat16"), record("ngram", tokens=[2], temperature=0.5)]
    assert divergences([record("plain", tokens=[1]), *other], None) == []


def test_samples_are_compared_under_the_coupled_rule_alone():
    """With its own control where plain decoding draws otherwise too. HF's samples are other ones by design."""
    sampled = {"temperature": 0.5, "tokens": [2]}
    records = [record("plain", temperature=0.5, tokens=[1], verifier="block"), record("hf", **sampled)]
    records += [record("ngram (block)", verifier="block", **sampled)]
    records += [record("ngram (coupled)", verifier="coupled", **sampled)]
    assert [found.method for found in divergences(records, None)] == ["ngram (coupled)"]
    own = record("plain", temperature=0.5, tokens=[2], verifier="coupled")
    assert divergences([*records, replace(own, method=COUPLED_CONTROL)], None) == []


def test_margins_are_measured_for_greedy_requests_alone():
    margins = Margins(tiny("llama"), PROMPTS)
    sampled = [record(m, temperature=0.5, tokens=[t], verifier="coupled") for m, t in [("plain", 1), ("ngram", 2)]]
    [found] = divergences(sampled, margins)
    assert found.margin is None and not found.tie
