"""What a call returns, in `generate`'s layout: sequences, scores, logits and the cache, one column per emitted token.

`generate` goes on with padding in a row that has ended until the last row ends, and returns what the model makes of
it. Here that is one forward at the end, and only where something of it is returned.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput

from specdec.compat import CACHE_FIELD, cached_tokens
from specdec.contracts import Draft, Scores
from specdec.invariant import InvariantTarget
from specdec.layer_outputs import layer_outputs
from specdec.loop import Batch
from specdec.requests import Request
from specdec.stats import Stats
from specdec.step import Segment
from specdec.target import Target


class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """What `generate` returns with `return_dict_in_generate=True`, with `stats` (specdec.stats.Stats) beside it."""

    stats: Stats | None = None


def collect(
    batch: Batch, input_ids: Tensor, config: GenerationConfig, cache: Cache | None
) -> SpeculativeOutput | Tensor:
    """The output of a batch that has run, the sequences alone if no more was asked for. `cache` (HF's, may be None)
    gets the keys and values of all columns but the last, as `generate` leaves it; it is empty still, or holds the
    prompts."""
    pad = pad_token(config)
    longest = max(len(request.emitted) for request in batch.requests)
    if batch.keeps_cache:
        for request in batch.requests:  # of some, a criterion took tokens back
            batch.cache.lengths[request.row] = request.slots - 1
        run_padding(batch, longest, pad)
    sequences = assemble(batch.requests, input_ids, pad)
    columns = (cached_tokens(cache) or input_ids.shape[1]) + longest - 1
    layers = {}
    if batch.reader is not None and batch.reader.asked and config.return_dict_in_generate:
        layers = layer_outputs(batch.reader, sequences[:, input_ids.shape[1] :], cached=cache is not None)
    if cache is not None:
        fill(cache, batch, columns)
    if not config.return_dict_in_generate:
        return sequences
    recorded = batch.recorder
    output = SpeculativeOutput(
        sequences=sequences,
        scores=None if recorded is None else recorded.columns(recorded.scores, longest),
        logits=None if recorded is None else recorded.columns(recorded.logits, longest),
        **{CACHE_FIELD: cache},
        **layers,
    )
    output.stats = batch.stats
    return output


def pad_token(config: GenerationConfig) -> int:
    """What stands after a row's end."""
    return 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)


def assemble(requests: Sequence[Request], input_ids: Tensor, pad: int) -> Tensor:
    """[B, columns + longest output] as HF returns it: prompts, outputs, then the pad token."""
    longest = max(len(request.emitted) for request in requests)
    out = np.full((len(requests), longest), pad, dtype=np.int64)
    for b, request in enumerate(requests):
        out[b, : len(request.emitted)] = request.emitted
    return torch.cat([input_ids, torch.from_numpy(out).to(input_ids.device)], dim=1)


@torch.no_grad()
def run_padding(batch: Batch, longest: int, pad: int) -> None:
    """Run the last token and the padding of every row that ended early, all but the last column's."""
    short = [request for request in batch.requests if len(request.emitted) < longest]
    if not short:
        return
    lengths = [longest - len(request.emitted) - 1 for request in short]
    pads = torch.full((len(short), max(lengths)), pad, device=batch.target.device)
    draft = Draft(pads, lengths)
    segments = [Segment(r.row, r.tokens[-1:], r.slots - 1, True, r.shift) for r in short]
    target = batch.target
    if isinstance(target, InvariantTarget):  # whose forwards may be too narrow; no request's bits depend on these
        target = Target(target.model)
    step = target.pack(segments, draft, batch.cache)
    logits, _ = target.forward(step, batch.cache)
    batch.count(step)
    for request, length in zip(short, lengths, strict=True):
        batch.cache.lengths[request.row] += 1 + length
    if batch.recorder is not None:
        scores = batch.processed(short, draft, Scores(logits, step.index))
        for b, request in enumerate(short):
            batch.recorder.take(request, step.index[b, : lengths[b] + 1], logits, scores.logits)


def fill(cache: Cache, batch: Batch, columns: int) -> None:
    """Give `cache` the keys and values of the columns that it lacks of `columns`; zeros where a row has padding."""
    present = cached_tokens(cache)
    if present == columns:
        return
    for index, layer in enumerate(batch.cache.layers):
        new = []
        for buffer in (layer.keys, layer.values):
            states = buffer.new_zeros(len(batch.requests), buffer.shape[1], columns - present, buffer.shape[3])
            for b, request in enumerate(batch.requests):
                slots = buffer[batch.cache.place(request.row), :, : batch.cache.lengths[request.row]]
                count = min(slots.shape[1], columns - present)
                states[b, :, columns - present - count :] = slots[:, slots.shape[1] - count :]
            new.append(states)
        cache.update(*new, index)
