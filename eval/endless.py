"""The decode loop with rows that never end, to be stepped by hand: what is measured of it does not depend on stops."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import LogitsProcessorList, StoppingCriteriaList

from specdec.contracts import Drafter
from specdec.loop import Batch
from specdec.processors import Processors
from specdec.registry import VERIFIERS, known
from specdec.requests import Request
from specdec.stopping import Stops
from specdec.target import Target


def endless(
    target: Target,
    drafter: Drafter | None,
    draft_length: int,
    prompts: Sequence[np.ndarray],
    room: int,
    kind: type[Batch] = Batch,
) -> Batch:
    """Greedy decoding of all `prompts` (int64 token ids) in one batch of class `kind`, none stepped yet.

    room: tokens that each row may emit, to be more than the caller's steps can."""
    return kind(
        target=target,
        drafter=drafter,
        verifier=known(VERIFIERS, "greedy", "verifier")(),
        processors=Processors(LogitsProcessorList(), target.vocab_size),
        stops=Stops(StoppingCriteriaList()),
        requests=[Request(row, row, row, prompt, 0, room) for row, prompt in enumerate(prompts)],
        seed=0,
        draft_length=draft_length,
    )
