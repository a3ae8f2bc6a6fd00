"""Heads on disk: what is read back, and what is refused."""

import errno
import json
import logging

import pytest
import safetensors.torch
import torch

from heads import saved
from heads.medusa import MedusaHeads
from heads.mtp import MTPHead
from tests.heads.test_medusa import random_heads
from tests.heads.test_mtp import random_head
from tests.tiny_models import tiny

IDS = torch.tensor([1, 5, 8])
MAKERS = {"medusa": (random_heads, MedusaHeads), "mtp": (random_head, MTPHead)}


@pytest.fixture
def model():
    return tiny("llama")


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("ids", [None, IDS])
def test_round_trip(kind, ids, model, tmp_path):
    make, cls = MAKERS[kind]
    head = make(model, draft_vocab_size=None if ids is None else len(ids), draft_ids=ids)
    head.save_pretrained(tmp_path / "head", about={"target": "tiny"})
    again = cls.from_pretrained(tmp_path / "head", model)
    assert again.config == head.config and again.about == {"target": "tiny"}
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), again.parameters(), strict=True))
    assert (again.draft_ids is None) if ids is None else torch.equal(again.draft_ids, ids)
    assert not again.training
    assert [path.name for path in tmp_path.iterdir()] == ["head"]  # no temporary folder is left


def test_buffers_are_kept(tmp_path):
    """DeepSeek's routing bias is a buffer: it must not come back as the target's."""
    model = tiny("deepseek_v3")
    head = random_head(model)
    [bias] = [buffer for name, buffer in head.named_buffers() if name.endswith("e_score_correction_bias")]
    bias.add_(torch.arange(len(bias)))
    head.save_pretrained(tmp_path)
    again = dict(MTPHead.from_pretrained(tmp_path, model).named_buffers())
    assert all(torch.equal(buffer, again[name]) for name, buffer in head.named_buffers())


def test_smaller_dtype_on_disk(model, tmp_path):
    head = random_heads(model)
    head.save_pretrained(tmp_path, dtype=torch.bfloat16)
    again = MedusaHeads.from_pretrained(tmp_path, model)
    for a, b in zip(head.parameters(), again.parameters(), strict=True):
        assert b.dtype == torch.float64 and torch.equal(a.bfloat16().double(), b)


@pytest.mark.parametrize("kind", MAKERS)
def test_another_target_is_refused_naming_both(kind, model, tmp_path):
    MAKERS[kind][0](model).save_pretrained(tmp_path, about={"target": "tiny"})
    with pytest.raises(ValueError, match=r"vocab_size 97 but the target LlamaForCausalLM has 101.*\(tiny\)"):
        MAKERS[kind][1].from_pretrained(tmp_path, tiny("llama", vocab=101))


def test_other_weights_of_the_same_shape_are_a_warning(model, tmp_path, caplog):
    head = random_heads(model)
    head.save_pretrained(tmp_path, about={"target": "tiny", "target_fingerprint": saved.fingerprint(model)})
    with caplog.at_level(logging.WARNING, "specdec"):
        MedusaHeads.from_pretrained(tmp_path, model)
        assert not caplog.records
        MedusaHeads.from_pretrained(tmp_path, tiny("llama", seed=1))
    assert "trained for other weights" in caplog.text


def test_fingerprint_depends_on_weights_and_not_on_their_dtype(model):
    ours = saved.fingerprint(model)
    assert len(ours) == 16
    assert saved.fingerprint(tiny("llama").bfloat16()) == ours
    assert saved.fingerprint(tiny("llama", dtype=torch.float32)) != saved.fingerprint(tiny("llama", seed=1))
    changed = tiny("llama")
    changed.model.layers[1].mlp.up_proj.weight.data += 0.01
    assert saved.fingerprint(changed) != ours


def test_a_truncated_file(model, tmp_path):
    random_heads(model).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="model.safetensors cannot be read"):
        MedusaHeads.from_pretrained(tmp_path, model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("blocks.0.0.weight"), r"missing \['blocks.0.0.weight'\]"),
        (lambda t: t.update(extra=torch.zeros(1)), r"unknown \['extra'\]"),
        (lambda t: t.update({"blocks.0.0.bias": torch.zeros(3)}), r"blocks.0.0.bias \(3,\) where .* \(32,\)"),
    ],
)
def test_tensors_that_do_not_match(change, message, model, tmp_path):
    random_heads(model).save_pretrained(tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    change(tensors)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        MedusaHeads.from_pretrained(tmp_path, model)


def test_what_is_no_head(model, tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no head"):
        MedusaHeads.from_pretrained(tmp_path, model)
    random_head(model).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="a head of kind 'mtp', not 'medusa'"):
        MedusaHeads.from_pretrained(tmp_path, model)
    for content, message in {"[]": "of kind None, not 'medusa'", '{"kind": "medusa"}': "is no medusa head's"}.items():
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            MedusaHeads.from_pretrained(tmp_path, model)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        MedusaHeads.from_pretrained(tmp_path, model)


def test_a_full_disk_leaves_the_earlier_save(model, tmp_path, monkeypatch):
    head = random_heads(model)
    head.save_pretrained(tmp_path / "head")
    before = {path.name: path.read_bytes() for path in (tmp_path / "head").iterdir()}

    def full(tensors, path):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(saved, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        random_heads(model, seed=1).save_pretrained(tmp_path / "head")
    assert {path.name: path.read_bytes() for path in (tmp_path / "head").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_shipped_heads_are_found_by_their_target(model, tmp_path, monkeypatch):
    monkeypatch.setattr(saved, "SHIPPED", tmp_path)
    with pytest.raises(ValueError, match="no medusa head for this target comes with specdec: train one"):
        saved.shipped("medusa", model)
    other = tiny("llama", seed=1)
    for name, owner in (("a", other), ("b", model)):
        about = {"target_type": "llama", "target_fingerprint": saved.fingerprint(owner)}
        random_heads(owner).save_pretrained(tmp_path / name / "medusa", about=about)
    assert saved.shipped("medusa", model) == tmp_path / "b" / "medusa"
    assert saved.shipped("medusa", tiny("llama", seed=2)) == tmp_path / "a" / "medusa"  # of the same shape
    with pytest.raises(ValueError, match="comes with specdec"):
        saved.shipped("medusa", tiny("llama", vocab=101))
    with pytest.raises(ValueError, match="comes with specdec"):
        saved.shipped("mtp", model)


def test_config_is_readable(model, tmp_path):
    random_heads(model).save_pretrained(tmp_path, about={"accuracies": [[0.5]]})
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["kind"] == "medusa" and config["heads"] == 3 and config["hidden_contract"] == "post_norm"
