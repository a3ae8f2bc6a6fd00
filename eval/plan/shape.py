"""What a forward of a model has to read and compute, from its configuration alone: no weights are loaded.

Counted are the matrices of the linear layers, the experts that a step's tokens wake, and attention over the cache.
Norms, activations and embeddings that are only looked up are left out: they are small beside these.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from specdec.disk import reading

EXPERTS = ".experts."  # in the name of every routed expert's weight, in all families of transformers
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
KINDS = (None, "full_attention", "sliding_attention")  # of layers; others cache and compute something else


@dataclass(frozen=True)
class AttentionLayers:
    """`count` layers alike.

    kv_elements: numbers cached per token and layer.   flops: per query token and token that it sees, and layer.
    window:      most tokens that a query sees; None = all.
    """

    count: int
    kv_elements: int
    flops: int
    window: int | None

    def seen(self, context: float) -> float:
        """Tokens of a context that a query attends to."""
        return context if self.window is None else min(context, self.window)


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only model as a step's cost sees it.

    matrices:       weights that every step reads: all linear layers but the routed experts, the output head included.
    expert_weights: of all routed experts of all layers; 0 for a dense model.
    experts, experts_per_token: per layer; 1 and 1 for a dense model.
    stored_weights: all that a device has to hold, looked-up tables included.
    vocab: V.   itemsize: bytes per weight and per cached number.

    Raises ValueError for a size that no model has.
    """

    name: str
    layers: int
    matrices: int
    expert_weights: int
    experts: int
    experts_per_token: int
    attention: tuple[AttentionLayers, ...]
    stored_weights: int
    vocab: int
    itemsize: int

    def __post_init__(self) -> None:
        sizes = (self.layers, self.matrices, self.experts_per_token, self.stored_weights, self.vocab, self.itemsize)
        if min(sizes) < 1 or self.expert_weights < 0 or self.experts < self.experts_per_token:
            raise ValueError(f"{self} is no model's shape: sizes are positive, and a token wakes some of the experts")

    @property
    def active_weights(self) -> float:
        """Weights that one token is multiplied with."""
        return self.matrices + self.expert_weights * self.experts_per_token / self.experts

    def weight_bytes(self, tokens: float) -> float:
        """Read by a step of `tokens` packed tokens, each of which wakes its experts independently and evenly."""
        awake = 1 - (1 - self.experts_per_token / self.experts) ** tokens
        return (self.matrices + self.expert_weights * awake) * self.itemsize

    def weight_flops(self, tokens: float) -> float:
        """A multiplication and an addition per token and active weight."""
        return 2 * tokens * self.active_weights

    def kv_bytes(self, context: float) -> float:
        """Cached keys and values that one row of `context` tokens reads in a step."""
        return sum(a.count * a.kv_elements * a.seen(context) for a in self.attention) * self.itemsize

    def attention_flops(self, context: float) -> float:
        """Of one query token over `context` tokens."""
        return sum(a.count * a.flops * a.seen(context) for a in self.attention)


def shape_of(model: PreTrainedModel, name: str) -> ModelShape:
    """The shape of a model, whether its weights are there or on the meta device.

    Raises ValueError for experts whose number the configuration does not give, and for layers of unknown cost."""
    config = model.config.get_text_config(decoder=True)
    experts = sum(w.numel() for key, w in model.named_parameters() if EXPERTS in key and w.dim() > 1)
    counts = [getattr(config, key) for key in EXPERT_COUNTS if getattr(config, key, None)]
    if experts and not (counts and getattr(config, "num_experts_per_tok", None)):
        raise ValueError("the configuration does not say how many experts there are and how many a token wakes")
    return ModelShape(
        name=name,
        layers=config.num_hidden_layers,
        matrices=_matrices(model) - experts,
        expert_weights=experts,
        experts=counts[0] if experts else 1,
        experts_per_token=config.num_experts_per_tok if experts else 1,
        attention=_attention(config),
        stored_weights=sum(w.numel() for w in model.parameters()),
        vocab=config.vocab_size,
        itemsize=model.dtype.itemsize,
    )


def planned_shape(spec: str, dtype: torch.dtype) -> ModelShape:
    """The shape of the model whose configuration `spec` names: a folder, a config.json or a Hub id.

    Raises ValueError, in one sentence, where there is no such configuration, it is not of a decoder-only model, or what
    its layers cost is not known."""
    with reading(f"model {spec!r} has no configuration that can be read"):
        config = AutoConfig.from_pretrained(spec)
    if config.is_encoder_decoder or type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"model {spec!r} ({config.model_type}) is not a decoder-only language model: give one that is")
    with reading(f"model {spec!r} cannot be planned for"):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        return shape_of(model, spec)


def _matrices(model: PreTrainedModel) -> int:
    """Numbers in all parameters of two dimensions or more, tied ones once, without tables that are only looked up."""
    head = model.get_output_embeddings()
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)} - {
        id(getattr(head, "weight", None))
    }
    return sum(w.numel() for w in model.parameters() if w.dim() > 1 and id(w) not in looked_up)


def _attention(config: PreTrainedConfig) -> tuple[AttentionLayers, ...]:
    """Layers of one kind together: a kind has its own window."""
    kv_elements, flops = _per_token(config)
    types = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if unknown := sorted(set(types) - set(KINDS)):
        raise ValueError(f"what layers of kind {', '.join(unknown)} cost is not known: plan for a model with attention")
    windows = [window if kind in (None, "sliding_attention") else None for kind in types]
    return tuple(
        AttentionLayers(len(list(alike)), kv_elements, flops, window)
        for window, alike in itertools.groupby(sorted(windows, key=lambda w: w or 0))
    )


def _per_token(config: PreTrainedConfig) -> tuple[int, int]:
    """Numbers cached per token and layer, and FLOPs per query and key: q k and the weighted sum of v, for each head."""
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):  # latent attention (DeepSeek-V2, 2405.04434) caches what keys and values
        # are made from, and queries attend to that, or all of the cache would be expanded in every step
        latent, rope = config.kv_lora_rank, config.qk_rope_head_dim
        return latent + rope, 2 * heads * (latent + rope + latent)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        kv_heads = 1  # GPTBigCode and Falcon, whose newer architecture repeats keys and values before it caches them
    return 2 * kv_heads * head_dim, 4 * heads * head_dim
