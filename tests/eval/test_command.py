"""`specdec eval` from its arguments to its folder, on a tiny model."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import eval.command
import specdec
from eval.folder import Folder
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
    return Folder(tmp_path / "out").read()


def summary(tmp_path) -> dict:
    return json.loads((tmp_path / "out" / "summary.json").read_text())


def test_writes_everything(tmp_path, evaluate):
    result = evaluate("--drafter", "ngram:min_n=1", "--drafter", "ngram:min_n=1,length=2")
    assert result.exit_code == 0, result.output
    found = summary(tmp_path)
    drafted = ["plain", "ngram:min_n=1", "ngram:min_n=1,length=2"]
    assert [(row["batch_size"], row["method"]) for row in found["rows"]] == [
        *((1, method) for method in ["hf", "hf + prompt lookup", *drafted]),  # HF drafts for batches of 1 alone
        *((2, method) for method in ["hf", *drafted]),
    ]
    assert all(row.keys() >= KEYS for row in found["rows"])
    assert all(row["tokens"] == 50 and row["requests"] == 5 for row in found["rows"])
    assert {row["exact_match_rate"] for row in found["rows"]} == {None, 1.0} and found["divergences"] == []
    assert found["complete"] and found["environment"]["target"] == "tiny"
    assert found["plain_across_batch_sizes"][0]["different"] == 0
    plain, ngram = found["rows"][2:4]
    assert ngram["mean_accepted_length"] > 1 and ngram["target_forwards"] < plain["target_forwards"]
    lengths = {n for r in results(tmp_path) if r.method == "ngram:min_n=1,length=2" for n in r.drafted}
    assert max(lengths) == 2  # its own length, not the run's
    assert len(results(tmp_path)) == (5 + 4) * 5
    assert "ngram:min_n=1,length=2" in result.stdout and "vs plain" in result.stdout
    assert "# Evaluation" in (tmp_path / "out" / "report.md").read_text()
    assert "<h1>Evaluation</h1>" in (tmp_path / "out" / "report.html").read_text()


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
    true_generate, calls = specdec.generate, []

    def interrupted(*arguments, **keywords):
        calls.append(keywords["request_ids"])
        if len(calls) == 9:
            raise KeyboardInterrupt
        return true_generate(*arguments, **keywords)

    monkeypatch.setattr(specdec, "generate", interrupted)
    result = evaluate()
    assert result.exit_code == eval.command.INTERRUPTED and "--resume" in result.stderr
    assert not summary(tmp_path)["complete"] and summary(tmp_path)["rows"][0]["method"] == "hf"
    before = (tmp_path / "out" / "results.jsonl").read_text()
    assert 0 < len(before.splitlines()) < 30
    monkeypatch.setattr(specdec, "generate", true_generate)
    assert evaluate("--resume").exit_code == 0
    assert (tmp_path / "out" / "results.jsonl").read_text().startswith(before)
    keys = [(r.id, r.method, r.batch_size) for r in results(tmp_path)]
    assert len(keys) == len(set(keys)) == (4 + 3) * 5
    assert summary(tmp_path)["complete"] and {row["tokens"] for row in summary(tmp_path)["rows"]} == {50}


def test_a_wrong_engine_is_reported_with_its_margins(tmp_path, evaluate, monkeypatch):
    """The control of the match rate: an engine that changes one token of every request."""
    true_generate = specdec.generate

    def broken(model, input_ids, **keywords):
        output, stats = true_generate(model, input_ids, **keywords)
        if keywords["drafter"] is not None and keywords["max_new_tokens"] == 10:
            output[:, input_ids.shape[1] + 4] = (output[:, input_ids.shape[1] + 4] + 1) % VOCAB
        return output, stats

    monkeypatch.setattr(specdec, "generate", broken)
    evaluate("--limit", "2")
    found = summary(tmp_path)
    assert [row["exact_match_rate"] for row in found["rows"]] == [1.0, 1.0, None, 0.0, 1.0, None, 0.0]
    assert len(found["divergences"]) == 4
    assert all(d["position"] == 4 and d["gap"] > 0 and not d["tie"] for d in found["divergences"])


def test_sampling_is_not_compared_token_by_token(tmp_path, evaluate):
    assert evaluate("--temperature", "1", "--limit", "2").exit_code == 0
    rows = summary(tmp_path)["rows"]
    assert all(row["exact_match_rate"] is None and row["temperature"] == 1.0 for row in rows)
    assert rows[-1]["verifier"] == "rejection"


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


class Failing(specdec.BaseDrafter):
    """Drafts nothing, and raises in the third draft of a batch of two."""

    name = "failing"
    drafts = 0

    def admit(self, ids):
        self.drafts = 0

    def propose(self, rows, budget, draws):
        self.drafts += 1
        if len(rows.ids) == 2 and self.drafts == 3:
            raise RuntimeError("boom")
        return specdec.Draft.empty(len(rows.ids))


def wrong_token() -> specdec.BaseDrafter:
    class WrongToken(specdec.BaseDrafter):
        name = "wrong"

        def propose(self, rows, budget, draws):
            return specdec.Draft(torch.full((len(budget), 1), VOCAB), [min(1, limit) for limit in budget])

    return WrongToken()


def test_a_drafter_that_raises_fails_its_row_alone(tmp_path, evaluate):
    result = evaluate("--drafter", f"{__name__}:Failing", "--drafter", "ngram", "--trace", "1")
    assert result.exit_code == eval.command.FAILED and "1 row(s) failed" in result.stderr
    rows = {(row["method"], row["batch_size"]): row for row in summary(tmp_path)["rows"]}
    failed = rows.pop((f"{__name__}:Failing", 2))
    assert failed["error"] == "RuntimeError: boom" and "in propose" in failed["traceback"]
    assert len(rows) == 8 and all(row["error"] is None and row["tokens"] == 50 for row in rows.values())
    assert summary(tmp_path)["complete"] and "(FAILED)" in result.stdout
    again = evaluate("--drafter", f"{__name__}:Failing", "--drafter", "ngram", "--trace", "1", "--resume")
    assert again.exit_code == eval.command.FAILED and len(summary(tmp_path)["rows"]) == 9


def test_a_token_outside_the_vocabulary_is_named_with_row_and_step(tmp_path, evaluate):
    evaluate("--drafter", f"{__name__}:wrong_token", "--limit", "2")
    failed = summary(tmp_path)["rows"][-1]
    assert "outside the target's vocabulary for row 0 (prompt 'p1') in the row's drafting step 1" in failed["error"]


def test_a_drafter_without_the_contract_is_refused_before_the_run(tmp_path, evaluate):
    result = evaluate("--drafter", "collections:Counter")
    assert result.exit_code == 2 and "made a Counter that lacks some of what" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_one_sentence_and_the_run_goes_on_later(tmp_path, evaluate, monkeypatch):
    """The disk takes two jobs and a part of the third."""
    true_open, appends = Path.open, []

    def full(path, mode="r", *arguments, **keywords):
        if path.name == "results.jsonl" and mode == "a":
            appends.append(path)
            if len(appends) == 3:
                with true_open(path, "a") as file:
                    file.write('{"id": "p0", "conv')
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return true_open(path, mode, *arguments, **keywords)

    monkeypatch.setattr(Path, "open", full)
    result = evaluate("--limit", "2")
    assert result.exit_code == 2 and "No space left on device" in result.stderr and "Traceback" not in result.stderr
    monkeypatch.setattr(Path, "open", true_open)
    assert len(results(tmp_path)) == 2
    assert evaluate("--limit", "2", "--resume").exit_code == 0 and summary(tmp_path)["complete"]
    assert len(results(tmp_path)) == 2 * (4 + 3)


def test_the_grid(tmp_path, evaluate, monkeypatch, model):
    """Two temperatures, two rules above 0, two lengths, two dtypes (here by name alone)."""
    half = tiny("llama", vocab=VOCAB, dtype=torch.float32)
    loads = {"float64": model, "float32": half}
    monkeypatch.setattr(
        eval.command, "load_target", lambda target, dtype, device: LoadedModel(loads[dtype], toy_tokenizer(), "tiny")
    )
    grid = ["--temperature", "0,0.7", "--verifier", "auto,coupled", "--draft-length", "2,4", "--dtype"]
    result = evaluate(*grid, "float64,float32", "--limit", "2", "--batch-sizes", "2", "--trace", "1")
    assert result.exit_code == 0, result.output
    rows = summary(tmp_path)["rows"]
    greedy = ["hf", "plain", "ngram:length=2 (auto)", "ngram:length=4 (auto)"]
    sampled = ["hf", "plain", "plain (coupled)"]
    sampled += [f"ngram:length={length} ({rule})" for length in (2, 4) for rule in ("auto", "coupled")]
    expected = [
        (dtype, temperature, method)
        for dtype in ("float64", "float32")
        for temperature, methods in ((0.0, greedy), (0.7, sampled))
        for method in methods
    ]
    assert [(row["dtype"], row["temperature"], row["method"]) for row in rows] == expected
    assert {row["exact_match_rate"] for row in rows if row["temperature"] == 0} == {None, 1.0}
    coupled = [row for row in rows if row["temperature"] and row["method"].endswith("(coupled)")]
    assert [row["exact_match_rate"] for row in coupled] == [None, 1.0, 1.0] * 2
    assert all(row["draft_length"] == 4 for row in rows if "length=4" in row["method"])
    traces = json.loads((tmp_path / "out" / "traces.json").read_text())
    assert len(traces) == 2 * (2 + 4) and all(trace["steps"] and trace["error"] is None for trace in traces)
    assert "| method | batch | T | dtype | accepted length |" in (tmp_path / "out" / "report.md").read_text()


def test_interleaved_repeats_are_continued_after_a_kill(tmp_path, evaluate):
    """A kill leaves whole jobs and half a line; the resumed run has the table of one that was never killed."""
    evaluate("--limit", "3", "--repeats", "2", "--drafter", "ngram:min_n=1")
    whole = (tmp_path / "out" / "results.jsonl").read_text()
    lines = whole.splitlines(keepends=True)
    (tmp_path / "out" / "results.jsonl").write_text("".join(lines[:17]) + lines[17][:40])
    (tmp_path / "out" / "summary.json").unlink()
    assert evaluate("--limit", "3", "--repeats", "2", "--drafter", "ngram:min_n=1", "--resume").exit_code == 0
    kept = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    assert kept[:17] == whole.splitlines()[:17]

    def counted(text: list[str]) -> list[dict]:
        rows = [json.loads(line) for line in text]
        return sorted(
            ({k: row[k] for k in ("id", "method", "batch_size", "repeat", "tokens", "accepted")} for row in rows),
            key=str,
        )

    assert counted(kept) == counted(whole.splitlines())


def test_all_turns_follow_the_models_own_answer(tmp_path, evaluate, model):
    rows = [{"question_id": 81, "category": "writing", "turns": ["abc", "de"]}, {"prompt": "xyz"}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert evaluate().exit_code == 0
    found = {record.id: record for record in results(tmp_path) if record.method == "ngram" and record.batch_size == 2}
    assert set(found) == {"81", "81, turn 2", "2"} and found["81, turn 2"].conversation == "81"
    answer = toy_tokenizer().decode(found["81"].tokens, skip_special_tokens=True)
    expected = toy_tokenizer()(f"abc\n\n{answer}\n\nde")["input_ids"]
    assert found["81, turn 2"].prompt_tokens == len(expected)
    with torch.no_grad():
        first = model(torch.tensor([expected])).logits[0, -1].argmax().item()
    assert found["81, turn 2"].tokens[0] == first
    assert {row["category"] for row in summary(tmp_path)["categories"]} == {"writing", ""}
    assert summary(tmp_path)["rows"][0]["requests"] == 3


def test_plain_evaluation_collects_at_no_cost_of_its_own(tmp_path, evaluate, monkeypatch):
    """Must show 3, counted: the timed call is the engine's alone. Nothing of it is made twice, no option makes it keep
    scores, and the only device reads beside the engine's own are the end's."""
    calls = []
    true_generate = specdec.generate

    def counted(*arguments, **keywords):
        calls.append(set(keywords))
        return true_generate(*arguments, **keywords)

    monkeypatch.setattr(specdec, "generate", counted)
    evaluate("--limit", "2", "--batch-sizes", "2")
    assert len(calls) == 2 * 2  # warm-up and timed run of plain and ngram, no other pass over the prompts
    assert not any({"output_scores", "output_logits", "streamer"} & keywords for keywords in calls)
