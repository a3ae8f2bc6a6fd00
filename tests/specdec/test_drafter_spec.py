"""Drafters named by a string, ours and a user's."""

import pytest
import torch

from drafters.ngram import NGramDrafter
from specdec.drafter_spec import DrafterSpec, build_drafter
from specdec.models import LoadedModel
from tests.tiny_models import tiny
from tests.toy_tokenizer import VOCAB, toy_tokenizer

OWN = """
class MyDrafter:
    def __init__(self, target, depth, mode="fast", folder: str | None = None):
        self.target, self.depth, self.mode, self.folder = target, depth, mode, folder
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "my_own_drafter.py").write_text(OWN)
    (tmp_path / "my_broken_drafter.py").write_text("import not_installed_anywhere\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("text", "source", "options", "length"),
    [
        ("ngram", "ngram", {}, None),
        ("ngram:max_n=3,length=8", "ngram", {"max_n": "3"}, 8),
        ("draft_model:model=some/path-0.5B", "draft_model", {"model": "some/path-0.5B"}, None),
        (
            "draft_model:model=C:/models,x=0.5,y=True",
            "draft_model",
            {"model": "C:/models", "x": "0.5", "y": "True"},
            None,
        ),
        ("mine:MyDrafter", "mine:MyDrafter", {}, None),
        ("a.b:MyDrafter:depth=2,length=0", "a.b:MyDrafter", {"depth": "2"}, 0),
    ],
)
def test_parse(text, source, options, length):
    assert DrafterSpec.parse(text) == DrafterSpec(text, source, options, length)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nope", "known are draft_model, medusa, mtp, ngram"),
        ("", "known are"),
        ("ngram:max_n", "'max_n' is not of the form key=value"),
        ("ngram:max_n=", "key=value"),
        ("ngram:max_n=3,,", "key=value"),
        ("ngram:length=-1", "length=-1"),
        ("ngram:length=two", "length=two"),
        ("ngram:length=True", "length=True"),
    ],
)
def test_parse_refuses(text, message):
    with pytest.raises(ValueError, match=message):
        DrafterSpec.parse(text)


def test_builds_ours_with_its_settings():
    drafter = build_drafter(DrafterSpec.parse("ngram:max_n=3,min_n=2,length=8"), target=None)
    assert isinstance(drafter, NGramDrafter) and (drafter.max_n, drafter.min_n) == (3, 2)


def test_builds_a_users_and_hands_over_the_target(own_module):
    target = object()
    drafter = build_drafter(DrafterSpec.parse("my_own_drafter:MyDrafter:depth=2"), target)
    assert (drafter.target, drafter.depth, drafter.mode) == (target, 2, "fast")


def test_what_is_annotated_as_text_stays_text(own_module):
    drafter = build_drafter(DrafterSpec.parse("my_own_drafter:MyDrafter:depth=0.5,mode=True,folder=007"), None)
    assert (drafter.depth, drafter.mode, drafter.folder) == (0.5, True, "007")


@pytest.fixture
def tiny_target(tmp_path):
    target = LoadedModel(tiny("llama", vocab=VOCAB), toy_tokenizer(), "tiny")
    target.model.save_pretrained(tmp_path / "draft")
    target.tokenizer.save_pretrained(tmp_path / "draft")
    return target


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([[5, 6, 7]])).logits


def test_builds_a_draft_model_from_a_folder(tiny_target, tmp_path):
    drafter = build_drafter(DrafterSpec.parse(f"draft_model:model={tmp_path / 'draft'}"), tiny_target)
    model = drafter.model.model
    assert model is not tiny_target.model and model.dtype == tiny_target.model.dtype
    assert torch.equal(logits_of(model), logits_of(tiny_target.model))


def test_builds_a_draft_model_from_the_targets_layers(tiny_target):
    drafter = build_drafter(DrafterSpec.parse("draft_model:layers=1"), tiny_target)
    assert drafter.model.model.config.num_hidden_layers == 1


@pytest.mark.parametrize("settings", ["", ":model=a,layers=1", ":layers=2", ":model=./not-there", ":model=5"])
def test_draft_model_refuses(tiny_target, settings):
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        build_drafter(DrafterSpec.parse(f"draft_model{settings}"), tiny_target)
    assert "layers" in str(error.value) or "not-there" in str(error.value) or "target '5'" in str(error.value)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("ngram:max=3", ValueError, "unexpected keyword argument 'max'; its settings are length, max_n, min_n"),
        ("ngram:max_n=x", ValueError, "max_n=x"),
        ("my_own_drafter:MyDrafter", ValueError, "missing a required argument: 'depth'"),
        ("my_own_drafter:Other", ValueError, "no attribute 'Other'"),
        ("math:pi", ValueError, "is a float: name a class"),
        ("no_such_module:Other", ImportError, "no module 'no_such_module'"),
        ("my_broken_drafter:Other", ModuleNotFoundError, "not_installed_anywhere"),
    ],
)
def test_build_refuses(own_module, text, error, message):
    with pytest.raises(error, match=message):
        build_drafter(DrafterSpec.parse(text), target=None)
