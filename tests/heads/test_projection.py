"""The target's head applied apart from the target gives the target's logits."""

import pytest
import torch

from heads.medusa import MedusaConfig
from heads.projection import Projection, checked_ids
from tests.tiny_models import FAMILIES, tiny

TOKENS = torch.randint(1, 97, (2, 9), generator=torch.Generator().manual_seed(0))
SCALED = {"gemma2", "granite"}  # whose logits are more than a matrix product


def state_and_logits(model):
    states = []
    handle = model.get_decoder().register_forward_hook(lambda module, args, out: states.append(out[0]))
    logits = model(TOKENS).logits
    handle.remove()
    return states[0], logits


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"bloom"}))
@torch.no_grad()
def test_equals_the_target(family):
    model = tiny(family)
    state, logits = state_and_logits(model)
    torch.testing.assert_close(Projection(model)(state), logits, rtol=0, atol=1e-12)
    ids = torch.tensor([3, 5, 96])
    torch.testing.assert_close(Projection(model, ids)(state), logits[..., ids], rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", sorted(SCALED))
@torch.no_grad()
def test_a_bare_product_would_differ(family):
    model = tiny(family)
    state, logits = state_and_logits(model)
    assert (model.get_output_embeddings()(state) - logits).abs().max() > 1e-2


def test_a_logit_scale_is_applied():
    """Cohere's, which the tiny model holds at 1."""
    model = tiny("cohere2")
    model.config.logit_scale = model.logit_scale = 0.25
    state, logits = state_and_logits(model)
    torch.testing.assert_close(Projection(model)(state), logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 2], "draft_vocab_size is 3 but 2 draft ids were given"),
        ([1, 2, 2], "must rise strictly"),
        ([2, 1, 3], "must rise strictly"),
        ([-1, 1, 3], "must rise strictly"),
        ([1, 2, 97], r"within 0\.\.96"),
        (None, "draft_vocab_size is 3 but None"),
    ],
)
def test_ids_that_cannot_be(ids, message):
    config = MedusaConfig(heads=1, layers=1, hidden_size=32, vocab_size=97, draft_vocab_size=3)
    with pytest.raises(ValueError, match=message):
        checked_ids(config, None if ids is None else torch.tensor(ids), torch.device("cpu"))
