"""Where a request ends: inside an accepted block, so that nothing after the stop is emitted, scored or streamed."""

from __future__ import annotations

import copy
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from specdec.requests import Request


def with_stop_strings(model: PreTrainedModel, tokenizer: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """`kwargs` of `model.generate` with stop strings, its argument's or either generation config's, as a criterion.

    `generate` builds it itself, but takes the tokenizer away from a call with a custom function. Raises ValueError for
    stop strings without a tokenizer."""
    kwargs = dict(kwargs)
    config, own = kwargs.get("generation_config"), model.generation_config.stop_strings
    given = (kwargs.pop("stop_strings", None), None if config is None else config.stop_strings, own)
    strings = next((each for each in given if each is not None), None)
    if strings is None:
        return kwargs
    if tokenizer is None:
        raise ValueError(f"stop_strings is {strings!r}, without tokenizer: pass tokenizer= as well")
    if config is not None:
        kwargs["generation_config"] = config = copy.copy(config)
        config.stop_strings = None
    if own is not None:
        kwargs["stop_strings"] = None  # or `generate` would fall back on the model's
    criteria = [*(kwargs.get("stopping_criteria") or []), StopStringCriteria(tokenizer, strings)]
    return kwargs | {"stopping_criteria": StoppingCriteriaList(criteria)}


class Stops:
    """HF's stopping criteria. End tokens and lengths are read out of theirs and checked on the host, inside a block.

    together: whether the other criteria, and the time, are asked for all rows of a batch at once (see `Columns`), as
              `generate` asks them. Else each row is a call of its own, and they see [1, columns] of it at every token.
    """

    def __init__(self, criteria: StoppingCriteriaList):
        self.eos: set[int] = set()
        self.deadline = float("inf")
        self.max_length = float("inf")
        self.others = StoppingCriteriaList()
        self.together = False
        self.device = torch.device("cpu")  # of the ids that criteria see
        self.pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)  # as `generate` decides it
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self.eos |= set(criterion.eos_token_id.flatten().tolist())  # once per call, before the loop
            elif type(criterion) is MaxLengthCriteria:
                self.max_length = min(self.max_length, criterion.max_length)
            elif type(criterion) is MaxTimeCriteria:
                self.deadline = min(self.deadline, criterion.initial_timestamp + criterion.max_time)
            else:
                self.others.append(criterion)

    @property
    def asks_more(self) -> bool:
        """Whether there are criteria beyond end tokens and lengths."""
        return bool(self.others) or self.deadline < float("inf")

    def cut(self, request: Request, tokens: list[int]) -> tuple[list[int], bool]:
        """The part of `tokens` up to and including the first stop, and whether there was one."""
        tokens = tokens[: request.room]
        alone = not self.together
        done = len(tokens) == request.room or (alone and time.time() > self.deadline)
        for count, token in enumerate(tokens, 1):
            other = alone and bool(self.others) and self._other_stop(request, tokens[:count])
            if other or token in self.eos:
                return tokens[:count], True
        return tokens, done

    def ask(self, ids: Tensor, scores: tuple[Tensor, ...] | None) -> np.ndarray:
        """[B] whether a row of `ids` [B, columns] stops here, by the criteria that `cut` leaves out."""
        return self.others(ids, scores).cpu().numpy() | (time.time() > self.deadline)

    def _other_stop(self, request: Request, tokens: list[int]) -> bool:
        ids = torch.from_numpy(np.concatenate([request.text, tokens])).to(self.device)[None]
        return bool(self.others(ids, None).any())
