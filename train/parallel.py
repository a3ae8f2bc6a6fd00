"""One process or many: a run's accelerator, the module that DDP and FSDP wrap, and the whole weights afterwards."""

from __future__ import annotations

import os

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, set_seed
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from train.settings import TrainSettings


def make_accelerator(settings: TrainSettings) -> Accelerator:
    """The accelerator for `settings`, one process or as many as the launcher started; every random stream is seeded.

    Raises ValueError for kinds of FSDP that would not do what was asked for.
    """
    # Without `cpu`, processes on a machine without an accelerator would each train alone.
    cpu = settings.device == "cpu" or not torch.accelerator.is_available()
    accelerator = Accelerator(cpu=cpu, mixed_precision=settings.mixed_precision)
    sharded = accelerator.distributed_type == DistributedType.FSDP
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true" and not sharded:
        raise ValueError(
            "--use_fsdp shards on accelerators only, not on CPU: leave it out to train data-parallel (DDP)"
        )
    if sharded and not accelerator.is_fsdp2:
        raise ValueError(
            "FSDP version 1 would flatten weights that a head shares with its target: launch with --fsdp_version 2"
        )
    set_seed(settings.seed)
    return accelerator


def leave(accelerator: Accelerator) -> None:
    """Every process's last call of a run. gloo's threads hold a collective's tensors a moment longer than it takes, and
    a process that exits in that moment is aborted; while it waits for the others here, they let go."""
    accelerator.wait_for_everyone()
    accelerator.end_training()


class LossModule(nn.Module):
    """A recipe's loss as the forward of one module. DDP and FSDP act when the module that they wrap is called, while a
    recipe calls whatever methods of its own module it likes."""

    def __init__(self, recipe, accelerator: Accelerator):
        super().__init__()
        self.trained = recipe.module
        self._loss, self._autocast = recipe.loss, accelerator.autocast

    def forward(self, batch) -> tuple[Tensor, dict[str, Tensor]]:
        with self._autocast():  # accelerate does this by itself for all but FSDP 2
            return self._loss(batch)


def prepare_sharding(plugin: FullyShardedDataParallelPlugin, module: nn.Module) -> None:
    """Have FSDP leave alone what is not trained, most of which is the target's own, and change no type: LossModule does
    that, while accelerate's policy for mixed precision would round the loss and the counts of tokens as well."""
    frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
    plugin.ignored_modules = [nn.ParameterList(frozen)]
    plugin.mixed_precision_policy = MixedPrecisionPolicy()


def gather_weights(module: nn.Module) -> None:
    """Replace parameters that FSDP has sharded by whole ones on every process; those shared by modules stay shared."""
    whole: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                if parameter not in whole:
                    whole[parameter] = nn.Parameter(parameter.full_tensor(), parameter.requires_grad)
                owner.register_parameter(name, whole[parameter])
