"""Training examples in padded batches, in an order that is a pure function of (seed, epoch).

A batch has a fixed number of examples, not of tokens: every epoch then has the same number of steps, which the
schedule of the learning rate and `batch_at` need to know in advance, and all processes take equally many. Lengths
differ little within a batch, and the limits on prompts and responses bound the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

WINDOW = 32  # steps of random examples that are sorted by length among themselves: more pads less but mixes less


@dataclass(frozen=True)
class Example:
    """tokens: prompt and response; response_start: index of the response's first token."""

    id: str
    tokens: list[int]
    response_start: int

    def __post_init__(self) -> None:
        if not 1 <= self.response_start <= len(self.tokens):
            raise ValueError(
                f"example {self.id!r} has {len(self.tokens)} tokens and response_start {self.response_start}: at least "
                f"one token comes before a response, which starts within the text or (an empty one) at its end"
            )

    @property
    def loss_mask(self) -> list[bool]:
        """Per token, whether its prediction is trained: that of every response token is."""
        return [place >= self.response_start for place in range(len(self.tokens))]


@dataclass(frozen=True)
class Batch:
    """B examples padded on the right to T tokens.

    tokens:    [B, T] int64; padding is 0.
    loss_mask: [B, T] bool, True where the token at that index is a response token, whose prediction is trained.
    hidden:    [B, T, D] float32 the target's states, where the loop has set them; those of padding mean nothing.
    rows:      the examples' indices in their set, by which cached states are found.
    """

    tokens: Tensor
    loss_mask: Tensor
    hidden: Tensor | None = None
    rows: Sequence[int] = ()


class Batches:
    """The batches of one process. Any step can be asked for, so that a resumed run goes on where it was.

    batch_size:  examples per process and step, at most (but for a batch size of 1: two, in the steps that even out a
                 number of examples which the processes do not divide).
    rank, world: this process and how many there are. In an epoch every example goes to exactly one process, once.
    per_epoch:   steps of an epoch.
    Raises ValueError for a set without a token to train on or with fewer examples than processes.
    """

    def __init__(self, examples: Sequence[Example], batch_size: int, seed: int, rank: int = 0, world: int = 1):
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: give at least 1 example")
        if not any(any(example.loss_mask) for example in examples):
            raise ValueError(
                f"none of the {len(examples)} examples has a response token, so that there is nothing to train on: "
                f"check the responses and where they start"
            )
        if len(examples) < world:
            raise ValueError(f"{len(examples)} examples cannot be shared by {world} processes: give more prompts")
        self.examples, self.seed, self.rank, self.world = examples, seed, rank, world
        self.lengths = np.array([len(example.tokens) for example in examples])
        # A process without an example in some step would leave the others waiting for its gradients.
        self.per_epoch = min(ceil(len(examples) / (batch_size * world)), len(examples) // world)
        self._epoch: tuple[int, list[np.ndarray]] = (-1, [])

    def batch_at(self, step: int) -> Batch:
        """The batch of step `step`, counted from 0 over all epochs."""
        epoch, place = divmod(step, self.per_epoch)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self.order(epoch))
        return padded(self.examples, self._epoch[1][place][self.rank :: self.world].tolist())

    def order(self, epoch: int) -> list[np.ndarray]:
        """Per step of an epoch, the indices of the examples of all processes together, the shortest first."""
        random = np.random.default_rng((self.seed, epoch))
        steps = np.array_split(random.permutation(len(self.examples)), self.per_epoch)
        ordered: list[np.ndarray] = []
        for start in range(0, self.per_epoch, WINDOW):
            window = np.concatenate(steps[start : start + WINDOW])
            by_length = window[np.argsort(self.lengths[window], kind="stable")]
            ordered += np.array_split(by_length, len(steps[start : start + WINDOW]))
        return [ordered[place] for place in random.permutation(self.per_epoch)]


def padded(examples: Sequence[Example], rows: Sequence[int]) -> Batch:
    """The examples at `rows` as one batch."""
    chosen = [examples[row] for row in rows]
    shape = (len(rows), max(len(example.tokens) for example in chosen))
    tokens, loss_mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.bool)
    for b, example in enumerate(chosen):
        tokens[b, : len(example.tokens)] = torch.tensor(example.tokens)
        loss_mask[b, : len(example.tokens)] = torch.tensor(example.loss_mask)
    return Batch(tokens, loss_mask, rows=rows)


def show_example(example: Example, tokenizer: PreTrainedTokenizerBase) -> str:
    """The example's text with its loss mask, for a person to check before training:

    example 'p0':
    [not trained on, 20 tokens] user: Say hello.
    [trained on, 7 tokens] Hello!<end>
    """
    parts = [f"example {example.id!r}:"]
    for trained, pairs in groupby(zip(example.loss_mask, example.tokens, strict=True), key=lambda pair: pair[0]):
        tokens = [token for _, token in pairs]
        parts.append(f"[{'' if trained else 'not '}trained on, {len(tokens)} tokens] {tokenizer.decode(tokens)}")
    return "\n".join(parts)
