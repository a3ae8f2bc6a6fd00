"""Models as transformers and its companions load them: spread over devices and disk, and quantised."""

import os

import pytest
import torch
from accelerate import dispatch_model
from transformers import AutoModelForCausalLM, TorchAoConfig

import specdec
from tests.specdec.test_generation import RandomDrafter, prompts, real_outputs
from tests.tiny_models import tiny

GREEDY = {"do_sample": False, "max_new_tokens": 24}


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral"])
def test_a_model_on_cpu_and_disk(family, tmp_path, caplog):
    """The second layer's weights are read from disk for every forward."""
    model = tiny(family)
    expected, outputs = model.generate(**prompts(), **GREEDY), real_outputs(model, max_new_tokens=24)
    places = {"model.layers.1": "disk"} | dict.fromkeys(
        ["model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"], "cpu"
    )
    model = dispatch_model(model, places, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
    assert model.model.layers[1].self_attn.q_proj.weight.device.type == "meta" and os.listdir(tmp_path)
    assert torch.equal(model.generate(**prompts(), **GREEDY), expected)
    out, stats = specdec.generate(
        model, **prompts(), **GREEDY, drafter=RandomDrafter(outputs), draft_length=4, return_stats=True
    )
    assert torch.equal(out, expected) and stats.mean_accepted_length > 1.5
    with specdec.patch(model) as patched:
        assert torch.equal(model.generate(**prompts(), **GREEDY), expected) and patched.stats is not None
    assert torch.equal(specdec.generate(model, **prompts(), **GREEDY, compile=True), expected)
    assert "runs eagerly, as it cannot be compiled here: some of its weights are offloaded" in caplog.text


def test_a_checkpoint_loaded_with_a_device_map(tmp_path):
    tiny("llama").save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", device_map="auto", dtype=torch.float64)
    assert torch.equal(specdec.generate(model, **prompts(), **GREEDY), model.generate(**prompts(), **GREEDY))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_checkpoint_quantised_as_it_is_loaded(family, tmp_path):
    """Weights in int8, by torchao, which computes on a CPU too. It is not among the development packages, since with a
    CPU build of torch it makes every command print warnings: `pip install torchao` to run this."""
    Int8WeightOnlyConfig = pytest.importorskip("torchao.quantization").Int8WeightOnlyConfig

    whole = tiny(family, dtype=torch.float32)
    whole.save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32, quantization_config=TorchAoConfig(Int8WeightOnlyConfig())
    )
    expected, outputs = model.generate(**prompts(), **GREEDY), real_outputs(model, max_new_tokens=24)
    assert not torch.equal(expected, whole.generate(**prompts(), **GREEDY))
    out, stats = specdec.generate(
        model, **prompts(), **GREEDY, drafter=RandomDrafter(outputs), draft_length=4, return_stats=True
    )
    assert torch.equal(out, expected) and stats.mean_accepted_length > 1.5
