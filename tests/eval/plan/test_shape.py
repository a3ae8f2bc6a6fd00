"""A model's shape from its configuration, against what real forwards of tiny models cache and compute."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, GPTBigCodeConfig

from eval.plan.shape import planned_shape, shape_of
from tests.tiny_models import FAMILIES, WINDOW, tiny

DENSE_EAGER = ("llama", "qwen3", "gpt2", "olmo2", "opt", "gpt_neox", "granite", "phi3")
T = 5


def cached_elements(model) -> int:
    """Numbers that transformers' own cache holds after T tokens, per token, over all layers."""
    output = model(torch.ones(1, T, dtype=torch.long), use_cache=True)
    cache = output.cache if hasattr(output, "cache") else output.past_key_values
    return sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers) // T


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_cached_numbers_are_those_of_a_real_cache(family):
    model = tiny(family)
    if not hasattr(type(model.config), "num_key_value_heads"):  # given to every family, kept also by those without
        model.config.__dict__.pop("num_key_value_heads", None)
    assert T < WINDOW  # so that no layer's window cuts
    assert shape_of(model, family).kv_bytes(T) == T * cached_elements(model) * model.dtype.itemsize


@torch.no_grad()
@pytest.mark.parametrize("family", DENSE_EAGER)
def test_flops_are_those_that_torch_counts(family):
    """Eager attention computes every query with every key: T queries, each over T tokens."""
    model, shape = tiny(family), shape_of(tiny(family), family)
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(1, T, dtype=torch.long), use_cache=False)
    assert counter.get_total_flops() == shape.weight_flops(T) + T * shape.attention_flops(T)


def test_llama_by_hand():
    """Hidden 32, 4 heads over 2 KV heads of 8, feed-forward 48, 2 layers, vocabulary 97, an untied head."""
    shape = shape_of(tiny("llama"), "llama")
    layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48
    assert shape.matrices == 2 * layer + 97 * 32 and shape.expert_weights == 0
    assert shape.active_weights == shape.matrices
    assert (
        shape.stored_weights == shape.matrices + 97 * 32 + 5 * 32
    )  # the embedding, and two norms a layer and one more
    assert shape.weight_bytes(1) == shape.weight_bytes(300) == 8 * shape.matrices
    assert (shape.layers, shape.vocab, shape.itemsize) == (2, 97, 8)


def test_mixtral_wakes_experts_by_the_tokens():
    """4 experts, 2 per token, each three matrices of 32 x 48 in each of 2 layers. Of 3 tokens' 2 of 4 experts, one is
    missed by all with probability 1/8."""
    shape = shape_of(tiny("mixtral"), "mixtral")
    assert shape.expert_weights == 2 * 4 * 3 * 32 * 48
    assert shape.active_weights == shape.matrices + shape.expert_weights / 2
    assert shape.weight_bytes(1) == 8 * shape.active_weights
    assert shape.weight_bytes(3) == 8 * (shape.matrices + shape.expert_weights * 7 / 8)
    assert shape.weight_bytes(1000) == 8 * (shape.matrices + shape.expert_weights)


def test_windows_bound_what_is_seen():
    """gemma2: one layer with a window of 8 tokens, one without; 2 x 2 KV heads x 8 numbers of 8 bytes per token."""
    shape = shape_of(tiny("gemma2"), "gemma2")
    assert shape.kv_bytes(100) == (8 + 100) * 2 * 2 * 8 * 8


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2", "deepseek_v3"])
def test_a_configuration_says_what_the_loaded_model_does(family, tmp_path):
    model = tiny(family)
    model.config.save_pretrained(tmp_path)
    planned = planned_shape(str(tmp_path), torch.float64)
    assert planned == shape_of(model, str(tmp_path))


def test_a_tied_head_is_counted_once(tmp_path):
    config = tiny("llama").config
    config.tie_word_embeddings = True
    config.save_pretrained(tmp_path)
    assert planned_shape(str(tmp_path), torch.float64).matrices == shape_of(tiny("llama"), "llama").matrices


def test_latent_attention_by_hand():
    """4 heads; scores over a latent of 16 and a rotary part of 4, values are the latent: 2 FLOPs for each."""
    (layers,) = shape_of(tiny("deepseek_v3"), "deepseek_v3").attention
    assert (layers.kv_elements, layers.flops) == (16 + 4, 2 * 4 * (16 + 4 + 16))


def test_multi_query_attention_caches_one_head():
    config = GPTBigCodeConfig(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=97, multi_query=True)
    assert shape_of(AutoModelForCausalLM.from_config(config), "gpt_bigcode").attention[0].kv_elements == 2 * 8


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "qwen3_next"}, "layers of kind linear_attention"),
        ({"model_type": "mamba"}, "num_attention_heads"),
        ({"model_type": "deepseek_v2", "num_experts_per_tok": None}, "how many experts"),
        ({"model_type": "llama", "num_hidden_layers": 0}, "no model's shape"),
        ({"model_type": "llama", "hidden_size": 30, "num_attention_heads": 4}, "configuration that can be read"),
        (5, "configuration that can be read"),
    ],
)
def test_what_cannot_be_planned_for_is_one_line(tmp_path, config, said):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=said) as error:
        planned_shape(str(tmp_path), torch.bfloat16)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_what_is_no_decoder_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(ValueError, match="not a decoder-only language model"):
        planned_shape(str(tmp_path), torch.bfloat16)
    with pytest.raises(ValueError, match="no configuration that can be read"):
        planned_shape(str(tmp_path / "nothing"), torch.bfloat16)
