"""A model made of some of another one's layers: the block of an MTP head, a draft model of the target's own kind."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder's list of layers. Raises NotImplementedError where no list has the configuration's length."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise NotImplementedError(f"{type(model).__name__} has no list of {count} decoder layers: use another model")


def submodel(model: PreTrainedModel, layers: Sequence[int], share: bool) -> PreTrainedModel:
    """A causal LM of `model`'s class that has only `layers` (indices, negative ones count from the end), in that order.

    share: True makes every parameter `model`'s own tensor. False shares only embeddings and the output head; the
    layers, the final norm and what else lies between are copies.
    Raises ValueError for an index that `model` does not have.
    """
    total = layers_of(model)
    for index in layers:
        if not -len(total) <= index < len(total):
            raise ValueError(f"layer {index} of a model with {len(total)}: give {-len(total)} to {len(total) - 1}")
    config = copy.deepcopy(model.config)
    text, small_text = (c.get_text_config(decoder=True) for c in (model.config, config))
    small_text.num_hidden_layers = len(layers)
    if getattr(text, "layer_types", None) is not None:
        small_text.layer_types = [text.layer_types[index] for index in layers]
    # What is in the memo is replaced, not copied: configurations by the smaller ones, shared parameters by themselves.
    memo = {id(model.config): config, id(text): small_text}
    for module in model.modules():
        if share or isinstance(module, nn.Embedding) or module is model.get_output_embeddings():
            memo |= {id(parameter): parameter for parameter in module.parameters(recurse=False)}
    memo[id(total)] = nn.ModuleList(copy.deepcopy(total[index], memo) for index in layers)
    small = copy.deepcopy(model, memo)
    for number, layer in enumerate(layers_of(small)):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):  # where the layer finds its cache
                module.layer_idx = number
    return small
