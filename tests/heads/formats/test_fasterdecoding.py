"""FasterDecoding's Medusa files against the formula of their paper, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from heads.formats import fasterdecoding
from heads.medusa import MedusaConfig, MedusaHeads
from tests.tiny_models import tiny

D, V, K, L = 32, 97, 3, 2
CONFIG = {"medusa_num_heads": K, "medusa_num_layers": L, "base_model_name_or_path": "a/target"}


def stock_tensors(own_projection, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return 0.3 * torch.randn(*shape, generator=generator, dtype=torch.float64)

    blocks = [(h, layer) for h in range(K) for layer in range(L)]
    tensors = {f"{h}.{layer}.linear.weight": random(D, D) for h, layer in blocks}
    tensors |= {f"{h}.{layer}.linear.bias": random(D) for h, layer in blocks}
    return tensors | ({f"{h}.{L}.weight": random(V, D) for h in range(K)} if own_projection else {})


def save(folder: Path, tensors, suffix="pt", config=CONFIG):
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / f"medusa_lm_head.{suffix}"
    torch.save(tensors, file) if suffix == "pt" else save_file(tensors, file)
    return file


def by_definition(tensors, model, hidden, layers=tuple(range(L))):
    """[K, n, V]: each head's x + SiLU(W x + b), layer after layer, then its projection or the target's."""
    logits = []
    for h in range(K):
        x = hidden
        for layer in layers:
            z = x @ tensors[f"{h}.{layer}.linear.weight"].T + tensors[f"{h}.{layer}.linear.bias"]
            x = x + z * torch.sigmoid(z)
        logits.append(x @ tensors.get(f"{h}.{L}.weight", model.lm_head.weight).T)
    return torch.stack(logits)


def states():
    return torch.randn(4, D, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("own_projection", [True, False])
@torch.no_grad()
def test_reading(suffix, own_projection, tmp_path):
    model, tensors, hidden = tiny("llama"), stock_tensors(own_projection), states()
    save(tmp_path, tensors, suffix)
    heads = fasterdecoding.read(tmp_path, model)
    assert heads.config == MedusaConfig(heads=K, layers=L, hidden_size=D, vocab_size=V, own_projection=own_projection)
    torch.testing.assert_close(heads(hidden), by_definition(tensors, model, hidden))
    assert (heads(hidden) - by_definition(tensors, model, hidden, layers=(1, 0))).abs().max() > 0.1
    no_bias = {name: torch.zeros_like(t) if name.endswith("bias") else t for name, t in tensors.items()}
    assert (heads(hidden) - by_definition(no_bias, model, hidden)).abs().max() > 0.1


@torch.no_grad()
def test_the_first_heads_of_more(tmp_path):
    """Published configurations name fewer heads than their files hold: nothing is dropped unless one says how many."""
    model, tensors, hidden = tiny("llama"), stock_tensors(True), states()
    save(tmp_path, tensors, config=CONFIG | {"medusa_num_heads": 2})
    with pytest.raises(ValueError, match=r"missing none, unknown 2\.0\.linear\.bias, 2\.0\.linear\.weight, .* 2 more"):
        fasterdecoding.read(tmp_path, model)
    for count in (1, 3):
        heads = fasterdecoding.read(tmp_path, model, heads=count)
        torch.testing.assert_close(heads(hidden), by_definition(tensors, model, hidden)[:count])


def test_bad_files_are_named(tmp_path):
    model, tensors = tiny("llama"), stock_tensors(True)
    file = save(tmp_path, tensors)
    file.write_bytes(file.read_bytes()[:-500])
    with pytest.raises(ValueError, match=r"medusa_lm_head\.pt cannot be read as plain tensors"):
        fasterdecoding.read(tmp_path, model)
    torch.save({"0.0.linear.weight": Path("code that would run")}, file)
    with pytest.raises(ValueError, match=r"medusa_lm_head\.pt cannot be read as plain tensors"):
        fasterdecoding.read(tmp_path, model)
    torch.save([torch.ones(1)], file)
    with pytest.raises(ValueError, match="is not a dictionary of tensors"):
        fasterdecoding.read(tmp_path, model)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"has no \.safetensors file"):
        fasterdecoding.read(tmp_path, model)
    file = save(tmp_path, tensors, "safetensors")
    file.write_bytes(file.read_bytes()[:-500])
    with pytest.raises(ValueError, match=r"medusa_lm_head\.safetensors cannot be read"):
        fasterdecoding.read(tmp_path, model)


def test_what_does_not_fit_is_named(tmp_path):
    model, tensors = tiny("llama"), stock_tensors(True)
    without_bias = {name: tensor for name, tensor in tensors.items() if name != "1.0.linear.bias"}
    without_projection = {name: tensor for name, tensor in tensors.items() if name != "2.2.weight"}
    cases = [
        (without_bias, CONFIG, r"missing 1\.0\.linear\.bias, unknown none"),
        (without_projection, CONFIG, r"missing 2\.2\.weight, unknown none"),
        (
            tensors | {"0.0.linear.weight": torch.ones(8, 8)},
            CONFIG,
            r"0\.0\.linear\.weight of shape \(8, 8\) .* \(32, 32\)",
        ),
        (tensors, CONFIG | {"medusa_num_layers": 3}, r"missing 0\.2\.linear\.bias"),
        (
            tensors | {"lm_head.weight": torch.ones(1)},
            CONFIG,
            "its key lm_head.weight does not begin with a head's number",
        ),
        (tensors, {"medusa_num_heads": K}, "has no medusa_num_layers"),
    ]
    for changed, config, message in cases:
        save(tmp_path, changed, config=config)
        with pytest.raises(ValueError, match=message):
            fasterdecoding.read(tmp_path, model)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        fasterdecoding.read(tmp_path, model)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"config\.json holds a list and no object"):
        fasterdecoding.read(tmp_path, model)


def random_heads(model, **settings):
    draft_ids = settings.pop("draft_ids", None)
    sizes = {"heads": K, "layers": L, "hidden_size": D, "vocab_size": V}
    heads = MedusaHeads(MedusaConfig(**sizes | settings), model, draft_ids)
    generator = torch.Generator().manual_seed(2)
    for parameter in heads.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return heads


@pytest.mark.parametrize("own_projection", [True, False])
@torch.no_grad()
def test_writing(own_projection, tmp_path):
    model, hidden = tiny("llama"), states()
    heads = random_heads(model, own_projection=own_projection)
    fasterdecoding.write(heads, model, tmp_path, "a/target")
    assert json.loads((tmp_path / "config.json").read_text()) == CONFIG
    tensors = torch.load(tmp_path / "medusa_lm_head.pt", weights_only=True)
    assert tensors.keys() == stock_tensors(own_projection).keys()
    torch.testing.assert_close(by_definition(tensors, model, hidden), heads(hidden))


@torch.no_grad()
def test_a_reduced_vocabulary(tmp_path):
    """The target's own projection is not in the file, so its readers have all of it; a reduced one of the heads' own
    has no place there."""
    model, hidden, draft_ids = tiny("llama"), states(), torch.tensor([3, 50, 96])
    heads = random_heads(model, draft_vocab_size=3, draft_ids=draft_ids)
    fasterdecoding.write(heads, model, tmp_path, "a/target")
    torch.testing.assert_close(fasterdecoding.read(tmp_path, model)(hidden)[..., draft_ids], heads(hidden))
    with pytest.raises(ValueError, match="no reduced vocabulary, .* only 3 of 97 ids"):
        own = random_heads(model, own_projection=True, draft_vocab_size=3, draft_ids=draft_ids)
        fasterdecoding.write(own, model, tmp_path, "a/target")
