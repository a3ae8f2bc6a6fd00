"""The reduced output vocabulary of a drafter: the tokens that the training responses are mostly made of."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from train.batches import Example


def most_frequent(
    examples: Sequence[Example], size: int, vocab_size: int, always: Iterable[int]
) -> tuple[Tensor, float]:
    """The `size` most frequent tokens of the responses, and the share of all response tokens that they cover.

    always: ids that are included whatever their count: the tokenizer's special tokens and the model's end tokens.
    Returns ids [size] int64 in ascending order, and prints the share. Of tokens that are equally frequent in the
    responses, as all are that never occur there, those frequent in the prompts are taken, then the lower ids.
    Raises ValueError for a size outside 1 .. vocab_size or too small for `always`.

        responses 5 5 7 7 9 of a vocabulary of 10, size 3, always {2}: ids 2 5 7, covered 4 / 5
    """
    kept = sorted(set(always))
    if not max(len(kept), 1) <= size <= vocab_size:
        raise ValueError(
            f"a draft vocabulary of {size} tokens was asked for: give at least the {len(kept)} special tokens and at "
            f"most the target's {vocab_size}"
        )
    counts = _counts([example.tokens[example.response_start :] for example in examples], vocab_size)
    in_prompts = _counts([example.tokens[: example.response_start] for example in examples], vocab_size)
    rank = counts.copy()
    rank[kept] = counts.max() + 1
    ids = np.sort(np.lexsort((-in_prompts, -rank))[:size])
    coverage = float(counts[ids].sum() / counts.sum())
    print(f"draft vocabulary: {size} of {vocab_size} tokens, {coverage:.2%} of the response tokens", file=sys.stderr)
    return torch.from_numpy(ids), coverage


def _counts(texts: Sequence[Sequence[int]], vocab_size: int) -> np.ndarray:
    return np.bincount(np.concatenate(texts).astype(np.int64), minlength=vocab_size)
