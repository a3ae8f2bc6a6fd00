"""Block verification (rule and paper: `verifiers.block`): three launches.

The target's rows are read for their log-normalisers, again for the prefixes' masses S_i = sum_x (P_i p - q)+, and the
emitted one a third time; no early exit, because the longest prefix that passes counts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.contracts import Draft, Scores, Verdict
from specdec.draws import inverse_cdf
from verifiers.block import acceptance, prefix_weights, reach_ratio, residual_mass
from verifiers.chains import drafted_probs, q_at
from verifiers.kernels.inputs import (
    Warp,
    arrives_last,
    draft_arguments,
    kernel,
    load_logits,
    load_q,
    packed,
    scratch,
    target_arguments,
)
from verifiers.kernels.nodes import run, score_nodes
from verifiers.kernels.pick import pick
from verifiers.kernels.pick import residual as residual_of
from verifiers.paths import chain_path, within_lengths
from verifiers.rejection import residual


@triton.jit
def next_weight(P, p_drafted, q_drafted, at):
    """P_i from P_{i-1} and the i-th drafted token's probabilities; a NaN stays."""
    grown = P * tl.load(p_drafted + at)
    ratio = tl.where(grown == 0, grown, grown / tl.load(q_drafted + at))
    return tl.where(ratio > 1, 1.0, ratio)


@kernel
def prefix_kernel(
    logits, stride, index, tokens, lengths, scale, floor,
    q_logits, q_logz, one_hot, q_stride_b, q_stride_n,
    logz, p_drafted, q_drafted, u, masses, arrived, stopped, P_stop, h,
    B, N, V, chunks, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """One program per row and chunk: its share of S_1 .. S_{length - 1}; the last of a row decides how many pass."""
    c = tl.program_id(0) % chunks
    b = tl.program_id(0) // chunks
    length = tl.load(lengths + b).to(tl.int32)
    v = c * BLOCK + tl.arange(0, BLOCK)
    P = 1.0
    for i in range(1, length):
        P = next_weight(P, p_drafted, q_drafted, b * N + i - 1)
        node = b * (N + 1) + i
        x = load_logits(logits, stride, scale, floor, tl.load(index + node), v, V)
        p = P * tl.exp(x - tl.load(logz + node))
        token = tl.load(tokens + b * N + i)
        q = load_q(q_logits, q_logz, one_hot, q_stride_b, q_stride_n, token, b, i, i < length, v, N, V)
        tl.store(masses + (b * N + i) * chunks + c, tl.sum(residual_of(p, q), 0))
    if arrives_last(arrived + b, chunks):
        decide(p_drafted, q_drafted, u, masses, stopped, P_stop, h, b, length, N, chunks, CHUNKS)


@triton.jit
def decide(p_drafted, q_drafted, u, masses, stopped, P_stop, h, b, length, N, chunks, CHUNKS: tl.constexpr):
    """h_1 .. h_length, the longest prefix that passes, and its P, which is NaN if any P on the draft is."""
    lane = tl.arange(0, CHUNKS)
    P = 1.0
    P_tau = 1.0
    tau = 0
    for i in range(1, length + 1):
        P = next_weight(P, p_drafted, q_drafted, b * N + i - 1)
        stored = tl.where(i < length, chunks, 0)
        S = tl.sum(tl.load(masses + (b * N + i) * chunks + lane, mask=lane < stored, other=0.0), 0)
        h_i = tl.where(i == length, P, tl.where(P >= 1, 1.0, S / (S + 1 - P)))
        tl.store(h + b * N + i - 1, h_i)
        passes = tl.load(u + b * N + i - 1) < h_i.to(tl.float64)
        tau = tl.where(passes, i, tau)
        P_tau = tl.where(passes, P, P_tau)
    tl.store(stopped + b, N + 1 - tau)
    tl.store(P_stop + b, tl.where(P != P, P, P_tau))


def block(draft: Draft, p: Scores, u: Tensor, pick_u: Tensor, warp: Warp | None = None) -> Verdict:
    """The verdict of `block_reference`, fused. u: [B, N] and pick_u: [B] float64 in [0, 1)."""
    target, q = target_arguments(draft, p, warp), draft_arguments(draft)
    nodes = score_nodes(target, q, u=None)
    B, N, chunks = target["B"], target["N"], target["chunks"]
    h, P_stop, masses = scratch(u.device, torch.float32, 0.0, B * N, B, B * N * chunks)
    run(
        prefix_kernel, B * chunks, **target, **q, logz=nodes.logz, p_drafted=nodes.p, q_drafted=nodes.q,
        u=packed(u), masses=masses, arrived=nodes.counters[1], stopped=nodes.stopped, P_stop=P_stop, h=h,
    )  # fmt: skip
    n_accepted, next_token = pick(target, q, nodes, pick_u, P_stop)
    return _verdict(draft, n_accepted, next_token, h.view(B, N))


def block_reference(draft: Draft, p: Scores, u: Tensor, pick_u: Tensor, warp: Warp | None = None) -> Verdict:
    """What `block` computes, by the rule's own functions on materialised probabilities."""
    N, V = draft.tokens.shape[1], p.logits.shape[-1]
    p = Scores((warp or Warp()).apply(p.logits), p.index)
    tokens = draft.tokens.masked_fill(~within_lengths(draft), 0)
    P = prefix_weights(p.log_prob(tokens).exp(), drafted_probs(draft, tokens, V))
    h = torch.zeros_like(P[:, 1:])
    last = draft.lengths_B
    for i in range(1, N + 1):
        place = last.clamp(max=i)
        S = residual_mass(P[:, i], p.probs(place), q_at(draft, tokens, place, V))
        h[:, i - 1] = torch.where(last == i, P[:, i], acceptance(P[:, i], S))
    h = h.masked_fill(~within_lengths(draft), 0)
    n_accepted = torch.where(u < h, torch.arange(1, N + 1, device=u.device), 0).amax(1) if N else last
    scaled = P.gather(1, n_accepted[:, None]) * p.probs(n_accepted)
    weights = residual(scaled, q_at(draft, tokens, n_accepted, V))
    undefined = P.gather(1, last[:, None]).isnan()
    return _verdict(draft, n_accepted, inverse_cdf(weights.masked_fill(undefined, torch.nan), pick_u), h)


def _verdict(draft: Draft, n_accepted: Tensor, next_token: Tensor, h: Tensor) -> Verdict:
    accept_prob = reach_ratio(h).masked_fill(~within_lengths(draft), torch.nan)
    return Verdict(chain_path(n_accepted, draft.tokens.shape[1]), n_accepted, next_token, accept_prob)
