"""Losses per token between a drafter's next-token distribution q and the target's p.

n tokens, V the target's vocabulary, Vd the drafter's: `draft_ids` [Vd] are the sorted target ids that the drafter can
propose, None where it can propose all (Vd = V). p is always over all of V and never renormalised over `draft_ids`: the
drafter's q is 0 outside them, so the target's mass there is mass that verification rejects.

With alpha = sum_x min(p(x), q(x)), the probability that a drafted token is accepted (Leviathan et al. 2211.17192):

    name           loss                                             p's mass m outside draft_ids
    ce             -log q(argmax p)                                 a token whose argmax is outside: loss 0, no gradient
    ce_data        -log q(the text's next token)                    the same, where the next token is outside
    kl             sum_x p log(p / q)  over draft_ids               adds nothing: (1 - m) KL(p inside || q) + constant
    reverse_kl     sum_x q log(q / p)                               exact: q is 0 there
    tv             1 - alpha, the total variation                   exact: m is part of it
    neg_log_alpha  -log alpha                                       exact
    lk_hybrid      lam * kl + (1 - lam) * tv                        as kl and tv
                   lam = exp(-3 alpha), alpha without gradient: kl while the drafter is bad, tv once it is good

Everything is computed from log-probabilities, in float32 at least.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

LossName = Literal["ce", "ce_data", "kl", "reverse_kl", "tv", "neg_log_alpha", "lk_hybrid"]


@dataclass(frozen=True)
class TargetLaw:
    """p at n places, as far as the losses need it, taken as constant.

    log_p: [n, Vd] at the drafter's ids, normalised over all of V.   top: [n] int64 argmax p, for the loss "ce" alone.
    """

    log_p: Tensor
    top: Tensor | None

    @staticmethod
    def of(logits: Tensor, draft_ids: Tensor | None, loss: LossName) -> TargetLaw:
        """From the target's logits [n, V], for `loss`."""
        logits = _wide(logits.detach())
        known = logits if draft_ids is None else logits[:, draft_ids]
        top = logits.argmax(-1) if loss == "ce" else None
        return TargetLaw(known - logits.logsumexp(-1, keepdim=True), top)

    def __getitem__(self, places: Tensor) -> TargetLaw:
        return TargetLaw(self.log_p[places], None if self.top is None else self.top[places])


def token_losses(
    name: LossName,
    draft_logits: Tensor,
    target: TargetLaw | None,
    tokens: Tensor | None = None,
    draft_ids: Tensor | None = None,
) -> Tensor:
    """[n] the loss `name` of each token, differentiable in `draft_logits`.

    draft_logits: [n, Vd].   target: of the same n places and ids; None is enough for "ce_data".
    tokens:       [n] int64 the text's own next tokens (target ids), which "ce_data" asks for.
    Raises ValueError for an unknown name.
    """
    if name not in get_args(LossName):
        raise ValueError(f"unknown loss {name!r}: give one of {', '.join(get_args(LossName))}")
    if name == "ce_data":
        return _cross_entropy(draft_logits, tokens, draft_ids)
    if name == "ce":
        return _cross_entropy(draft_logits, target.top, draft_ids)
    log_p, log_q = target.log_p, torch.log_softmax(_wide(draft_logits), dim=-1)
    if name == "kl":
        return _kl(log_p, log_q)
    if name == "reverse_kl":
        return (log_q.exp() * (log_q - log_p)).sum(-1)
    log_alpha = torch.minimum(log_p, log_q).logsumexp(-1)
    if name == "neg_log_alpha":
        return -log_alpha
    tv = 1 - log_alpha.exp()
    if name == "tv":
        return tv
    lam = torch.exp(-3 * log_alpha.detach().exp())
    return lam * _kl(log_p, log_q) + (1 - lam) * tv


def acceptance(draft_logits: Tensor, target: TargetLaw) -> Tensor:
    """[n] alpha = sum_x min(p(x), q(x)) of each token; p outside the drafter's ids counts as rejected."""
    return torch.minimum(target.log_p, torch.log_softmax(_wide(draft_logits), dim=-1)).logsumexp(-1).exp()


def depth_weights(decay: float, depths: int, device: torch.device | str = "cpu") -> Tensor:
    """[K] weights of the losses at depths 1..K: they fall by `decay` from depth to depth and sum to 1.

    depth_weights(0.6, 3) = (.51, .31, .18), as FastMTP (2509.18362) trains."""
    weights = decay ** torch.arange(depths, dtype=torch.float32, device=device)
    return weights / weights.sum()


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    p = log_p.exp()
    return -(torch.special.entr(p).sum(-1) + torch.linalg.vecdot(p, log_q))  # cross-entropy minus entropy; p = 0 adds 0


def _cross_entropy(draft_logits: Tensor, tokens: Tensor, draft_ids: Tensor | None) -> Tensor:
    """[n] -log q(token), 0 where the drafter cannot propose the token."""
    if draft_ids is None:
        return torch.nn.functional.cross_entropy(_wide(draft_logits), tokens, reduction="none")
    columns = torch.searchsorted(draft_ids, tokens).clamp(max=len(draft_ids) - 1)
    columns = torch.where(draft_ids[columns] == tokens, columns, -1)
    return torch.nn.functional.cross_entropy(_wide(draft_logits), columns, ignore_index=-1, reduction="none")


def _wide(logits: Tensor) -> Tensor:
    """At least float32: the tails of a distribution over 50k tokens are below bfloat16's resolution."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
