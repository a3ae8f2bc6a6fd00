"""The frozen target's hidden states of a batch: computed on the fly, or read from a cache on disk.

A cache is one array of all examples' states without padding, in the target's own floating-point type, so that nothing
is lost. It is mapped into memory, not read as a whole.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from heads.saved import fingerprint
from specdec.capture import HiddenContract, final_norm
from train.batches import Batch, Example, padded
from train.provenance import claim, digest

ROWS = 16  # examples per forward while a cache is filled
ARRAY, PARTIAL = "states.bin", "states.partial"


class States(Protocol):
    """What a training loop asks for states."""

    def of(self, batch: Batch) -> Tensor:
        """[B, T, D] float32 on the target's device: the state at every token; at padding finite and of no meaning."""
        ...


class ComputedStates:
    """One forward of the target per batch.

    contract: the state after the last norm ("post_norm") or what goes into that norm ("pre_norm").
    """

    def __init__(self, model: PreTrainedModel, contract: HiddenContract):
        self.model, self.contract = model, contract

    def of(self, batch: Batch) -> Tensor:
        return target_states(self.model, batch.tokens, self.contract).float()


class CachedStates:
    """States from the folder that `cache_states` filled for the same arguments; `Batch.rows` says which.

    Raises ValueError where the folder was filled for something else or is not complete."""

    def __init__(self, model: PreTrainedModel, contract: HiddenContract, examples: Sequence[Example], folder: Path):
        claim(folder, made_from(model, contract, examples))
        if not (folder / ARRAY).exists():
            raise ValueError(f"{folder} does not hold the states of all examples: run cache_states to complete it")
        self.device, self.width = model.device, hidden_size(model)
        self.ends = [0, *accumulate(len(example.tokens) for example in examples)]
        size = self.ends[-1] * self.width
        if (folder / ARRAY).stat().st_size != size * model.dtype.itemsize:
            raise ValueError(
                f"{folder / ARRAY} has {(folder / ARRAY).stat().st_size} bytes where the states of all examples take "
                f"{size * model.dtype.itemsize}: remove the folder to compute them again"
            )
        self.states_MD = torch.from_file(str(folder / ARRAY), size=size, dtype=model.dtype).view(-1, self.width)

    def of(self, batch: Batch) -> Tensor:
        hidden = torch.zeros(*batch.tokens.shape, self.width)
        for state_TD, row in zip(hidden, batch.rows, strict=True):
            stored = self.states_MD[self.ends[row] : self.ends[row + 1]]
            state_TD[: len(stored)] = stored
        return hidden.to(self.device)


@torch.no_grad()
def target_states(model: PreTrainedModel, tokens: Tensor, contract: HiddenContract) -> Tensor:
    """[B, T, D] states of `tokens` [B, T], which are padded on the right if at all.

    It needs no mask: attention is causal, so that no token sees the padding behind it, and positions count from 0.
    Raises ValueError for a model in training mode, whose dropout would change the states."""
    decoder = model.get_decoder()
    if decoder.training:
        raise ValueError("the target is in training mode, where dropout would change its states: call model.eval()")
    tokens = tokens.to(model.device)
    if contract == "post_norm":
        return decoder(input_ids=tokens, use_cache=False).last_hidden_state
    captured: list[Tensor] = []
    hook = final_norm(decoder).register_forward_pre_hook(lambda norm, inputs: captured.append(inputs[0]))
    try:
        decoder(input_ids=tokens, use_cache=False)
    finally:
        hook.remove()
    return captured[0]


def cache_states(model: PreTrainedModel, contract: HiddenContract, examples: Sequence[Example], folder: Path) -> None:
    """Fill `folder` with the states of `examples`, in one process; a run that was killed is taken up where it was.

    Prints the size first. Raises ValueError, in one sentence, where the folder was filled for something else or the
    disk has less room."""
    claim(folder, made_from(model, contract, examples))
    if (folder / ARRAY).exists():
        return
    groups = [range(start, min(start + ROWS, len(examples))) for start in range(0, len(examples), ROWS)]
    token_bytes = hidden_size(model) * model.dtype.itemsize
    ends = list(accumulate(token_bytes * sum(len(examples[row].tokens) for row in rows) for rows in groups))
    partial = folder / PARTIAL
    partial.touch()
    done = sum(end <= partial.stat().st_size for end in ends)
    os.truncate(partial, ends[done - 1] if done else 0)  # the group that a kill cut off is computed anew
    _check_room(folder, ends[-1], ends[-1] - partial.stat().st_size)
    with partial.open("ab") as file:
        for rows in groups[done:]:
            hidden = target_states(model, padded(examples, rows).tokens, contract).cpu()
            for state_TD, row in zip(hidden, rows, strict=True):
                stored = state_TD[: len(examples[row].tokens)].contiguous()
                file.write(stored.view(torch.uint8).numpy().tobytes())
    os.replace(partial, folder / ARRAY)


def hidden_size(model: PreTrainedModel) -> int:
    """D, the width of the states."""
    return model.config.get_text_config(decoder=True).hidden_size


def made_from(model: PreTrainedModel, contract: HiddenContract, examples: Sequence[Example]) -> dict[str, Any]:
    """What meta.json records."""
    return {
        "target": fingerprint(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "hidden_contract": contract,
        "examples": digest([example.tokens for example in examples]),
    }


def _check_room(folder: Path, total: int, missing: int) -> None:
    """Print how large the cache is. Raises ValueError where the disk has less room than is `missing`."""
    print(f"hidden states in {folder}: {total / 1e9:.3f} GB, {missing / 1e9:.3f} GB of it to write", file=sys.stderr)
    free = shutil.disk_usage(folder).free
    if missing > free:
        raise ValueError(
            f"{folder} has {free / 1e9:.3f} GB of free disk and the states need {missing / 1e9:.3f} GB more: give "
            f"another folder, or compute the states on the fly"
        )
