"""The heads that come with specdec: small enough to ship, found by name, and accepted on the real target."""

import json

import pytest
import torch

import specdec
from heads.saved import SHIPPED, fingerprint, shipped
from specdec.prompts import encode, load_prompts

KINDS = ("medusa", "mtp")


@pytest.mark.parametrize("kind", KINDS)
def test_size_and_card(kind):
    folders = list(SHIPPED.glob(f"*/{kind}"))
    assert len(folders) == 1
    names = {path.name: path.stat().st_size for path in folders[0].iterdir()}
    assert names["model.safetensors"] < 12e6 and sum(names.values()) < 13e6
    about = json.loads((folders[0] / "config.json").read_text())["about"]
    assert about["target"] == "demo" and len(about["accuracies"]) == about["depths"]
    card = (folders[0] / "README.md").read_text()
    assert about["target_fingerprint"] in card


@pytest.mark.slow
@pytest.mark.parametrize("name", ["medusa", "medusa:nodes=8", "mtp", "mtp:top_k=2"])
def test_drafts_for_the_demo(demo, name):
    assert json.loads((shipped(name.partition(":")[0], demo.model) / "config.json").read_text())["about"][
        "target_fingerprint"
    ] == fingerprint(demo.model)
    [tokens] = encode(load_prompts(None, 1), demo.tokenizer, False)
    ids = torch.tensor([tokens])
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 48, "do_sample": False}
    length = 8 if ":" in name else 3
    found, stats = specdec.generate(demo.model, ids, drafter=name, draft_length=length, return_stats=True, **settings)
    assert torch.equal(found, demo.model.generate(ids, **settings))
    assert stats.mean_accepted_length > 1  # some drafts are right; the cards say how many
