"""`specdec export`: what lies in the new folder is the head, or there is no new folder."""

import pytest
import torch

from heads.export import FORMATS, export
from heads.formats import fasterdecoding, native_mtp, vllm_medusa
from heads.medusa import MedusaConfig, MedusaHeads
from heads.mtp import MTPConfig, MTPHead
from tests.tiny_models import tiny

SIZES = {"layers": 1, "hidden_size": 32, "vocab_size": 97}
READERS = {"vllm-medusa": vllm_medusa.read, "fasterdecoding": fasterdecoding.read, "native-mtp": native_mtp.read}


def saved_head(folder, model, kind, draft_ids=None):
    size = None if draft_ids is None else len(draft_ids)
    if kind == "mtp":
        head = MTPHead(MTPConfig(**SIZES, draft_vocab_size=size), model, draft_ids)
    else:
        head = MedusaHeads(MedusaConfig(heads=2, **SIZES, draft_vocab_size=size), model, draft_ids)
    generator = torch.Generator().manual_seed(1)
    for parameter in head.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    head.save_pretrained(folder)
    return head


@pytest.mark.parametrize("ids", [None, [1, 4, 90]])
@pytest.mark.parametrize("format", FORMATS)
@torch.no_grad()
def test_what_is_exported_gives_the_heads_logits(format, ids, tmp_path):
    model, draft_ids = tiny("llama"), None if ids is None else torch.tensor(ids)
    kind = FORMATS[format][0]
    head = saved_head(tmp_path / "head", model, kind, draft_ids)
    export(tmp_path / "head", format, tmp_path / "out", model, "a/target")
    again = READERS[format](tmp_path / "out", model)
    hidden = torch.randn(1, 9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    if kind == "medusa":
        expected, found = head(hidden), again(hidden)
    else:
        tokens = torch.arange(9)[None]
        expected, found = (torch.stack([h.project(s) for s in h(tokens, hidden, 3)]) for h in (head, again))
    if found.shape != expected.shape:  # the format has no reduced vocabulary
        found = found[..., ids]
    torch.testing.assert_close(found, expected)
    assert {path.name for path in tmp_path.iterdir()} == {"head", "out"}


@pytest.mark.parametrize("format", FORMATS)
def test_files_that_say_something_else_are_not_left_behind(format, tmp_path, monkeypatch):
    """A writer with a mistake: it writes another head than the one given to it."""
    model, (kind, files) = tiny("llama"), FORMATS[format]
    saved_head(tmp_path / "head", model, kind)
    right = files.write

    def wrong(head, *rest):
        next(head.parameters()).data.mul_(1.01)
        right(head, *rest)
        next(head.parameters()).data.div_(1.01)

    monkeypatch.setattr(files, "write", wrong)
    with pytest.raises(ValueError, match=rf"the {format} files do not give the head's logits, .*nothing was exported"):
        export(tmp_path / "head", format, tmp_path / "out", model, "a/target")
    assert {path.name for path in tmp_path.iterdir()} == {"head"}


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    model = tiny("llama")
    saved_head(tmp_path / "head", model, "medusa")

    def full(*args, **more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        export(tmp_path / "head", "fasterdecoding", tmp_path / "out", model, "a/target")
    assert {path.name for path in tmp_path.iterdir()} == {"head"}


def test_what_cannot_be_exported_is_named(tmp_path):
    model = tiny("llama")
    saved_head(tmp_path / "head", model, "medusa")

    def refused(message, format="vllm-medusa", folder="head", out="out", error=ValueError):
        with pytest.raises(error, match=message):
            export(tmp_path / folder, format, tmp_path / out, model, "a/target")

    refused("unknown format 'onnx': known are vllm-medusa, fasterdecoding, native-mtp", format="onnx")
    refused("native-mtp is for mtp heads, but .*head holds one of kind 'medusa'", format="native-mtp")
    refused("config.json does not exist", folder="nothing", error=FileNotFoundError)
    refused("head is there already: give a new folder", out="head", error=FileExistsError)
    other = tiny("llama", vocab=98)
    with pytest.raises(ValueError, match="vocab_size 97 but the target LlamaForCausalLM has 98"):
        export(tmp_path / "head", "vllm-medusa", tmp_path / "out", other, "a/target")
    assert {path.name for path in tmp_path.iterdir()} == {"head"}
