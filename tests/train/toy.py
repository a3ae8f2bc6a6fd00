"""A recipe of 200 parameters on random states, to test the training loop with; as a command, one run of it.

python -m tests.train.toy --target toy --prompts toy --out DIR ...
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.hf_argparser import HfArg

from train.batches import Batch
from train.loop import Data, Outcome, train
from train.parallel import leave, make_accelerator
from train.settings import TrainSettings, claim, parse

V, D, T, K = 11, 8, 6, 2
EXAMPLES = 48


@dataclass(frozen=True, kw_only=True)
class ToySettings(TrainSettings):
    dropout: float = HfArg(default=0.0, help="of the state, so that a run depends on the random stream")
    pause: float = HfArg(default=0.0, help="seconds that a batch takes to come")
    fsdp: bool = HfArg(default=False, help="shard, although accelerate does not on CPU")


class ToyModule(nn.Module):
    """As in a head: a trained part, and the target's own output head, frozen and held elsewhere too."""

    def __init__(self, target: nn.Linear, dropout: float):
        super().__init__()
        self.mix, self.dropout, self.head = nn.Linear(D, K * D), nn.Dropout(dropout), target.requires_grad_(False)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., K, V]"""
        return self.head(self.dropout(self.mix(hidden)).unflatten(-1, (K, D)))


class ToyRecipe:
    """Depth k predicts, from the state at t, token t + k by cross-entropy."""

    def __init__(self, dropout: float = 0.0):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.target = nn.Linear(D, V)
            self.module = ToyModule(self.target, dropout)

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        losses, tokens, top1 = [], [], []
        for depth in range(1, K + 1):
            mask, wanted = batch.loss_mask[:, depth:], batch.tokens[:, depth:]
            logits = self.module.logits(batch.hidden[:, :-depth])[mask][:, depth - 1]
            losses.append(nn.functional.cross_entropy(logits, wanted[mask], reduction="sum"))
            tokens.append(mask.sum(dtype=torch.float32))
            top1.append((logits.argmax(-1) == wanted[mask]).sum(dtype=torch.float32))
        return torch.stack(losses).sum(), {"tokens": torch.stack(tokens), "top1": torch.stack(top1)}

    def save(self, folder: Path, about: dict[str, Any]) -> None:
        folder.mkdir(exist_ok=True)
        trained = {name: p.detach().contiguous() for name, p in self.module.named_parameters() if p.requires_grad}
        save_file(trained, folder / "model.safetensors")


class ToyBatches:
    """EXAMPLES texts in the same order in every epoch, so that neighbouring batches are one larger batch; lengths of
    responses differ. calls: functions to call when the batch of a step is asked for."""

    def __init__(self, batch_size: int, rank: int = 0, world: int = 1, seed: int = 1, pause: float = 0.0):
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(V, (EXAMPLES, T), generator=generator)
        starts = torch.randint(1, T - 1, (EXAMPLES, 1), generator=generator)
        self.mask = torch.arange(T) >= starts
        self.size, self.rank, self.world, self.pause = batch_size, rank, world, pause
        self.per_epoch = EXAMPLES // (batch_size * world)
        self.calls: dict[int, Any] = {}

    def batch_at(self, step: int) -> Batch:
        time.sleep(self.pause)
        self.calls.get(step, lambda: None)()
        start = step % self.per_epoch * self.size * self.world
        rows = range(start + self.rank, start + self.size * self.world, self.world)
        return Batch(self.tokens[list(rows)], self.mask[list(rows)], rows=rows)


class ToyStates:
    """A state per token id, the same one wherever it stands. `spoilt`: number of the call whose states are NaN."""

    def __init__(self, spoilt: int | None = None):
        self.table = torch.randn(V, D, generator=torch.Generator().manual_seed(2))
        self.spoilt, self.calls = spoilt, 0

    def of(self, batch: Batch) -> Tensor:
        self.calls += 1
        return self.table[batch.tokens] * (float("nan") if self.calls == self.spoilt else 1)


def toy_data(settings: ToySettings, rank: int = 0, world: int = 1, seed: int = 1) -> Data:
    return Data(ToyBatches(settings.batch_size, rank, world, seed, settings.pause), ToyStates())


def shard_on_cpu(accelerator: Accelerator) -> None:
    """Have accelerate take its FSDP path over gloo, which by itself it does on accelerators only."""
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    if accelerator.mixed_precision != "no":
        accelerator.state.fsdp_plugin.set_mixed_precision(accelerator.mixed_precision)


def check_sharded(module: ToyModule) -> None:
    """What is trained is in shards, and what is the target's is not."""
    assert isinstance(module.mix.weight, DTensor) and not isinstance(module.head.weight, DTensor)


def run(argv: Sequence[str]) -> Outcome:
    """One run, as a recipe's main does it; the trained weights go to OUT/head."""
    torch.set_num_threads(1)
    settings = parse(ToySettings, argv, "toy")
    claim(settings)
    accelerator = make_accelerator(settings)
    place = (accelerator.process_index, accelerator.num_processes)
    recipe, data = ToyRecipe(settings.dropout), toy_data(settings, *place)
    if settings.fsdp:
        shard_on_cpu(accelerator)
        data.batches.calls[0] = lambda: check_sharded(recipe.module)
    if "TOY_FAILS_AT" in os.environ:
        data.batches.calls[int(os.environ["TOY_FAILS_AT"])] = lambda: sys.exit(3)
    held_out = toy_data(settings, *place, seed=3) if settings.held_out else None
    outcome = train(recipe, data, held_out, settings, accelerator)
    if accelerator.is_main_process and not outcome.interrupted:
        recipe.save(Path(settings.out) / "head", {})
    leave(accelerator)
    return outcome


if __name__ == "__main__":
    run(sys.argv[1:])
