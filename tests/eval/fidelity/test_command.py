"""`specdec fidelity` from its arguments to its folder and exit status, on a tiny model."""

import json

import pytest
import torch

import eval.fidelity.command
import eval.fidelity.verdict
from specdec import compiled
from specdec.models import LoadedModel
from tests.eval.samples import command
from tests.tiny_models import tiny
from tests.toy_tokenizer import VOCAB, toy_tokenizer

PROMPTS = ["abcabcabc", "xyxyxy", "12121212"]


@pytest.fixture
def model(monkeypatch):
    model = tiny("llama", dtype=torch.float32, vocab=VOCAB)
    loaded = LoadedModel(model, toy_tokenizer(), "tiny")
    monkeypatch.setattr(eval.fidelity.command, "load_target", lambda *arguments: loaded)
    return model


@pytest.fixture
def fidelity(tmp_path, model):
    return command("fidelity", tmp_path, PROMPTS, "--batch-size", "2", "--max-new-tokens", "16")


def report(tmp_path) -> dict:
    return json.loads((tmp_path / "out" / "fidelity.json").read_text())


@pytest.mark.parametrize(
    ("options", "rate"),
    [([], 1.0), (["--temperature", "1"], None), (["--temperature", "1", "--verifier", "coupled"], 1.0)],
)
def test_a_correct_method_is_lossless(tmp_path, fidelity, options, rate):
    result = fidelity("--drafter", "ngram:min_n=1", *options)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("lossless within ")
    found = report(tmp_path)
    assert found["verdict"] == result.stdout.strip() and found["findings"] == []
    assert [rung["requests"] for rung in found["rungs"]] == [3] * 6
    assert found["exact_match"] == {"speculative": rate, "speculative, batched": rate}
    assert found["causes"] == dict.fromkeys(("state", "rule", "batch", "precision", "unexplained"), 0)
    assert bool(found["tests"]) == bool(options)
    text = (tmp_path / "out" / "fidelity.md").read_text()
    assert text.startswith(f"# Fidelity\n\n**{found['verdict']}**") and "unexplained 0" in text


def test_a_lossy_rule_fails_and_says_so_first(tmp_path, fidelity):
    result = fidelity("--drafter", "ngram:min_n=1", "--temperature", "1", "--verifier", "typical", "--samples", "4")
    assert result.exit_code == 1
    assert result.stdout.startswith("NOT lossless") and "lossy" in result.stdout
    kinds = {finding["kind"] for finding in report(tmp_path)["findings"]}
    assert kinds >= {"lossy", "test"}  # the tests see it without being told


def test_a_killed_run_continues_to_the_same_report(tmp_path, fidelity, monkeypatch):
    whole = fidelity("--temperature", "1")
    expected = report(tmp_path)
    (tmp_path / "out").rename(tmp_path / "whole")
    true_observe, calls = eval.fidelity.command.observe, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 9:
            raise KeyboardInterrupt
        return true_observe(*arguments)

    monkeypatch.setattr(eval.fidelity.command, "observe", interrupted)
    result = fidelity("--temperature", "1")
    assert result.exit_code == 130 and "--resume" in result.stderr and "interrupted" in report(tmp_path)["verdict"]
    monkeypatch.setattr(eval.fidelity.command, "observe", true_observe)
    assert fidelity("--temperature", "1", "--resume").stdout == whole.stdout
    assert report(tmp_path)["tests"] == expected["tests"]
    refused = fidelity("--temperature", "0.5", "--resume")
    assert refused.exit_code == 2 and "temperature" in refused.stderr


def test_ctrl_c_while_differences_are_explained_leaves_a_report_that_claims_nothing(tmp_path, fidelity, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(eval.fidelity.verdict, "differences", interrupted)
        result = fidelity()
    assert result.exit_code == 130 and result.stdout.startswith("interrupted: nothing wrong so far in 6 requests")
    assert report(tmp_path)["verdict"] == result.stdout.strip()
    assert fidelity("--resume").stdout.startswith("lossless within")


def test_a_run_is_not_continued_with_other_weights(tmp_path, fidelity, model):
    fidelity()
    before = (tmp_path / "out" / "environment.json").read_text()
    with torch.no_grad():
        next(model.parameters()).add_(1)
    result = fidelity("--resume")
    assert result.exit_code == 2 and "holds a run with other weights (" in result.stderr
    assert (tmp_path / "out" / "environment.json").read_text() == before


def test_compiled_forwards_are_a_setting_of_the_run(tmp_path, fidelity, monkeypatch):
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    result = fidelity("--compile", "--limit", "1")
    assert result.exit_code == 0 and result.stdout.startswith("lossless within "), result.output
    refused = fidelity("--limit", "1", "--resume")
    assert refused.exit_code == 2 and "holds a run with compile=True, not False" in refused.stderr


def test_json_is_alone_on_standard_output(tmp_path, fidelity):
    assert json.loads(fidelity("--json").stdout) == report(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch-size", "0"], "batch_size is 0"),
        (["--samples", "2"], "greedy decoding has no seed"),
        (["--verifier", "block"], "does not fit do_sample=False"),
        (["--max-new-tokens", "250"], "256 positions"),
        (["--drafter", "nope"], "known are"),
        (["--self-check", "--compile"], "leave --invariant and --compile out"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_written(tmp_path, fidelity, options, message):
    result = fidelity(*options)
    assert result.exit_code == 2 and message in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_drafter_that_raises_fails_its_requests_and_not_the_run(tmp_path, fidelity, monkeypatch):
    (tmp_path / "breaking.py").write_text(
        "import specdec\n"
        "class Breaking(specdec.BaseDrafter):\n"
        "    def propose(self, rows, budget, draws):\n"
        "        if len(rows.ids) == 1:\n"
        "            raise RuntimeError('out of drafts')\n"
        "        return specdec.Draft.empty(len(rows.ids), rows.device)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    result = fidelity("--drafter", "breaking:Breaking")
    assert result.exit_code == 1 and "out of drafts" in result.stdout
    found = report(tmp_path)
    assert [rung["failed"] for rung in found["rungs"]] == [0, 0, 0, 0, 3, 1]
    assert found["exact_match"] == {"speculative": None, "speculative, batched": 1.0}  # of those that did not fail
