"""Steps for the kernel tests, and what may differ between a kernel and its torch reference.

Both must emit the same tokens; a row may differ only where a float64 replay, its uniforms moved by no more than
rounding can move a threshold, gives the kernel's row too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.contracts import Draft, Scores, Verdict
from verifiers.kernels.inputs import Warp

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDING = 1e-5  # of a probability or a cumulative one, float32 sums over 262,144 tokens included


@dataclass(frozen=True)
class Step:
    """One verification step and its uniforms."""

    draft: Draft
    p: Scores
    u: Tensor
    pick_u: Tensor

    @property
    def arguments(self) -> tuple[Draft, Scores, Tensor, Tensor]:
        return self.draft, self.p, self.u, self.pick_u


def packed_index(lengths: list[int], N: int) -> Tensor:
    """[B, N + 1] as `contracts.Scores.index` describes it."""
    firsts = [sum(length + 1 for length in lengths[:b]) for b in range(len(lengths))]
    rows = [
        [first + j if j <= length else first for j in range(N + 1)]
        for first, length in zip(firsts, lengths, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.long, device=DEVICE).view(len(lengths), N + 1)


def random_step(lengths: list[int], V: int, kind: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Step:
    """Ragged rows with q near p, so that some tokens are accepted and some are not.

    kind: "q", "one-hot" (the most probable token) or "mixed" (every other row one-hot, its q never to be read)."""
    g = torch.Generator().manual_seed(seed)
    B, N = len(lengths), max(lengths, default=0)
    index = packed_index(lengths, N)
    logits = (3 * torch.randn(sum(lengths) + B, V, generator=g)).to(dtype)
    near = logits.float()[index[:, :N].cpu()] + 0.7 * torch.randn(B, N, V, generator=g)
    q_logits = near.to(dtype)
    gumbel = -(-torch.rand(B, N, V, generator=g).clamp(min=1e-12).log()).log()
    tokens = (q_logits.float() + gumbel).argmax(-1)
    certain = torch.arange(B) % 2 == 0 if kind == "mixed" else torch.full((B,), kind == "one-hot")
    tokens = torch.where(certain[:, None], logits.float()[index[:, :N].cpu()].argmax(-1), tokens)
    q_logits[certain] = torch.nan
    draft = Draft(
        tokens=tokens.to(DEVICE),
        lengths=lengths,
        q_logits=None if kind == "one-hot" else q_logits.to(DEVICE),
        q_logz=None if kind == "one-hot" else q_logits.float().logsumexp(-1).to(DEVICE),
        one_hot=certain.to(DEVICE) if kind == "mixed" else None,
    )
    u = torch.rand(B, N, generator=g, dtype=torch.float64).to(DEVICE)
    pick_u = torch.rand(B, generator=g, dtype=torch.float64).to(DEVICE)
    return Step(draft, Scores(logits.to(DEVICE), index), u, pick_u)


def in_float64(step: Step, warp: Warp | None) -> Step:
    """The same step in float64 after the warp, which float32 defines."""
    draft, p = step.draft, Scores((warp or Warp()).apply(step.p.logits).double(), step.p.index)
    if draft.q_logits is not None:
        q_logits = draft.q_logits.double()
        draft = replace(draft, q_logits=q_logits, q_logz=q_logits.logsumexp(-1))
    return Step(draft, p, step.u, step.pick_u)


def differing_rows(got: Verdict, want: Verdict) -> list[int]:
    """Rows whose accepted count or next token differ; asserts that the paths say the same as the counts."""
    place = torch.arange(got.path.shape[1], device=got.path.device)
    assert torch.equal(got.path, torch.where(place < got.n_accepted[:, None], place, -1))
    differ = (got.n_accepted != want.n_accepted) | (got.next_token != want.next_token)
    return differ.nonzero()[:, 0].tolist()


def replayed(reference: Callable, exact: Step, got: Verdict) -> Tensor:
    """[B] bool: a float64 replay with uniforms moved by up to ROUNDING can give the row that the kernel gave.

    The token of an inverse CDF grows with its uniform, so two replays bound it."""
    possible = torch.zeros_like(got.n_accepted, dtype=torch.bool)
    low_u, high_u = moved(exact.pick_u, -ROUNDING), moved(exact.pick_u, ROUNDING)
    for move in (-ROUNDING, 0, ROUNDING):
        u = moved(exact.u, move)
        low, high = (reference(exact.draft, exact.p, u, pick_u) for pick_u in (low_u, high_u))
        within = (low.next_token <= got.next_token) & (got.next_token <= high.next_token)
        possible |= (low.n_accepted == got.n_accepted) & within
    return possible


def moved(u: Tensor, move: float) -> Tensor:
    """Uniforms moved within [0, 1): what is 0 stays one, so that accepting a token of p = 0 is never explained."""
    return (u + move).clamp(0, 1 - 2**-53)


def near_ties(kernel: Callable, reference: Callable, step: Step, warp: Warp | None = None) -> int:
    """How many rows differ between kernel and reference, each confirmed as a near-tie; asserts that none differs else.

    The acceptance probabilities must agree to rounding wherever the emitted tokens do and are defined."""
    got, want = kernel(*step.arguments, warp), reference(*step.arguments, warp)
    differing = differing_rows(got, want)
    if differing:
        possible = replayed(reference, in_float64(step, warp), got)
        unexplained = [b for b in differing if not possible[b]]
        assert not unexplained, f"rows {unexplained} differ and float64 shows no near-tie: {got} against {want}"
    same = (got.n_accepted == want.n_accepted) & (got.next_token == want.next_token) & (got.next_token >= 0)
    assert torch.allclose(got.accept_prob[same], want.accept_prob[same], atol=ROUNDING, rtol=1e-4, equal_nan=True)
    return len(differing)
