"""`specdec report`: the same report from the folder alone, what a kill left, and runs side by side."""

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

import eval.command
from specdec.cli import app
from specdec.models import LoadedModel
from tests.eval.samples import failure
from tests.tiny_models import tiny
from tests.toy_tokenizer import VOCAB, toy_tokenizer


@pytest.fixture
def invoke(monkeypatch):
    loaded = LoadedModel(tiny("llama", vocab=VOCAB), toy_tokenizer(), "tiny")
    monkeypatch.setattr(eval.command, "load_target", lambda *arguments: loaded)
    return lambda *arguments: CliRunner().invoke(app, list(map(str, arguments)))


def evaluate(invoke, tmp_path, name, *options):
    (tmp_path / "p.jsonl").write_text('{"prompt": "abcabcabc", "category": "x"}\n{"prompt": "xyz", "category": "y"}\n')
    fixed = ["--prompts", tmp_path / "p.jsonl", "--batch-sizes", "1,2", "--max-new-tokens", "8", "--raw"]
    result = invoke("eval", *fixed, "--out", tmp_path / name, *options)
    assert result.exit_code == 0, result.output
    return tmp_path / name


def test_a_rebuilt_report_is_the_same(invoke, tmp_path):
    folder = evaluate(invoke, tmp_path, "a", "--trace", "1", "--memory", "100")
    before = {name: (folder / name).read_text() for name in ("summary.json", "report.md", "report.html")}
    for name in ("report.md", "report.html"):
        (folder / name).unlink()
    result = invoke("report", folder)
    assert result.exit_code == 0 and "vs plain" in result.stdout
    assert {name: (folder / name).read_text() for name in before} == before


def test_a_killed_run_has_a_report_that_says_so(invoke, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/bin/specdec", "eval", "--out", "a b"])
    folder = evaluate(invoke, tmp_path, "a")
    lines = (folder / "results.jsonl").read_text().splitlines(keepends=True)
    (folder / "results.jsonl").write_text("".join(lines[:7]) + "{half")
    for name in ("summary.json", "report.md", "divergences.json", "memory.json", "traces.json"):
        (folder / name).unlink()
    assert invoke("report", folder).exit_code == 0
    text = (folder / "report.md").read_text()
    assert "Interrupted" in text and "Command: `specdec eval --out 'a b'`" in text
    assert not json.loads((folder / "summary.json").read_text())["complete"]
    assert (folder / "results.jsonl").read_text().endswith("{half")  # nothing is taken from what --resume goes on from


def test_a_fidelity_verdict_inside_the_folder_is_shown(invoke, tmp_path):
    folder = evaluate(invoke, tmp_path, "a")
    (folder / "fidelity").mkdir()
    found = {"verdict": "NOT lossless: 2 x rule", "causes": {"rule": 2, "unexplained": 0}}
    (folder / "fidelity" / "fidelity.json").write_text(json.dumps(found))
    assert invoke("report", folder).exit_code == 0
    for name in ("report.md", "report.html"):
        assert "NOT lossless: 2 x rule" in (folder / name).read_text()
    assert "Divergences by cause" in (folder / "report.html").read_text()


def test_several_runs_side_by_side(invoke, tmp_path):
    first = evaluate(invoke, tmp_path, "a")
    second = evaluate(invoke, tmp_path, "b", "--drafter", "ngram", "--drafter", "ngram:min_n=1", "--seed", "3")
    result = invoke("report", first, second, "--out", tmp_path / "both")
    assert result.exit_code == 0, result.output
    text = (tmp_path / "both" / "report.md").read_text()
    assert f"- A: {first}" in text and f"- B: {second}" in text
    assert "| method | batch | accepted length A | accepted length B | tokens/s A |" in text
    alone = next(line for line in text.splitlines() if line.startswith("| ngram:min_n=1 | 1 |"))
    assert alone.split(" | ")[2] == "-" and alone.split(" | ")[3] != "-"  # run A has no such row
    assert "| seed | 0 | 3 |" in text and "| raw |" not in text
    assert "<h1>Comparison</h1>" in (tmp_path / "both" / "report.html").read_text()


def test_a_comparison_says_what_is_wrong_with_its_runs(invoke, tmp_path):
    """One run was interrupted, in the other a row failed; the row's line is not FAILED, since one of the two has it."""
    first = evaluate(invoke, tmp_path, "a")
    second = Path(shutil.copytree(first, tmp_path / "b"))
    summary = json.loads((first / "summary.json").read_text())
    (first / "summary.json").write_text(json.dumps(summary | {"complete": False}))
    with (second / "results.jsonl").open("a") as file:
        file.write(json.dumps(asdict(failure("ngram", batch_size=1, dtype="float64"))) + "\n")
    result = invoke("report", first, second, "--out", tmp_path / "both")
    assert result.exit_code == 0, result.output
    text = (tmp_path / "both" / "report.md").read_text()
    assert "- A: Interrupted" in text and "- B: Failed: ngram, batch 1" in text
    line = next(line for line in text.splitlines() if line.startswith("| ngram | 1 |"))
    assert line.split(" | ")[2] != "-" and line.split(" | ")[3] == "-"
    assert "B: Failed" in (tmp_path / "both" / "report.html").read_text()


def test_a_comparison_as_json(invoke, tmp_path):
    first = evaluate(invoke, tmp_path, "a")
    folders = [first, Path(shutil.copytree(first, tmp_path / "b"))]
    found = json.loads(invoke("report", *folders, "--out", tmp_path / "both", "--json").stdout)
    assert found == {str(f): json.loads((f / "summary.json").read_text())["rows"] for f in folders}


def test_files_of_another_version_or_damaged_ones_are_named(invoke, tmp_path):
    folder = evaluate(invoke, tmp_path, "a")
    (folder / "old").mkdir()
    for name in ("old/fidelity.json", "divergences.json", "traces.json"):
        before = (folder / name).read_text() if (folder / name).exists() else None
        (folder / name).write_text("[1]" if before else "{}")
        result = invoke("report", folder)
        assert result.exit_code == 2 and f"{folder} cannot be reported" in result.stderr, name
        (folder / name).write_text(before) if before else (folder / name).unlink()
    assert invoke("report", folder).exit_code == 0
    (folder / "results.jsonl").write_text('{"id": "a", "method": "plain"}\n')
    result = invoke("report", folder)
    assert result.exit_code == 2 and "line 1, is not a result of this version" in result.stderr


def test_what_cannot_be_reported_is_refused_in_one_sentence(invoke, tmp_path):
    folder = evaluate(invoke, tmp_path, "a")
    shutil.copytree(folder, tmp_path / "b")
    cases = [
        ([tmp_path / "nowhere"], "holds no results"),
        ([folder, tmp_path / "b"], "say where the comparison goes with --out"),
        ([folder, folder, "--out", tmp_path / "c"], "given more than once"),
        ([folder, "--out", tmp_path / "c"], "is for comparing several folders"),
        ([folder, tmp_path / "b", "--out", tmp_path / "b"], "holds a run, whose report"),
        ([folder, tmp_path / "b", "--out", tmp_path / "p.jsonl"], "cannot be made a folder"),
        ([folder, folder / ".." / "a", "--out", tmp_path / "c"], "given more than once"),
    ]
    for arguments, message in cases:
        result = invoke("report", *arguments)
        assert result.exit_code == 2 and message in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "c").exists()


def test_wandb_gets_the_tables_and_the_plots_offline(invoke, tmp_path, monkeypatch):
    for name, value in {"MODE": "offline", "SILENT": "true", "DIR": tmp_path, "CACHE_DIR": tmp_path / "c"}.items():
        monkeypatch.setenv(f"WANDB_{name}", str(value))
    folder = evaluate(invoke, tmp_path, "a", "--wandb")
    [run] = (tmp_path / "wandb").glob("offline-run-*")
    assert list(run.glob("run-*.wandb"))
    tables = [json.loads(file.read_text()) for file in (run / "files" / "media" / "table").glob("*.json")]
    rows = json.loads((folder / "summary.json").read_text())["rows"]
    [main] = [table for table in tables if "same as plain" in table["columns"]]
    assert len(main["data"]) == len(rows)
    assert list((run / "files" / "media" / "images").rglob("*.png"))
