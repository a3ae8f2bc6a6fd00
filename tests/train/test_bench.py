"""`specdec bench train`: what it prints, and that its bare pass trains nothing."""

import json
from dataclasses import replace

import pytest
import torch

from specdec.models import LoadedModel
from tests.tiny_models import tiny
from train import bench
from train.batches import Example, padded
from train.mtp import MTPRecipe, MTPSettings
from train.states import target_states


@pytest.fixture
def loaded(monkeypatch):
    made = LoadedModel(tiny("llama", dtype=torch.float32), None, "tiny")
    monkeypatch.setattr(bench, "load_target", lambda *_: made)


def made():
    model = tiny("llama", dtype=torch.float32)
    recipe = MTPRecipe(MTPSettings(target="", prompts="", out=""), LoadedModel(model, None, "tiny"), None)
    batch = padded([Example("a", [5, 6, 7, 8, 9, 10, 11], 2)], [0])
    return recipe, replace(batch, hidden=target_states(model, batch.tokens, "post_norm"))


SETTINGS = {"target": "", "dtype": "", "device": "", "batch_size": 2, "draft_vocab_size": 40, "repeats": 3}


@pytest.mark.parametrize("kind", bench.RECIPES)
def test_ratio_of_its_own_seconds(kind, loaded, capsys):
    bench.run(kind=kind, as_json=True, **SETTINGS)
    found = json.loads(capsys.readouterr().out)
    low, high = found["quartiles"]
    assert found["recipe"] == kind and 0 < low <= found["ratio"] <= high
    assert found["tokens_per_second"] == pytest.approx(2 * bench.RESPONSE / found["step_seconds"])
    bench.run(kind=kind, as_json=False, **SETTINGS)
    assert capsys.readouterr().out.startswith(f"{kind}: ")


def test_bare_changes_no_weight_and_a_step_does():
    recipe, batch = made()
    before = [parameter.clone() for parameter in recipe.module.parameters()]

    def changed():
        return any(not torch.equal(a, b) for a, b in zip(before, recipe.module.parameters(), strict=True))

    bench.bare(recipe, batch)
    assert not changed() and all(parameter.grad is None for parameter in recipe.module.parameters())
    bench.whole(recipe, batch, torch.optim.AdamW(recipe.module.parameters()))
    assert changed()


def test_unknown_recipe(loaded):
    with pytest.raises(ValueError, match="unknown recipe 'x': known are medusa, mtp"):
        bench.run(kind="x", as_json=False, **SETTINGS)


def test_more_draft_ids_than_the_target_has(loaded):
    with pytest.raises(ValueError, match="--draft-vocab-size is 98: give at most 97"):
        bench.run(kind="medusa", as_json=False, **SETTINGS | {"draft_vocab_size": 98})
