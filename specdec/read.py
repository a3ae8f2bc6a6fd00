"""The one device-to-host read of a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdec.contracts import Draft, Verdict


@dataclass(frozen=True)
class Read:
    """A verdict on the host: lists by row, `accepted` [B, P] token ids, `accept_prob` [B, N].

    invalid: whether a row's draft held a token or a parent that it must not."""

    n_accepted: list[int]
    next_token: list[int]
    invalid: bool
    accepted: list[list[int]]
    accept_prob: np.ndarray


def read_verdict(draft: Draft, verdict: Verdict, invalid: Tensor) -> Read:
    """One copy from the device; invalid: [B] bool. float64 holds every int64 token id exactly."""
    if draft.tokens.shape[1] == 0:
        B = len(verdict.next_token)
        return Read([0] * B, verdict.next_token.tolist(), False, [[]] * B, np.empty((B, 0)))
    accepted = draft.tokens.gather(1, verdict.path.clamp(min=0))
    one_each = torch.stack([verdict.n_accepted, verdict.next_token, invalid.long()], dim=1)
    read = torch.cat([one_each.double(), accepted.double(), verdict.accept_prob.double()], dim=1).cpu().numpy()
    P = accepted.shape[1]
    ints = read[:, : 3 + P].astype(np.int64)
    return Read(ints[:, 0].tolist(), ints[:, 1].tolist(), ints[:, 2].any(), ints[:, 3:].tolist(), read[:, 3 + P :])
