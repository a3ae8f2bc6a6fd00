"""Where a request ends: inside an accepted block, so that nothing after the stop is emitted, scored or streamed."""

from __future__ import annotations

import copy
import time
from typing import Any

import numpy as np
import torch
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
    """HF's stopping criteria, asked at every token of a block as plain `generate` asks at every step.

    End tokens, lengths and times are read out of their criteria and checked on the host; any other criterion is called
    with the request's own ids [1, columns] per token, in HF's column layout, and with scores None. A stopped row is
    padded; HF goes on emitting for it until all rows have stopped where the call has no end token.
    """

    def __init__(self, criteria: StoppingCriteriaList):
        self.eos: set[int] = set()
        self.deadline = float("inf")
        self.max_length = float("inf")
        self.others = StoppingCriteriaList()
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self.eos |= set(criterion.eos_token_id.flatten().tolist())  # once per call, before the loop
            elif type(criterion) is MaxLengthCriteria:
                self.max_length = min(self.max_length, criterion.max_length)
            elif type(criterion) is MaxTimeCriteria:
                self.deadline = min(self.deadline, criterion.initial_timestamp + criterion.max_time)
            else:
                self.others.append(criterion)

    def cut(self, request: Request, tokens: list[int]) -> tuple[list[int], bool]:
        """The part of `tokens` up to and including the first stop, and whether there was one."""
        tokens = tokens[: request.room]
        done = len(tokens) == request.room or time.time() > self.deadline
        for count, token in enumerate(tokens, 1):
            if token in self.eos or (self.others and self._other_stop(request, tokens[:count])):
                return tokens[:count], True
        return tokens, done

    def _other_stop(self, request: Request, tokens: list[int]) -> bool:
        ids = torch.from_numpy(np.concatenate([request.text, tokens]))[None]
        return bool(self.others(ids, None).any())
