"""`specdec eval` on a tiny model, for the tests of its parts."""

import pytest

import eval.command
from specdec.models import LoadedModel
from tests.eval.samples import command
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
    return command("eval", tmp_path, PROMPTS, "--batch-sizes", "1,2", "--max-new-tokens", "10")
