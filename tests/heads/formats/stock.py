"""Checkpoints as model families publish them, tiny and random, and what their MTP computes, written from the papers and
from how serving engines run them: only a family's decoder layer is transformers' own class."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer

from tests.tiny_models import tiny

D, V = 32, 97
LAST = 1  # index of the tiny targets' last layer


@dataclass(frozen=True)
class Stock:
    """One family. enorm, hnorm, fc, final: the whole names of a stage's own weights; layer: what its decoder layer's
    names start with. centred: norms multiply by 1 + weight."""

    target: Callable[[], transformers.PreTrainedModel]
    layer_class: type[nn.Module]
    enorm: str
    hnorm: str
    fc: str
    final: str
    layer: str
    copies: tuple[str, ...] = ()
    embedding_first: bool = True
    zero_first: bool = False
    centred: bool = False
    state: str = "post_norm"


def _qwen3(class_name: str, **more) -> transformers.PreTrainedModel:
    """A Qwen3-Next or Qwen3.5 target of one recurrent and one attention layer."""
    config = getattr(transformers, class_name)(
        vocab_size=V, hidden_size=D, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        pad_token_id=0, bos_token_id=None, eos_token_id=None, **more,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float64, experts_implementation="eager"
        ).eval()


def _deepseek_names(stage: int) -> dict:
    at = f"model.layers.{LAST + 1 + stage}."
    return {
        "enorm": f"{at}enorm.weight",
        "hnorm": f"{at}hnorm.weight",
        "fc": f"{at}eh_proj.weight",
        "final": f"{at}shared_head.norm.weight",
        "layer": at,
        "copies": (f"{at}embed_tokens.weight", f"{at}shared_head.head.weight"),
    }


_QWEN = {
    "enorm": "mtp.pre_fc_norm_embedding.weight",
    "hnorm": "mtp.pre_fc_norm_hidden.weight",
    "fc": "mtp.fc.weight",
    "final": "mtp.norm.weight",
    "layer": "mtp.layers.0.",
    "centred": True,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
STOCK = {
    "deepseek_v3": Stock(lambda: tiny("deepseek_v3"), DeepseekV3DecoderLayer, **_deepseek_names(0)),
    "glm4_moe": Stock(lambda: tiny("glm4_moe"), Glm4MoeDecoderLayer, **_deepseek_names(0)),
    "qwen3_next": Stock(lambda: _qwen3("Qwen3NextConfig", **_EXPERTS), Qwen3NextDecoderLayer, **_QWEN),
    "qwen3_5": Stock(lambda: _qwen3("Qwen3_5TextConfig"), Qwen3_5DecoderLayer, **_QWEN),
    "mimo": Stock(
        lambda: tiny("qwen2"),
        Qwen2DecoderLayer,
        enorm="model.mtp_layers.0.token_layernorm.weight",
        hnorm="model.mtp_layers.0.hidden_layernorm.weight",
        fc="model.mtp_layers.0.input_proj.weight",
        final="model.mtp_layers.0.final_layernorm.weight",
        layer="model.mtp_layers.0.",
        embedding_first=False,
        zero_first=True,
        state="pre_norm",
    ),
    "llama": Stock(
        lambda: tiny("llama"), LlamaDecoderLayer, **_deepseek_names(0)
    ),  # DeepSeek-V3's names, nobody's file
}
SECOND_STAGE = Stock(lambda: tiny("deepseek_v3"), DeepseekV3DecoderLayer, **_deepseek_names(1))


def new_layer(stock: Stock, model: transformers.PreTrainedModel) -> nn.Module:
    return stock.layer_class(model.config, LAST).to(torch.float64).eval()


def mtp_tensors(stock: Stock, model: transformers.PreTrainedModel, seed: int = 0) -> dict[str, Tensor]:
    """Random MTP weights of one stage under the family's names, experts apart."""
    generator = torch.Generator().manual_seed(seed)

    def random(shape: torch.Size, is_norm: bool) -> Tensor:
        noise = 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)
        return noise + 1 if is_norm and not stock.centred else noise

    tensors = {name: random(torch.Size([D]), True) for name in (stock.enorm, stock.hnorm, stock.final)}
    tensors[stock.fc] = random(torch.Size([D, 2 * D]), False)
    for name, tensor in new_layer(stock, model).state_dict().items():
        value = random(tensor.shape, name.endswith("norm.weight"))
        if name == "mlp.experts.gate_up_proj":
            half = value.shape[1] // 2
            for e in range(len(value)):
                tensors[f"{stock.layer}mlp.experts.{e}.gate_proj.weight"] = value[e, :half]
                tensors[f"{stock.layer}mlp.experts.{e}.up_proj.weight"] = value[e, half:]
        elif name == "mlp.experts.down_proj":
            for e in range(len(value)):
                tensors[f"{stock.layer}mlp.experts.{e}.down_proj.weight"] = value[e]
        else:
            tensors[stock.layer + name] = value
    return tensors


def load_layer(stock: Stock, model: transformers.PreTrainedModel, tensors: dict[str, Tensor]) -> nn.Module:
    """The family's decoder layer with the weights of `tensors`."""
    layer = new_layer(stock, model)
    state = {}
    for name in layer.state_dict():
        experts = [f"{stock.layer}mlp.experts.{e}." for e in range(4)]
        if name == "mlp.experts.gate_up_proj":
            pairs = [[tensors[f"{e}gate_proj.weight"], tensors[f"{e}up_proj.weight"]] for e in experts]
            state[name] = torch.stack([torch.cat(pair) for pair in pairs])
        elif name == "mlp.experts.down_proj":
            state[name] = torch.stack([tensors[f"{e}down_proj.weight"] for e in experts])
        else:
            state[name] = tensors[stock.layer + name]
    layer.load_state_dict(state)
    return layer


class Reference:
    """What one stage computes, in plain torch. broken: a mistake that a loader could make.

    swapped: the halves of fc's input.   no_enorm, no_hnorm: one of its norms left out.   no_final: the state that is
    recycled and projected before the last norm.   no_centre: norm weights of a centred family taken as they are (or the
    reverse).   other_zero: position 0's embedding zeroed where it is not, or the reverse.   gate_up: experts' halves.
    """

    def __init__(self, stock: Stock, model: transformers.PreTrainedModel, tensors: dict[str, Tensor], broken: str = ""):
        self.stock, self.model, self.tensors, self.broken = stock, model, dict(tensors), broken
        if broken == "gate_up":
            for name in [name for name in tensors if ".experts." in name and "gate_proj" in name]:
                up = name.replace("gate_proj", "up_proj")
                self.tensors[name], self.tensors[up] = tensors[up], tensors[name]
        self.layer = load_layer(stock, model, self.tensors)

    def norm(self, state: Tensor, name: str, left_out: str) -> Tensor:
        if self.broken == left_out:
            return state
        weight = self.tensors[name] + (1 if self.stock.centred != (self.broken == "no_centre") else 0)
        rms = (state.square().mean(-1, keepdim=True) + self.model.config.rms_norm_eps).sqrt()
        return state / rms * weight

    def entry(self, token: int, state: Tensor, slot: int) -> Tensor:
        """[D] what slot `slot` puts into the decoder layer."""
        embedding = self.model.get_input_embeddings().weight[token]
        if slot == 0 and self.stock.zero_first != (self.broken == "other_zero"):
            embedding = torch.zeros_like(embedding)
        halves = [
            self.norm(embedding, self.stock.enorm, "no_enorm"),
            self.norm(state, self.stock.hnorm, "no_hnorm"),
        ]
        if self.stock.embedding_first == (self.broken == "swapped"):
            halves.reverse()
        return self.tensors[self.stock.fc] @ torch.cat(halves)

    def run(self, entries: list[Tensor]) -> Tensor:
        """[n, D] states, after the last norm, of n slots that attend causally to each other."""
        z, n = torch.stack(entries)[None], len(entries)
        positions = torch.arange(n)[None]
        mask = torch.full((n, n), -torch.inf, dtype=z.dtype).triu(1)[None, None]
        rotary = self.model.get_decoder().rotary_emb(z, positions)
        out = self.layer(z, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        return self.norm((out[0] if isinstance(out, tuple) else out)[0], self.stock.final, "no_final")

    def project(self, states: Tensor) -> Tensor:
        return states @ self.model.get_output_embeddings().weight.T


def write_sharded(folder: Path, shards: list[dict[str, Tensor]]) -> None:
    """A checkpoint of several files with its index."""
    folder.mkdir(exist_ok=True)
    where = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file({name: tensor.detach().contiguous().clone() for name, tensor in shard.items()}, folder / file)
        where |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
