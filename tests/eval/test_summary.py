"""Every number of the table, worked out by hand."""

import pytest

from eval.summary import categories, plain_across_batch_sizes, rows, table
from tests.eval.samples import failure, record

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
    assert ngram["phase_shares"] == pytest.approx({"draft": 0.1, "forward": 0.6, "verify": 0.2, "loop": 0.1})
    assert ngram["decode_step_ms"] == pytest.approx(10_000 / 3)
    assert ngram["audit_share"] == pytest.approx(0.01 / 2.0) and found["plain"]["audit_share"] is None
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


def test_vllm_is_compared_by_its_faster_way():
    """By all batches together: plain takes 3 + 3 seconds, its n-grams 1 + 4; ngram takes 2 on each."""
    records = []
    for batch, plain, drafted in [(0, 3.0, 1.0), (1, 3.0, 4.0)]:
        for method, seconds in {"vllm": plain, "vllm + ngram": drafted, "ngram": 2.0}.items():
            records += two_requests(method, seconds, batch=batch)
    found = {row["method"]: row for row in rows(records, ["vllm", "ngram"], 0.0, "float32", ())}
    assert found["ngram"]["speedup_vs_vllm"] == pytest.approx((1 / 2 + 4 / 2) / 2)
    assert found["vllm"]["speedup_vs_vllm"] == pytest.approx((1 / 3 + 4 / 3) / 2)


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
    shared = {"dtype": "float32", "temperature": 0.0, "reference_batch_size": 1, "requests": 2}
    assert plain_across_batch_sizes(records) == [
        shared | {"batch_size": 4, "different": 1},
        shared | {"batch_size": 8, "different": 0},
    ]
    assert plain_across_batch_sizes([]) == []


def test_the_table_keeps_dtypes_and_temperatures_apart():
    results = []
    for dtype, temperature, seconds in [("float32", 0.0, 4.0), ("float32", 0.8, 2.0), ("bfloat16", 0.0, 8.0)]:
        place = {"dtype": dtype, "temperature": temperature}
        for size in (1, 2):
            results += two_requests("plain", 8.0, batch_size=size, **place)
            results += two_requests("ngram", seconds, ([1, 2, 3, 4], [5, 7]), batch_size=size, **place)
    found = table(results)
    keys = [(row["dtype"], row["temperature"], row["batch_size"], row["method"]) for row in found]
    conditions = [("float32", 0.0), ("float32", 0.8), ("bfloat16", 0.0)]
    assert keys == [(*c, size, method) for c in conditions for size in (1, 2) for method in ("plain", "ngram")]
    assert [row["speedup_vs_plain"] for row in found[1::2]] == pytest.approx([2, 2, 4, 4, 1, 1])
    assert [row["exact_match_rate"] for row in found[1::2]] == [0.5, 0.5, None, None, 0.5, 0.5]


def test_a_failed_row_has_its_traceback_and_no_numbers():
    results = [*two_requests("plain", 4.0), *two_requests("ngram", 2.0), failure("ngram", batch=1)]
    results += [*two_requests("plain", 4.0, batch_size=4), *two_requests("ngram", 1.0, batch_size=4)]
    plain, failed, plain_at_4, sound = table(results)
    assert failed.keys() == plain.keys() == sound.keys()
    assert (failed["error"], failed["batch_size"], failed["drafter"]) == ("RuntimeError: boom", 2, "ngram")
    assert "Traceback" in failed["traceback"] and failed["lossless"] is None
    assert failed["tokens_per_second"] is None and failed["acceptance_rate"] is None and failed["requests"] == 0
    assert plain["error"] is None and sound["error"] is None
    assert sound["speedup_vs_plain"] == pytest.approx(4.0)  # the other batch size is not touched


def test_a_run_of_nothing_but_failures_has_a_table():
    [row] = table([failure("hf")])
    assert row["method"] == "hf" and row["error"] == "RuntimeError: boom"


def test_coupled_outputs_are_held_to_the_coupled_control():
    place = {"temperature": 0.8}
    results = two_requests("plain", 4.0, ([9], [9]), verifier="block", **place)
    results += two_requests("plain (coupled)", 8.0, ([1], [2]), verifier="coupled", drafter=None, **place)
    results += two_requests("ngram (coupled)", 4.0, ([1], [3]), verifier="coupled", **place)
    results += two_requests("ngram (block)", 4.0, ([1], [3]), verifier="block", **place)
    found = {row["method"]: row for row in table(results)}
    assert found["ngram (coupled)"]["exact_match_rate"] == 0.5
    assert found["ngram (coupled)"]["speedup_vs_plain"] == pytest.approx(1.0)  # speed is against plain as it is
    assert found["ngram (block)"]["exact_match_rate"] is None
    assert found["plain (coupled)"]["exact_match_rate"] is None


def test_categories_and_which_batches_have_a_speed():
    """Batch 0 is of one category, batch 1 mixes two: both count for acceptance, only the first for speed."""
    maths, code = {"category": "maths"}, {"category": "code"}
    results = []
    for method, seconds in [("plain", 4.0), ("ngram", 1.0)]:
        results += [record(method, id=name, batch_seconds=seconds, **maths) for name in "ab"]
        results.append(record(method, id="c", batch=1, batch_seconds=3.0, **maths))
        results.append(record(method, id="d", batch=1, batch_seconds=3.0, **code))
    found = {(row["category"], row["method"]): row for row in categories(results)}
    assert found["maths", "ngram"]["requests"] == 3 and found["code", "ngram"]["requests"] == 1
    assert found["maths", "ngram"]["speedup_vs_plain"] == pytest.approx(4.0)
    assert found["code", "ngram"]["speedup_vs_plain"] is None
    assert found["code", "ngram"]["mean_accepted_length"] == 1.5 and found["code", "ngram"]["tokens"] == 4
    assert categories(two_requests("plain", 4.0)) == []  # a single category is the total
