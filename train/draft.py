"""A small draft model, distilled from the target on its own responses (DistillSpec, Zhou et al. 2310.08461).

It starts as some of the target's layers between the target's own embedding and output head, which stay as they are.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers.hf_argparser import HfArg

from drafters.draft_model import DraftModelDrafter, build
from heads.projection import Projection
from heads.submodel import submodel
from specdec.models import LoadedModel
from train.batches import Batch
from train.chains import ChainRecipe, ChainSettings
from train.run import run
from train.settings import parse

DRAFT_LENGTH = 3  # of the last evaluation


@dataclass(frozen=True, kw_only=True)
class DraftSettings(ChainSettings):
    """`specdec train draft`."""

    layers: list[int] = HfArg(default_factory=lambda: [0, -1], help="the target's layers to start from, in order")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("layers", len(self.layers) >= 1, "at least one")


class DraftRecipe(ChainRecipe):
    """One depth: the draft model's own next token, from the text alone."""

    first = 0

    def __init__(self, settings: DraftSettings, loaded: LoadedModel, draft_ids: Tensor | None):
        small = copy.deepcopy(submodel(loaded.model, settings.layers, share=True)).float()
        fixed = {small.get_input_embeddings(), small.get_output_embeddings()}
        for module in small.modules():
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(module not in fixed and not isinstance(module, nn.Embedding))
        if draft_ids is not None:
            draft_ids = draft_ids.to(small.device)
            small.config.draft_ids = draft_ids.tolist()
        super().__init__(small, loaded.model, draft_ids, 1, settings)
        self.project = Projection(small, draft_ids)
        self.tokenizer = loaded.tokenizer

    def states(self, batch: Batch) -> Sequence[Tensor]:
        decoder = self.module.get_decoder()
        return [decoder(input_ids=batch.tokens, use_cache=False).last_hidden_state]

    def logits(self, depth: int, states: Tensor) -> Tensor:
        return self.project(states)

    def save(self, folder: Path, about: dict[str, Any]) -> None:
        """A model as transformers keeps it, with its tokenizer; `draft_ids` in its configuration where reduced."""
        self.module.config.specdec = about
        copy.deepcopy(self.module).to(self.save_dtype).save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def drafters(folder: Path, loaded: LoadedModel) -> dict[str, tuple[DraftModelDrafter, int]]:
    """What the run's last evaluation drafts with."""
    return {"draft_model": (build(loaded, model=str(folder)), DRAFT_LENGTH)}


def main(argv: Sequence[str] | None = None) -> None:
    """`specdec train draft`, and `accelerate launch -m train.draft`."""
    settings = parse(DraftSettings, sys.argv[1:] if argv is None else argv, "specdec train draft")
    run(settings, "draft", DraftRecipe, drafters)


if __name__ == "__main__":
    main()
