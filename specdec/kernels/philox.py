"""`specdec.streams` in Triton: the same words bit for bit, the same uniforms, Gumbel noise equal up to log's rounding.

The generator itself is Triton's own Philox 4x32-10; what is here is the addressing and the transforms.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.streams import DEPTH_BITS, Purpose

BLOCK = 1024  # Philox calls per program, four words each


@triton.jit
def stream_words(seed, request, time, use, index):
    """Four uint32 tensors: words 4 * index to 4 * index + 3 of the stream (request, time, use); index is a tensor.

    use: purpose << 24 | depth, as in `specdec.streams`.
    """
    zero = index.to(tl.uint32) * 0
    return tl.philox(seed, zero + request.to(tl.uint32), zero + time.to(tl.uint32), zero + use, index.to(tl.uint32))


@triton.jit
def unit(high, low):
    """float64 in [0, 1) with 53 random bits from two words."""
    return ((high >> 5).to(tl.float64) * 67108864.0 + (low >> 6).to(tl.float64)) * 1.1102230246251565e-16


@triton.jit
def gumbel(words):
    """Standard Gumbel noise in float32 from uint32 words: -log(-log(1 - v)), v = (word + 1/2) / 2**32 kept below 1."""
    v = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    # log1p(-v), which Triton lacks: log(w) is of a rounded w = 1 - v, and v / (1 - w) undoes that rounding.
    w = 1.0 - v
    log_w = tl.where(w == 1.0, -v, tl.log(w) * (v / tl.where(w == 1.0, 1.0, 1.0 - w)))
    return -tl.log(-log_w)


@triton.jit
def in_order(w0, w1, w2, w3):
    """[4 n] the words of n calls as one sequence: w0[0], w1[0], w2[0], w3[0], w0[1], ..."""
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit(do_not_specialize=["seed"])
def _words_kernel(out, seed, requests, times, use, first_call, count, BLOCK: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    index = first_call + part * BLOCK + tl.arange(0, BLOCK)
    four = stream_words(seed, tl.load(requests + row), tl.load(times + row), use, index)
    at = part * BLOCK * 4 + tl.arange(0, 4 * BLOCK)
    tl.store(out + row.to(tl.int64) * count + at, in_order(*four).to(tl.int64), mask=at < count)


@triton.jit(do_not_specialize=["seed"])
def _uniforms_kernel(out, seed, requests, times, use, count, BLOCK: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    index = part * BLOCK + tl.arange(0, BLOCK)
    w0, w1, w2, w3 = stream_words(seed, tl.load(requests + row), tl.load(times + row), use, index)
    at = part * BLOCK * 2 + tl.arange(0, 2 * BLOCK)
    tl.store(out + row.to(tl.int64) * count + at, tl.interleave(unit(w0, w1), unit(w2, w3)), mask=at < count)


@triton.jit
def _gumbel_kernel(out, words, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, gumbel(tl.load(words + at, mask=at < size, other=0).to(tl.uint32)), mask=at < size)


def words(seed: int, requests: Tensor, times: Tensor, purpose: Purpose, first: int, count: int) -> Tensor:
    """As `specdec.streams.words`: [n, count] int64, from word `first`, a multiple of 4."""
    out = torch.empty(len(requests), count, dtype=torch.int64, device=requests.device)
    return _by_row(_words_kernel, out, 4, seed, requests, times, int(purpose) << DEPTH_BITS, first // 4)


def uniforms(seed: int, requests: Tensor, times: Tensor, purpose: Purpose, depth: int, count: int) -> Tensor:
    """As `specdec.streams.uniforms`, on the device: [n, count] float64 in [0, 1)."""
    out = torch.empty(len(requests), count, dtype=torch.float64, device=requests.device)
    return _by_row(_uniforms_kernel, out, 2, seed, requests, times, (int(purpose) << DEPTH_BITS) + depth)


def gumbel_noise(words: Tensor) -> Tensor:
    """As `specdec.streams.gumbel` in float32, from int64 words of any shape."""
    words = words.contiguous()
    out = torch.empty_like(words, dtype=torch.float32)
    if words.numel():
        _gumbel_kernel[(triton.cdiv(words.numel(), BLOCK),)](out, words, words.numel(), BLOCK=BLOCK)
    return out


def signed(seed: int) -> int:
    """The seed modulo 2**64 as the int64 that a kernel takes, the same bits."""
    return (seed + 2**63) % 2**64 - 2**63


def _by_row(
    kernel: Callable, out: Tensor, per_call: int, seed: int, requests: Tensor, times: Tensor, *address: int
) -> Tensor:
    """Fills `out` [n, count], of which one Philox call makes `per_call` numbers."""
    n, count = out.shape
    if out.numel():
        grid = (n, triton.cdiv(count, BLOCK * per_call))
        kernel[grid](out, signed(seed), requests, times, *address, count, BLOCK=BLOCK)
    return out
