"""Do training and serving agree? How often the engine's own drafts are right, at every place of given texts.

The real decode loop runs over each text under a rule that accepts nothing and emits the text's own next token, so that
the drafter meets exactly the prefixes that training met, through its own caches and states.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Literal

import numpy as np
import torch
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from specdec.call_checks import check_positions
from specdec.contracts import Draft, Drafter, Draws, Scores, Verdict
from specdec.loop import Batch
from specdec.processors import Processors
from specdec.requests import Request
from specdec.stopping import Stops
from specdec.target import Target
from train.batches import Example


@dataclass(frozen=True)
class Accuracy:
    """How far chains of predicted tokens follow a text, by depth k = 1..K.

    reached: [K] chains that are right at all earlier depths and whose text has a token at depth k.
    right:   [K] those of them that are right at depth k too.

    Example: reached (4, 2), right (3, 1) gives conditional [3/4, 1/2] and joint [3/4, 3/8]. One of the three chains
    that were right at depth 1 met the end of its text there.
    """

    reached: tuple[int, ...]
    right: tuple[int, ...]

    def __post_init__(self) -> None:
        counts = zip((inf, *self.right), self.reached, self.right, strict=False)
        sound = all(0 <= right <= reached <= before for before, reached, right in counts)
        if len(self.reached) != len(self.right) or not sound:
            raise ValueError(
                f"reached {self.reached} and right {self.right} are not counts of one set of chains: of those that are "
                f"right at a depth some reach the next, and of those some are right"
            )

    @staticmethod
    def none(depths: int) -> Accuracy:
        """Nothing counted yet."""
        return Accuracy((0,) * depths, (0,) * depths)

    @property
    def conditional(self) -> list[float | None]:
        """[K] share that is right at depth k of those that reached it; None where none did."""
        return [right / reached if reached else None for right, reached in zip(self.right, self.reached, strict=True)]

    @property
    def joint(self) -> list[float | None]:
        """[K] share of chains that are right at all depths 1..k; None where none reached depth k.

        The product of the conditional shares, so that a chain whose text ends early counts for the depths that it has
        (Kaplan and Meier's estimate); without such chains it is right[k] / reached[1]."""
        return list(accumulate(self.conditional, lambda before, share: None if share is None else before * share))

    def __add__(self, other: Accuracy) -> Accuracy:
        if len(self.reached) != len(other.reached):
            raise ValueError(
                f"accuracies of {len(self.reached)} and {len(other.reached)} depths cannot be added: count the same "
                f"depths in both"
            )
        return Accuracy(
            tuple(map(operator.add, self.reached, other.reached)), tuple(map(operator.add, self.right, other.right))
        )


def replayed_accuracy(
    model: PreTrainedModel, drafter: Drafter, texts: Sequence[Example], depths: int, batch_size: int
) -> Accuracy:
    """How often `drafter`'s arg-max chains follow `texts`, of which `batch_size` run at a time.

    A chain starts at every slot t >= response_start - 2 (t >= 0) of a text; its draft of depth k = 1..depths stands
    for token t + 1 + k and is counted where the text has one. So all counted tokens are of the response; the first of
    them counts too, although generation never drafts it.

    Raises ValueError for a drafter of trees and for one that drafts fewer than `depths` tokens where a text has them.
    """
    for name, value in (("depths", depths), ("batch_size", batch_size), ("the number of texts", len(texts))):
        if value < 1:
            raise ValueError(f"{name} is {value}: give at least 1")
    target, total = Target(model), Accuracy.none(depths)
    ordered = sorted(texts, key=lambda text: len(text.tokens))  # those that run together then end together
    for first in range(0, len(ordered), batch_size):
        total += _replay(target, drafter, ordered[first : first + batch_size], depths)
    return total


def _replay(target: Target, drafter: Drafter, texts: Sequence[Example], depths: int) -> Accuracy:
    requests = []
    for b, text in enumerate(texts):
        # Nothing is drafted in the step that ends a prompt, so the loop's prompt ends one token before the text's does.
        prompt = text.tokens[: max(1, text.response_start - 1)]
        # One token more than the text has: the loop drafts up to the last but one token that it may emit.
        limit = len(text.tokens) - len(prompt) + 1
        requests.append(Request(b, b, b, np.array(prompt, dtype=np.int64), 0, limit))
    check_positions(target, requests)
    verifier = ReplayVerifier([text.tokens for text in texts], depths, drafter.name)
    ReplayBatch(
        target=target,
        drafter=drafter,
        verifier=verifier,
        processors=Processors(LogitsProcessorList(), target.vocab_size),
        stops=Stops(StoppingCriteriaList()),  # an end token inside a text is a token like any other
        requests=requests,
        seed=0,
        draft_length=depths,
    ).run()
    return verifier.accuracy


class ReplayBatch(Batch):
    """The decode loop as it is, except that its rule learns which requests it judges."""

    verifier: ReplayVerifier

    def verify(self, scored: Sequence[Request], draft: Draft, scores: Scores, draws: Draws) -> Verdict:
        self.verifier.scored = scored
        return super().verify(scored, draft, scores, draws)


class ReplayVerifier:
    """Accepts nothing and emits each text's own next token; counts how far each draft follows the text.

    texts:  the tokens of each request's text, by `Request.index`.
    scored: the requests of the present step, in the order of the draft's rows.
    """

    name = "replay"
    lossless = False
    draws: Literal["argmax"] = "argmax"

    def __init__(self, texts: Sequence[Sequence[int]], depths: int, drafter: str):
        self.texts, self.depths, self.drafter = texts, depths, drafter
        self.scored: Sequence[Request] = ()
        self._reached, self._right = [0] * depths, [0] * depths

    @property
    def accuracy(self) -> Accuracy:
        """All drafts so far."""
        return Accuracy(tuple(self._reached), tuple(self._right))

    def verify(self, draft: Draft, p: Scores, draws: Draws) -> Verdict:
        if draft.parents is not None:
            raise ValueError(f"drafter {self.drafter!r} drafts trees: replay follows chains, make it draft those")
        B, N = draft.tokens.shape
        next_tokens = []
        rows = zip(self.scored, draft.tokens.tolist(), draft.lengths, strict=True)  # a second read per step; not timed
        for request, drafted, length in rows:
            rest = self.texts[request.index][len(request.tokens) :]
            if request.steps:
                self._count(drafted[:length], rest[: self.depths])
            next_tokens.append(rest[0] if rest else 0)  # the text is complete: the token after it is never run
        tokens = draft.tokens
        return Verdict(
            path=torch.full_like(tokens, -1),
            n_accepted=tokens.new_zeros(B),
            next_token=tokens.new_tensor(next_tokens),
            accept_prob=torch.full((B, N), torch.nan, device=tokens.device),
        )

    def _count(self, drafted: Sequence[int], text: Sequence[int]) -> None:
        """One chain against what follows in the text."""
        if len(drafted) != len(text):
            raise ValueError(
                f"drafter {self.drafter!r} drafted {len(drafted)} tokens where {len(text)} were asked for: replay it "
                f"to the depth that it always reaches"
            )
        for depth, (token, expected) in enumerate(zip(drafted, text, strict=True)):
            self._reached[depth] += 1
            if token != expected:
                return
            self._right[depth] += 1
