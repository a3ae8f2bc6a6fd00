"""The training loop: the same for every recipe, on one process or many."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import get_cosine_schedule_with_warmup

from train.batches import Batch, Batches
from train.checkpoints import Checkpoints, TrainState
from train.log import Log, Values
from train.parallel import LossModule, gather_weights, prepare_sharding
from train.settings import TrainSettings
from train.states import States

Sums = dict[str, Tensor]


class Recipe(Protocol):
    """What is trained.

    module: its parameters that require a gradient are trained, in float32; all others stay as they are.
    """

    module: nn.Module

    def loss(self, batch: Batch) -> tuple[Tensor, Sums]:
        """The sum of the loss over the batch's counted tokens, and of each metric the sums [K] by depth; the metric
        "tokens" is how many were counted. The loss is divided by the tokens of depth 1 in the whole step, a metric by
        those of its own depth."""
        ...

    def save(self, folder: Path, about: dict[str, Any]) -> None:
        """Write the trained weights to `folder`."""
        ...


@dataclass(frozen=True)
class Data:
    """Batches of this process, and the target's states for them where the recipe reads any."""

    batches: Batches
    states: States | None = None

    def batch_at(self, step: int, device: torch.device) -> Batch:
        """The `step`-th batch, all of it on `device`."""
        batch = self.batches.batch_at(step)
        hidden = None if self.states is None else self.states.of(batch).to(device)
        return replace(batch, tokens=batch.tokens.to(device), loss_mask=batch.loss_mask.to(device), hidden=hidden)


@dataclass(frozen=True)
class Outcome:
    """How a run ended: after `step` of `total` updates, `interrupted` if by a signal (--resume goes on).

    best_step, best_loss: the evaluation with the lowest held-out loss, None and inf without held-out data."""

    step: int
    total: int
    best_step: int | None
    best_loss: float
    interrupted: bool


def train(
    recipe: Recipe, data: Data, held_out: Data | None, settings: TrainSettings, accelerator: Accelerator
) -> Outcome:
    """Train `recipe.module`, with `settings.resume` from the last checkpoint on. Every process calls it.

    Leaves the weights of the best evaluation in the module (the last ones without held-out data), whole on every
    process. SIGINT or SIGTERM ends it after the current step, with a checkpoint.
    Raises FloatingPointError that names the step where the loss is not finite, OSError where a checkpoint cannot be
    written, ValueError for less data than one step takes or a damaged checkpoint.
    """
    total = settings.epochs * data.batches.per_epoch // settings.accumulation
    if total == 0:
        raise ValueError(
            f"{settings.epochs} epoch(s) of {data.batches.per_epoch} batches are less than one step of "
            f"{settings.accumulation}: lower accumulation or batch_size, or give more prompts"
        )
    state = _prepare(recipe, settings, accelerator, total)
    checkpoints = Checkpoints(Path(settings.out) / "checkpoints", accelerator)
    if settings.resume:
        checkpoints.resume(state)
    stop = False
    with Log(settings, accelerator.is_main_process, state.step, total) as log, _signals() as caught:
        while state.step < total and not stop:
            values, stop = _gradient(state, data, settings, accelerator, caught)
            _check_finite(values, state.step + 1, checkpoints)
            state.optimizer.step()
            state.schedule.step()
            state.optimizer.zero_grad()
            state.step += 1
            log.step(state.step, values)
            due = held_out is not None and _is_due(state.step, settings.eval_every, total)
            improved = due and _evaluate(state, held_out, accelerator, log)
            if improved or stop or _is_due(state.step, settings.save_every, total):
                checkpoints.save(state)
    if state.best_step is not None and state.step == total:
        checkpoints.load_best(state)
    gather_weights(recipe.module)
    return Outcome(state.step, total, state.best_step, state.best_loss, state.step < total)


def _prepare(recipe: Recipe, settings: TrainSettings, accelerator: Accelerator, total: int) -> TrainState:
    trained = [parameter for parameter in recipe.module.parameters() if parameter.requires_grad]
    for parameter in trained:
        if parameter.dtype.itemsize < 4:
            raise ValueError(
                f"trained parameters are {parameter.dtype}, in which small updates are lost: make them float32, and "
                f"compute in bfloat16 by mixed_precision"
            )
    optimizer = torch.optim.AdamW(trained, lr=settings.learning_rate, weight_decay=settings.weight_decay)
    schedule = get_cosine_schedule_with_warmup(optimizer, round(settings.warmup * total), total)
    if accelerator.is_fsdp2:
        prepare_sharding(accelerator.state.fsdp_plugin, recipe.module)
    model, optimizer = accelerator.prepare(LossModule(recipe, accelerator), optimizer)
    return TrainState(model.train(), optimizer, schedule)


def _gradient(
    state: TrainState, data: Data, settings: TrainSettings, accelerator: Accelerator, caught: list[int]
) -> tuple[Values, bool]:
    """Leave in the parameters the clipped gradient of the next step's mean loss per token.

    The mean is over the tokens of all micro-batches and processes together: they contribute sums, and only the total is
    divided. So it does not matter how the step's examples were split, nor that some batches have fewer tokens.
    Returns what there is to log, and whether any process has `caught` a signal to stop.
    """
    sums: Sums = {}
    for micro in range(settings.accumulation):
        last = micro == settings.accumulation - 1
        with nullcontext() if last else accelerator.no_sync(state.model):
            batch = data.batch_at(state.step * settings.accumulation + micro, accelerator.device)
            loss, metrics = state.model(batch)
            loss.backward()  # accelerator.backward would divide by the accumulation that a launcher may have set
        sums = _added(sums, loss, metrics)
    sums["stop"] = loss.new_full((1,), bool(caught))
    sums = accelerator.reduce(sums, reduction="sum")
    scale = accelerator.num_processes / sums["tokens"][0].clamp(min=1)  # DDP and FSDP average the processes' gradients
    for parameter in state.model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(scale)
    norm = accelerator.clip_grad_norm_(state.model.parameters(), settings.clip)
    sums["grad_norm"] = (norm.full_tensor() if isinstance(norm, DTensor) else norm).reshape(1)
    numbers = _to_host(sums)
    (told_to_stop,), (grad_norm,) = numbers.pop("stop"), numbers.pop("grad_norm")
    rate = state.schedule.get_last_lr()[0]
    return {**_means(numbers), "grad_norm": grad_norm, "learning_rate": rate}, told_to_stop > 0


@torch.no_grad()
def _evaluate(state: TrainState, held_out: Data, accelerator: Accelerator, log: Log) -> bool:
    """Log the held-out means. True where the loss is the lowest so far, which `state` then records."""
    state.model.eval()
    sums: Sums = {}
    for step in range(held_out.batches.per_epoch):
        sums = _added(sums, *state.model(held_out.batch_at(step, accelerator.device)))
    state.model.train()
    values = _means(_to_host(accelerator.reduce(sums, reduction="sum")))
    log.held_out(state.step, values)
    improved = values["loss"] < state.best_loss
    if improved:
        state.best_step, state.best_loss = state.step, values["loss"]
    return improved


def _added(sums: Sums, loss: Tensor, metrics: Sums) -> Sums:
    new = {"loss": loss.detach().reshape(1), **metrics}
    return {name: value if name not in sums else sums[name] + value for name, value in new.items()}


def _to_host(sums: Sums) -> dict[str, list[float]]:
    """The step's one read of the device."""
    flat = iter(torch.cat([value.flatten() for value in sums.values()]).tolist())
    return {name: list(islice(flat, value.numel())) for name, value in sums.items()}


def _means(numbers: dict[str, list[float]]) -> Values:
    """Sums to means, and the tokens of depth 1."""
    (loss,), tokens = numbers.pop("loss"), [max(count, 1) for count in numbers.pop("tokens")]
    means = {name: [a / b for a, b in zip(value, tokens, strict=True)] for name, value in numbers.items()}
    return {"loss": loss / tokens[0], "tokens": tokens[0], **means}


def _check_finite(values: Values, step: int, checkpoints: Checkpoints) -> None:
    if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
        raise FloatingPointError(
            f"the loss is {values['loss']} with a gradient of length {values['grad_norm']} at step {step}, which "
            f"changed nothing; the last good checkpoint is {checkpoints.last() or 'none'}: lower learning_rate, "
            f"or look for what is not finite in that step's examples or the target's states of them"
        )


def _is_due(step: int, every: int, total: int) -> bool:
    return step % every == 0 or step == total


@contextmanager
def _signals() -> Iterator[list[int]]:
    """The SIGINT and SIGTERM caught so far. Only the first is: a second one acts as it would without training."""
    caught: list[int] = []

    def catch(number: int, frame: object) -> None:
        caught.append(number)
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before = {number: signal.signal(number, catch) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        restore()
