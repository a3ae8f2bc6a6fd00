"""`specdec bench schedule`: both sides answer the same requests, and its figures are those of times known by hand."""

import json

import pytest

from eval import bench_schedule
from eval.bench_schedule import STATIC, NoDrafts, Outcome, gaps, in_turns, stream, summaries
from eval.methods import EncodedPrompt
from specdec.models import LoadedModel
from tests.tiny_models import tiny
from tests.toy_tokenizer import VOCAB, toy_tokenizer

SETTINGS = {
    "target": "", "drafter": "ngram", "dtype": "", "device": "", "prompts": None, "limit": 10, "raw": True,
    "max_batch": 3, "max_new_tokens": 6, "chunk": 64, "repeats": 1, "compile": False,
}  # fmt: skip


@pytest.fixture
def model(monkeypatch):
    model = tiny("llama", vocab=VOCAB)
    model.config.max_position_embeddings = 4096  # the built-in prompts are long for a tokenizer of single bytes
    monkeypatch.setattr(bench_schedule, "load_target", lambda *_: LoadedModel(model, toy_tokenizer(), "tiny"))
    return model


def test_all_methods_answer_all_requests_alike(model, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "\n".join(json.dumps({"prompt": text}) for text in ("ababab", "x", "some longer text here", "1"))
    )
    bench_schedule.run(**SETTINGS | {"prompts": prompts}, as_json=True)
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["method"] for row in rows] == [STATIC, "stream, plain", "stream, ngram"]
    for row in rows:
        assert (row["requests"], row["tokens"], row["same"]) == (10, 60, 10)  # four prompts, which start over
        assert (row["gap_ms"] is None) == (row["method"] == STATIC)
    assert rows[0]["vs_static"] == [1, 1, 1]
    bench_schedule.run(**SETTINGS | {"prompts": prompts}, as_json=False)
    assert "vs static" in capsys.readouterr().out


def test_gaps_end_with_the_last_arrival():
    emitted = {0: [1.0, 2.0, 4.0, 9.0], 1: [2.0, 3.0, 5.0], 2: [4.0, 6.0]}  # request 2 comes last, at 4
    assert list(gaps(emitted)) == [1.0, 2.0, 1.0]
    assert list(gaps({0: [1.0, 2.0]})) == []  # nothing arrived beside it


def test_rows_are_watched_from_their_first_token(model, monkeypatch):
    seen = []
    monkeypatch.setattr(bench_schedule, "gaps", lambda emitted: seen.append(emitted) or gaps(emitted))
    requests = [EncodedPrompt(n, str(n), "", [1, 2, 3 + n]) for n in range(5)]
    found = stream(model, requests, 2, 4, 64, NoDrafts(), 1)
    assert [len(tokens) for tokens in found.tokens] == [4] * 5
    assert {row: len(times) for row, times in seen[0].items()} == dict.fromkeys(range(5), 4)
    assert len(found.gaps) == 4 * 3 and min(found.gaps) > 0  # of requests 0 to 3, before the last one emits


def test_ratios_are_of_one_round():
    def runs(*seconds, gaps=()):
        return [Outcome([[1, 2], [3, 4]], time, list(gaps)) for time in seconds]

    static, ours = summaries({STATIC: runs(4.0, 8.0, 2.0), "ours": runs(2.0, 2.0, 2.0, gaps=[0.01] * 18 + [0.03] * 2)})
    assert static["tokens_per_second"] == [1.0, 0.5, 2.0]
    assert ours["vs_static"] == [2.0, 1.0, 4.0]
    assert ours["gap_ms"] == pytest.approx([10, 10, 10])
    assert ours["gap_p95_of_median"][0] == pytest.approx(3)  # 2 of 20 are three times as long


def test_another_method_is_first_in_each_round():
    order = []
    outcome = Outcome([[1]], 1.0, [])
    in_turns({name: lambda name=name: order.append(name) or outcome for name in "abc"}, 3)
    assert "".join(order) == "abcbcacab"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_batch": 0}, "are 10, 0, 64 and 1: give at least 1"),
        ({"max_new_tokens": 4096}, "more than the model's 4096 positions"),
        ({"drafter": "ngram:length=0"}, "drafts nothing"),
    ],
)
def test_what_cannot_run_is_refused(model, changes, message):
    with pytest.raises(ValueError, match=message):
        bench_schedule.run(**SETTINGS | changes, as_json=True)
