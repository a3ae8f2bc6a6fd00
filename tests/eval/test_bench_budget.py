"""`specdec bench budget`: what is compared, figures that follow from known speeds, and a killed run that goes on."""

import json
from types import SimpleNamespace

import pytest
import torch

from drafters.ngram import NGramDrafter
from eval import bench_budget
from eval.bench_budget import LEARNED, METHODS, PLAIN, RANDOM, Round, missing, order, summaries, worst
from specdec.models import LoadedModel
from specdec.speculation import LONGEST
from tests.tiny_models import tiny
from tests.toy_tokenizer import VOCAB, toy_tokenizer

SETTINGS = {
    "target": "", "drafter": "ngram", "dtype": "", "device": "", "batch_sizes": [2], "max_new_tokens": 5,
    "repeats": 1, "raw": True, "resume": False, "compile": False, "as_json": True,
}  # fmt: skip
TEXTS = {"copies": [[1, 2, 3] * 4, [4, 5] * 6], RANDOM: [[9, 8, 7]]}


@pytest.fixture
def model(monkeypatch):
    model = tiny("llama", dtype=torch.float32, vocab=VOCAB)
    monkeypatch.setattr(bench_budget, "load_target", lambda *_: LoadedModel(model, toy_tokenizer(), "tiny"))
    monkeypatch.setattr(bench_budget, "by_category", lambda *_: TEXTS)
    return model


def speeds(plain, learned, **fixed):
    return dict.fromkeys(map(str, range(1, LONGEST + 1)), 1.0) | {PLAIN: plain, LEARNED: learned} | fixed


def test_categories_are_the_built_in_ones_and_random_tokens():
    found = bench_budget.by_category(toy_tokenizer(), tiny("llama", vocab=VOCAB), True)
    assert len(found) == 7 and {len(prompts) for prompts in found.values()} == {10}
    assert {len(tokens) for tokens in found[RANDOM]} == {128}
    assert max(map(max, found[RANDOM])) < VOCAB


@pytest.fixture
def steps(monkeypatch):
    """Every step: whose it was (the object and its most drafted tokens, None where learned), and its tokens after."""
    found, step = [], bench_budget.Run.step

    def watched(run):
        step(run)
        batch = run.batch
        length = 0 if batch.drafter is None else None if batch.budget is not None else batch.draft_length
        found.append((run, length, batch.stats.emitted))

    monkeypatch.setattr(bench_budget.Run, "step", watched)
    return found


def test_every_method_decodes_every_round_in_full(model, tmp_path, steps, capsys):
    bench_budget.run(**SETTINGS, out=tmp_path / "out")
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert [(cell["category"], cell["batch_size"], cell["rounds"]) for cell in cells] == [
        ("copies", 2, 1),
        (RANDOM, 2, 1),
    ]
    runs = list({run: length for run, length, _ in steps}.items())
    assert [length for _, length in runs] == [0, None, *range(1, LONGEST + 1)] * 2
    prompts = [[request.columns[request.pads : request.prompt_columns].tolist() for request in run.batch.requests]
               for run, _ in runs]  # fmt: skip
    assert prompts == [TEXTS["copies"]] * len(METHODS) + [TEXTS[RANDOM] * 2] * len(METHODS)  # which start over
    rows = [request.row for run, _ in runs[: len(METHODS)] for request in run.batch.requests]
    assert len(set(rows)) == 2 * len(METHODS)  # they share one drafter
    for (run, _), asked in zip(runs, prompts, strict=True):  # each as plain decoding alone
        for request, prompt in zip(run.batch.requests, asked, strict=True):
            alone = model.generate(torch.tensor([prompt]), max_new_tokens=5, do_sample=False, pad_token_id=0)
            assert request.emitted.tolist() == alone[0, len(prompt) :].tolist()


def test_the_run_that_is_behind_goes_on(model, tmp_path, steps):
    bench_budget.run(**SETTINGS | {"max_new_tokens": 20}, out=tmp_path / "out")
    emitted = dict.fromkeys(list(dict.fromkeys(run for run, *_ in steps))[: len(METHODS)], 0)  # of the first round
    for run, _, now in steps:
        if run in emitted:
            assert emitted[run] == min(tokens for tokens in emitted.values() if tokens < 2 * 20)
            emitted[run] = now
    assert set(emitted.values()) == {2 * 20}


def test_a_killed_run_goes_on(model, tmp_path, capsys):
    out = tmp_path / "out"
    bench_budget.run(**SETTINGS, out=out)
    first, second = (out / "results.jsonl").read_text().splitlines()
    (out / "results.jsonl").write_text(first + "\n" + second[: len(second) // 2])
    bench_budget.run(**SETTINGS | {"resume": True, "batch_sizes": [1, 2]}, out=out)
    lines = (out / "results.jsonl").read_text().splitlines()
    assert lines[0] == first
    assert [(row["category"], row["batch_size"]) for row in map(json.loads, lines)] == [
        ("copies", 2), ("copies", 1), (RANDOM, 1), (RANDOM, 2),
    ]  # fmt: skip
    with pytest.raises(FileExistsError, match="--resume"):
        bench_budget.run(**SETTINGS, out=out)
    with pytest.raises(ValueError, match="max_new_tokens=5, not 7"):
        bench_budget.run(**SETTINGS | {"resume": True, "max_new_tokens": 7}, out=out)


@pytest.mark.parametrize(
    "wrong", [None, {PLAIN: 1.0}, speeds(1.0, None), speeds(0, 1.0), speeds(1.0, 1.0, another=1.0)]
)
def test_a_line_without_every_methods_speed_is_named(model, tmp_path, wrong):
    line = {"category": "copies", "batch_size": 2, "round": 0, "tokens_per_second": wrong}
    out = tmp_path / "out"
    bench_budget.run(**SETTINGS, out=out)
    (out / "results.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=r"results.jsonl, line 1, is not a result of this version .* remove the line"):
        bench_budget.run(**SETTINGS | {"resume": True}, out=out)


def test_rounds_come_in_turns_and_not_twice():
    done = [Round("a", 1, 0, {}), Round("b", 2, 1, {})]
    assert list(missing(["a", "b"], [1, 2], 2, done)) == [
        (0, "a", 2), (0, "b", 1), (0, "b", 2), (1, "a", 1), (1, "a", 2), (1, "b", 1),
    ]  # fmt: skip


def test_rounds_begin_with_other_methods():
    assert all(sorted(order(number)) == sorted(METHODS) for number in range(12))
    assert [order(number)[0] for number in range(3)] == [PLAIN, LEARNED, "1"]


def test_what_is_counted_begins_with_the_step_after_every_row_has_a_token(model, monkeypatch):
    """By a clock that moves one second per step."""
    seconds = iter(range(100))
    run = bench_budget.Run(model, [[1, 2, 3], [4, 5, 6, 7]], NGramDrafter(), 0, 0, 4, False)
    monkeypatch.setattr(bench_budget, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    counted = []
    while run.batch.live or run.batch.waiting:
        run.step()
        counted.append((run.tokens, run.seconds))
    assert counted == [(0, 0), (2, 1), (4, 2), (6, 3)]


def test_figures_by_hand():
    """Length 3 is the best by its median 30, although 5 has the highest single speed."""
    rounds = [
        Round("maths", 4, 0, speeds(10, 20, **{"3": 40.0, "5": 10.0})),
        Round("maths", 4, 1, speeds(20, 30, **{"3": 30.0, "5": 90.0})),
        Round("maths", 4, 2, speeds(10, 27, **{"3": 30.0, "5": 20.0})),
        Round("writing", 4, 0, speeds(10, 9, **{"2": 10.0})),
    ]
    maths, writing = summaries(rounds)
    assert (maths["best_length"], maths["rounds"], maths["plain_tokens_per_second"]) == ("3", 3, 10)
    assert maths["of_plain"][1] == 2.0 and maths["of_best"][1] == 0.9 and maths["best_of_plain"] == 3.0
    assert (writing["best_length"], writing["of_best"]) == ("2", [0.9, 0.9, 0.9])
    assert worst([maths, writing]) == (
        "learned lengths reach, of plain at least 0.900 (writing, batch 4), to be 0.97: 1 of 2 below; of the best "
        "fixed length at least 0.900 (maths, batch 4), to be 0.95: 2 of 2 below"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_sizes": [0]}, "--batch-sizes are"),
        ({"batch_sizes": [2, 2]}, "each batch size once"),
        ({"max_new_tokens": 256}, "more than the model's 256 positions"),
        ({"max_new_tokens": 1}, "more than one token"),
        ({"drafter": "ngram:length=3"}, "has a length of its own"),
    ],
)
def test_what_cannot_be_compared_is_refused(model, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        bench_budget.run(**SETTINGS | changes, out=tmp_path / "out")
