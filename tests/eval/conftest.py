"""`specdec eval` on a tiny model, for the tests of its parts."""

import json

import pytest
from typer.testing import CliRunner

import eval.command
from specdec.cli import app
from specdec.models import LoadedModel
from tests.tiny_models import tiny
from tests.toy_tokenizer import VOCAB, toy_tokenizer

PROMPTS = ["abcabcabc", "xyz", "aaaa", "no repetition", "12121212"]


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
