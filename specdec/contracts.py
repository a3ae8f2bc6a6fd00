"""The two contracts (`Drafter`, `Verifier`) and the data that passes between them.

Shape letters: B rows of this step, N drafted nodes per row (padded to the longest row), V vocabulary,
R scored positions (all rows' nodes, packed), P accepted path length, D hidden size.

A *node* is a place where the target's next-token distribution is known. Node 0 is the root (after the last
committed token); node j + 1 is the place after drafted token j. A chain draft of row b uses nodes 0..lengths[b].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Draft:
    """Drafted tokens of one step, with the exact distribution each of them was drawn from.

    tokens:   [B, N] int64, ids in the target's vocabulary; entries at or past `lengths[b]` are ignored.
    lengths:  one int per row, on the host, so that the packed forward is laid out without reading the device.
              Rows may draft different numbers of tokens, including 0.
    parents:  [B, N] int64, index of the parent drafted token, -1 for a child of the root; a parent comes before its
              children. None means a chain: token j hangs off token j - 1.
    q_logits: [B, N, Vd] log q up to a constant per node (-inf where q is 0), or None where every row is one-hot. In a
              tree, siblings were drawn in the order of their index, and the q of one drawn without replacement is 0 at
              the earlier ones.
    q_logz:   [B, N] log-normaliser of `q_logits` over its last axis: q = exp(q_logits - q_logz).
    q_ids:    [Vd] target ids of q's columns for a drafter with a reduced vocabulary; None means Vd = V.
    one_hot:  [B] bool, rows whose tokens were chosen deterministically (n-gram, arg-max) although other rows of the
              batch were sampled; None means no row if there is a q, every row if there is none.
    grades:   one int per row, a few different ones, higher where the draft rests on more: drafts of one grade are about
              as often accepted. Where the lengths of a `trimmable` drafter are learned, acceptance is learned by
              grade. None means that all are alike.
    """

    tokens: Tensor
    lengths: Sequence[int]
    parents: Tensor | None = None
    q_logits: Tensor | None = None
    q_logz: Tensor | None = None
    q_ids: Tensor | None = None
    one_hot: Tensor | None = None
    grades: Sequence[int] | None = None

    @cached_property
    def lengths_B(self) -> Tensor:
        """[B] int64 `lengths` where the tokens are; the copy does not wait for the device."""
        return torch.tensor(self.lengths, dtype=torch.long).to(self.tokens.device, non_blocking=True)

    @staticmethod
    def empty(rows: int, device: torch.device | str = "cpu") -> Draft:
        """No drafted token in any of `rows` rows: the step is one of plain decoding."""
        return Draft(torch.zeros(rows, 0, dtype=torch.long, device=device), [0] * rows)


@dataclass(frozen=True)
class Scores:
    """The target's *processed* distribution p at every node of a step, packed without padding.

    logits: [R, V] scores after every logits processor (float32 when sampling).
    index:  [B, N + 1] int64, row of `logits` for each node; past a row's draft it repeats the root's row, so that
            any gather is in range and its result is to be ignored.
    """

    logits: Tensor
    index: Tensor

    @cached_property
    def logz(self) -> Tensor:
        """[R] log-normaliser of `logits`, computed once however many rules ask."""
        return torch.logsumexp(self.logits, dim=-1)

    def log_prob(self, tokens_BN: Tensor) -> Tensor:
        """[B, N] log p of tokens_BN[b, j] at node j: for a chain, of drafted token j given its prefix."""
        rows_BN = self.index[:, : tokens_BN.shape[1]]
        return self.logits[rows_BN, tokens_BN] - self.logz[rows_BN]

    def all_probs(self) -> Tensor:
        """[B, N + 1, V] p at every node, a copy that may be written."""
        return (self.logits - self.logz[:, None]).exp()[self.index]

    def probs(self, nodes_B: Tensor) -> Tensor:
        """[B, V] p at one node per row."""
        rows_B = self.index.gather(1, nodes_B[:, None])[:, 0]
        return (self.logits[rows_B] - self.logz[rows_B, None]).exp()


@dataclass(frozen=True)
class Verdict:
    """What a verifier decided for every row of a step.

    path:        [B, P] int64, drafted-token indices of the accepted path in order; entries past `n_accepted` are -1.
    n_accepted:  [B] int64, accepted drafted tokens, 0..lengths[b].
    next_token:  [B] int64, the token emitted after them (correction or bonus); -1 where p or q is undefined there (NaN,
                 no mass), which the loop turns into an error that names row and step in its one read.
    accept_prob: [B, N] float, probability with which drafted token j was accepted given that it was reached (chains:
                 min(1, p/q); one-hot: p; greedy: 0 or 1); NaN where the rule defines none. Averaged over reached
                 positions it estimates the acceptance rate with less noise than counting.
    """

    path: Tensor
    n_accepted: Tensor
    next_token: Tensor
    accept_prob: Tensor

    @classmethod
    def undrafted(cls, next_token: Tensor) -> Verdict:
        """Of rows [B] that drafted nothing."""
        none = next_token.new_zeros(len(next_token), 0)
        return cls(none, torch.zeros_like(next_token), next_token, none.float())

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> Verdict:
        """Of no rows."""
        ids = torch.zeros(0, dtype=torch.long, device=device)
        return cls(ids[:, None], ids, ids, torch.zeros(0, 0, device=device))


class Draws(Protocol):
    """All randomness of one step, addressed by (seed, request id, step or position, purpose, index).

    Made by the loop for the kind of draws the verifier asks for; B is the step's rows. `uniform` and `pick` are there
    for fresh draws, `choose` for coupled ones.
    """

    def sample(
        self, logits: Tensor, depth: int, rows: Sequence[int] | None = None, index: int = 0
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Draw a draft token per row at `depth` (0 = first drafted token) from the drafter's raw `logits`.

        logits: [b, V] of the rows named by `rows` (indices into the step's B rows, on the host; None = all of them).
        index tells apart the draws of one row at one depth: a tree's siblings and cousins. To draw siblings without
        replacement, set the earlier ones' logits to -inf; the q returned is then the one that verification needs.
        Returns tokens [b] int64, q_logits [b, V] after the request's warpers, q_logz [b]; the last two are None where
        the choice is deterministic (greedy), which makes the draft one-hot.
        """
        ...

    def uniform(self, count: int) -> Tensor:
        """[B, count] float64 in [0, 1), the acceptance tests' u, fresh at every step."""
        ...

    def pick(self, weights: Tensor) -> Tensor:
        """[B] int64 token per row, drawn from unnormalised non-negative `weights` [B, V] (correction or bonus).

        At most once per step. -1 where a row holds a NaN or has no mass: an error here would read the device."""
        ...

    def pick_uniform(self) -> Tensor:
        """[B] float64 in [0, 1), the number that `pick` draws with, for a rule whose kernel draws by itself."""
        ...

    def choose(self, logits: Tensor, rows: Tensor, depths: Tensor) -> Tensor:
        """[n] int64: argmax(logits + g), g the Gumbel noise of each row's position at that depth; -1 where undefined.

        logits: [n, V] processed; rows, depths: [n] int64 on the logits' device, step row and depth below the root."""
        ...


@runtime_checkable
class Verifier(Protocol):
    """A verification rule. `lossless` says whether the output provably follows the target; `draws` which kind of
    randomness its drafts need: "argmax", "fresh" (new at every step) or "coupled" (keyed by position)."""

    name: str
    lossless: bool
    draws: Literal["argmax", "fresh", "coupled"]

    def verify(self, draft: Draft, p: Scores, draws: Draws) -> Verdict: ...


@dataclass(frozen=True)
class Rows:
    """What a drafter sees of the batch in one step. Row ids stay the same from `admit` to `release`.

    ids:        the B row ids of this step, in the order of the draft's rows.
    tokens:     per row, its committed real tokens (prompt and output, no padding): int64 numpy arrays, host memory,
                views that must not be written or kept.
    device:     where the target's logits are and drafted tokens must be.
    vocab_size: V, the width of the target's logits.
    """

    ids: Sequence[int]
    tokens: Sequence[np.ndarray]
    device: torch.device
    vocab_size: int


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens for a whole batch. Only `propose` is required of a third party's drafter: deriving from
    `specdec.BaseDrafter` supplies the rest as no-ops.

    needs_hidden: which hidden state of the target `observe` receives: None, "post_norm" or "pre_norm".
    trimmable:    drafts are one-hot chains that depend on the committed text alone, and cost next to nothing: where
                  lengths are learned they are cut to what pays once it is known which rows have any (others are told
                  how much to draft). May be left out.
    A drafter object serves one generation at a time; use one per thread.
    """

    name: str
    needs_hidden: Literal["post_norm", "pre_norm"] | None

    def propose(self, rows: Rows, budget: Sequence[int], draws: Draws) -> Draft:
        """Draft at most `budget[b]` tokens (may be 0) for each row of `rows`."""
        ...

    def observe(self, rows: Rows, verdict: Verdict, hidden: Sequence[Tensor] | None) -> None:
        """After the commit: `rows` with the accepted tokens appended (and cut at a stop), the verdict, and per row
        the target's state [n, D] of the tokens that were newly run and kept, prompt chunks included."""
        ...

    def admit(self, ids: Sequence[int]) -> None:
        """Rows `ids` start new requests."""
        ...

    def release(self, ids: Sequence[int]) -> None:
        """Rows `ids` are finished; what was kept for them can go."""
        ...


class BaseDrafter:
    """No-op parts of the drafter contract, for drafters that keep no state."""

    name = "custom"
    needs_hidden: Literal["post_norm", "pre_norm"] | None = None
    trimmable = False

    def observe(self, rows: Rows, verdict: Verdict, hidden: Sequence[Tensor] | None) -> None:
        pass

    def admit(self, ids: Sequence[int]) -> None:
        pass

    def release(self, ids: Sequence[int]) -> None:
        pass

    def compile(self, on: bool) -> None:
        """Run what can be compiled so, or, unless `on`, eagerly; called before each generation."""
