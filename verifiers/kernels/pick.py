"""Second pass, over one row per request: the token after the accepted ones, from norm((P p - q)+), P = 1 for rejection.

The draw is `specdec.draws.inverse_cdf` over exact integer masses, here 2**62 for all of p: integers add up the same in
any order, so chunks may run in parallel. Every chunk stores its mass; the last to finish finds the chunk that holds u,
and the token in it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from verifiers.kernels.inputs import accepted_count, arrives_last, kernel, load_logits, load_q, packed, scratch
from verifiers.kernels.nodes import Nodes, run

MASS = tl.constexpr(2.0**62)  # a power of two: multiplying a float32 by it is exact, and so is the integer's sum
UNDEFINED = tl.constexpr(-1)


@kernel
def pick_kernel(
    logits, stride, index, tokens, lengths, scale, floor,
    q_logits, q_logz, one_hot, q_stride_b, q_stride_n,
    logz, P, stopped, pick_u, rest_mass, full_mass, arrived, n_accepted, next_token,
    B, N, V, chunks, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """P: [B] float32, or None for 1."""
    c = tl.program_id(0) % chunks
    b = tl.program_id(0) // chunks
    length = tl.load(lengths + b)
    n = accepted_count(stopped, b, length, N)
    row = tl.load(index + b * (N + 1) + n)
    z = tl.load(logz + b * (N + 1) + n)
    factor = 1.0
    if P is not None:
        factor = tl.load(P + b)
    drafted = n < length
    token = tl.load(tokens + b * N + n, mask=drafted, other=0)

    v = c * BLOCK + tl.arange(0, BLOCK)
    p = factor * tl.exp(load_logits(logits, stride, scale, floor, row, v, V) - z)
    q = load_q(q_logits, q_logz, one_hot, q_stride_b, q_stride_n, token, b, n, drafted, v, N, V)
    has_nan = tl.max(((p - q) != (p - q)).to(tl.int32), 0) > 0
    tl.store(rest_mass + b * chunks + c, tl.where(has_nan, UNDEFINED, tl.sum(mass_of(residual(p, q)), 0)))
    tl.store(full_mass + b * chunks + c, tl.sum(mass_of(p), 0))
    if arrives_last(arrived + b, chunks):
        chunk, inner, without_rest, defined = chunk_of(
            rest_mass + b * chunks, full_mass + b * chunks, tl.load(pick_u + b), chunks, CHUNKS
        )
        v = chunk * BLOCK + tl.arange(0, BLOCK)
        p = factor * tl.exp(load_logits(logits, stride, scale, floor, row, v, V) - z)
        q = load_q(q_logits, q_logz, one_hot, q_stride_b, q_stride_n, token, b, n, drafted, v, N, V)
        mass = mass_of(tl.where(without_rest, p, residual(p, q)))
        found = chunk * BLOCK + tl.sum((tl.cumsum(mass, 0) <= inner).to(tl.int64), 0)
        tl.store(next_token + b, tl.where(defined, found, UNDEFINED))
        tl.store(n_accepted + b, n)


@triton.jit
def residual(p, q):
    """(p - q)+."""
    return tl.maximum(p - q, 0.0)


@triton.jit
def mass_of(weight):
    """Integer mass; 0 for a NaN, whose conversion is undefined."""
    return (tl.where(weight > 0, weight, 0.0) * MASS).to(tl.int64)


@triton.jit
def chunk_of(rest_mass, full_mass, u, chunks, CHUNKS: tl.constexpr):
    """The chunk that holds u, the mass to go inside it, whether there was no residual mass, and if a token exists."""
    c = tl.arange(0, CHUNKS)
    rest = tl.load(rest_mass + c, mask=c < chunks, other=0)
    full = tl.load(full_mass + c, mask=c < chunks, other=0)
    without_rest = tl.sum(tl.where(rest > 0, rest, 0), 0) == 0
    mass = tl.where(without_rest, full, tl.where(rest > 0, rest, 0))
    total = tl.sum(mass, 0)
    target = tl.minimum((u * total.to(tl.float64)).to(tl.int64), total - 1)
    before = tl.cumsum(mass, 0) <= target
    chunk = tl.sum(before.to(tl.int32), 0)
    defined = (tl.min(rest, 0) >= 0) & (total > 0)
    return tl.where(defined, chunk, 0), target - tl.sum(tl.where(before, mass, 0), 0), without_rest, defined


def pick(
    target: dict[str, Any], q: dict[str, Any], nodes: Nodes, pick_u: Tensor, P: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """n_accepted and next_token, both [B] int64, after `nodes.stopped` is decided. pick_u: [B] float64."""
    B, programs = target["B"], target["B"] * target["chunks"]
    n_accepted, next_token, rest_mass, full_mass = scratch(pick_u.device, torch.int64, 0, B, B, programs, programs)
    run(
        pick_kernel, programs, **target, **q, logz=nodes.logz, P=P, stopped=nodes.stopped, pick_u=packed(pick_u),
        rest_mass=rest_mass, full_mass=full_mass, arrived=nodes.counters[0], n_accepted=n_accepted,
        next_token=next_token,
    )  # fmt: skip
    return n_accepted, next_token
