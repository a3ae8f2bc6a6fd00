"""Addressed random streams: every random number is a pure function of what it is for, never of what came before.

The generator is Philox 4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011). Its key is the
seed; its counter says which number is meant: (request id, step or position, purpose and depth, index / 4). So a
request's sample does not depend on which other requests share its batch, on its slot or on preemption.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

Array = Tensor | np.ndarray

WORD = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
DEPTH_BITS = 24
BELOW_ONE = {torch.float32: 1 - 2**-24, torch.float64: 1 - 2**-53}


class Purpose(IntEnum):
    """What a draw is for; two purposes never share a number."""

    DRAFT = 0
    ACCEPT = 1
    PICK = 2
    COUPLED = 3


def philox(key: tuple[int, int], counter: tuple[Array, Array, Array, Array]) -> tuple[Array, ...]:
    """Four 32-bit words per counter, by operators alone, so that torch tensors and numpy arrays both work.

    key: two 32-bit words, low word first. counter: four int64 arrays of 32-bit words that broadcast together.
    Returns four int64 arrays of the broadcast shape, values in [0, 2**32).

        philox((0, 0), (zero, zero, zero, zero))  # 6627e8d5 e169c58d bc57ac4c 9b00dbd8
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # int64 products wrap modulo 2**64, which leaves the bits of the unsigned product. Their low words become c1 and
        # c3, which are only XORed until the end: the bits above them are masked once, after that.
        low, high = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = ((high >> 32) ^ c1 ^ k0) & WORD, high, ((low >> 32) ^ c3 ^ k1) & WORD, low
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return c0, c1 & WORD, c2, c3 & WORD


def words(seed: int, requests: Tensor, times: Tensor, purpose: Purpose, first: int, count: int) -> Tensor:
    """[n, count] int64, words first .. first + count - 1 of n streams, on the arguments' device.

    seed: any int, taken modulo 2**64. requests, times (a step or a position): [n] int64 below 2**32. first: a
    multiple of 4.
    """
    index = torch.arange(first // 4, (first + count + 3) // 4, device=requests.device)
    counter = _counter(requests, times, purpose, 0, index)
    return torch.stack(philox(_key(seed), counter), dim=-1).flatten(1)[:, :count]


def uniforms(
    seed: int, requests: np.ndarray, times: np.ndarray, purpose: Purpose, depth: int, count: int
) -> np.ndarray:
    """[n, count] float64 in [0, 1) with 53 random bits, two words for each; arguments as for `words`.

    On the host: a rule needs a handful per row, and 80 small device operations would cost more than one copy.
    """
    counter = _counter(requests, times, purpose, depth, np.arange((count + 1) // 2))
    w0, w1, w2, w3 = philox(_key(seed), counter)
    pairs = np.stack((_unit(w0, w1), _unit(w2, w3)), axis=-1)
    return pairs.reshape(len(requests), 2 * pairs.shape[1])[:, :count]


def _key(seed: int) -> tuple[int, int]:
    return seed & WORD, (seed >> 32) & WORD


def _counter(requests: Array, times: Array, purpose: Purpose, depth: int, index: Array) -> tuple[Array, ...]:
    use = (int(purpose) << DEPTH_BITS) + depth
    return requests[:, None], times[:, None], index[None] * 0 + use, index[None]


def _unit(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    return ((high >> 5) * 2**26 + (low >> 6)) * 2.0**-53


def gumbel(words: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard Gumbel noise from 32-bit words, elementwise, finite for every word.

    -log(-log(1 - v)) with v = (word + 1/2) / 2**32: large noise, which decides an arg-max, comes from small v, where
    floats are dense, so all 32 bits count there even in float32. v is kept below 1, or the noise would be infinite.
    """
    v = ((words.to(dtype) + 0.5) * 2.0**-32).clamp(max=BELOW_ONE[dtype])
    return -torch.log(-torch.log1p(-v))
