"""Greedy and coupled verification (`verifiers.greedy`, `verifiers.coupled`): arg-maxes up to the first mismatch.

Coupled adds the Gumbel noise of the place's absolute position to the logits, made in registers as they are loaded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.contracts import Draft, Scores, Verdict
from specdec.draws import defined_argmax
from specdec.kernels.philox import gumbel, in_order, signed, stream_words
from specdec.streams import DEPTH_BITS, Purpose
from specdec.streams import gumbel as gumbel_reference
from specdec.streams import words as words_reference
from verifiers.kernels.inputs import (
    Warp,
    accepted_count,
    arrives_last,
    kernel,
    load_logits,
    packed,
    scratch,
    target_arguments,
)
from verifiers.kernels.nodes import run
from verifiers.paths import chain_path

USE = tl.constexpr(int(Purpose.COUPLED) << DEPTH_BITS)


@kernel
def choice_kernel(
    logits, stride, index, tokens, lengths, scale, floor, seed, requests, positions,
    tops, ids, arrived, stopped, choice,
    B, N, V, chunks, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Programs as in `nodes`. requests, positions: [B] int64, or None for no noise."""
    program = tl.program_id(0)
    c = program % chunks
    b = program // chunks % B
    j = program // (chunks * B)
    length = tl.load(lengths + b)
    if j <= accepted_count(stopped, b, length, N):
        node = b * (N + 1) + j
        x = load_logits(logits, stride, scale, floor, tl.load(index + node), c * BLOCK + tl.arange(0, BLOCK), V)
        if requests is not None:
            call = c * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
            x += gumbel(in_order(*stream_words(seed, tl.load(requests + b), tl.load(positions + b) + j, USE, call)))
        top, at = tl.max(tl.where(x != x, float("inf"), x), 0, return_indices=True)  # a NaN must not go unseen
        tl.store(tops + node * chunks + c, top)
        tl.store(ids + node * chunks + c, c * BLOCK + at)
        if arrives_last(arrived + node, chunks):
            chosen = first_of_chunks(tops + node * chunks, ids + node * chunks, chunks, CHUNKS)
            tl.store(choice + node, chosen)
            if j < length:
                matches = chosen == tl.load(tokens + b * N + j)
                tl.atomic_max(stopped + b, tl.where(matches, 0, N + 1 - j))


@triton.jit
def first_of_chunks(tops, ids, chunks, CHUNKS: tl.constexpr):
    """The first id with the highest value, int64; -1 where that is not finite."""
    c = tl.arange(0, CHUNKS)
    top, chunk = tl.max(tl.load(tops + c, mask=c < chunks, other=-float("inf")), 0, return_indices=True)
    return tl.where(tl.abs(top) < float("inf"), tl.load(ids + chunk), -1).to(tl.int64)


def greedy(draft: Draft, p: Scores) -> Verdict:
    """The verdict of `greedy_reference`, fused. `accept_prob` is NaN past the first mismatch."""
    return _choose(draft, p, None)


def coupled(
    draft: Draft, p: Scores, seed: int, requests: Tensor, positions: Tensor, warp: Warp | None = None
) -> Verdict:
    """The verdict of `coupled_reference`, fused.

    requests: [B] int64 ids. positions: [B] int64 absolute position of the row's next token."""
    return _choose(draft, p, warp, signed(seed), requests, positions)


def greedy_reference(draft: Draft, p: Scores) -> Verdict:
    """What `greedy` computes."""
    return _verdict(draft, defined_argmax(p.logits)[p.index])


def coupled_reference(
    draft: Draft, p: Scores, seed: int, requests: Tensor, positions: Tensor, warp: Warp | None = None
) -> Verdict:
    """What `coupled` computes, with [B, N + 1, V] noise in memory."""
    logits = (warp or Warp()).apply(p.logits)[p.index]
    B, places, V = logits.shape
    times = (positions[:, None] + torch.arange(places, device=positions.device)).flatten()
    words = words_reference(seed, requests.repeat_interleave(places), times, Purpose.COUPLED, 0, V)
    noise = gumbel_reference(words).view(B, places, V)
    return _verdict(draft, defined_argmax((logits + noise).view(-1, V)).view(B, places))


def _choose(
    draft: Draft,
    p: Scores,
    warp: Warp | None,
    seed: int = 0,
    requests: Tensor | None = None,
    positions: Tensor | None = None,
) -> Verdict:
    target = target_arguments(draft, p, warp)
    B, places, device = target["B"], target["N"] + 1, p.logits.device
    programs = B * places * target["chunks"]
    stopped, arrived, ids = scratch(device, torch.int32, 0, B, B * places, programs)
    choice = torch.full((B, places), -1, dtype=torch.int64, device=device)
    run(
        choice_kernel, programs, **target, seed=seed, requests=packed(requests), positions=packed(positions),
        tops=torch.empty(programs, device=device), ids=ids, arrived=arrived, stopped=stopped, choice=choice,
    )  # fmt: skip
    return _verdict(draft, choice)


def _verdict(draft: Draft, choice: Tensor) -> Verdict:
    """choice: [B, N + 1], any value past the first mismatch."""
    N = draft.tokens.shape[1]
    place = torch.arange(N, device=choice.device)
    drafted = place < draft.lengths_B[:, None]
    match = draft.tokens == choice[:, :-1]
    n_accepted = (match & drafted).long().cumprod(1).sum(1)
    accept_prob = match.float().masked_fill(~drafted | (place > n_accepted[:, None]), torch.nan)
    return Verdict(chain_path(n_accepted, N), n_accepted, choice.gather(1, n_accepted[:, None])[:, 0], accept_prob)
