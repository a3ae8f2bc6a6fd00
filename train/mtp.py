"""A multi-token-prediction head, trained on the target's own responses (FastMTP 2509.18362; DeepSeek-V3 2412.19437).

The unrolled chains read the text's own tokens and the head's own states, with the attention that drafting has.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.hf_argparser import HfArg

from drafters.mtp import MTPDrafter
from heads.mtp import MTPConfig, MTPHead
from specdec.models import LoadedModel
from train.batches import Batch
from train.chains import ChainRecipe, ChainSettings
from train.run import run
from train.settings import parse


@dataclass(frozen=True, kw_only=True)
class MTPSettings(ChainSettings):
    """`specdec train mtp`."""

    depths: int = HfArg(default=3, help="tokens ahead that are trained, with a loss each")
    layers: int = HfArg(
        default=1, help="1: one layer, applied again for each depth; else one per depth, as many as depths"
    )
    depth_decay: float = HfArg(default=0.6, help="weight of each further depth's loss, relative to the one before")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("depths", self.depths >= 1, "at least 1")
        self._check("layers", self.layers in (1, self.depths), f"1, or {self.depths} for a layer per depth")


class MTPRecipe(ChainRecipe):
    """All chains of a text at once, see `MTPHead.forward`."""

    def __init__(self, settings: MTPSettings, loaded: LoadedModel, draft_ids: Tensor | None):
        target = loaded.model
        config = MTPConfig(
            layers=settings.layers,
            hidden_size=target.config.get_text_config(decoder=True).hidden_size,
            vocab_size=target.get_output_embeddings().weight.shape[0],
            draft_vocab_size=settings.draft_vocab_size,
        )
        head = MTPHead(config, target, draft_ids).float()
        super().__init__(head, target, head.draft_ids, settings.depths, settings)

    def states(self, batch: Batch) -> Sequence[Tensor]:
        return self.module(batch.tokens, batch.hidden, self.depths)

    def logits(self, depth: int, states: Tensor) -> Tensor:
        return self.module.project(states)

    def save(self, folder: Path, about: dict[str, Any]) -> None:
        self.module.save_pretrained(folder, about, self.save_dtype)


def drafters(folder: Path, loaded: LoadedModel) -> dict[str, tuple[MTPDrafter, int]]:
    """What the run's last evaluation drafts with: chains as deep as was trained, and a tree of twice as many tokens."""
    head = MTPHead.from_pretrained(folder, loaded.model)
    depths = head.about["depths"]
    found = {"mtp": (MTPDrafter(head), depths)}
    if head.config.layers == 1 and head.config.draft_vocab_size != 1:
        found["mtp:top_k=2"] = (MTPDrafter(head, top_k=2), 2 * depths)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """`specdec train mtp`, and `accelerate launch -m train.mtp`."""
    settings = parse(MTPSettings, sys.argv[1:] if argv is None else argv, "specdec train mtp")
    run(settings, "mtp", MTPRecipe, drafters)


if __name__ == "__main__":
    main()
