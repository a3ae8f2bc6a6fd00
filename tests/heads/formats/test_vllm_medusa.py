"""vLLM's Medusa files against what its loader makes of them, in plain torch. `make test-vllm` asks vLLM itself."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from heads.formats import vllm_medusa
from tests.heads.formats.test_fasterdecoding import D, K, L, V, random_heads, states
from tests.tiny_models import tiny


def as_vllm(folder, hidden, drop_biases=False):
    """[K, n, V] what vLLM 0.32 computes: blocks, a projection each or head 0's for all, -inf outside the token map."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    assert (config["model_type"], config["architectures"]) == ("medusa", ["MedusaModel"])
    assert [key for key in config if "num" in key and "heads" in key] == ["num_heads"]  # it takes any such key for it
    logits, used = [], set()
    for h in range(config["num_heads"]):
        x = hidden
        for layer in range(config["num_hidden_layers"]):
            name = f"blocks.{h}.layers.{layer}"
            z = x @ tensors[f"{name}.weight"].T
            if config.get("medusa_fc_bias", False) and not drop_biases:
                z = z + tensors[f"{name}.bias"]
            x = x + torch.nn.functional.silu(z)
            used |= {f"{name}.weight", f"{name}.bias"}
        projection = f"lm_heads.{0 if config.get('original_lm_head', False) else h}.weight"
        logits.append(x @ tensors[projection].T)
        used.add(projection)
    logits = torch.stack(logits)
    assert logits.shape[-1] == config["truncated_vocab_size"]
    if config["truncated_vocab_size"] < config["vocab_size"]:
        whole = torch.full((*logits.shape[:-1], config["vocab_size"]), -torch.inf, dtype=logits.dtype)
        whole[..., tensors["token_map"]] = logits
        logits = whole
        used.add("token_map")
    assert used == set(tensors)  # it skips what it does not know without a word
    return logits


@pytest.mark.parametrize("own_projection", [True, False])
@torch.no_grad()
def test_writing(own_projection, tmp_path):
    model, hidden = tiny("llama"), states()
    heads = random_heads(model, own_projection=own_projection)
    vllm_medusa.write(heads, model, tmp_path, "a/target")
    torch.testing.assert_close(as_vllm(tmp_path, hidden), heads(hidden))
    assert (as_vllm(tmp_path, hidden, drop_biases=True) - heads(hidden)).abs().max() > 0.1
    again = vllm_medusa.read(tmp_path, model)
    assert again.config == heads.config
    torch.testing.assert_close(again(hidden), heads(hidden))


@pytest.mark.parametrize("own_projection", [True, False])
@torch.no_grad()
def test_a_reduced_vocabulary_needs_no_token_map(own_projection, tmp_path):
    """vLLM 0.32 loads none: heads with projections of their own still propose the same tokens, others from all ids."""
    model, hidden, draft_ids = tiny("llama"), states(), torch.tensor([3, 50, 96])
    heads = random_heads(model, own_projection=own_projection, draft_vocab_size=3, draft_ids=draft_ids)
    vllm_medusa.write(heads, model, tmp_path, "a/target")
    found = as_vllm(tmp_path, hidden)
    torch.testing.assert_close(found[..., draft_ids], heads(hidden))
    proposed = draft_ids[heads(hidden).argmax(-1)]
    if own_projection:
        assert torch.equal(found.argmax(-1), proposed)
        zeros = torch.zeros_like(found).index_copy(-1, draft_ids, heads(hidden))
        assert not torch.equal(zeros.argmax(-1), proposed)  # rows of zeros would not do
    else:
        whole = random_heads(model)
        torch.testing.assert_close(found, whole(hidden))


@torch.no_grad()
def test_scaled_and_capped_logits_have_the_same_arg_max(tmp_path):
    for family in ("gemma2", "granite"):
        model, hidden, folder = tiny(family), states(), tmp_path / family
        folder.mkdir()
        heads = random_heads(model)
        vllm_medusa.write(heads, model, folder, "a/target")
        assert torch.equal(as_vllm(folder, hidden).argmax(-1), heads(hidden).argmax(-1))
        torch.testing.assert_close(vllm_medusa.read(folder, model)(hidden), heads(hidden))


@torch.no_grad()
def test_files_of_others(tmp_path):
    """No biases, a token map out of order, whole projections that vLLM itself cuts, one projection that is not the
    target's."""
    model, hidden, token_map = tiny("llama"), states(), torch.tensor([50, 3, 96])
    generator = torch.Generator().manual_seed(4)

    def random(*shape):
        return 0.3 * torch.randn(*shape, generator=generator, dtype=torch.float64)

    config = {
        "model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": D, "vocab_size": V, "num_heads": K,
        "num_hidden_layers": L, "truncated_vocab_size": V, "original_lm_head": True,
    }  # fmt: skip
    tensors = {f"blocks.{h}.layers.{layer}.weight": random(D, D) for h in range(K) for layer in range(L)}
    tensors["lm_heads.0.weight"] = random(V, D)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    heads = vllm_medusa.read(tmp_path, model)

    def by_hand(h):
        x = hidden
        for layer in range(L):
            x = x + torch.nn.functional.silu(x @ tensors[f"blocks.{h}.layers.{layer}.weight"].T)
        return x @ tensors["lm_heads.0.weight"].T

    expected = torch.stack([by_hand(h) for h in range(K)])
    torch.testing.assert_close(heads(hidden), expected)
    (tmp_path / "config.json").write_text(json.dumps(config | {"truncated_vocab_size": 3}))
    for rows in (tensors["lm_heads.0.weight"], tensors["lm_heads.0.weight"][token_map]):
        save_file(tensors | {"lm_heads.0.weight": rows, "token_map": token_map}, tmp_path / "model.safetensors")
        heads = vllm_medusa.read(tmp_path, model)
        assert heads.draft_ids.tolist() == [3, 50, 96]
        torch.testing.assert_close(heads(hidden), expected[..., [3, 50, 96]])


@torch.no_grad()
def test_what_does_not_fit_is_named(tmp_path):
    model = tiny("llama")
    vllm_medusa.write(random_heads(model), model, tmp_path, "a/target")
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    cases = [
        (config | {"vocab_size": 98}, tensors, "vocab_size 98 but this target needs 97"),
        (config | {"logit_scale": 0.5}, tensors, "logit_scale 0.5"),
        (config | {"medusa_fc_bias": False}, tensors, r"missing none, unknown blocks\.0\.layers\.0\.bias"),
        (config | {"num_heads": 4}, tensors, r"missing blocks\.3\.layers\.0\.bias"),
        ({key: value for key, value in config.items() if key != "num_heads"}, tensors, "has no num_heads"),
        (config, {n: t for n, t in tensors.items() if n != "lm_heads.0.weight"}, r"missing lm_heads\.0\.weight"),
    ]
    for changed, these, message in cases:
        (tmp_path / "config.json").write_text(json.dumps(changed))
        save_file(these, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            vllm_medusa.read(tmp_path, model)


def test_an_output_head_with_a_bias_is_refused(tmp_path):
    model = tiny("llama")
    model.lm_head.bias = torch.nn.Parameter(torch.ones(V, dtype=torch.float64))
    with pytest.raises(ValueError, match="output head of a/target has a bias"):
        vllm_medusa.write(random_heads(model), model, tmp_path, "a/target")
