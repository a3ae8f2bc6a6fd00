"""Multi-token prediction weights as the model families that ship them name and compute them.

DeepSeek-V3, GLM-4.5: stage i is `model.layers.{L + i}.`, L the target's number of layers: `enorm`, `hnorm`, `eh_proj`,
    `shared_head.norm`, the decoder layer's own names, and copies of the target's `embed_tokens` and `shared_head.head`.
    Served by vLLM, SGLang and transformers.
Qwen3-Next, Qwen3.5: one stage, `mtp.`: `pre_fc_norm_embedding`, `pre_fc_norm_hidden`, `fc`, `norm`, `layers.0.` and the
    decoder layer's names; norm weights less one. Served by vLLM and SGLang.
MiMo (a Qwen2 decoder): stage i is `model.mtp_layers.{i}.`: `token_layernorm`, `hidden_layernorm`, `input_proj`,
    `final_layernorm`, and the decoder layer's names; reads the state *before* the last norm. Served by vLLM.

Other targets of dense RMSNorm layers get DeepSeek-V3's names. No released engine serves those: a DeepSeek-style loader
that is given the target's own kind of layer would.

Loaders do not quite agree. What goes on to the next depth is DeepSeek's and GLM's state after the last norm, as in
SGLang and transformers; vLLM took the one before it, until 0.32 for DeepSeek and still there for GLM-4.5, at a cost in
acceptance (its pull requests 45895 and 47448). vLLM zeroes their embedding at position 0, which SGLang, transformers
and the paper (2412.19437, section 2.2) do not, nor does this; MiMo's is zeroed by both engines. SGLang gives MiMo the
state after the last norm, vLLM's loader, by MiMo's authors, the one before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from heads.formats.files import Checkpoint, fill, save_config, save_tensors
from heads.mtp import MTPConfig, MTPHead, State
from heads.submodel import layers_of


@dataclass(frozen=True)
class Family:
    """Names and settings of a family's MTP.

    prefix: what the names of one stage start with; {stage} is its number.
    names:  of enorm, hnorm, fc and the final norm, after the prefix.
    count:  the configuration's key for the number of stages.
    layer:  where, after the prefix, the decoder layer's own names follow.
    after_layers: stages are numbered on from the target's layers, not from 0.
    copies: where, after the prefix, copies of the target's embedding and output head may lie.
    centred: norms multiply by one more than their weight. Those of the target's own class do so themselves, but enorm
        and hnorm are nn.RMSNorm here, whatever the target.
    concat, hidden_contract, recycled, zero_first_embedding: as in MTPConfig.
    """

    prefix: str
    names: tuple[str, str, str, str]
    count: str
    layer: str = ""
    after_layers: bool = False
    copies: tuple[str, ...] = ()
    centred: bool = False
    concat: str = "embedding_first"
    hidden_contract: State = "post_norm"
    recycled: State = "post_norm"
    zero_first_embedding: bool = False

    def settings(self) -> dict[str, Any]:
        """What the family fixes of an MTPConfig."""
        names = ("concat", "hidden_contract", "recycled", "zero_first_embedding")
        return {name: getattr(self, name) for name in names}


DEEPSEEK = Family(
    prefix="model.layers.{stage}.",
    names=("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    count="num_nextn_predict_layers",
    after_layers=True,
    copies=("embed_tokens", "shared_head.head"),
)
QWEN = Family(
    prefix="mtp.",
    names=("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    count="mtp_num_hidden_layers",
    layer="layers.0.",
    centred=True,
)
MIMO = Family(
    prefix="model.mtp_layers.{stage}.",
    names=("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    count="num_nextn_predict_layers",
    concat="hidden_first",
    hidden_contract="pre_norm",
    zero_first_embedding=True,
)
FAMILIES = {
    "deepseek_v3": DEEPSEEK,
    "glm4_moe": DEEPSEEK,
    "qwen3_next": QWEN,
    "qwen3_5_text": QWEN,
    "qwen3_5_moe_text": QWEN,
    "mimo": MIMO,
    "qwen2": MIMO,
}


def family_of(model: PreTrainedModel) -> Family:
    """The family whose names MTP weights for the target bear. Raises ValueError for a target that none fits."""
    text = model.config.get_text_config(decoder=True)
    if text.model_type in FAMILIES:
        return FAMILIES[text.model_type]
    is_dense = all(parameter.dim() <= 2 for parameter in layers_of(model)[-1].parameters())
    if not hasattr(text, "rms_norm_eps") or not is_dense:
        raise ValueError(
            f"no family ships MTP weights for a target like {type(model).__name__}: use one of {', '.join(FAMILIES)}, "
            f"or one of dense layers with RMSNorm, as Llama's"
        )
    return DEEPSEEK


def read(folder: str | Path, model: PreTrainedModel) -> MTPHead:
    """The MTP head for the target `model` in `folder`, a checkpoint of the whole model or of MTP weights alone; of a
    whole one only these are read.

    Raises ValueError, naming keys, for tensors that are missing, left over (quantised weights have their scales), of
    another shape, or a copy of another embedding or output head than the target's.
    """
    folder, family = Path(folder), family_of(model)
    checkpoint = Checkpoint(folder)
    numbers = _stage_numbers(family, model, checkpoint)
    if not numbers:
        raise ValueError(f"{folder} holds no MTP weights for {type(model).__name__}: no key matches {family.prefix}*")
    V, D = model.get_output_embeddings().weight.shape
    config = MTPConfig(layers=max(numbers) + 1, hidden_size=D, vocab_size=V, **family.settings())
    head = MTPHead(config, model)
    prefixes = tuple(_prefix(family, model, i) for i in range(config.layers))
    found = {name for name in checkpoint if name.startswith(prefixes)}
    for name, of_target in _copies(family, model, config.layers).items():
        if name in found and not torch.equal(checkpoint[name].to(of_target), of_target):
            raise ValueError(
                f"{folder} has a {name} that is not the target's: give the target that it was trained with"
            )
        found.discard(name)
    fill(_named(family, head, model), checkpoint.only(found), folder)
    for stage in head.stages if family.centred else ():
        stage.enorm.weight.data += 1
        stage.hnorm.weight.data += 1
    return head.eval()


def write(head: MTPHead, model: PreTrainedModel, folder: Path, target: str) -> None:
    """Write the MTP weights to model.safetensors in `folder`, and to config.json the target's configuration with their
    number. They are served once both are in the target's own folder. target: the target's name, for errors.

    A head with a reduced vocabulary is written for the whole one: no family has another.
    Raises ValueError for a head that works otherwise than the family's.
    """
    family = family_of(model)
    for name, expected in family.settings().items():
        if name != "concat" and (found := getattr(head.config, name)) != expected:  # fc's columns can change places
            raise ValueError(
                f"MTP weights for {target} ({family.prefix}*) are served with {name} {expected!r}, but the head has "
                f"{found!r}: train one with {name} {expected!r}"
            )
    if head.config.layers > 1 and "{stage}" not in family.prefix:
        raise ValueError(f"MTP weights for {target} are one stage, not {head.config.layers}: train with one layer")
    named = _named(family, head, model)
    for i in range(head.config.layers):
        enorm, hnorm, fc, _ = _keys(family, model, i)
        if head.config.concat != family.concat:
            named[fc] = torch.cat(named[fc].chunk(2, dim=1)[::-1], dim=1)
        if family.centred:
            named |= {enorm: named[enorm] - 1, hnorm: named[hnorm] - 1}
    save_tensors(named | _copies(family, model, head.config.layers), folder / "model.safetensors")
    save_config(json.loads(model.config.to_json_string()) | {family.count: head.config.layers}, folder)


def _prefix(family: Family, model: PreTrainedModel, stage: int) -> str:
    return family.prefix.format(stage=stage + _first(family, model))


def _keys(family: Family, model: PreTrainedModel, stage: int) -> list[str]:
    """The whole names of a stage's enorm, hnorm, fc and final norm."""
    return [f"{_prefix(family, model, stage)}{name}.weight" for name in family.names]


def _first(family: Family, model: PreTrainedModel) -> int:
    """The number of the first stage."""
    return model.config.get_text_config(decoder=True).num_hidden_layers if family.after_layers else 0


def _stage_numbers(family: Family, model: PreTrainedModel, names: Checkpoint) -> set[int]:
    """Which stages, counted from 0, `names` has anything of."""
    pattern = re.compile(re.escape(family.prefix).replace(re.escape("{stage}"), r"(\d+)"))
    matches = [match for name in names if (match := pattern.match(name))]
    numbers = {int(match[1]) - _first(family, model) if pattern.groups else 0 for match in matches}
    return {number for number in numbers if number >= 0}


def _named(family: Family, head: MTPHead, model: PreTrainedModel) -> dict[str, Tensor]:
    """The head's own tensors, to be read or overwritten, under the family's names."""
    named = {}
    for i, stage in enumerate(head.stages):
        final = list(stage.final.parameters())
        if len(final) != 1:
            raise ValueError(f"{type(model).__name__} has {len(final)} parameters after its layers, not one norm")
        weights = (stage.enorm.weight, stage.hnorm.weight, stage.fc.weight, *final)
        named |= {key: weight.data for key, weight in zip(_keys(family, model, i), weights, strict=True)}
        prefix = f"{_prefix(family, model, i)}{family.layer}"
        named |= {f"{prefix}{name}": tensor for name, tensor in _layer_tensors(stage.layer)}
    return named


def _layer_tensors(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A decoder layer's tensors under the names of checkpoints, in which experts lie apart that transformers fuses."""
    for name, tensor in layer.state_dict().items():
        stem, _, last = name.rpartition(".")
        if tensor.dim() != 3:
            yield name, tensor
        elif last == "gate_up_proj":  # [E, 2F, D]
            for e, expert in enumerate(tensor):
                gate, up = expert.chunk(2)
                yield from ((f"{stem}.{e}.gate_proj.weight", gate), (f"{stem}.{e}.up_proj.weight", up))
        else:  # down_proj [E, D, F]
            yield from ((f"{stem}.{e}.{last}.weight", expert) for e, expert in enumerate(tensor))


def _copies(family: Family, model: PreTrainedModel, stages: int) -> dict[str, Tensor]:
    """The target's tensors that the family repeats in every stage."""
    tensors = (model.get_input_embeddings().weight.data, model.get_output_embeddings().weight.data)
    return {
        f"{_prefix(family, model, i)}{name}.weight": tensor
        for i in range(stages)
        for name, tensor in zip(family.copies, tensors, strict=False)
    }
