"""Order, warm-up and records of the interleaved runs."""

from dataclasses import replace

import pytest

from eval.methods import Method, Outcome
from eval.runner import WARM_UP_TOKENS, Failure, Record, batches, execute, schedule
from eval.summary import compile_seconds
from specdec.stats import RowStats, Stats
from tests.eval.samples import prompts_of


def test_batches_hold_every_prompt_once_by_length():
    prompts = prompts_of(5, 2, 9, 2, 1)
    found = [[prompt.number for prompt in batch] for batch in batches(prompts, 2)]
    assert found == [[4, 1], [3, 0], [2]]


def test_methods_take_turns_and_the_first_one_changes():
    methods = [Method(name, None, 0.0, "float32", None, None) for name in "abc"]
    jobs = list(schedule(prompts_of(1, 2, 3, 4), methods, [2, 4], repeats=2))
    order = ["".join(job.method.name for job in jobs[start : start + 3]) for start in range(0, len(jobs), 3)]
    assert order == ["abc", "bca", "bca", "cab", "abc", "bca"]
    assert [(job.batch_size, job.batch, job.repeat) for job in jobs[::3]] == [
        (2, 0, 0),
        (2, 0, 1),
        (2, 1, 0),
        (2, 1, 1),
        (4, 0, 0),
        (4, 0, 1),
    ]
    assert len({job.key for job in jobs}) == len(jobs)


def recording_method(name: str, calls: list, drafter: str | None = "ngram", trees: bool = False) -> Method:
    def generate(prompts, max_new_tokens):
        calls.append((name, len(prompts), max_new_tokens))
        rows = [RowStats(prompt.number, 1, 2, [3], [1], [[0.123456789, None]]) for prompt in prompts]
        stats = Stats(name, "typical", False, rows, 7, 5, 40, 6)
        return Outcome([[prompt.number, 50] for prompt in prompts], 0.5, 0.25, len(prompts), 7, stats, trees)

    return Method(name, drafter, 0.8, "bfloat16", 4, generate)


def test_each_method_is_warmed_once_per_batch_size_and_only_timed_calls_are_written():
    calls, written = [], []
    methods = [recording_method("a", calls), recording_method("b", calls)]
    jobs = list(schedule(prompts_of(1, 2, 3), methods, [2], repeats=1))
    execute(jobs, 20, written.append)
    assert calls == [
        ("a", 2, WARM_UP_TOKENS),
        ("a", 2, 20),
        ("b", 2, WARM_UP_TOKENS),
        ("b", 2, 20),
        ("b", 1, 20),
        ("a", 1, 20),
    ]
    assert [[record.id for record in records] for records in written] == [["p0", "p1"]] * 2 + [["p2"]] * 2


def test_records_carry_the_row_and_its_batch():
    written = []
    execute(list(schedule(prompts_of(4, 6), [recording_method("a", [])], [2], 1)), 20, written.extend)
    second = written[1]
    assert (second.id, second.tokens, second.prompt_tokens) == ("p1", [1, 50], 6)
    assert (second.drafted, second.accepted, second.rows) == ([3], [1], 2)
    assert (second.batch_seconds, second.batch_forwards, second.batch_decode_forwards) == (0.5, 7, 5)
    assert (second.batch_packed_tokens, second.batch_syncs) == (40, 6)
    assert (second.verifier, second.lossless) == ("typical", False)
    assert (second.temperature, second.dtype, second.draft_length) == (0.8, "bfloat16", 4)
    assert (second.batch_prefill_seconds, second.batch_prefill_tokens) == (0.25, 2)
    assert second.accept_prob == [[0.123457, None]] and second.conversation == "p1"


def test_compiling_is_the_warm_ups_and_counts_once():
    calls, written = [], []
    method = recording_method("a", calls)

    def compiling(prompts, max_new_tokens):
        outcome = method.generate(prompts, max_new_tokens)
        outcome.stats.compile_seconds = 60.0 if len(calls) == 1 else 0.25  # later: looking the graph up
        return outcome

    execute(list(schedule(prompts_of(4, 6, 5), [replace(method, generate=compiling)], [2], 2)), 20, written.extend)
    assert [(r.batch, r.repeat, r.batch_compile_seconds) for r in written] == [
        (0, 0, 60.0), (0, 0, 60.0), (0, 1, 0.0), (0, 1, 0.0), (1, 0, 0.0), (1, 1, 0.0),
    ]  # fmt: skip
    assert compile_seconds(written) == 60.0


def test_trees_have_no_probabilities_by_position():
    written = []
    execute(list(schedule(prompts_of(4), [recording_method("a", [], trees=True)], [1], 1)), 20, written.extend)
    assert written[0].accept_prob is None and written[0].accepted == [1]


def test_a_lossy_rule_does_no_harm_to_plain_decoding():
    written = []
    execute(list(schedule(prompts_of(4), [recording_method("plain", [], drafter=None)], [1], 1)), 20, written.extend)
    assert written[0].lossless


def test_a_method_is_left_out_where_its_batch_is_too_large():
    methods = [Method("a", None, 0.0, "float32", None, None), Method("b", None, 0.0, "float32", None, None, 1)]
    jobs = list(schedule(prompts_of(1, 2), methods, [1, 2], repeats=1))
    assert [(job.method.name, job.batch_size) for job in jobs] == [("a", 1), ("b", 1), ("b", 1), ("a", 1), ("a", 2)]


def broken_method(name: str, calls: list, error: BaseException, at: int) -> Method:
    """As `recording_method`, raising at its call number `at`, warm-ups counted."""
    sound = recording_method(name, calls)

    def generate(prompts, max_new_tokens):
        if len([call for call in calls if call[0] == name]) == at:
            calls.append((name, len(prompts), max_new_tokens))
            raise error
        return sound.generate(prompts, max_new_tokens)

    return Method(name, "ngram", 0.8, "bfloat16", 4, generate)


def test_what_raises_fails_its_own_row_and_the_rest_goes_on():
    calls, written = [], []
    methods = [recording_method("a", calls), broken_method("b", calls, RuntimeError("boom"), at=2)]
    jobs = list(schedule(prompts_of(1, 2, 3), methods, [1, 3], repeats=1))
    execute(jobs, 20, written.extend)
    failures = [result for result in written if isinstance(result, Failure)]
    assert [(found.method, found.batch_size, found.batch, found.error) for found in failures] == [
        ("b", 1, 1, "RuntimeError: boom")
    ]
    assert "in generate" in failures[0].traceback and failures[0].row == ("bfloat16", 0.8, "b", 1)
    kept = [(found.method, found.batch_size, found.id) for found in written if isinstance(found, Record)]
    assert sorted(kept) == [("a", 1, "p0"), ("a", 1, "p1"), ("a", 1, "p2"), *(("a", 3, f"p{n}") for n in range(3)),
                            ("b", 1, "p0"), *(("b", 3, f"p{n}") for n in range(3))]  # fmt: skip


def test_rows_that_failed_before_are_not_tried_again():
    calls = []
    jobs = list(schedule(prompts_of(1, 2), [recording_method("a", calls)], [1, 2], repeats=1))
    execute(jobs, 20, lambda results: None, failed={("bfloat16", 0.8, "a", 1)})
    assert {count for _, count, _ in calls} == {2}


def test_ctrl_c_is_no_failure():
    method = broken_method("a", [], KeyboardInterrupt(), at=1)
    with pytest.raises(KeyboardInterrupt):
        execute(list(schedule(prompts_of(1), [method], [1], 1)), 20, lambda results: None)
