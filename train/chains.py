"""What all recipes have in common: chains of predicted tokens, their losses and how often they are right.

Counted are chains that draft response tokens only. With `first` = 1 (heads), the chain of slot t predicts token
t + 1 + k at depth k = 1..K from the target's state h_t, where token t + 1 is the target's own; with `first` = 0 (a
draft model) token t + k. The target's distribution for token i is that of its state h_{i-1}.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.hf_argparser import HfArg

from heads.projection import Projection
from train.batches import Batch
from train.losses import LossName, TargetLaw, acceptance, depth_weights, token_losses
from train.settings import TrainSettings

RANKS = 10  # candidates per depth whose accuracies are recorded, for trees


@dataclass(frozen=True, kw_only=True)
class ChainSettings(TrainSettings):
    """What recipes of chains add to every run's settings."""

    draft_vocab_size: int | None = HfArg(
        default=None, help="propose only the most frequent tokens of the training responses, this many; default: all"
    )
    save_dtype: Literal["bfloat16", "float32"] = HfArg(default="bfloat16", help="type of the weights that are saved")
    acceptance_prompts: int = HfArg(default=16, help="held-out prompts that the finished head is tried out on")
    acceptance_tokens: int = HfArg(default=64, help="new tokens for each of them")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("acceptance_prompts", self.acceptance_prompts >= 1, "at least 1")
        self._check("acceptance_tokens", self.acceptance_tokens >= 3, "at least 3: room for a draft")
        self._check("draft_vocab_size", self.draft_vocab_size is None or self.draft_vocab_size >= 1, "at least 1")
        self._check("held_out", self.held_out > 0, "more than 0: every run ends with an evaluation on held-out prompts")


class ChainRecipe(ABC):
    """A recipe for `train.loop.train`. depths: K."""

    first = 1

    def __init__(
        self,
        module: nn.Module,
        target: PreTrainedModel,
        draft_ids: Tensor | None,
        depths: int,
        settings: ChainSettings,
    ):
        self.module, self.draft_ids, self.depths = module, draft_ids, depths
        self.target_logits = Projection(target)
        self.loss_name: LossName = settings.loss
        self.weights = depth_weights(settings.depth_decay, depths).tolist()
        self.save_dtype: torch.dtype = getattr(torch, settings.save_dtype)

    @abstractmethod
    def states(self, batch: Batch) -> Sequence[Tensor]:
        """Per depth [B, T, D]: what `logits` reads at each chain's slot."""

    @abstractmethod
    def logits(self, depth: int, states: Tensor) -> Tensor:
        """[n, Vd] logits at `depth`, counted from 1, of the states [n, D]."""

    @abstractmethod
    def save(self, folder: Path, about: dict[str, Any]) -> None: ...

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted sum of the depths' losses, and sums [K]: tokens, top1 (the arg-max is the text's token), reached
        and right (see `train.replay.Accuracy`); without gradients also top5 and alpha."""
        law, row_BT = self._target_law(batch)
        alive = torch.ones_like(batch.loss_mask)
        total, sums, reporting = 0.0, [], not torch.is_grad_enabled()
        for depth, states in enumerate(self.states(batch), start=1):
            counted = self.counted(batch, depth)
            labels = ahead(batch.tokens, self.first + depth)[counted]
            p = law[ahead(row_BT, self.first + depth - 1)[counted]]
            q = self.logits(depth, states[counted])
            losses = token_losses(self.loss_name, q, p, labels, self.draft_ids)
            total = total + self.weights[depth - 1] * losses.sum()
            with torch.no_grad():
                hit = self.candidates(q, 1)[:, 0] == labels
                reached = alive & counted
                alive = alive.index_put((counted,), alive[counted] & hit)
                found = {"tokens": counted, "top1": hit, "reached": reached, "right": reached & alive}
                if reporting:
                    found["alpha"] = acceptance(q, p)
                    found["top5"] = (self.candidates(q, 5) == labels[:, None]).any(1)
                sums.append({name: value.sum(dtype=torch.float32) for name, value in found.items()})
        return total, {name: torch.stack([of_depth[name] for of_depth in sums]) for name in sums[0]}

    @torch.no_grad()
    def rank_counts(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """How often the text's token is each of the RANKS most probable candidates [K, RANKS], and of how many chains
        [K], among those that are right at all earlier depths."""
        alive = torch.ones_like(batch.loss_mask)
        ranks, reached = [], []
        for depth, states in enumerate(self.states(batch), start=1):
            at = alive & self.counted(batch, depth)
            hits = (
                self.candidates(self.logits(depth, states[at]), RANKS)
                == ahead(batch.tokens, self.first + depth)[at][:, None]
            )
            ranks.append(hits.sum(0))
            reached.append(at.sum())
            alive = alive.index_put((at,), hits[:, 0])
        return torch.stack(ranks), torch.stack(reached)

    def counted(self, batch: Batch, depth: int) -> Tensor:
        """[B, T] chains whose first token and whose token at `depth` are of the response."""
        return ahead(batch.loss_mask, self.first + 1) & ahead(batch.loss_mask, self.first + depth)

    def candidates(self, logits: Tensor, count: int) -> Tensor:
        """[n, count] target ids of the most probable tokens, best first."""
        columns = logits.argmax(-1, keepdim=True) if count == 1 else logits.topk(min(count, logits.shape[-1])).indices
        return columns if self.draft_ids is None else self.draft_ids[columns]

    @torch.no_grad()
    def _target_law(self, batch: Batch) -> tuple[TargetLaw, Tensor]:
        """p at each of the m slots before a response token, and [B, T] which of them each slot is."""
        asked = ahead(batch.loss_mask, 1)
        row_BT = torch.zeros_like(batch.tokens).masked_scatter_(
            asked, torch.arange(batch.tokens.numel(), device=asked.device)
        )
        return TargetLaw.of(self.target_logits(batch.hidden[asked]), self.draft_ids, self.loss_name), row_BT


def ahead(values_BT: Tensor, n: int) -> Tensor:
    """[B, T] what stands n places further on; 0 where the text has ended."""
    return nn.functional.pad(values_BT, (0, n))[:, n:]


def head_accuracies(recipe: ChainRecipe, batches: Sequence[Batch]) -> list[list[float]]:
    """[K][RANKS] for `drafters.trees`: of the chains that reach a depth, the share whose token is at each rank."""
    ranks = reached = 0
    for batch in batches:
        more_ranks, more_reached = recipe.rank_counts(batch)
        ranks, reached = ranks + more_ranks, reached + more_reached
    return (ranks / reached.clamp(min=1)[:, None]).tolist()
