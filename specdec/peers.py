"""Several processes that share one sharded model (FSDP, ZeRO-3): each forward is all processes' together.

A process that is done runs on with a token that nobody needs until the last one is done, as `generate` does with
`synced_gpus`.
"""

from __future__ import annotations

import logging

import numpy as np
import torch
import torch.distributed
from torch import Tensor
from transformers import PreTrainedModel
from transformers.distributed.fsdp import is_fsdp_managed_module
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.utils import ModelOutput

from specdec.cache import SlotCache
from specdec.capture import HiddenContract
from specdec.contracts import Draft
from specdec.step import Segment, Step
from specdec.target import Target

logger = logging.getLogger("specdec")


def are_needed(model: PreTrainedModel) -> bool:
    """Whether `generate` would set `synced_gpus` itself."""
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    several = several and torch.distributed.get_world_size() > 1
    return several and (is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model))


class PeerTarget(Target):
    """A target that runs every forward together with its peers, one reduction before each."""

    def forward(
        self, step: Step, cache: SlotCache, hidden: HiddenContract | None = None, embeds: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        self._any_at_work(True)
        return super().forward(step, cache, hidden, embeds)

    def compile(self, on: bool = True) -> None:
        if on:
            logger.warning("%s runs eagerly: its weights are spread over peers", type(self.model).__name__)

    def run_model(self, **inputs: object) -> ModelOutput:
        self._any_at_work(True)
        return super().run_model(**inputs)

    def wait(self) -> None:
        """Run along until the peers are done."""
        while self._any_at_work(False):
            cache = self.new_cache()
            cache.admit([0])
            step = self.pack([Segment(0, np.zeros(1, dtype=np.int64), 0, scored=True)], Draft.empty(1), cache)
            super().forward(step, cache)

    def _any_at_work(self, me: bool) -> bool:
        at_work = torch.tensor(float(me), device=self.device)
        torch.distributed.all_reduce(at_work)
        return at_work.item() > 0
