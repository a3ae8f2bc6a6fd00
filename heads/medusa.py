"""Medusa heads (Cai et al. 2401.10774): further output heads that each predict one token more ahead."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from heads.projection import Projection, checked_ids
from heads.saved import check_fits, load_own, read, saved_tensors, write


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


class MedusaHeads(nn.Module):
    """K heads on the target's final (post-norm) state h_t. Head i, counted from 0, predicts token t + 2 + i; token
    t + 1 is the target's own to give.

    Each is `layers` residual blocks x + SiLU(W x + b), which start at zero and so as the identity, then a projection.

    model:     the target, for its output head. draft_ids: [Vd] int64 sorted target ids, for a reduced vocabulary.
    """

    def __init__(self, config: MedusaConfig, model: PreTrainedModel, draft_ids: Tensor | None = None):
        super().__init__()
        self.config, self.about = config, {}
        weight = model.get_output_embeddings().weight
        self.register_buffer("draft_ids", checked_ids(config, draft_ids, weight.device), persistent=False)
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

    def save_pretrained(
        self, folder: str | Path, about: dict[str, Any] | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Write config.json and model.safetensors, atomically. about: what a reader wants to know (target, recipe)."""
        tensors = saved_tensors(self, dtype)
        write(folder, "medusa", asdict(self.config), tensors, self.about if about is None else about)

    @classmethod
    def from_pretrained(cls, folder: str | Path, model: PreTrainedModel) -> MedusaHeads:
        """The heads in `folder` on the target's device, in its dtype. Raises ValueError where they do not fit it."""
        saved, tensors = read(folder, "medusa")
        about = saved.pop("about")
        config = MedusaConfig(**saved)
        check_fits(config, about, model, folder)
        heads = cls(config, model, tensors.pop("draft_ids", None))
        load_own(heads, tensors, folder)
        heads.about = about
        return heads.eval()
