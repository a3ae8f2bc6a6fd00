"""The end of a run: the head is saved, tried out in the real engine on held-out prompts, and described by a card."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from heads.saved import fingerprint
from specdec.contracts import Drafter
from specdec.models import LoadedModel
from train.acceptance import evaluate_acceptance
from train.batches import Batch, Batches, Example
from train.card import Trained, write_card
from train.chains import ChainRecipe, ChainSettings, head_accuracies
from train.data import TrainPrompt
from train.loop import Data
from train.replay import Accuracy, replayed_accuracy
from train.states import States

TOGETHER = 8  # held-out prompts that are answered, or replayed, together


def finish(
    settings: ChainSettings,
    kind: str,
    recipe: ChainRecipe,
    loaded: LoadedModel,
    training: Sequence[Example],
    held_out: Sequence[Example],
    states: States,
    drafters: Callable[[Path, LoadedModel], dict[str, tuple[Drafter, int]]],
) -> Path:
    """Write OUT/head: weights, configuration and README.md. Returns that folder.

    states: the target's, of `held_out`.
    drafters: from that folder, what to try out: by name, each with its draft length; the first one drafts chains."""
    peak = peak_bytes(loaded.model.device)
    folder, out = Path(settings.out) / "head", Path(settings.out)
    recipe.module.eval()
    tried = held_out[: settings.acceptance_prompts]
    batches = every_batch(held_out, states, settings, loaded)
    about = {
        "target": settings.target,
        "target_type": loaded.model.config.get_text_config(decoder=True).model_type,
        "target_fingerprint": fingerprint(loaded.model),
        "depths": recipe.depths,
        "accuracies": head_accuracies(recipe, batches),
    }
    recipe.save(folder, about)
    for parameter in recipe.module.parameters():  # what is compared below is what was saved
        if parameter.requires_grad:
            parameter.data.copy_(parameter.to(recipe.save_dtype))
    made = drafters(folder, loaded)
    chain, _ = next(iter(made.values()))
    agreement = (
        training_accuracy(recipe, every_batch(tried, states, settings, loaded)),
        replayed_accuracy(loaded.model, chain, tried, recipe.depths, TOGETHER),
    )
    prompts = [TrainPrompt(example.id, example.tokens[: example.response_start]) for example in tried]
    temperatures = sorted({0.0, settings.temperature})
    evaluate_acceptance(loaded, made, prompts, settings.acceptance_tokens, (1, TOGETHER), temperatures, out)
    trained = Trained(
        kind=kind,
        target=loaded.description,
        fingerprint=about["target_fingerprint"],
        prompts=len(training),
        response_tokens=sum(len(example.tokens) - example.response_start for example in training),
        peak_bytes=peak,
        training=agreement[0],
        engine=agreement[1],
    )
    write_card(folder, out, trained)
    return folder


def every_batch(chosen: Sequence[Example], states: States, settings: ChainSettings, loaded: LoadedModel) -> list[Batch]:
    """All of `chosen`, the first of the examples that `states` knows, once and in this process alone."""
    data = Data(Batches(chosen, settings.batch_size, settings.seed), states)
    return [data.batch_at(step, loaded.model.device) for step in range(data.batches.per_epoch)]


@torch.no_grad()
def training_accuracy(recipe: ChainRecipe, batches: Sequence[Batch]) -> Accuracy:
    """How far the recipe's arg-max chains follow the texts, by the training code."""
    found = Accuracy.none(recipe.depths)
    for batch in batches:
        _, sums = recipe.loss(batch)
        found += Accuracy(*(tuple(map(round, sums[name].tolist())) for name in ("reached", "right")))
    return found


def peak_bytes(device: torch.device) -> int:
    """The largest memory that this process has held so far: on an accelerator its tensors, else all of it."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
