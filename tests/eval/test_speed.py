"""Prefill and decode apart, the limits that step times set, and spread: each worked out by hand."""

import pytest

from eval.runs import Run, grouped
from eval.speed import limits, speeds, step_seconds
from tests.eval.samples import PHASES, record


def runs(method: str, *seconds: float, **changes):
    """One batch of two requests of 4 tokens each, timed `len(seconds)` times; prefill 1 second, 2 tokens by then."""
    made = [
        record(method, id=name, repeat=repeat, batch_seconds=time, **changes)
        for repeat, time in enumerate(seconds)
        for name in "ab"
    ]
    return grouped(made)[2][method]


def test_prefill_and_decode_are_apart():
    found = speeds(runs("ngram", 3.0), runs("plain", 4.0), runs("hf", 5.0), {})
    assert found["tokens_per_second"] == 8 / 3
    assert found["prefill_tokens_per_second"] == 6 / 1  # two prompts of 3 tokens
    assert found["decode_tokens_per_second"] == 6 / 2
    assert found["speedup_vs_plain"] == pytest.approx(4 / 3) and found["speedup_vs_hf"] == pytest.approx(5 / 3)
    assert found["decode_speedup_vs_plain"] == pytest.approx(3 / 2)
    assert found["decode_speedup_vs_plain_quartiles"] == pytest.approx([1.5, 1.5])


def test_a_batch_that_ended_with_its_prefill_has_no_decode_speed():
    one_token = {"tokens": [1], "batch_prefill_seconds": 4.0}
    [run] = runs("plain", 4.0, **one_token).values()
    assert isinstance(run, Run) and run.decode_speed is None
    found = speeds(runs("plain", 4.0, **one_token), runs("plain", 4.0, **one_token), {}, {})
    assert found["decode_tokens_per_second"] is None and found["decode_speedup_vs_plain"] is None


def test_spread_is_of_repeats():
    assert speeds(runs("plain", 4.0, 5.0, 4.5), {}, {}, {})["spread"] == pytest.approx(1 / 4.5)
    assert speeds(runs("plain", 4.0), {}, {}, {})["spread"] is None


def test_step_seconds_leave_out_prefill():
    """PHASES hold 10 seconds of decode phases over 3 steps; HF has none."""
    assert step_seconds(runs("plain", 4.0)) == {"draft": 1 / 3, "forward": 2.0, "verify": 2 / 3, "loop": 1 / 3}
    assert step_seconds(runs("hf", 4.0)) is None


def test_limits():
    """Plain steps of 10/3 s; drafted ones of 1/3 + 2 + 2/3 = 3 s beside the loop, AL 1.5 and 2 tokens drafted."""
    row = {
        "mean_accepted_length": 1.5,
        "drafted_per_step": 2.0,
        "noise_free_acceptance": 0.5,
        "decode_speedup_vs_plain": 1.0,
    }
    found = limits(row, runs("ngram", 3.0), runs("plain", 4.0), 2)
    ideal = 1.5 * (10 / 3) / 3
    assert found["ideal_speedup"] == pytest.approx(ideal)
    assert found["achieved_of_ideal"] == pytest.approx(1 / ideal)
    assert found["oracle_speedup"] == pytest.approx(1.5 * (10 / 3) / (10 / 3 + 0.25 * (3 - 10 / 3)))
    assert found["ideal_of_oracle"] == pytest.approx(found["ideal_speedup"] / found["oracle_speedup"])
    c = (1 / 3) / 2 / (10 / 3)  # 0.05
    assert found["predicted_speedup"] == pytest.approx((1 + 0.5 + 0.25) / (2 * c + 1))
    without = limits(row | {"noise_free_acceptance": None}, runs("ngram", 3.0), runs("plain", 4.0), 2)
    assert without["predicted_speedup"] is None and without["ideal_speedup"] == found["ideal_speedup"]


def test_plain_and_hf_have_no_limits():
    plain = {"mean_accepted_length": 1.0, "drafted_per_step": 0.0}
    assert set(limits(plain, runs("plain", 4.0), runs("plain", 4.0), 0).values()) == {None}
    hf = {"mean_accepted_length": None, "drafted_per_step": None}
    assert set(limits(hf, runs("hf", 4.0), runs("plain", 4.0), None).values()) == {None}


def test_phase_times_are_means_over_all_batches():
    slow = {key: 3 * value for key, value in PHASES.items()}
    both = runs("plain", 4.0) | {(1, 0): Run([record("plain", batch=1, batch_phases=slow, batch_decode_forwards=1)])}
    assert step_seconds(both)["forward"] == pytest.approx((6 + 18) / 4)
