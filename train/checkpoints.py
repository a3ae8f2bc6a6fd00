"""Checkpoints of a training run: one file each, complete or not there at all.

A checkpoint holds everything that the rest of the run depends on, so that a resumed run computes the same bits as an
uninterrupted one; the data's order needs no saving, since it is a function of the step. The file is the same for one
process, for DDP and for FSDP: full tensors under the module's own parameter names, frozen ones left out.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

KEPT = 2  # the last ones, beside the best
CONTENT = ("weights", "optimizer", "schedule", "best_step", "best_loss", "random")  # of a file
SAVED = StateDictOptions(full_state_dict=True, cpu_offload=True)
LOADED = StateDictOptions(full_state_dict=True, strict=False)  # not strict: the frozen parameters are not in the file


@dataclass
class TrainState:
    """All that changes in training.

    step:      updates done.
    best_step: step of the lowest held-out loss so far, None before the first evaluation; best_loss: that loss.
    """

    model: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler
    step: int = 0
    best_step: int | None = None
    best_loss: float = math.inf


class Checkpoints:
    """The folder of one run's checkpoints, `step-00000200.pt` and so on. Every process calls each method."""

    def __init__(self, folder: Path, accelerator: Accelerator):
        self.folder, self.accelerator = folder, accelerator

    def save(self, state: TrainState) -> None:
        """Write the state, then remove all but the last two checkpoints and the best one.

        Raises OSError, in one sentence, where the file cannot be written; the earlier ones are then as they were."""
        content = self._content(state)
        if self.accelerator.is_main_process:
            path = self._path(state.step)
            try:
                _write(content, path)
            except (OSError, RuntimeError) as error:  # torch reports a failed write as either
                raise OSError(
                    f"could not write checkpoint {path} ({_line(error)}): make room and go on with --resume "
                    f"{_from(self._steps())}"
                ) from error
            for step in self._steps()[:-KEPT]:
                if step != state.best_step:
                    self._path(step).unlink()
        self.accelerator.wait_for_everyone()

    def resume(self, state: TrainState) -> None:
        """Set `state` to the last checkpoint; leave it as it is where there is none yet.

        Raises ValueError, in one sentence, for a damaged file: which other to go back to is the user's choice."""
        if not self._steps():
            return
        *earlier, last = self._steps()
        content = self._read(last, earlier)
        if content["weights"].keys() != self._trained(state):
            raise ValueError(
                f"{self._path(last)} holds other weights than are trained: resume with the version that began it"
            )
        set_state_dict(
            state.model,
            state.optimizer,
            model_state_dict=content["weights"],
            optim_state_dict=content["optimizer"],
            options=LOADED,
        )
        state.schedule.load_state_dict(content["schedule"])
        state.step, state.best_step, state.best_loss = last, content["best_step"], content["best_loss"]
        self._set_random(content["random"])

    def load_best(self, state: TrainState) -> None:
        """Give the model the weights of the best checkpoint."""
        content = self._read(state.best_step, ())
        set_model_state_dict(state.model, content["weights"], options=LOADED)

    def last(self) -> Path | None:
        """The newest checkpoint, None before the first."""
        return self._path(self._steps()[-1]) if self._steps() else None

    def _content(self, state: TrainState) -> dict:
        weights, optimizer = get_state_dict(state.model, state.optimizer, options=SAVED)
        trained = self._trained(state)
        random = [torch.get_rng_state()]
        if self.accelerator.device.type != "cpu":
            random.append(torch.get_device_module(self.accelerator.device).get_rng_state())
        return {
            "weights": {name: value for name, value in weights.items() if name in trained},
            "optimizer": optimizer,
            "schedule": state.schedule.state_dict(),
            "best_step": state.best_step,
            "best_loss": state.best_loss,
            "random": gather_object([random]),  # by process
        }

    def _read(self, step: int, earlier: Iterable[int]) -> dict:
        path = self._path(step)
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
            return {key: content[key] for key in CONTENT}
        except Exception as error:  # flipped bytes end in whatever the unpickler makes of them
            raise ValueError(
                f"checkpoint {path} is damaged ({_line(error)}): remove it to resume {_from(list(earlier))}"
            ) from error

    def _trained(self, state: TrainState) -> set[str]:
        """Names of all but the frozen parameters, which may have several each (an output head that is an embedding)."""
        module = self.accelerator.unwrap_model(state.model)
        named = module.named_parameters(remove_duplicate=False)
        return module.state_dict().keys() - {name for name, parameter in named if not parameter.requires_grad}

    def _set_random(self, states: list[list[torch.Tensor]]) -> None:
        if len(states) != self.accelerator.num_processes:
            raise ValueError(
                f"the run in {self.folder.parent} had {len(states)} processes, not {self.accelerator.num_processes}: "
                f"resume it with as many"
            )
        cpu, *device = states[self.accelerator.process_index]
        torch.set_rng_state(cpu)
        if device:
            torch.get_device_module(self.accelerator.device).set_rng_state(device[0])

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.pt"

    def _steps(self) -> list[int]:
        return sorted(int(path.stem.removeprefix("step-")) for path in self.folder.glob("step-*.pt"))


def _write(content: dict, path: Path) -> None:
    """All of `content` under `path`, or nothing: on the disk before it gets its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_name(f".{path.name}")
    try:
        with made.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(made, path)
    finally:
        made.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def _from(steps: list[int]) -> str:
    return f"from step {steps[-1]}" if steps else "from the start"


def _line(error: Exception) -> str:
    """What an error says, on one line and without torch's stack of C++ frames."""
    return str(error).partition("\n")[0]
