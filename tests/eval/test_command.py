"""`specdec eval` from its arguments to its folder, on a tiny model."""

import json

import pytest
from typer.testing import CliRunner

import eval.command
from eval.runner import Record
from specdec.cli import app
from specdec.models import LoadedModel
from tests.tiny_models import tiny
from tests.toy_tokenizer import VOCAB, toy_tokenizer

PROMPTS = ["abcabcabc", "xyz", "aaaa", "no repetition", "12121212"]
KEYS = {
    "method", "drafter", "verifier", "batch_size", "temperature", "dtype", "mean_accepted_length", "acceptance_rate",
    "tokens_per_second", "speedup_vs_plain", "speedup_vs_hf", "exact_match_rate", "target_forwards", "tokens",
}  # fmt: skip


@pytest.fixture
def model(monkeypatch):
    model = tiny("llama", vocab=VOCAB)
    monkeypatch.setattr(eval.command, "load_target", lambda *arguments: LoadedModel(model, toy_tokenizer(), "tiny"))
    return model


@pytest.fixture
def evaluate(tmp_path, model):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": f"p{n}", "prompt": text}) + "\n" for n, text in enumerate(PROMPTS)))

    def invoke(*options: str):
        fixed = ["eval", "--prompts", str(path), "--batch-sizes", "1,2", "--max-new-tokens", "10", "--raw"]
        return CliRunner().invoke(app, [*fixed, "--out", str(tmp_path / "out"), *options])

    return invoke


def results(tmp_path) -> list[Record]:
    return [Record(**json.loads(line)) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]


def summary(tmp_path) -> dict:
    return json.loads((tmp_path / "out" / "summary.json").read_text())


def test_writes_everything(tmp_path, evaluate):
    result = evaluate("--drafter", "ngram:min_n=1", "--drafter", "ngram:min_n=1,length=2")
    assert result.exit_code == 0, result.output
    found = summary(tmp_path)
    assert [(row["batch_size"], row["method"]) for row in found["rows"]] == [
        (size, method) for size in (1, 2) for method in ("hf", "plain", "ngram:min_n=1", "ngram:min_n=1,length=2")
    ]
    assert all(row.keys() >= KEYS for row in found["rows"])
    assert all(row["tokens"] == 50 and row["requests"] == 5 for row in found["rows"])
    assert {row["exact_match_rate"] for row in found["rows"]} == {None, 1.0} and found["divergences"] == []
    assert found["complete"] and found["environment"]["target"] == "tiny"
    assert found["plain_across_batch_sizes"][0]["different"] == 0
    ngram = found["rows"][2]
    assert ngram["mean_accepted_length"] > 1 and ngram["target_forwards"] < found["rows"][1]["target_forwards"]
    lengths = {n for r in results(tmp_path) if r.method == "ngram:min_n=1,length=2" for n in r.drafted}
    assert max(lengths) == 2  # its own length, not the run's
    assert len(results(tmp_path)) == 2 * 4 * 5
    assert "ngram:min_n=1,length=2" in result.stdout and "vs plain" in result.stdout
    assert "# Evaluation" in (tmp_path / "out" / "report.md").read_text()


def test_json_is_alone_on_standard_output(tmp_path, evaluate):
    result = evaluate("--json", "--limit", "2")
    assert json.loads(result.stdout) == summary(tmp_path)["rows"]


def test_refuses_another_runs_folder_and_loses_nothing(tmp_path, evaluate):
    evaluate("--limit", "2")
    before = (tmp_path / "out" / "results.jsonl").read_text()
    for options, message in [([], "--resume"), (["--resume", "--seed", "1"], "seed=0, not 1")]:
        result = evaluate("--limit", "2", *options)
        assert result.exit_code == 2 and message in result.stderr and "Traceback" not in result.stderr
    assert (tmp_path / "out" / "results.jsonl").read_text() == before


def test_interrupted_run_is_usable_and_resumes_where_it_was(tmp_path, evaluate, monkeypatch):
    true_generate, calls = eval.command.specdec.generate, []

    def interrupted(*arguments, **keywords):
        calls.append(keywords["request_ids"])
        if len(calls) == 9:
            raise KeyboardInterrupt
        return true_generate(*arguments, **keywords)

    monkeypatch.setattr(eval.command.specdec, "generate", interrupted)
    result = evaluate()
    assert result.exit_code == eval.command.INTERRUPTED and "--resume" in result.stderr
    assert not summary(tmp_path)["complete"] and summary(tmp_path)["rows"][0]["method"] == "hf"
    before = (tmp_path / "out" / "results.jsonl").read_text()
    assert 0 < len(before.splitlines()) < 30
    monkeypatch.setattr(eval.command.specdec, "generate", true_generate)
    assert evaluate("--resume").exit_code == 0
    assert (tmp_path / "out" / "results.jsonl").read_text().startswith(before)
    keys = [(r.id, r.method, r.batch_size) for r in results(tmp_path)]
    assert len(keys) == len(set(keys)) == 2 * 3 * 5
    assert summary(tmp_path)["complete"] and {row["tokens"] for row in summary(tmp_path)["rows"]} == {50}


def test_a_wrong_engine_is_reported_with_its_margins(tmp_path, evaluate, monkeypatch):
    """The control of the match rate: an engine that changes one token of every request."""
    true_generate = eval.command.specdec.generate

    def broken(model, input_ids, **keywords):
        output, stats = true_generate(model, input_ids, **keywords)
        if keywords["drafter"] is not None and keywords["max_new_tokens"] == 10:
            output[:, input_ids.shape[1] + 4] = (output[:, input_ids.shape[1] + 4] + 1) % VOCAB
        return output, stats

    monkeypatch.setattr(eval.command.specdec, "generate", broken)
    evaluate("--limit", "2")
    found = summary(tmp_path)
    assert [row["exact_match_rate"] for row in found["rows"]] == [1.0, None, 0.0] * 2
    assert len(found["divergences"]) == 4
    assert all(d["position"] == 4 and d["gap"] > 0 and not d["tie"] for d in found["divergences"])


def test_sampling_is_not_compared_token_by_token(tmp_path, evaluate):
    assert evaluate("--temperature", "1", "--limit", "2").exit_code == 0
    rows = summary(tmp_path)["rows"]
    assert all(row["exact_match_rate"] is None and row["temperature"] == 1.0 for row in rows)
    assert rows[2]["verifier"] == "rejection"


def test_prompt_that_does_not_fit_is_refused_before_the_run(tmp_path, evaluate):
    result = evaluate("--max-new-tokens", "250")
    assert result.exit_code == 2 and "'p0' has 9 tokens" in result.stderr and "256 positions" in result.stderr
    assert not (tmp_path / "out").exists()


def test_unknown_drafter_is_refused_before_the_run(tmp_path, evaluate):
    result = evaluate("--drafter", "nope")
    assert result.exit_code == 2 and "known are" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_verifier_that_does_not_fit_is_refused_before_the_run(tmp_path, evaluate):
    result = evaluate("--verifier", "block")
    assert result.exit_code == 2 and "does not fit do_sample=False" in result.stderr
    assert not (tmp_path / "out").exists()


def test_memory_is_measured_for_every_engine_method(tmp_path, evaluate):
    result = evaluate("--limit", "2", "--memory", "120")
    found = summary(tmp_path)["memory"]
    assert [(memory["method"], memory["batch_size"], memory["context"]) for memory in found] == [
        ("plain", 2, 120),
        ("ngram", 2, 120),
    ]
    assert "memory of ngram, batch 2" in result.stdout


def test_memory_at_an_impossible_context_is_refused_before_the_run(tmp_path, evaluate):
    assert evaluate("--memory", "300").exit_code == 2
    assert not (tmp_path / "out").exists()


def test_broken_prompt_line_is_named_or_skipped(tmp_path, evaluate):
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write("{broken\n")
    result = evaluate()
    assert result.exit_code == 2 and "line 6" in result.stderr and not (tmp_path / "out").exists()
    assert evaluate("--skip-bad").exit_code == 0
    assert {row["requests"] for row in summary(tmp_path)["rows"]} == {5}


def test_interrupted_before_the_first_result(tmp_path, evaluate, monkeypatch):
    def interrupted(*arguments, **keywords):
        raise KeyboardInterrupt

    monkeypatch.setattr(eval.command, "execute", interrupted)
    assert evaluate().exit_code == eval.command.INTERRUPTED
    assert summary(tmp_path)["rows"] == []
