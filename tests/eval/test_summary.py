"""Every number of the table, worked out by hand."""

import pytest

from eval.summary import plain_across_batch_sizes, rows
from tests.eval.samples import record

METHODS = ["hf", "plain", "ngram"]


def two_requests(method: str, seconds: float, tokens=([1, 2, 3, 4], [5, 6]), **changes) -> list:
    return [
        record(method, id=name, tokens=list(row), batch_seconds=seconds, **changes)
        for name, row in zip("ab", tokens, strict=True)
    ]


def summary(records: list, compared: tuple = ("hf", "ngram")) -> dict[str, dict]:
    return {row["method"]: row for row in rows(records, METHODS, 0.0, "float32", compared)}


def test_one_batch():
    found = summary(
        two_requests("ngram", 2.0, ([1, 2, 3, 4], [5, 7]), batch_forwards=3)
        + two_requests("hf", 6.0)
        + two_requests("plain", 4.0)
    )
    assert list(found) == METHODS  # in the order asked for, not that of the records
    ngram = found["ngram"]
    assert ngram["mean_accepted_length"] == 1 + 2 / 4  # accepted [1, 0] in both rows
    assert ngram["acceptance_rate"] == 2 / 8
    assert ngram["tokens_per_second"] == 6 / 2.0
    assert ngram["speedup_vs_plain"] == pytest.approx(2.0)
    assert ngram["speedup_vs_hf"] == pytest.approx(3.0)
    assert ngram["speedup_vs_hf_quartiles"] == pytest.approx([3.0, 3.0])
    assert (ngram["exact_match_rate"], ngram["divergences"], ngram["requests"]) == (0.5, 1, 2)
    assert (ngram["target_forwards"], ngram["tokens"]) == (3, 6)
    assert ngram["phase_shares"] == {"draft": 0.1, "forward": 0.6, "verify": 0.2, "loop": 0.1}
    assert ngram["decode_step_ms"] == pytest.approx(10_000 / 3)
    assert (ngram["batch_size"], ngram["temperature"], ngram["dtype"]) == (2, 0.0, "float32")
    assert found["plain"]["mean_accepted_length"] == 1 and found["plain"]["acceptance_rate"] is None
    assert found["plain"]["exact_match_rate"] is None and found["plain"]["speedup_vs_hf"] == pytest.approx(1.5)
    assert found["hf"]["exact_match_rate"] == 1.0 and found["hf"]["mean_accepted_length"] is None
    assert found["hf"]["phase_shares"] is None and found["hf"]["decode_step_ms"] is None


def test_ratios_are_medians_over_batches_and_repeats_and_tokens_are_of_one_pass():
    records = []
    for key, plain, ngram in [((0, 0), 4.0, 4.0), ((0, 1), 4.0, 2.0), ((1, 0), 4.0, 1.0), ((1, 1), 4.0, 3.0)]:
        place = {"batch": key[0], "repeat": key[1]}
        records += two_requests("plain", plain, **place) + two_requests("ngram", ngram, **place)
    ngram = summary(records)["ngram"]
    assert ngram["speedup_vs_plain"] == pytest.approx((4 / 3 + 2) / 2)  # of 1, 2, 4 and 4/3
    assert ngram["tokens"] == 12 and ngram["requests"] == 4 and ngram["timed_batches"] == 4
    assert ngram["tokens_per_second"] == pytest.approx(12 / (3.0 + 2.0))  # median seconds of batches 0 and 1
    assert ngram["speedup_vs_hf"] is None and ngram["speedup_vs_hf_quartiles"] is None


def test_speed_counts_each_methods_own_tokens():
    short = two_requests("ngram", 2.0, ([1, 2, 3], []))
    assert summary(short + two_requests("plain", 4.0))["ngram"]["speedup_vs_plain"] == pytest.approx(1.0)


def test_no_match_rate_where_samples_differ_by_design():
    records = two_requests("plain", 4.0) + two_requests("ngram", 4.0)
    assert summary(records)["ngram"]["exact_match_rate"] == 1.0
    assert summary(records, compared=())["ngram"]["exact_match_rate"] is None


def test_an_interrupted_run_compares_what_both_have():
    records = two_requests("plain", 4.0) + two_requests("ngram", 2.0) + two_requests("plain", 1.0, batch=1)
    found = summary(records)
    assert found["ngram"]["speedup_vs_plain"] == pytest.approx(2.0)
    assert found["ngram"]["requests"] == 2 and found["plain"]["requests"] == 4
    assert "hf" not in found


def test_plain_decoding_is_compared_with_itself_at_other_batch_sizes():
    changed = ([1, 2, 3, 4], [5, 7])
    records = two_requests("plain", 1.0, batch_size=1) + two_requests("plain", 1.0, changed, batch_size=4)
    records += two_requests("plain", 1.0, batch_size=8) + two_requests("ngram", 1.0, changed, batch_size=8)
    records += two_requests("plain", 1.0, changed, batch_size=8, repeat=1)
    assert plain_across_batch_sizes(records) == [
        {"batch_size": 4, "reference_batch_size": 1, "requests": 2, "different": 1},
        {"batch_size": 8, "reference_batch_size": 1, "requests": 2, "different": 0},
    ]
    assert plain_across_batch_sizes([]) == []
