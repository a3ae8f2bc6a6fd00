"""Where an output first differs from plain decoding's, and whether the target itself was undecided there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

import torch
from transformers import PreTrainedModel

from eval.runner import Record
from eval.runs import compared_methods, conditions, control_of, grouped, paired

TIE = 1e-4  # logits closer than this in float32 may be ordered either way by a sum taken in another order


@dataclass(frozen=True)
class Divergence:
    """One request that differs from plain decoding at the same dtype, temperature and batch size.

    position: index of the first output token that differs.
    token, control_token: the two there; None where that output had ended already.
    margin:   logit of the most probable token minus that of the second, from one cache-free forward of the shared
              prefix (float32 of the model's logits, before any logits processor); None where not computed.
    gap:      logit of the most probable token minus that of the less probable of the two; None as above.
    """

    dtype: str
    temperature: float
    method: str
    batch_size: int
    id: str
    position: int
    token: int | None
    control_token: int | None
    margin: float | None = None
    gap: float | None = None

    @property
    def tie(self) -> bool:
        """Whether both tokens were as good as the most probable one."""
        return self.gap is not None and self.gap < TIE

    def as_row(self) -> dict[str, Any]:
        """As summary.json lists it."""
        return asdict(self) | {"tie": self.tie}


def first_difference(tokens: Sequence[int], control: Sequence[int]) -> int | None:
    """Index of the first place where the two differ, a missing token counting as different."""
    pairs = zip_longest(tokens, control)
    return next((place for place, (token, other) in enumerate(pairs) if token != other), None)


def divergences(records: Iterable[Record], margins: Margins | None) -> list[Divergence]:
    """The first divergence of every request that has one, of the methods whose outputs should equal plain decoding's.

    margins: of the records' one dtype, asked for greedy requests at the cost of a forward per place; None leaves them
    out, and then the records may be of several dtypes."""
    found = []
    for (dtype, temperature), kept in conditions(records).items():
        for method, size, record, control in _comparisons(kept):
            place = first_difference(record.tokens, control.tokens)
            if place is None:
                continue
            ours, theirs = _token(record.tokens, place), _token(control.tokens, place)
            measured = (None, None)
            if margins is not None and temperature == 0:
                measured = margins.after(record.id, control.tokens[:place], ours, theirs)
            found.append(Divergence(dtype, temperature, method, size, record.id, place, ours, theirs, *measured))
    return found


def _comparisons(records: list[Record]) -> Iterator[tuple[str, int, Record, Record]]:
    """Method, batch size, record and control of each request that should be the same, of one dtype and temperature."""
    compared = compared_methods(records)
    for size, methods in grouped(records).items():
        for method, runs in methods.items():
            if method in compared:
                for record, control in paired(runs, control_of(method, methods)):
                    yield method, size, record, control


def _token(tokens: list[int], place: int) -> int | None:
    return tokens[place] if place < len(tokens) else None


class Margins:
    """Teacher-forced logits of divergent prefixes; methods often diverge at the same one.

    prompts: encoded prompt tokens by request id."""

    def __init__(self, model: PreTrainedModel, prompts: dict[str, list[int]]) -> None:
        self._model, self._prompts = model, prompts
        self._logits: dict[tuple[int, ...], torch.Tensor] = {}

    def after(self, id: str, output: list[int], *tokens: int | None) -> tuple[float, float | None]:
        """Top-2 margin after a request's prompt and `output`, and how far the least probable of `tokens` is below the
        top; None for that where one of them is None."""
        logits = self._after((*self._prompts[id], *output))
        first, second = logits.topk(2).values.tolist()
        below = None if None in tokens else first - logits[list(tokens)].min().item()
        return first - second, below

    @torch.inference_mode()
    def _after(self, prefix: tuple[int, ...]) -> torch.Tensor:
        if prefix not in self._logits:
            input_ids = torch.tensor([prefix], device=self._model.device)
            output = self._model(input_ids=input_ids, use_cache=False, logits_to_keep=1)
            self._logits[prefix] = output.logits[0, -1].float().cpu()
        return self._logits[prefix]
