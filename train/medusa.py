"""Medusa heads, trained on the target's own responses (Cai et al. 2401.10774, Medusa-1: the target stays frozen)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.hf_argparser import HfArg

from drafters.medusa import MedusaDrafter
from drafters.trees import best_first
from heads.medusa import MedusaConfig, MedusaHeads
from specdec.models import LoadedModel
from train.batches import Batch
from train.chains import ChainRecipe, ChainSettings
from train.run import run
from train.settings import parse

TREE_NODES = 12  # of the tree that the last evaluation tries


@dataclass(frozen=True, kw_only=True)
class MedusaSettings(ChainSettings):
    """`specdec train medusa`."""

    heads: int = HfArg(default=4, help="how many tokens ahead, one head each")
    layers: int = HfArg(default=1, help="residual blocks per head")
    own_projection: bool = HfArg(default=False, help="an output projection per head; else all use the target's")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("heads", "layers"):
            self._check(name, getattr(self, name) >= 1, "at least 1")


class MedusaRecipe(ChainRecipe):
    """Head k reads the target's state alone, whatever is drafted before."""

    def __init__(self, settings: MedusaSettings, loaded: LoadedModel, draft_ids: Tensor | None):
        target = loaded.model
        config = MedusaConfig(
            heads=settings.heads,
            layers=settings.layers,
            hidden_size=target.config.get_text_config(decoder=True).hidden_size,
            vocab_size=target.get_output_embeddings().weight.shape[0],
            own_projection=settings.own_projection,
            draft_vocab_size=settings.draft_vocab_size,
        )
        heads = MedusaHeads(config, target, draft_ids).float()
        super().__init__(heads, target, heads.draft_ids, config.heads, settings)

    def states(self, batch: Batch) -> Sequence[Tensor]:
        return [batch.hidden] * self.depths

    def logits(self, depth: int, states: Tensor) -> Tensor:
        return self.module.head(depth - 1, states)

    def save(self, folder: Path, about: dict[str, Any]) -> None:
        self.module.save_pretrained(folder, about, self.save_dtype)


def drafters(folder: Path, loaded: LoadedModel) -> dict[str, tuple[MedusaDrafter, int]]:
    """What the run's last evaluation drafts with: the chain, and the tree of 12 nodes that its accuracies give."""
    heads = MedusaHeads.from_pretrained(folder, loaded.model)
    tree = best_first(heads.about["accuracies"], TREE_NODES)
    return {
        "medusa": (MedusaDrafter(heads), heads.config.heads),
        f"medusa:nodes={TREE_NODES}": (MedusaDrafter(heads, tree), TREE_NODES),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """`specdec train medusa`, and `accelerate launch -m train.medusa`."""
    settings = parse(MedusaSettings, sys.argv[1:] if argv is None else argv, "specdec train medusa")
    run(settings, "medusa", MedusaRecipe, drafters)


if __name__ == "__main__":
    main()
