"""The command line: what it passes on, and errors as one sentence."""

import subprocess
import sys
from itertools import chain

import pytest
from typer.testing import CliRunner

import specdec.cli
from specdec.cli import app
from specdec.cli_options import one_sentence_errors, sampling_arguments
from specdec.models import LoadedModel
from tests.tiny_models import tiny
from tests.toy_tokenizer import VOCAB, toy_tokenizer

GENERATE = ["generate", "--target", "tiny", "--raw"]


@pytest.fixture
def target(monkeypatch):
    model = tiny("llama", vocab=VOCAB)
    loaded = LoadedModel(model, toy_tokenizer(), "a tiny model")
    monkeypatch.setattr(specdec.cli, "load_target", lambda *arguments: loaded)
    return loaded


def invoke(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def text_of(loaded: LoadedModel, prompt: str, count: int) -> str:
    """HF's greedy answer."""
    inputs = loaded.tokenizer(prompt, return_tensors="pt")
    output = loaded.model.generate(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=count, do_sample=False
    )
    return loaded.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("options", [[], ["--draft-length", "0"], ["--drafter", "ngram:max_n=2,length=3"]])
def test_generate_prints_the_models_text_and_one_line_of_statistics(target, options):
    result = invoke(*GENERATE, "--prompt", "abcabcab", "--max-new-tokens", "12", *options)
    assert result.exit_code == 0, result.output
    text, _, statistics = result.stdout.rstrip("\n").rpartition("\n")
    assert text == text_of(target, "abcabcab", 12)
    assert statistics.startswith("12 tokens in") and "mean accepted length" in statistics
    assert "a tiny model" in result.stderr


def test_color_adds_only_escapes(target):
    def answer(*options: str) -> str:
        result = invoke(*GENERATE, "--prompt", "b", "--max-new-tokens", "40", *options)
        return result.stdout.rpartition("\n40 tokens")[0]

    plain, colored = answer(), answer("--color")
    assert "\x1b[32m" in colored and "\x1b[32m" not in plain
    assert colored.replace("\x1b[32m", "").replace("\x1b[0m", "") == plain


def test_generate_passes_options_on(target, monkeypatch):
    seen = {}

    def fake(model, input_ids, **keywords):
        seen.update(keywords)
        return None, specdec.Stats("ngram", "rejection", True)

    monkeypatch.setattr(specdec, "generate", fake)
    options = {
        "--temperature": "0.5",
        "--top-k": "7",
        "--seed": "3",
        "--draft-length": "4",
        "--verifier": "rejection",
        "--drafter": "ngram:max_n=2",
    }
    assert invoke(*GENERATE, "--prompt", "x", *chain.from_iterable(options.items())).exit_code == 0
    assert (seen["do_sample"], seen["temperature"], seen["top_k"], seen["top_p"]) == (True, 0.5, 7, 1.0)
    assert (seen["seed"], seen["draft_length"], seen["verifier"], seen["drafter"].max_n) == (3, 4, "rejection", 2)
    assert seen["max_new_tokens"] == 128


def test_warpers_are_off_unless_asked_for():
    assert sampling_arguments(0, None, None) == {"do_sample": False}
    assert sampling_arguments(0.7, None, None) == {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 1.0}
    assert sampling_arguments(1.0, 5, 0.9) == {"do_sample": True, "temperature": 1.0, "top_k": 5, "top_p": 0.9}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "--prompt is empty"),
        (["--prompt", "x", "--drafter", "nope"], "known are draft_model, medusa, mtp, ngram"),
        (["--prompt", "x", "--drafter", "no_such_module:Name"], "no module 'no_such_module'"),
        (["--prompt", "x", "--draft-length", "-1"], "-1"),
        (["--prompt", "x", "--temperature", "-1"], "--temperature is -1.0"),
        (["--prompt", "x", "--temperature", "nan"], "--temperature is nan"),
        (["--prompt", "x", "--temperature", "inf"], "--temperature is inf"),
        (["--prompt", "x", "--temperature", "1e-45"], "--temperature is 1e-45"),
        (["--prompt", "x", "--top-k", "5"], "need a --temperature above 0"),
        (["--prompt", "x", "--temperature", "1", "--top-p", "0"], "--top-p is 0.0"),
        (["--prompt", "x", "--temperature", "1", "--top-k", "-2"], "--top-k is -2"),
        (["--prompt", "x", "--verifier", "nope"], "unknown verifier 'nope'"),
        (["--prompt", "x" * 300], "256 positions"),
    ],
)
def test_errors_are_one_sentence_with_status_2(target, arguments, message):
    result = invoke(*GENERATE, *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    last = result.stderr.rstrip("\n").splitlines()[-1]
    assert last.startswith("specdec: ") and message in last
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("batch_sizes", ["1,x", "", "1,,2", "0"])
def test_eval_refuses_bad_batch_sizes(tmp_path, batch_sizes):
    result = invoke("eval", "--out", str(tmp_path / "out"), "--batch-sizes", batch_sizes)
    assert result.exit_code == 2 and "batch" in result.stderr
    assert not (tmp_path / "out").exists()


def test_other_peoples_errors_keep_their_traceback():
    """The control: a ValueError raised inside a library is not the user's to mend."""

    @one_sentence_errors
    def command() -> None:
        import json

        json.loads("{")

    with pytest.raises(ValueError, match="Expecting property name"):
        command()


def test_importing_the_command_line_loads_no_drafter_and_no_evaluation():
    code = "import sys, specdec.cli; print([name for name in ('drafters', 'eval', 'train') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
