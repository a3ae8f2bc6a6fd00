"""The batch column by column, as plain `generate` goes through it, while rows run ahead of one another.

A criterion of the user's own sees all rows at once, each column as soon as every row has come to it, and what a row has
beyond its stop is taken back; a streamer gets a column when nothing can change it any more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from specdec.requests import Request
from specdec.score_recorder import ScoreRecorder
from specdec.stopping import Stops


class Columns:
    """requests: all rows.   input_ids: [B, c] what `generate` was given.
    stops:    whose criteria are asked here and not in `Stops.cut`, if they ask for all rows together.
    pad:      what a row holds after its end, where `generate` pads; None where it goes on in a row that has stopped,
              for as long as another has not.
    recorder: has the scores, which a criterion sees if they were asked for. Those of padding are zeros here.
    streamer: gets the prompts, and each column [B]; `end` is to be called when all is done.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        input_ids: Tensor,
        stops: Stops,
        pad: int | None,
        recorder: ScoreRecorder | None,
        streamer: BaseStreamer | None,
    ):
        self.requests, self.input_ids, self.stops = requests, input_ids, stops
        self.pad, self.recorder, self.streamer = pad, recorder, streamer
        self.asked = self.streamed = 0  # columns
        self.stopped = np.zeros(len(requests), dtype=bool)
        self.scores: list[Tensor] = []
        if streamer is not None:
            streamer.put(input_ids.cpu())

    def advance(self) -> None:
        """After a step: ask and stream what has become complete."""
        while self.stops.together and self._is_complete(self.asked + 1):
            self.asked += 1
            self._ask()
        while self.streamer is not None and self._is_complete(self.streamed + 1):
            if self.stops.together and self.streamed == self.asked:
                break
            self.streamer.put(torch.from_numpy(self._emitted(self.streamed + 1)[:, -1]))
            self.streamed += 1

    def _is_complete(self, count: int) -> bool:
        """Whether every row has `count` tokens or has ended, and one has them."""
        lengths = [len(request.emitted) for request in self.requests]
        return max(lengths) >= count and all(
            request.done or length >= count for request, length in zip(self.requests, lengths, strict=True)
        )

    def _emitted(self, count: int) -> np.ndarray:
        """[B, count] emitted tokens, then padding."""
        emitted = np.full((len(self.requests), count), 0 if self.pad is None else self.pad, dtype=np.int64)
        for row, request in zip(emitted, self.requests, strict=True):
            row[: len(request.emitted)] = request.emitted[:count]
        return emitted

    def _ask(self) -> None:
        emitted = torch.from_numpy(self._emitted(self.asked)).to(self.input_ids.device)
        stop = self.stops.ask(torch.cat([self.input_ids, emitted], dim=1), self._scores())
        self.stopped |= stop
        for request, stopped in zip(self.requests, self.stopped, strict=True):
            if stopped if self.pad is not None else self.stopped.all():
                self._end(request)

    def _end(self, request: Request) -> None:
        request.done = True
        request.cut(self.asked)
        if self.recorder is not None:
            self.recorder.cut(request)

    def _scores(self) -> tuple[Tensor, ...] | None:
        if self.recorder is None or self.recorder.scores is None:
            return None
        rows = [kept[self.asked - 1] if len(kept) >= self.asked else None for kept in self.recorder.scores]
        like = next(row for row in rows if row is not None)
        self.scores.append(torch.stack([torch.zeros_like(like) if row is None else row for row in rows]))
        return tuple(self.scores)
