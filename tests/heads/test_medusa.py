"""Medusa heads against the formula of their paper, and where they start."""

import numpy as np
import pytest
import torch

from heads.medusa import MedusaConfig, MedusaHeads
from tests.tiny_models import tiny

SIZES = {"hidden_size": 32, "vocab_size": 97}


def random_heads(model, seed=0, **settings):
    draft_ids = settings.pop("draft_ids", None)
    heads = MedusaHeads(MedusaConfig(**{"heads": 3, "layers": 2} | SIZES | settings), model, draft_ids)
    generator = torch.Generator().manual_seed(seed)
    for parameter in heads.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.data += 0.2 * noise.to(parameter.device)
    return heads


def by_hand(heads, model, hidden, own_projection, ids):
    """numpy, one head and one position at a time."""
    weights = {name: parameter.detach().numpy() for name, parameter in heads.named_parameters()}
    shared = model.get_output_embeddings().weight.detach().numpy()
    logits = np.zeros((heads.config.heads, len(hidden), len(ids)))
    for head in range(heads.config.heads):
        for n, state in enumerate(hidden.numpy()):
            for layer in range(heads.config.layers):
                z = weights[f"blocks.{head}.{layer}.weight"] @ state + weights[f"blocks.{head}.{layer}.bias"]
                state = state + z / (1 + np.exp(-z))
            rows = weights[f"projections.{head}.weight"] if own_projection else shared[ids]
            logits[head, n] = rows @ state
    return torch.from_numpy(logits)


@pytest.mark.parametrize("own_projection", [False, True])
@pytest.mark.parametrize("ids", [None, [0, 4, 9, 50]])
@torch.no_grad()
def test_formula(own_projection, ids):
    model = tiny("llama")
    draft_ids = None if ids is None else torch.tensor(ids)
    size = None if ids is None else len(ids)
    heads = random_heads(model, own_projection=own_projection, draft_vocab_size=size, draft_ids=draft_ids)
    hidden = torch.randn(5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    want = by_hand(heads, model, hidden, own_projection, list(range(97)) if ids is None else ids)
    torch.testing.assert_close(heads(hidden), want, rtol=0, atol=1e-12)
    assert heads(hidden.view(5, 1, 32)).shape == (3, 5, 1, want.shape[-1])
    assert (heads(hidden)[0] - heads(hidden)[1]).abs().max() > 0.1  # heads do not share their blocks


@pytest.mark.parametrize("own_projection", [False, True])
@torch.no_grad()
def test_new_heads_are_the_target_itself(own_projection):
    """Zero blocks are the identity, so that training starts from what the target predicts for the next token."""
    model = tiny("gemma2" if not own_projection else "llama")
    tokens = torch.tensor([[5, 6, 7, 8]])
    states = []
    model.get_decoder().register_forward_hook(lambda module, args, out: states.append(out[0]))
    logits = model(tokens).logits
    config = MedusaConfig(heads=2, layers=2, own_projection=own_projection, **SIZES)
    torch.testing.assert_close(MedusaHeads(config, model)(states[0])[1], logits, rtol=0, atol=1e-12)


def test_the_target_is_no_part_of_the_heads():
    model = tiny("llama")
    heads = random_heads(model)
    assert {name.split(".")[0] for name, _ in heads.named_parameters()} == {"blocks"}
    assert sum(p.numel() for p in heads.parameters()) == 3 * 2 * (32 * 32 + 32)


@pytest.mark.parametrize("name", ["heads", "layers"])
def test_sizes_below_one_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} of at least 1, not 0"):
        MedusaConfig(**{"heads": 1, "layers": 1} | SIZES | {name: 0})


def test_another_state_is_refused():
    with pytest.raises(ValueError, match="post_norm"):
        MedusaConfig(heads=1, layers=1, hidden_contract="pre_norm", **SIZES)
