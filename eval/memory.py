"""Tensor bytes of a generation: weights, slot cache, and everything else that a step holds at once."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from eval.endless import endless
from specdec.contracts import BaseDrafter, Draft, Drafter, Draws, Rows
from specdec.loop import Batch
from specdec.target import Target

DECODE_STEPS = 3


@dataclass(frozen=True)
class Memory:
    """Bytes with `batch_size` rows of about `context` tokens, decoding greedily.

    weights: the target's parameters and buffers, shared ones once.   cache: the slot cache's buffers.
    prefill, decode: the most that any step of that kind holds beside them, the drafter's work included but not the
    weights and cache of a draft model.
    """

    method: str
    batch_size: int
    context: int
    weights: int
    cache: int
    prefill: int
    decode: int

    @property
    def share(self) -> float:
        """What a decode step holds, relative to weights + cache."""
        return self.decode / (self.weights + self.cache)


def measure(
    method: str, model: PreTrainedModel, drafter: Drafter | None, draft_length: int, batch_size: int, context: int
) -> Memory:
    """Prefill `batch_size` prompts that leave the decode steps just below `context` tokens, and watch every step."""
    batch = _batch(model, drafter, draft_length, batch_size, context)
    prefill, decode = 0, 0
    with torch.no_grad():
        while any(request.steps == 0 for request in batch.requests):
            prefill = max(prefill, beside_cache(batch))
        for _ in range(DECODE_STEPS):
            decode = max(decode, beside_cache(batch))
    if drafter is not None:
        drafter.release(list(batch.live))
    return Memory(method, batch_size, context, weight_bytes(model), batch.cache.nbytes, prefill, decode)


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of all parameters and buffers, tied weights once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in itertools.chain(model.parameters(), model.buffers())
    }
    return sum(storages.values())


class PeakBytes(TorchDispatchMode):
    """`peak`: the most bytes that tensors made inside the mode's block held at once. An operation's output counts from
    its storage's first appearance until the storage is freed; views, and what was there before, do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._known.update(storages((args, kwargs)))
        result = func(*args, **(kwargs or {}))
        self.count(result)
        return result

    def count(self, tree: Any) -> None:
        """Count the tensors in `tree` from now on until they are freed."""
        for storage in storages(tree):
            if storage not in self._known:
                self._known.add(storage)
                self._change(storage.nbytes())
                weakref.finalize(storage, self._change, -storage.nbytes())

    def _change(self, count: int) -> None:
        self.live += count
        self.peak = max(self.peak, self.live)


def storages(tree: Any) -> list[torch.UntypedStorage]:
    """Those of all tensors in `tree`."""
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class FullDrafts(BaseDrafter):
    """`drafter` with its one-hot drafts filled up to the budget, so that what is measured does not depend on whether
    the text happens to repeat itself. Drafts with a q are left as they are: models always fill them."""

    def __init__(self, drafter: Drafter):
        self.drafter, self.name, self.needs_hidden = drafter, drafter.name, drafter.needs_hidden
        self.observe, self.admit, self.release = drafter.observe, drafter.admit, drafter.release

    def propose(self, rows: Rows, budget: Sequence[int], draws: Draws) -> Draft:
        draft = self.drafter.propose(rows, budget, draws)
        if draft.q_logits is not None or draft.parents is not None:
            return draft
        missing = max(budget) - draft.tokens.shape[1]
        return Draft(torch.nn.functional.pad(draft.tokens, (0, missing)), list(budget))


def _batch(model: PreTrainedModel, drafter: Drafter | None, draft_length: int, batch_size: int, context: int) -> Batch:
    target = Target(model)
    room = DECODE_STEPS * (draft_length + 1) + 1
    if not room < context <= (target.max_positions or context):
        raise ValueError(
            f"the context to measure memory at is {context} tokens: give more than {room}, and no more than the "
            f"model's {target.max_positions} positions"
        )
    text = np.random.default_rng(0).integers(0, target.vocab_size, context - room)
    full = None if drafter is None else FullDrafts(drafter)
    return endless(target, full, draft_length, [text.copy() for _ in range(batch_size)], 2 * room)


def beside_cache(batch: Batch) -> int:
    """Peak of one step beside the cache. Where the cache grows in it, a layer's old buffer counts until it is freed."""
    with PeakBytes() as used:
        used.count([buffer for layer in batch.cache.layers for buffer in (layer.keys, layer.values)])
        batch.step()
    return used.peak - batch.cache.nbytes
