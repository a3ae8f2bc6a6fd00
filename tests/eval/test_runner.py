"""Order, warm-up and records of the interleaved runs."""

from eval.methods import Method, Outcome
from eval.runner import WARM_UP_TOKENS, batches, execute, schedule
from specdec.stats import RowStats, Stats
from tests.eval.samples import prompts_of


def test_batches_hold_every_prompt_once_by_length():
    prompts = prompts_of(5, 2, 9, 2, 1)
    found = [[prompt.number for prompt in batch] for batch in batches(prompts, 2)]
    assert found == [[4, 1], [3, 0], [2]]


def test_methods_take_turns_and_the_first_one_changes():
    methods = [Method(name, None, None) for name in "abc"]
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


def recording_method(name: str, calls: list, drafter: str | None = "ngram") -> Method:
    def generate(prompts, max_new_tokens):
        calls.append((name, len(prompts), max_new_tokens))
        stats = Stats(
            name, "typical", False, [RowStats(prompt.number, 1, 2, [3], [1]) for prompt in prompts], 7, 5, 40, 6
        )
        return Outcome([[prompt.number, 50] for prompt in prompts], 0.5, stats.forwards, stats)

    return Method(name, drafter, generate)


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
    assert (second.batch_packed_tokens, second.batch_syncs, second.verifier, second.lossless) == (
        40,
        6,
        "typical",
        False,
    )


def test_a_lossy_rule_does_no_harm_to_plain_decoding():
    written = []
    execute(list(schedule(prompts_of(4), [recording_method("plain", [], drafter=None)], [1], 1)), 20, written.extend)
    assert written[0].lossless
