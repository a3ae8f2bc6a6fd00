"""`specdec eval` from its arguments to its folder, on a tiny model."""

import json

import torch
from torch._dynamo.utils import counters

import eval.command
import specdec
from eval.runner import WARM_UP_TOKENS
from specdec import compiled
from specdec.models import LoadedModel
from tests.eval.outputs import results, summary
from tests.heads.test_medusa import random_heads
from tests.heads.test_mtp import random_head
from tests.shapes import depend_on_shapes
from tests.tiny_models import tiny
from tests.toy_tokenizer import VOCAB, toy_tokenizer

KEYS = {
    "method", "drafter", "verifier", "batch_size", "temperature", "dtype", "mean_accepted_length", "acceptance_rate",
    "tokens_per_second", "speedup_vs_plain", "speedup_vs_hf", "exact_match_rate", "target_forwards", "tokens",
}  # fmt: skip


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


def test_learned_draft_lengths_are_a_row_too(tmp_path, evaluate):
    result = evaluate("--drafter", "ngram:min_n=1", "--draft-length", "2,auto", "--memory", "120", "--trace", "1")
    assert result.exit_code == 0, result.output
    rows = {row["method"]: row for row in summary(tmp_path)["rows"] if row["batch_size"] == 2}
    learned, fixed = rows["ngram:min_n=1,length=auto"], rows["ngram:min_n=1,length=2"]
    assert learned["draft_length"] is None and fixed["draft_length"] == 2
    assert learned["exact_match_rate"] == 1.0 and learned["predicted_speedup"] is None


def test_invariant_mode_beside_the_default_one(tmp_path, evaluate, model, monkeypatch):
    """With kernels that depend on their shapes only the invariant mode gives plain decoding's tokens."""
    depend_on_shapes(monkeypatch)
    settings = ("--drafter", "ngram:min_n=1", "--verifier", "coupled", "--temperature", "1", "--trace", "1")
    result = evaluate(*settings, "--invariant")
    assert result.exit_code == 0, result.output
    rates = {(row["batch_size"], row["method"]): row["exact_match_rate"] for row in summary(tmp_path)["rows"]}
    assert rates[1, "ngram:min_n=1"] == rates[2, "ngram:min_n=1"] == 1.0
    assert rates[1, "plain (default mode)"] < 1 and rates[2, "plain (default mode)"] < 1
    assert summary(tmp_path)["plain_across_batch_sizes"][0]["different"] == 0
    for wrong in (["--draft-length", "8"], ["--drafter", "ngram:length=9"]):
        result = evaluate("--invariant", *wrong, "--out", str(tmp_path / "other"))
        assert result.exit_code == 2 and "in invariant mode give at most 7" in result.stderr


def test_compiling_is_done_before_anything_is_timed(tmp_path, evaluate, monkeypatch):
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    graphs, generate = {True: 0, False: 0}, specdec.generate

    def watched(model, input_ids, **keywords):
        before = counters["stats"]["unique_graphs"]
        found = generate(model, input_ids, **keywords)
        graphs[keywords["max_new_tokens"] == WARM_UP_TOKENS] += counters["stats"]["unique_graphs"] - before
        return found

    monkeypatch.setattr(specdec, "generate", watched)
    result = evaluate("--compile", "--limit", "2", "--drafter", "draft_model:layers=1")
    assert result.exit_code == 0, result.output
    assert graphs == {True: 2, False: 0}
    found = summary(tmp_path)
    by_batch = {record.job: record.batch_compile_seconds for record in results(tmp_path)}
    assert 0 < found["compile_seconds"] == sum(by_batch.values())
    assert "Compiling took" in (tmp_path / "out" / "report.md").read_text()


def test_json_is_alone_on_standard_output(tmp_path, evaluate):
    result = evaluate("--json", "--limit", "2")
    assert json.loads(result.stdout) == summary(tmp_path)["rows"]


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


def test_memory_is_measured_for_every_engine_method(tmp_path, evaluate):
    result = evaluate("--limit", "2", "--memory", "120")
    found = summary(tmp_path)["memory"]
    assert [(memory["method"], memory["batch_size"], memory["context"]) for memory in found] == [
        ("plain", 2, 120),
        ("ngram", 2, 120),
    ]
    assert "memory of ngram, batch 2" in result.stdout


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


def test_heads_in_the_grid(tmp_path, evaluate, model):
    """Medusa's tree and chain and MTP's chain, each with settings of its own, at every rule that fits."""
    random_heads(model, vocab_size=VOCAB).save_pretrained(
        tmp_path / "medusa", about={"accuracies": [[0.5, 0.3], [0.4, 0.1], [0.2, 0.1]]}
    )
    random_head(model, vocab_size=VOCAB).save_pretrained(tmp_path / "mtp")
    names = [
        f"medusa:head={tmp_path / 'medusa'},nodes=6,length=6",
        f"medusa:head={tmp_path / 'medusa'},length=3",
        f"mtp:head={tmp_path / 'mtp'},length=2",
    ]
    options = [option for name in names for option in ("--drafter", name)]
    grid = ["--temperature", "0,1", "--batch-sizes", "2", "--limit", "2", "--trace", "1", "--memory", "100"]
    result = evaluate(*options, *grid)
    assert result.exit_code == 0, result.output
    rows = {(row["method"], row["temperature"]): row for row in summary(tmp_path)["rows"]}
    assert [rows[name, 0.0]["draft_length"] for name in names] == [6, 3, 2]
    assert [rows[name, 0.0]["exact_match_rate"] for name in names] == [1.0] * 3
    assert [rows[name, 1.0]["verifier"] for name in names] == ["tree_rejection", "rejection", "block"]
    assert rows[names[0], 0.0]["noise_free_acceptance"] is None  # of a tree's nodes there is no list by depth
    about = summary(tmp_path)["environment"]
    assert len({about["weights"], *(about[f"weights of {name}"] for name in names)}) == 3  # two have the same heads
    drafted = json.loads((tmp_path / "out" / "traces.json").read_text())[0]["steps"][1]["drafted"]
    assert len(drafted) == 6 and sum(token["parent"] == -1 for token in drafted) == 2
