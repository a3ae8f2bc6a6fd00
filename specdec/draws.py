"""The three kinds of randomness a verification rule can ask for, one class per kind, made once per step.

`ArgmaxDraws` draws nothing. `FreshDraws` keys every number by the request's step, so that none is met twice.
`CoupledDraws` keys Gumbel noise by absolute position, so that drafter and target choose with the same noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.contracts import Draws
from specdec.streams import Purpose, gumbel, uniforms, words

Warp = Callable[[Tensor], Tensor]

MASS = 2.0**46  # integer mass of a row in `inverse_cdf`
BLOCK = 512  # columns of which a maximum is looked for at a time
COUPLED_STEP = 2**13  # tokens whose noise is made at a time on a CPU: what passes through its cache, not its memory


def make_draws(
    kind: str,
    seed: int,
    request_ids: Sequence[int],
    steps: Sequence[int],
    positions: Sequence[int],
    warp: Warp,
    device: torch.device | str,
) -> Draws:
    """The step's draws for B rows.

    kind:        "argmax", "fresh" or "coupled": the verifier's `draws`.
    request_ids: B ints in [0, 2**32) that name the rows' streams.
    steps:       B ints, verdicts the row has had so far.
    positions:   B ints, the row's committed real tokens, which is the absolute position of its next token.
    warp:        the request's prefix-free processors, [b, V] logits to [b, V].
    """
    if kind == "argmax":
        return ArgmaxDraws(warp)
    if kind == "fresh":
        return FreshDraws(seed, request_ids, steps, warp, device)
    if kind == "coupled":
        return CoupledDraws(seed, request_ids, positions, warp, device)
    raise ValueError(f"a verifier's draws must be 'argmax', 'fresh' or 'coupled', not {kind!r}")


class ArgmaxDraws:
    """Greedy decoding: drafts are arg-maxes and nothing is random."""

    def __init__(self, warp: Warp):
        self.warp = warp

    def sample(
        self, logits: Tensor, depth: int, rows: Sequence[int] | None = None, index: int = 0
    ) -> tuple[Tensor, None, None]:
        return defined_argmax(self.warp(logits)).clamp(min=0), None, None

    def uniform(self, count: int) -> Tensor:
        raise _wrong_kind("arg-max", "uniforms", "fresh")

    def pick(self, weights: Tensor) -> Tensor:
        raise _wrong_kind("arg-max", "uniforms", "fresh")

    def choose(self, logits: Tensor, rows: Tensor, depths: Tensor) -> Tensor:
        raise _wrong_kind("arg-max", "noise by position", "coupled")


class FreshDraws:
    """Numbers keyed by (seed, request, step, purpose, depth): for every rule but the coupled one.

    Keying them by position instead would bias block verification, which meets positions beyond the accepted prefix
    again after having conditioned on their numbers.
    """

    def __init__(
        self, seed: int, request_ids: Sequence[int], steps: Sequence[int], warp: Warp, device: torch.device | str
    ):
        self.seed = seed
        self.requests_B = request_array(request_ids)
        self.steps_B = np.array(steps, dtype=np.int64)
        self.warp = warp
        self.device = device

    def sample(
        self, logits: Tensor, depth: int, rows: Sequence[int] | None = None, index: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        raw = logits.float()
        q_logits = self.warp(raw)
        # Where the warpers forbid all that the drafter can propose, it drafts by its own q: exact like any other.
        q_logits = torch.where(q_logits.amax(-1, keepdim=True) == -torch.inf, raw, q_logits)
        q_logz = q_logits.logsumexp(-1)
        u = self._uniform(Purpose.DRAFT, depth, index + 1, rows)[:, index]
        tokens = inverse_cdf((q_logits - q_logz[:, None]).exp(), u)
        # A NaN row must not index out of the vocabulary here: its q is NaN too, which the verifier turns into -1.
        return tokens.clamp(min=0), q_logits, q_logz

    def uniform(self, count: int) -> Tensor:
        return self._uniform(Purpose.ACCEPT, 0, count)

    def pick_uniform(self) -> Tensor:
        return self._uniform(Purpose.PICK, 0, 1)[:, 0]

    def pick(self, weights: Tensor) -> Tensor:
        return inverse_cdf(weights, self.pick_uniform())

    def choose(self, logits: Tensor, rows: Tensor, depths: Tensor) -> Tensor:
        raise _wrong_kind("fresh", "noise by position", "coupled")

    def _uniform(self, purpose: Purpose, depth: int, count: int, rows: Sequence[int] | None = None) -> Tensor:
        rows = slice(None) if rows is None else np.asarray(rows)
        u = uniforms(self.seed, self.requests_B[rows], self.steps_B[rows], purpose, depth, count)
        return torch.from_numpy(u).to(self.device, non_blocking=True)


class CoupledDraws:
    """Gumbel noise keyed by (seed, request, absolute position, target vocabulary id): drafter-invariant sampling.

    Daliri, Musco, Suresh 2408.07978: the drafter proposes argmax(log q + g), the target emits argmax(log p + g).
    """

    def __init__(
        self, seed: int, request_ids: Sequence[int], positions: Sequence[int], warp: Warp, device: torch.device | str
    ):
        self.seed = seed
        self.requests_B = torch.from_numpy(request_array(request_ids)).to(device, non_blocking=True)
        self.positions_B = torch.tensor(positions, dtype=torch.long).to(device, non_blocking=True)
        self.warp = warp

    def sample(
        self, logits: Tensor, depth: int, rows: Sequence[int] | None = None, index: int = 0
    ) -> tuple[Tensor, None, None]:
        rows_b = torch.arange(len(logits)) if rows is None else torch.as_tensor(rows, dtype=torch.long)
        rows_b = rows_b.to(logits.device, non_blocking=True)
        tokens = self.choose(self.warp(logits.float()), rows_b, torch.full_like(rows_b, depth))
        return tokens.clamp(min=0), None, None

    def choose(self, logits: Tensor, rows: Tensor, depths: Tensor) -> Tensor:
        """[n] int64: argmax(logits + g) with each row's noise at position + depth, -1 where no logit is finite.

        logits: [n, V] processed; rows, depths: [n] int64, step row and depth below the root of each.
        """
        requests, times = self.requests_B[rows], self.positions_B[rows] + depths
        V = logits.shape[-1]
        step = COUPLED_STEP if logits.device.type == "cpu" else V
        top, index = logits.new_full((len(logits),), -torch.inf), torch.zeros_like(rows)
        for first in range(0, V, step):
            part = logits[:, first : first + step]
            noise = gumbel(words(self.seed, requests, times, Purpose.COUPLED, first, part.shape[1]))
            part_top, part_index = _first_max(part + noise)
            better = (part_top > top) | part_top.isnan()
            top, index = torch.where(better, part_top, top), torch.where(better, first + part_index, index)
        return torch.where(top.isfinite(), index, -1)

    def uniform(self, count: int) -> Tensor:
        raise _wrong_kind("coupled", "uniforms", "fresh")

    def pick(self, weights: Tensor) -> Tensor:
        raise _wrong_kind("coupled", "uniforms", "fresh")


def inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """[B] int64: per row the token whose share of the cumulative weight holds u; -1 for a NaN row or one without mass.

    weights: [B, V] non-negative, unnormalised. u: [B] float64 in [0, 1).
    The sum runs over integers (a whole row is 2**46): it is exact in any order, so a parallel scan on any device can
    neither reach a token of weight 0 nor pass the last one. Rounding down moves at most V / 2**46 of the mass.
    """
    total = weights.sum(-1, keepdim=True, dtype=torch.float64)
    cdf = (weights * (MASS / total)).long().cumsum(-1)
    mass = cdf[:, -1:]
    target = torch.minimum((u[:, None] * mass).long(), mass - 1)
    index = torch.searchsorted(cdf, target, right=True)[:, 0]
    return torch.where((total > 0) & total.isfinite(), index[:, None], -1)[:, 0]


def defined_argmax(logits: Tensor) -> Tensor:
    """[n] int64 arg-max of logits [n, V], the first of equals; -1 for a row that holds a NaN or +inf, or only -inf."""
    top, index = _first_max(logits)
    return torch.where(top.isfinite(), index, -1)


def _first_max(logits: Tensor) -> tuple[Tensor, Tensor]:
    """[n] maximum and its first index; the maximum is NaN where the row holds one.

    Blocks first, then the best block: the reduction without indices is 5 times faster than the one with (CPU).
    """
    n, V = logits.shape
    if V <= BLOCK:
        index = logits.argmax(-1)
        return logits.gather(1, index[:, None])[:, 0], index
    whole = V - V % BLOCK
    blocks = logits[:, :whole].unflatten(1, (-1, BLOCK))
    top, block = blocks.amax(-1).max(-1)
    index = block * BLOCK + blocks[torch.arange(n, device=logits.device), block].argmax(-1)
    if whole < V:
        tail_top, tail_index = logits[:, whole:].max(-1)
        index = torch.where(tail_top > top, whole + tail_index, index)
        top = torch.maximum(top, tail_top)  # keeps a NaN of either
    return top, index


def raise_if_undefined(next_token: int, row: int, request_id: int, step: int) -> None:
    """ValueError that names row and step where a verdict's next token (a host value) is -1."""
    if next_token < 0:
        raise ValueError(
            f"row {row} (request {request_id}) has no next-token distribution at its step {step}: its logits hold a "
            f"NaN or infinity, or the processors left no token; check the model's dtype, the processors and the "
            f"drafter's q"
        )


def _wrong_kind(kind: str, missing: str, needed: str) -> ValueError:
    return ValueError(f"{kind} draws hold no {missing}: a verifier that needs them sets draws = {needed!r}")


def request_array(request_ids: Sequence[int]) -> np.ndarray:
    """[B] int64. Raises ValueError for an id that does not fit the counter's 32-bit word."""
    for request_id in request_ids:
        if not 0 <= request_id < 2**32:
            raise ValueError(
                f"request id {request_id} must be in [0, 2**32): it is one word of the generator's counter"
            )
    return np.array(request_ids, dtype=np.int64)
