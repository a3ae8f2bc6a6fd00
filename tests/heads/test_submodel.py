"""A model of some of the layers computes what those layers compute in the whole one, and shares what it says."""

import pytest
import torch

from heads.submodel import layers_of, submodel
from specdec.capture import final_norm
from specdec.compat import cache_argument
from tests.tiny_models import FAMILIES, tiny

TOKENS = torch.randint(1, 97, (2, 12), generator=torch.Generator().manual_seed(0))


def after_first_layer(model):
    """Logits of the first layer alone, from the whole model's parts."""
    seen = []
    handles = [layers_of(model)[0].register_forward_hook(lambda module, args, out: seen.append(out))]
    handles.append(final_norm(model.get_decoder()).register_forward_pre_hook(lambda module, args: (first(seen[0]),)))
    logits = model(TOKENS).logits
    for handle in handles:
        handle.remove()
    return logits


def first(out):
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"bloom"}))
@torch.no_grad()
def test_first_layer_alone(family):
    model = tiny(family)
    small = submodel(model, [0], share=True)
    torch.testing.assert_close(small(TOKENS).logits, after_first_layer(model), rtol=0, atol=1e-12)
    assert (small(TOKENS).logits - model(TOKENS).logits).abs().max() > 1e-3  # and not the whole model's


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "deepseek_v3", "gpt_oss"])
@torch.no_grad()
def test_any_layer_finds_its_place_in_a_cache(family):
    small = submodel(tiny(family), [-1], share=False)
    whole = small(TOKENS).logits
    name, cache, parts = cache_argument(small), None, []
    for column in TOKENS.split(1, dim=1):
        out = small(column, **{name: cache}, use_cache=True)
        cache = out[name]
        parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-5)


def test_what_is_shared():
    model = tiny("llama")
    shared, copied = submodel(model, [1], share=True), submodel(model, [1], share=False)
    whole = {id(parameter) for parameter in model.parameters()}
    assert all(id(parameter) in whole for parameter in shared.parameters())
    common = {name for name, parameter in copied.named_parameters() if id(parameter) in whole}
    assert common == {"model.embed_tokens.weight", "lm_head.weight"}
    before = model(TOKENS).logits
    for name, parameter in copied.named_parameters():
        if name not in common:
            parameter.data.zero_()
    assert torch.equal(model(TOKENS).logits, before)
    assert len(layers_of(model)) == model.config.num_hidden_layers == 2


@pytest.mark.parametrize("index", [2, -3])
def test_a_layer_that_is_not_there(index):
    with pytest.raises(ValueError, match=f"layer {index} of a model with 2: give -2 to 1"):
        submodel(tiny("llama"), [index], share=True)
