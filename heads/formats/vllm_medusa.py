"""Medusa heads for vLLM, which serves them up to version 0.32 (its `MedusaModel`).

`config.json`: `num_heads`, `num_hidden_layers` (residual blocks per head), `hidden_size`, `vocab_size`,
`medusa_fc_bias` (without which vLLM drops the biases), `original_lm_head` (one projection for all heads). Weights:
`blocks.{h}.layers.{l}.{weight,bias}`; `lm_heads.{h}.weight`, only of head 0 where it is one for all (a copy: vLLM does
not lend the target's).

A reduced vocabulary has a place in the format (`truncated_vocab_size`, `token_map`), and is read here, but vLLM 0.32
refuses to load a file with a token map, so that none is written.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from heads.formats.files import Checkpoint, fill, read_config, save_config, save_tensors, setting
from heads.medusa import MedusaConfig, MedusaHeads
from heads.projection import Projection


def read(folder: str | Path, model: PreTrainedModel) -> MedusaHeads:
    """The heads that vLLM would run from `folder`, for the target `model`: with projections of their own, unless the
    one for all of them is the target's.

    Raises ValueError for a damaged file and, naming its keys, for one that does not fit config.json or the target.
    """
    folder = Path(folder)
    described, tensors = read_config(file := folder / "config.json"), dict(Checkpoint(folder))
    V, D = model.get_output_embeddings().weight.shape
    for name, expected in (("vocab_size", V), ("logit_scale", 1.0)):
        if (found := described.get(name, expected)) != expected:
            raise ValueError(
                f"{folder} has {name} {found} but this target needs {expected}: give another target or file"
            )
    heads_count = setting(described, "num_heads", file)
    draft_ids = _sort_vocabulary(tensors)
    one_for_all = tensors.pop("lm_heads.0.weight", None) if described.get("original_lm_head") else None
    of_target = Projection(model, draft_ids).weight
    shared = one_for_all is not None and torch.equal(one_for_all.to(of_target), of_target)
    if one_for_all is not None and not shared:
        tensors |= {f"lm_heads.{h}.weight": one_for_all for h in range(heads_count)}
    config = MedusaConfig(
        heads=heads_count,
        layers=setting(described, "num_hidden_layers", file),
        hidden_size=D,
        vocab_size=V,
        own_projection=not shared,
        draft_vocab_size=None if draft_ids is None else len(draft_ids),
    )
    heads = MedusaHeads(config, model, draft_ids)
    fill(_named(heads, biases=described.get("medusa_fc_bias", False)), tensors, folder)
    heads.about = {"target": described.get("base_model_name_or_path")}
    return heads.eval()


def write(heads: MedusaHeads, model: PreTrainedModel, folder: Path, target: str) -> None:
    """Write config.json and model.safetensors into `folder`. target: the target's name, for people.

    vLLM takes arg-maxes, so that scale and soft cap of the target's logits, which do not move them, can be left out.
    With a reduced vocabulary, heads that use the target's projection get all of it, and propose from all ids; heads
    with their own get rows for the other ids that are never the largest.
    Raises ValueError where the target's output head has a bias, which vLLM's heads cannot have.
    """
    tensors = _named(heads, biases=True)
    for h, projection in enumerate(heads.projections):
        tensors[f"lm_heads.{h}.weight"] = _over_all_ids(projection.weight, heads)
    if not heads.config.own_projection:
        of_target = Projection(model)
        if of_target.bias is not None:
            raise ValueError(
                f"the output head of {target} has a bias, which vLLM's Medusa heads cannot have: train heads with "
                f"projections of their own"
            )
        tensors["lm_heads.0.weight"] = of_target.weight
    save_config(_settings(heads, target), folder)
    save_tensors(tensors, folder / "model.safetensors")


def _over_all_ids(rows: Tensor, heads: MedusaHeads) -> Tensor:
    """[V, D] a projection [Vd, D] over all ids: the others' logit is the mean of all, so below the largest."""
    if heads.draft_ids is None:
        return rows
    return rows.mean(0).repeat(heads.config.vocab_size, 1).index_copy(0, heads.draft_ids, rows)


def _settings(heads: MedusaHeads, target: str) -> dict[str, object]:
    """config.json. vLLM takes any key that contains "num" and "heads" for the number of heads: only one may."""
    config = heads.config
    return {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "base_model_name_or_path": target,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.vocab_size,
        "num_heads": config.heads,
        "num_hidden_layers": config.layers,
        "medusa_fc_bias": True,
        "original_lm_head": not config.own_projection,
        "dtype": str(next(heads.parameters()).dtype).removeprefix("torch."),
    }


def _named(heads: MedusaHeads, biases: bool) -> dict[str, Tensor]:
    """The heads' parameters under vLLM's names. biases: whether the file has those of the blocks; new ones are zero."""
    named = {}
    for h, blocks in enumerate(heads.blocks):
        for layer, block in enumerate(blocks):
            named[f"blocks.{h}.layers.{layer}.weight"] = block.weight
            if biases:
                named[f"blocks.{h}.layers.{layer}.bias"] = block.bias
    return named | {f"lm_heads.{h}.weight": projection.weight for h, projection in enumerate(heads.projections)}


def _sort_vocabulary(tensors: dict[str, Tensor]) -> Tensor | None:
    """Take the token map out of `tensors`, sorted, and bring the projections' rows into its order; None = all ids."""
    if (token_map := tensors.pop("token_map", None)) is None:
        return None
    draft_ids, order = token_map.sort()
    for name in [name for name in tensors if name.startswith("lm_heads.")]:
        rows = tensors[name]
        tensors[name] = rows[draft_ids] if len(rows) > len(draft_ids) else rows[order]  # vLLM cuts a full one itself
    return draft_ids
