"""GGUF files as ordinary model folders: converted once by transformers, kept under the user's cache folder.

Reading a GGUF file dequantises every tensor in Python (about half a minute for 135M parameters), so the float32 result
is saved. An entry is named after the file's content, appears by one rename when it is complete, and is used only
while the files in it have the digests that its manifest lists.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec.disk import reading

_MANIFEST = "specdec-manifest.json"


def model_folder(gguf: Path) -> Path:
    """The folder with the float32 model and tokenizer of a `.gguf` file, converted now if it was not before.

    Raises ImportError where the package that reads GGUF files is missing, and ValueError where the file is not one
    or is damaged."""
    root = _cache_root()
    entry = root / f"{gguf.stem}-{_digest(gguf)[:16]}-transformers-{transformers.__version__}"
    if _is_intact(entry):
        return entry
    if importlib.util.find_spec("gguf") is None:
        raise ImportError(f"reading {gguf} needs the package gguf: pip install specdec[gguf]")
    print(f"specdec: converting {gguf.name}, about a minute; kept in {entry} for the next time", file=sys.stderr)
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".converting-") as temporary:
        folder = Path(temporary) / "model"
        _convert(gguf, folder)
        _write_manifest(folder)
        _publish(folder, entry)
    return entry


def _cache_root() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdec"


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _is_intact(entry: Path) -> bool:
    try:
        digests = json.loads((entry / _MANIFEST).read_text())
        return all(_digest(entry / name) == digest for name, digest in digests.items())
    except (OSError, ValueError):  # missing, unreadable, or a manifest that is not JSON
        return False


def _convert(gguf: Path, folder: Path) -> None:
    with gguf.open("rb") as content:
        if content.read(4) != b"GGUF":
            raise ValueError(f"{gguf} is not a GGUF file: it does not begin with the letters GGUF")
    # Kept off the screen are progress bars; warnings are logged and errors raised all the same.
    with reading(f"{gguf} could not be converted"), contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        # transformers still counts the dequantised model as a GGUF-quantised one, which it refuses to save
        model.hf_quantizer = None
        model.is_quantized = False
        model.config.__dict__.pop("quantization_config", None)
        model.save_pretrained(folder)
    if model.config.eos_token_id is not None:  # transformers 5.16 takes the beginning-of-text token for the end token
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.save_pretrained(folder)


def _write_manifest(folder: Path) -> None:
    digests = {file.name: _digest(file) for file in sorted(folder.iterdir())}
    (folder / _MANIFEST).write_text(json.dumps(digests, indent=2))


def _publish(folder: Path, entry: Path) -> None:
    """Rename the finished `folder` to `entry`, in the place of a damaged one but not of one that appeared meanwhile."""
    if not _is_intact(entry):
        shutil.rmtree(entry, ignore_errors=True)
    try:
        folder.rename(entry)
    except OSError:  # another process converted the same file: its entry is as good as ours
        if not _is_intact(entry):
            raise
