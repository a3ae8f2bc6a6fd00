"""The recipes' losses and counts against loops over single chains."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from specdec.models import LoadedModel
from tests.tiny_models import tiny
from train.batches import Example, padded
from train.chains import ahead, head_accuracies
from train.draft import DraftRecipe, DraftSettings
from train.medusa import MedusaRecipe, MedusaSettings
from train.mtp import MTPRecipe, MTPSettings
from train.states import target_states

BASE = {"target": "", "prompts": "", "out": "", "loss": "kl", "depth_decay": 0.5}
V = 13  # few tokens, so that a prediction is right now and then
IDS = torch.arange(0, V, 2)
RECIPES = {
    "medusa": (MedusaRecipe, MedusaSettings, {"heads": 3, "layers": 2}),
    "mtp": (MTPRecipe, MTPSettings, {"depths": 3}),
    "mtp, 3 layers": (MTPRecipe, MTPSettings, {"depths": 3, "layers": 3}),
    "draft": (DraftRecipe, DraftSettings, {"layers": [0]}),
}


def made(name, ids=None, **settings):
    """A recipe on a tiny target, its parameters moved so that it is right now and then, and a ragged batch."""
    model = tiny("llama", dtype=torch.float32, vocab=V)
    make, cls, own = RECIPES[name]
    loaded = LoadedModel(model, SimpleNamespace(), "tiny")
    recipe = make(cls(**BASE | own | settings, draft_vocab_size=None if ids is None else len(ids)), loaded, ids)
    generator = torch.Generator().manual_seed(0)
    for parameter in recipe.module.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    examples = [example(model, prompt, length) for prompt, length in ((4, 9), (2, 5), (6, 1), (3, 0), (1, 6))]
    batch = with_states(model, examples)
    return model, recipe, examples, batch


def with_states(model, examples):
    batch = padded(examples, range(len(examples)))
    return replace(batch, hidden=target_states(model, batch.tokens, "post_norm"))


def example(model, prompt, length):
    tokens = torch.randint(1, V, (1, prompt), generator=torch.Generator().manual_seed(prompt))
    for _ in range(length):
        tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
    return Example(str(prompt), tokens[0].tolist(), prompt)


def single_chains(model, recipe, examples, ids):
    """(depth, log q over all ids, log p, token, joint hit) of every counted prediction, text by text."""
    first = recipe.first
    for text in examples:
        alone = with_states(model, [text])
        p = model(alone.tokens).logits[0].log_softmax(-1)
        states = recipe.states(alone)
        for t in range(len(text.tokens)):
            alive = True
            for depth in range(1, recipe.depths + 1):
                place = t + first + depth
                if t + first + 1 < text.response_start or place >= len(text.tokens):
                    break
                q = recipe.logits(depth, states[depth - 1][0, t][None])[0].log_softmax(-1)
                full = torch.full((V,), -math.inf)
                full[torch.arange(V) if ids is None else ids] = q
                reached, hit = alive, full.argmax().item() == text.tokens[place]
                alive = alive and hit
                yield depth, full, p[place - 1], text.tokens[place], reached, alive


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("ids", [None, IDS], ids=["all", "reduced"])
@torch.no_grad()
def test_loss_and_counts(name, ids):
    model, recipe, examples, batch = made(name, ids)
    loss, sums = recipe.loss(batch)
    want = {key: [0.0] * recipe.depths for key in sums}
    total, weights = 0.0, [0.5**k for k in range(recipe.depths)]
    for depth, q, p, token, reached, right in single_chains(model, recipe, examples, ids):
        inside = q > -math.inf
        kl = (p.exp() * (p - q))[inside].sum().item()
        total += weights[depth - 1] / sum(weights) * kl
        found = {
            "tokens": 1,
            "top1": q.argmax() == token,
            "top5": token in q.topk(5).indices,
            "alpha": torch.minimum(p.exp(), q.exp()).sum(),
            "reached": reached,
            "right": right,
        }
        for key, value in found.items():
            want[key][depth - 1] += float(value)
    assert loss.item() == pytest.approx(total, rel=1e-4)
    for key in sums:
        assert sums[key].tolist() == pytest.approx(want[key], rel=1e-4), key
    assert sums["tokens"][0] > 15
    if ids is None:
        assert 0 < sums["top1"][0] < sums["tokens"][0]  # so that hits and misses are both there to be counted


@pytest.mark.parametrize("name", RECIPES)
def test_training_reads_less(name):
    """What only reports need is left out of training steps, and every trained parameter gets a gradient."""
    _, recipe, _, batch = made(name)
    loss, sums = recipe.loss(batch)
    assert set(sums) == {"tokens", "top1", "reached", "right"}
    loss.backward()
    for parameter in recipe.module.parameters():
        assert (parameter.grad is not None) == parameter.requires_grad


def test_the_comparison_notices_a_mask_off_by_one():
    model, recipe, examples, batch = made("medusa")
    with torch.no_grad():
        right, _ = recipe.loss(batch)
        wrong, _ = recipe.loss(replace(batch, loss_mask=ahead(batch.loss_mask, 1)))
    assert abs(wrong - right) > 1e-2


@torch.no_grad()
def test_accuracies_by_rank():
    model, recipe, examples, batch = made("medusa")
    counts = torch.zeros(3, 10)
    chains = torch.zeros(3)
    for depth, q, _, token, reached, _ in single_chains(model, recipe, examples, None):
        if reached:
            chains[depth - 1] += 1
            counts[depth - 1] += q.topk(10).indices == token
    torch.testing.assert_close(
        torch.tensor(head_accuracies(recipe, [batch, batch])), counts / chains.clamp(min=1)[:, None]
    )


def test_the_draft_model_leaves_its_target_alone():
    model, recipe, _, batch = made("draft")
    before = [parameter.clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD([p for p in recipe.module.parameters() if p.requires_grad], lr=1.0)
    recipe.loss(batch)[0].backward()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    fixed = {name for name, parameter in recipe.module.named_parameters() if not parameter.requires_grad}
    assert fixed == {"model.embed_tokens.weight", "lm_head.weight"}
