"""`specdec bench train`: what a training step costs beside the bare forward and backward of the same modules."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace

import torch

from eval.environment import described
from eval.timing import interleaved
from specdec.models import load_target
from train.batches import Batch, Example, padded
from train.chains import ChainRecipe, ahead
from train.finish import peak_bytes
from train.medusa import MedusaRecipe, MedusaSettings
from train.mtp import MTPRecipe, MTPSettings
from train.states import target_states

RECIPES = {"medusa": (MedusaRecipe, MedusaSettings), "mtp": (MTPRecipe, MTPSettings)}
PROMPT, RESPONSE = 96, 96  # tokens of each example


def run(
    *,
    kind: str,
    target: str,
    dtype: str,
    device: str,
    batch_size: int,
    draft_vocab_size: int,
    repeats: int,
    as_json: bool,
) -> None:
    """Time both in turn on random texts, the target's states given, and print their ratio.

    Bare: forward of the module and of both projections (the head's and the target's own, whose distribution the losses
    compare with) at the counted places, and backward from the sum of the logits. The whole step adds the losses, the
    counts, the clipping of the gradient and AdamW."""
    if kind not in RECIPES:
        raise ValueError(f"unknown recipe {kind!r}: known are {', '.join(RECIPES)}")
    loaded = load_target(target, dtype, device)
    loaded.model.requires_grad_(False)
    vocabulary = loaded.model.get_output_embeddings().weight.shape[0]
    if draft_vocab_size > vocabulary:
        raise ValueError(f"--draft-vocab-size is {draft_vocab_size}: give at most {vocabulary}, the target's ids")
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(vocabulary, (batch_size, PROMPT + RESPONSE), generator=generator).tolist()
    batch = padded([Example(str(n), text, PROMPT) for n, text in enumerate(texts)], range(batch_size))
    batch = replace(batch, hidden=target_states(loaded.model, batch.tokens, "post_norm").float())
    make, settings = RECIPES[kind]
    ids = torch.arange(draft_vocab_size)
    recipe = make(settings(target=target, prompts="", out="", draft_vocab_size=draft_vocab_size), loaded, ids)
    optimizer = torch.optim.AdamW(recipe.module.parameters())
    calls = {"bare": lambda: bare(recipe, batch), "step": lambda: whole(recipe, batch, optimizer)}
    seconds = interleaved(calls, repeats, loaded.model.device)
    ratios = [step / alone for step, alone in zip(seconds["step"], seconds["bare"], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    found = {
        "recipe": kind,
        "ratio": statistics.median(ratios),
        "quartiles": [low, high],
        "step_seconds": statistics.median(seconds["step"]),
        "tokens_per_second": batch_size * RESPONSE / statistics.median(seconds["step"]),
        "peak_bytes": peak_bytes(loaded.model.device),
    }
    if as_json:
        about = described(loaded, {})
        print(json.dumps({"environment": about, **found}, indent=2))
        return
    print(
        f"{kind}: {found['ratio']:.2f}x the bare forward and backward [{low:.2f}, {high:.2f}], "
        f"{found['tokens_per_second']:.0f} response tokens/s, peak memory {found['peak_bytes'] / 2**20:.0f} MiB"
    )


def bare(recipe: ChainRecipe, batch: Batch) -> None:
    total = 0.0
    with torch.no_grad():
        recipe.target_logits(batch.hidden[ahead(batch.loss_mask, 1)])
    for depth, states in enumerate(recipe.states(batch), start=1):
        total = total + recipe.logits(depth, states[recipe.counted(batch, depth)]).sum()
    total.backward()
    recipe.module.zero_grad()


def whole(recipe: ChainRecipe, batch: Batch, optimizer: torch.optim.Optimizer) -> None:
    loss, sums = recipe.loss(batch)
    loss.backward()
    for parameter in recipe.module.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(sums["tokens"][0])
    torch.nn.utils.clip_grad_norm_(recipe.module.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
