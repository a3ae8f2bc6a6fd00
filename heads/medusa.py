"""Medusa heads (Cai et al. 2401.10774): further output heads that each predict one token more ahead."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from heads.projection import Projection
from heads.saved import SavedHead


@dataclass(frozen=True)
class MedusaConfig:
    """heads: how many tokens ahead.   layers: residual blocks per head.
    own_projection: each head has an output projection of its own, started from the target's; else all use the target's.
    draft_vocab_size: number of ids that the heads can propose, None = all.
    """

    heads: int
    layers: int
    hidden_size: int
    vocab_size: int
    own_projection: bool = False
    draft_vocab_size: int | None = None
    hidden_contract: str = "post_norm"

    def __post_init__(self):
        for name in ("heads", "layers", "hidden_size", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"medusa heads need {name} of at least 1, not {getattr(self, name)}")
        if self.hidden_contract != "post_norm":
            raise ValueError(f"medusa heads read the post_norm state, not {self.hidden_contract!r}")


class MedusaHeads(SavedHead):
    """K heads on the target's final (post-norm) state h_t. Head i, counted from 0, predicts token t + 2 + i; token
    t + 1 is the target's own to give.

    Each is `layers` residual blocks x + SiLU(W x + b), which start at zero and so as the identity, then a projection.

    model:     the target, for its output head. draft_ids: [Vd] int64 sorted target ids, for a reduced vocabulary.
    """

    kind, config_class = "medusa", MedusaConfig

    def __init__(self, config: MedusaConfig, model: PreTrainedModel, draft_ids: Tensor | None = None):
        super().__init__(config, model, draft_ids)
        weight = model.get_output_embeddings().weight
        D, at = config.hidden_size, {"device": weight.device, "dtype": weight.dtype}
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(D, D, **at) for _ in range(config.layers)) for _ in range(config.heads)
        )
        for parameter in self.blocks.parameters():
            nn.init.zeros_(parameter)
        shared = Projection(model, self.draft_ids)
        self.projections = nn.ModuleList()
        if config.own_projection:
            self.projections.extend(nn.Linear(D, len(shared.weight), bias=False, **at) for _ in range(config.heads))
            for projection in self.projections:
                projection.weight.data.copy_(shared.weight)
        self._shared = shared

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., D] states -> [K, ..., Vd] logits over `draft_ids`."""
        return torch.stack([self.head(i, hidden) for i in range(self.config.heads)])

    def head(self, i: int, hidden: Tensor) -> Tensor:
        """[..., D] states -> [..., Vd] logits of head `i`, counted from 0."""
        for block in self.blocks[i]:
            hidden = hidden + nn.functional.silu(block(hidden))
        return self.projections[i](hidden) if self.config.own_projection else self._shared(hidden)
