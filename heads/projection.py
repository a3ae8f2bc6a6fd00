"""The target's output head, usable on any state and over any part of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class Projection:
    """From a post-norm state to the target's logits, over all ids or over `ids` only.

    Not a module: the weight is the target's own, and neither trained nor saved with a head. Families that scale or cap
    their logits after the matrix product (Cohere, Granite, Gemma) get theirs.

    ids: [Vd] int64 target ids, or None for all.
    """

    def __init__(self, model: PreTrainedModel, ids: Tensor | None = None):
        head = model.get_output_embeddings()
        self.weight, self.bias = head.weight.detach(), getattr(head, "bias", None)
        if ids is not None:
            self.weight = self.weight[ids]
            self.bias = None if self.bias is None else self.bias[ids]
        config = model.config.get_text_config(decoder=True)
        self.scale = getattr(config, "logit_scale", None) or 1.0
        self.scale /= getattr(config, "logits_scaling", None) or 1.0
        self.cap = getattr(config, "final_logit_softcapping", None)

    def __call__(self, state: Tensor) -> Tensor:
        """[..., D] states, the target's last norm applied -> [..., Vd] logits."""
        logits = nn.functional.linear(state.to(self.weight.dtype), self.weight, self.bias) * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def checked_ids(config: Any, draft_ids: Tensor | None, device: torch.device) -> Tensor | None:
    """`draft_ids` on `device`. Raises ValueError unless they are as many, sorted, distinct ids as the config says."""
    expected, given = config.draft_vocab_size, None if draft_ids is None else len(draft_ids)
    if expected != given:
        raise ValueError(f"draft_vocab_size is {expected} but {given} draft ids were given: make them agree")
    if draft_ids is None:
        return None
    ids = draft_ids.to(device=device, dtype=torch.long)
    if not (ids.diff() > 0).all() or ids[0] < 0 or ids[-1] >= config.vocab_size:
        raise ValueError(f"draft ids must rise strictly within 0..{config.vocab_size - 1}: sort them and drop doubles")
    return ids


def head_rows(head: nn.Linear, ids: Tensor) -> nn.Linear:
    """An output head that has only the rows `ids` [Vd] of `head`, copied."""
    part = nn.Linear(head.in_features, len(ids), bias=head.bias is not None, device="meta")
    part.weight = nn.Parameter(head.weight.detach()[ids], requires_grad=False)
    if head.bias is not None:
        part.bias = nn.Parameter(head.bias.detach()[ids], requires_grad=False)
    return part
