"""Heads on disk: `config.json` beside `model.safetensors`, checked against the target they are loaded for."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from heads.projection import checked_ids

logger = logging.getLogger("specdec")

SHIPPED = Path(__file__).parent / "shipped"
SAMPLES = 64  # values of each parameter that a fingerprint looks at


class SavedHead(nn.Module):
    """What is saved and loaded alike whatever the head: its configuration, `about` and its own weights.

    kind:  how config.json names it.   config_class: of its configuration.
    about: what a reader of a saved head wants to know (target, recipe, accuracies).
    """

    kind: ClassVar[str]
    config_class: ClassVar[type]

    def __init__(self, config: Any, model: PreTrainedModel, draft_ids: Tensor | None = None):
        super().__init__()
        self.config, self.about = config, {}
        device = model.get_output_embeddings().weight.device
        self.register_buffer("draft_ids", checked_ids(config, draft_ids, device), persistent=False)

    def save_pretrained(
        self, folder: str | Path, about: dict[str, Any] | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Write config.json and model.safetensors, atomically. dtype: of the weights on disk, None = as they are."""
        tensors = saved_tensors(self, dtype)
        write(folder, self.kind, asdict(self.config), tensors, self.about if about is None else about)

    @classmethod
    def from_pretrained(cls, folder: str | Path, model: PreTrainedModel) -> Self:
        """The head in `folder` on the target's device, in its dtype. Raises ValueError where it does not fit it."""
        saved, tensors = read(folder, cls.kind)
        about = saved.pop("about", {})
        try:
            config = cls.config_class(**saved)
        except TypeError as error:
            raise ValueError(f"{folder}/config.json is no {cls.kind} head's ({error}): save the head again") from None
        check_fits(config, about, model, folder)
        head = cls(config, model, tensors.pop("draft_ids", None))
        load_own(head, tensors, folder)
        head.about = about
        return head.eval()


def fingerprint(model: PreTrainedModel) -> str:
    """16 hex digits that tell one set of weights from another, the same whatever floating-point type they are held in.

    Hashes a stride of every parameter, rounded to bfloat16."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        values = parameter.detach().flatten()
        sample = values[:: max(1, len(values) // SAMPLES)][:SAMPLES].to(torch.bfloat16).float().cpu()
        digest.update(f"{name} {tuple(parameter.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:16]


def write(folder: str | Path, kind: str, config: dict[str, Any], tensors: dict[str, Tensor], about: dict) -> None:
    """Write a head to `folder`; what an earlier save left there is replaced only once the new files are complete."""
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, made / "model.safetensors"
        )
        (made / "model.safetensors").chmod(0o644)  # safetensors makes it the owner's alone
        described = {"kind": kind, **config, "about": about}
        (made / "config.json").write_text(json.dumps(described, indent=2) + "\n")
        folder.mkdir(exist_ok=True)
        for file in ("model.safetensors", "config.json"):  # the file that readers open first comes last
            os.replace(made / file, folder / file)
    finally:
        shutil.rmtree(made)


def read(folder: str | Path, kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration (with `about`) and tensors of a saved head.

    Raises FileNotFoundError for a folder without one and ValueError for a damaged file or another kind of head."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{folder} holds no head: give a folder that `specdec train {kind}` or save_pretrained wrote"
        )
    try:
        config = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'} is not JSON ({error}): save the head again") from None
    found = config.get("kind") if isinstance(config, dict) else None
    if found != kind:
        raise ValueError(f"{folder} holds a head of kind {found!r}, not {kind!r}: give another folder")
    try:
        tensors = load_file(folder / "model.safetensors")
    except (SafetensorError, FileNotFoundError) as error:
        raise ValueError(
            f"{folder / 'model.safetensors'} cannot be read ({error}): save or copy the head again"
        ) from None
    return {key: value for key, value in config.items() if key != "kind"}, tensors


def check_fits(config: Any, about: dict[str, Any], model: PreTrainedModel, folder: str | Path) -> None:
    """ValueError that names both sides where a head cannot belong to `model`; a warning where the shape fits but the
    weights are others than those it was trained for."""
    target = model.config.get_text_config(decoder=True)
    vocabulary = model.get_output_embeddings().weight.shape[0]
    for name, theirs in (("hidden_size", target.hidden_size), ("vocab_size", vocabulary)):
        if (ours := getattr(config, name)) != theirs:
            raise ValueError(
                f"the head in {folder} has {name} {ours} but the target {type(model).__name__} has {theirs}: "
                f"use the target that it was trained for ({about.get('target', 'not recorded')})"
            )
    trained_for = about.get("target_fingerprint")
    if trained_for is not None and trained_for != (found := fingerprint(model)):
        logger.warning(
            "the head in %s was trained for other weights (%s, %s) than this target's (%s): expect lower acceptance",
            folder, about.get("target", "not recorded"), trained_for, found,
        )  # fmt: skip


def saved_tensors(head: SavedHead, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """What a head keeps on disk: its state, floating-point numbers as `dtype` (None = as they are), and `draft_ids`."""
    tensors = {
        name: tensor.to(dtype or tensor.dtype) if tensor.is_floating_point() else tensor
        for name, tensor in head.state_dict().items()
    }
    return tensors if head.draft_ids is None else tensors | {"draft_ids": head.draft_ids}


def load_own(module: nn.Module, tensors: dict[str, Tensor], folder: str | Path) -> None:
    """Copy `tensors` into `module`'s parameters and buffers of the same names.

    Raises ValueError that names what is missing, left over or of another shape."""
    own = module.state_dict()
    missing, unknown = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    if missing or unknown:
        raise ValueError(
            f"the head in {folder} does not hold what its configuration says: missing {missing[:3]}, unknown "
            f"{unknown[:3]}; save it again"
        )
    for name, tensor in own.items():
        if tensors[name].shape != tensor.shape:
            raise ValueError(
                f"the head in {folder} has {name} {tuple(tensors[name].shape)} where its target asks for "
                f"{tuple(tensor.shape)}: use the target that it was trained for"
            )
        tensor.copy_(tensors[name])


def shipped(kind: str, model: PreTrainedModel) -> Path:
    """The folder of the head of `kind` that comes with specdec for `model`: the same weights if there is one, else the
    same shape. Raises ValueError, which says how to train one, where there is neither."""
    configs = {path.parent: json.loads(path.read_text()) for path in sorted(SHIPPED.glob(f"*/{kind}/config.json"))}
    target = model.config.get_text_config(decoder=True)
    shape = (target.hidden_size, model.get_output_embeddings().weight.shape[0], target.model_type)
    fitting = {
        folder: config["about"]["target_fingerprint"]
        for folder, config in configs.items()
        if (config["hidden_size"], config["vocab_size"], config["about"]["target_type"]) == shape
    }
    if not fitting:
        raise ValueError(
            f"no {kind} head for this target comes with specdec: train one with `specdec train {kind}` and give it as "
            f"{kind}:head=FOLDER"
        )
    ours = fingerprint(model)
    return next((folder for folder, trained_for in fitting.items() if trained_for == ours), next(iter(fitting)))
