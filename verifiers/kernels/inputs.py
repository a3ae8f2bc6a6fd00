"""What all kernels share: the arguments they are launched with and how they read p and q.

In kernels: b row; j place on the chain (0 = root, token j hangs off place j); c chunk of the vocabulary; v [BLOCK] ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.contracts import Draft, Scores
from verifiers.chains import check_chain

BLOCK = 8192  # vocabulary entries per program
WARPS = 16  # 16 entries per thread: few enough registers that several programs' loads are in flight on a multiprocessor


@dataclass(frozen=True)
class Warp:
    """From raw logits to p, one number per scored position, applied as the logits are loaded.

    scale: [R] float32, 1 / temperature.
    floor: [R] float32 on the scaled logits: what is below it is excluded, what equals it stays. It expresses top-k (the
           k-th largest) and min-p (the largest + log min_p) as HF defines them, and top-p where no excluded token has
           the same logit as the last one kept.
    """

    scale: Tensor | None = None
    floor: Tensor | None = None

    def apply(self, logits: Tensor) -> Tensor:
        """[R, V] processed logits in float32 (float64 stays): the torch definition."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.scale is not None:
            logits = logits * self.scale[:, None]
        if self.floor is not None:
            logits = logits.masked_fill(logits < self.floor[:, None], -torch.inf)
        return logits


def target_arguments(draft: Draft, p: Scores, warp: Warp | None = None) -> dict[str, Any]:
    """Keyword arguments that every kernel takes: the target's side of the step, and sizes."""
    check_chain(draft, "kernels")
    V = p.logits.shape[-1]
    _check_rows("p.logits", p.logits)
    warp = warp or Warp()
    block = min(BLOCK, triton.next_power_of_2(V))
    chunks = triton.cdiv(V, block)
    return {
        "logits": p.logits,
        "stride": p.logits.stride(0),
        "index": packed(p.index),
        "tokens": packed(draft.tokens),
        "lengths": draft.lengths_B,
        "scale": packed(warp.scale),
        "floor": packed(warp.floor),
        "B": len(draft.tokens),
        "N": draft.tokens.shape[1],
        "V": V,
        "chunks": chunks,
        "BLOCK": block,
        "CHUNKS": triton.next_power_of_2(chunks),
    }


def draft_arguments(draft: Draft) -> dict[str, Any]:
    """Keyword arguments for q; all None where every row is one-hot."""
    if draft.q_ids is not None:
        raise ValueError("the kernels need q over the whole vocabulary and q_ids is set: use the torch rule for it")
    has_q = draft.q_logits is not None
    if has_q:
        _check_rows("draft.q_logits", draft.q_logits)
    return {
        "q_logits": draft.q_logits,
        "q_logz": packed(draft.q_logz),
        "one_hot": None if draft.one_hot is None else packed(draft.one_hot).view(torch.uint8),
        "q_stride_b": draft.q_logits.stride(0) if has_q else 0,
        "q_stride_n": draft.q_logits.stride(1) if has_q else 0,
    }


def scratch(device: torch.device, dtype: torch.dtype, fill: float, *sizes: int) -> list[Tensor]:
    """Flat buffers in one allocation filled by one launch, each aligned to 64 bytes at least: a kernel is compiled once
    more for pointers that are not, in the middle of a generation whose batch shrinks."""
    room = [triton.cdiv(size, 16) * 16 for size in sizes]
    parts = torch.full((sum(room),), fill, dtype=dtype, device=device).split(room)
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]


def packed(tensor: Tensor | None) -> Tensor | None:
    """Without gaps, as kernels address all but the large inputs."""
    return None if tensor is None else tensor.contiguous()


def _check_rows(name: str, tensor: Tensor) -> None:
    if tensor.stride(-1) != 1:
        raise ValueError(f"{name} has stride {tensor.stride(-1)} along the vocabulary: call .contiguous() on it")


kernel = triton.jit(do_not_specialize=["B", "N", "seed"])  # they change from step to step: not worth compiling again


@triton.jit
def load_logits(logits, stride, scale, floor, row, v, V):
    """Processed logits of one scored position, float32; -inf past the vocabulary."""
    x = tl.load(logits + row * stride + v, mask=v < V, other=-float("inf")).to(tl.float32)
    if scale is not None:
        x = x * tl.load(scale + row)
    if floor is not None:
        x = tl.where(x < tl.load(floor + row), -float("inf"), x)
    return x


@triton.jit
def load_q(q_logits, q_logz, one_hot, q_stride_b, q_stride_n, token, b, j, drafted, v, N, V):
    """q that token j of row b was drawn from; 0 where `drafted` is false. The logits of one-hot rows are not read."""
    certain = tl.where(v == tl.where(drafted, token, -1), 1.0, 0.0)
    if q_logits is None:
        q = certain
    else:
        sampled = drafted
        if one_hot is not None:
            sampled = drafted & (tl.load(one_hot + b) == 0)
        at = q_logits + b.to(tl.int64) * q_stride_b + j * q_stride_n.to(tl.int64)
        x = tl.load(at + v, mask=v < tl.where(sampled, V, 0), other=-float("inf")).to(tl.float32)
        z = tl.load(q_logz + b * N + j, mask=sampled, other=0.0).to(tl.float32)
        q = tl.where(sampled, tl.exp(x - z), certain)
    return q


@triton.jit
def arrives_last(counter, expected):
    """True in the last of `expected` programs that come here, which then sees what all of them stored before."""
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == expected - 1
    tl.debug_barrier()
    return last


@triton.jit
def accepted_count(stopped, b, length, N):
    """Accepted tokens of row b so far as known: `stopped` holds N + 1 - (first rejected token), 0 while there is none.

    Volatile: while programs still run, a newer value saves work and an older one does no harm."""
    mark = tl.load(stopped + b, volatile=True)
    return tl.where(mark > 0, N + 1 - mark, length)
