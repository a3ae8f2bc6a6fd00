"""First pass over the target's logits: log-normaliser of every place, p and q of every drafted token, first rejection.

One program per place and chunk of the vocabulary, earlier places first. The last program of a place to finish combines
the chunks and, for rejection, tests the place's token; programs of later places then find that their row has stopped
and read nothing. A place before the first rejection is never skipped, so the outcome does not depend on timing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from verifiers.kernels.inputs import WARPS, accepted_count, arrives_last, kernel, load_logits, load_q, scratch


@triton.jit
def accepts(p, q, u):
    """u < p / q, strict, in float64 because u has 53 bits; false for a NaN."""
    return u * q.to(tl.float64) < p.to(tl.float64)


@kernel
def node_kernel(
    logits, stride, index, tokens, lengths, scale, floor,
    q_logits, q_logz, one_hot, q_stride_b, q_stride_n,
    u, tops, sums, arrived, stopped, logz, p_drafted, q_drafted,
    B, N, V, chunks, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """u: [B, N] float64, or None where nothing is tested and every place is read."""
    program = tl.program_id(0)
    c = program % chunks
    b = program // chunks % B
    j = program // (chunks * B)
    length = tl.load(lengths + b)
    if j <= accepted_count(stopped, b, length, N):
        node = b * (N + 1) + j
        row = tl.load(index + node)
        x = load_logits(logits, stride, scale, floor, row, c * BLOCK + tl.arange(0, BLOCK), V)
        top = tl.max(x, 0)
        tl.store(tops + node * chunks + c, top)
        tl.store(sums + node * chunks + c, tl.sum(tl.exp(x - tl.where(top == -float("inf"), 0.0, top)), 0))
        if arrives_last(arrived + node, chunks):
            z = combined_logz(tops + node * chunks, sums + node * chunks, chunks, CHUNKS)
            tl.store(logz + node, z)
            if j < length:
                token = tl.load(tokens + b * N + j)
                p = tl.exp(load_logits(logits, stride, scale, floor, row, token, V) - z)
                q = load_q(q_logits, q_logz, one_hot, q_stride_b, q_stride_n, token, b, j, j < length, token, N, V)
                tl.store(p_drafted + b * N + j, p)
                tl.store(q_drafted + b * N + j, q)
                if u is not None:
                    tl.atomic_max(stopped + b, tl.where(accepts(p, q, tl.load(u + b * N + j)), 0, N + 1 - j))


@triton.jit
def combined_logz(tops, sums, chunks, CHUNKS: tl.constexpr):
    """Log-normaliser from the chunks' maxima and sums of exp(x - maximum); not finite where p is undefined."""
    c = tl.arange(0, CHUNKS)
    top = tl.load(tops + c, mask=c < chunks, other=-float("inf"))
    total = tl.load(sums + c, mask=c < chunks, other=0.0)
    highest = tl.max(top, 0)
    highest = tl.where(highest == -float("inf"), 0.0, highest)
    return highest + tl.log(tl.sum(total * tl.exp(top - highest), 0))


@dataclass(frozen=True)
class Nodes:
    """What the first pass leaves on the device. Values of places that were skipped stay NaN.

    counters: two [B] int32 zeros for the `arrives_last` of later kernels. stopped: [B] int32, see `accepted_count`.
    logz: [B, N + 1]. p, q: [B, N] of the drafted tokens.
    """

    counters: tuple[Tensor, Tensor]
    stopped: Tensor
    logz: Tensor
    p: Tensor
    q: Tensor


def score_nodes(target: dict[str, Any], q: dict[str, Any], u: Tensor | None) -> Nodes:
    """Launch the first pass. u: [B, N] float64 to stop at the first rejection, None to read every place."""
    B, N, device = target["B"], target["N"], target["logits"].device
    programs = B * (N + 1) * target["chunks"]
    stopped, arrived, *counters = scratch(device, torch.int32, 0, B, B * (N + 1), B, B)
    logz, p_drafted, q_drafted, tops, sums = scratch(
        device, torch.float32, torch.nan, B * (N + 1), B * N, B * N, programs, programs
    )
    run(
        node_kernel, programs, **target, **q, u=u, tops=tops, sums=sums, arrived=arrived, stopped=stopped, logz=logz,
        p_drafted=p_drafted, q_drafted=q_drafted,
    )  # fmt: skip
    return Nodes(tuple(counters), stopped, logz.view(B, N + 1), p_drafted.view(B, N), q_drafted.view(B, N))


def run(function: Callable, programs: int, **arguments: Any) -> None:
    """Launch on a grid of one axis; an empty batch has nothing to launch."""
    if programs:
        function[(programs,)](**arguments, num_warps=WARPS, enable_fp_fusion=False)  # rounds p - q as torch does
