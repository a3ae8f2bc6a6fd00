"""Medusa heads as FasterDecoding/Medusa saves them.

`config.json` names `medusa_num_heads`, `medusa_num_layers` and `base_model_name_or_path`. The weights, in
`medusa_lm_head.pt` (a state dictionary) or `medusa_lm_head.safetensors`, are `{head}.{layer}.linear.{weight,bias}` of
the residual blocks and `{head}.{layers}.weight` of each head's output projection. Where no head has a projection they
use the target's: that project starts each from the target's output head and loads over it only what the file holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from heads.formats.files import Checkpoint, fill, read_config, read_pt, save_config, setting
from heads.medusa import MedusaConfig, MedusaHeads


def read(folder: str | Path, model: PreTrainedModel, heads: int | None = None) -> MedusaHeads:
    """The heads in `folder` for the target `model`.

    heads: how many of the heads to load, the nearest ones; None = as many as the configuration says, which has to be
        all that the file holds (some published configurations name fewer heads than there are).
    Raises ValueError for a damaged file and, naming its keys, for one that does not fit the configuration or target.
    """
    folder = Path(folder)
    described = read_config(file := folder / "config.json")
    layers = setting(described, "medusa_num_layers", file)
    tensors = _tensors(folder)
    if heads is not None:
        tensors = {name: tensor for name, tensor in tensors.items() if int(name.partition(".")[0]) < heads}
    weight = model.get_output_embeddings().weight
    config = MedusaConfig(
        heads=setting(described, "medusa_num_heads", file) if heads is None else heads,
        layers=layers,
        hidden_size=weight.shape[1],
        vocab_size=weight.shape[0],
        own_projection=any(name.endswith(f".{layers}.weight") for name in tensors),
    )
    loaded = MedusaHeads(config, model)
    fill(_named(loaded), tensors, folder)
    loaded.about = {"target": described.get("base_model_name_or_path")}
    return loaded.eval()


def write(heads: MedusaHeads, model: PreTrainedModel, folder: Path, target: str) -> None:
    """Write config.json and medusa_lm_head.pt into `folder`. target: what `base_model_name_or_path` says.

    Heads that use the target's own projection are written without one, and so propose from the whole vocabulary.
    Raises ValueError for projections over a reduced vocabulary, which this format cannot say.
    """
    if heads.config.own_projection and heads.draft_ids is not None:
        raise ValueError(
            f"FasterDecoding's format has no reduced vocabulary, but the heads' own projections have only "
            f"{heads.config.draft_vocab_size} of {heads.config.vocab_size} ids: train without --draft-vocab-size"
        )
    described = {
        "base_model_name_or_path": target,
        "medusa_num_heads": heads.config.heads,
        "medusa_num_layers": heads.config.layers,
    }
    save_config(described, folder)
    torch.save(
        {name: tensor.detach().cpu().clone() for name, tensor in _named(heads).items()}, folder / "medusa_lm_head.pt"
    )


def _named(heads: MedusaHeads) -> dict[str, Tensor]:
    """The heads' parameters under this format's names."""
    named = {}
    for h, blocks in enumerate(heads.blocks):
        for layer, block in enumerate(blocks):
            named |= {f"{h}.{layer}.linear.weight": block.weight, f"{h}.{layer}.linear.bias": block.bias}
    for h, projection in enumerate(heads.projections):
        named[f"{h}.{heads.config.layers}.weight"] = projection.weight
    return named


def _tensors(folder: Path) -> Mapping[str, Tensor]:
    file = folder / "medusa_lm_head.pt"
    tensors = read_pt(file) if file.is_file() else Checkpoint(folder)
    if odd := sorted(name for name in tensors if not name.partition(".")[0].isdecimal()):
        raise ValueError(f"{folder} does not hold Medusa heads: its key {odd[0]} does not begin with a head's number")
    return tensors
