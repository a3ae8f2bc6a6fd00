"""From the target's logits to p: Hugging Face's logits processors at every scored position of a step.

A processor sees what it would see in plain `generate`: the ids of its own position's prefix, in HF's column layout
(left pads included), with the drafted path to that position appended. Processors that never look at the prefix run
once over all R positions. The others run once per prefix length, or once for all where that is known to be the same.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from specdec.contracts import Draft

PREFIX_FREE = {
    hf.TemperatureLogitsWarper,
    hf.TopKLogitsWarper,
    hf.TopPLogitsWarper,
    hf.TopHLogitsWarper,
    hf.MinPLogitsWarper,
    hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper,
    hf.EtaLogitsWarper,
    hf.SuppressTokensLogitsProcessor,
    hf.InfNanRemoveLogitsProcessor,
    hf.LogitNormalization,
}
# Processors that look at the prefix's length only, do the same at every length where they act, and nothing elsewhere.
ACTS_AT_LENGTH = {
    hf.MinLengthLogitsProcessor: lambda self, length: length < self.min_length,
    hf.MinNewTokensLengthLogitsProcessor: lambda self, length: (
        length - self.prompt_length_to_skip < self.min_new_tokens
    ),
    hf.ForcedBOSTokenLogitsProcessor: lambda self, length: length == 1,
    hf.ForcedEOSTokenLogitsProcessor: lambda self, length: length == self.max_length - 1,
    hf.SuppressTokensAtBeginLogitsProcessor: lambda self, length: length == self.begin_index,
}
REFUSED = {
    hf.UnbatchedClassifierFreeGuidanceLogitsProcessor: "it keeps a cache of its own (guidance_scale)",
    hf.ClassifierFreeGuidanceLogitsProcessor: "it needs a conditional and an unconditional row per request",
    hf.DiaClassifierFreeGuidanceLogitsProcessor: "it needs a conditional and an unconditional row per request",
    hf.SynthIDTextWatermarkLogitsProcessor: "it keeps state that a rejected draft cannot roll back (watermarking)",
}


@dataclass(frozen=True)
class Prefixes:
    """What stands before each of the R scored positions: row by row, the root first, then the row's drafted nodes.

    columns:  per row, its ids in HF's column layout (left pads, prompt, emitted tokens): host int64 arrays.
    requests: per row, its index in the batch that the user passed.
    draft:    the step's draft.
    parents:  host copy of `draft.parents` for a tree, None for a chain.
    unseen:   per row, columns of HF's layout that `columns` does without: processors of lengths alone count them.

    Nothing is built until a processor asks. Example: columns [[7, 8]], chain draft [[4, 5]]: lengths = [2, 3, 4],
    ids = [[7, 8, 0, 0], [7, 8, 4, 0], [7, 8, 4, 5]].
    """

    columns: Sequence[np.ndarray]
    requests: Sequence[int]
    draft: Draft
    parents: np.ndarray | None = None
    unseen: Sequence[int] = ()

    @cached_property
    def rows(self) -> np.ndarray:
        """[R] row of each scored position."""
        return np.repeat(np.arange(len(self.columns)), np.asarray(self.draft.lengths, dtype=np.int64) + 1)

    @cached_property
    def paths(self) -> np.ndarray:
        """[R, P] drafted-token indices from the root to each scored position, then -1."""
        paths = []
        for row, count in enumerate(self.draft.lengths):
            first = len(paths)
            paths.append([])
            for node in range(count):
                parent = node - 1 if self.parents is None else int(self.parents[row, node])
                paths.append([*paths[first + 1 + parent], node])
        longest = max(map(len, paths), default=0)
        padded = [path + [-1] * (longest - len(path)) for path in paths]
        return np.array(padded, dtype=np.int64).reshape(len(paths), longest)

    @cached_property
    def lengths(self) -> np.ndarray:
        """[R] number of ids in each prefix."""
        committed = np.array([len(ids) for ids in self.columns], dtype=np.int64)
        return committed[self.rows] + (self.paths >= 0).sum(1)

    @property
    def unseen_columns(self) -> np.ndarray:
        """[R] `unseen` of each scored position's row, 0 where it was not given."""
        return np.array(self.unseen or [0] * len(self.columns), dtype=np.int64)[self.rows]

    @cached_property
    def layout_lengths(self) -> np.ndarray:
        """[R] the same in HF's layout of the whole batch, which processors of lengths are made for."""
        return self.lengths + self.unseen_columns

    @cached_property
    def ids(self) -> Tensor:
        """[R, L] int64 prefixes on the draft's device, right-padded with 0."""
        R, P = self.paths.shape
        committed = np.zeros((len(self.columns), max(map(len, self.columns), default=0) + P + 1), dtype=np.int64)
        for row, ids in enumerate(self.columns):
            committed[row, : len(ids)] = ids
        last = committed.shape[1] - 1  # receives what is past the end of a path
        starts = np.array([len(ids) for ids in self.columns], dtype=np.int64)[self.rows, None]
        targets = np.where(self.paths >= 0, starts + np.arange(P), last)
        device = self.draft.tokens.device
        rows, paths, targets = (_sent(a, device) for a in (self.rows, self.paths.clip(0), targets))
        drafted = self.draft.tokens[rows[:, None], paths]
        return _sent(committed, device)[rows].scatter_(1, targets, drafted)[:, :last]

    @cached_property
    def groups(self) -> list[tuple[Tensor, int]]:
        """Scored positions [n] of equal prefix length, and that length."""
        device = self.draft.tokens.device
        return [
            (_sent(np.flatnonzero(self.lengths == length), device), int(length)) for length in np.unique(self.lengths)
        ]

    @property
    def batch_rows(self) -> np.ndarray:
        """[R] index in the user's batch of each scored position's request."""
        return np.asarray(self.requests, dtype=np.int64)[self.rows]


class Processors:
    """A call's processors, applied to packed scores in HF's order, in float32 as HF applies them.

    Processors are taken to be functions of (prefix, scores); a user's own are called with rows of equal prefix length
    that may belong to any requests. NotImplementedError for those of HF's that are known to be something else.

    rows: rows of the user's batch after the expansion for `num_return_sequences`, for processors made before it.
    """

    def __init__(self, processors: LogitsProcessorList, vocab_size: int, rows: int | None = None):
        for processor in processors:
            if type(processor) in REFUSED:
                raise NotImplementedError(
                    f"{type(processor).__name__} cannot be used with speculative decoding: {REFUSED[type(processor)]}; "
                    f"remove it from the generation config or the processors"
                )
        self.processors = [_for_rows(processor, rows) for processor in processors]
        self.vocab_size = vocab_size

    @property
    def is_identity(self) -> bool:
        """True where there is no processor at all."""
        return not self.processors

    def warp(self, logits: Tensor) -> Tensor:
        """[n, V] draft logits after the processors that need no prefix: what makes q resemble p.

        Any q is exact as long as the verifier is told; the prefix-dependent processors are left out for their cost."""
        free = [processor for processor in self.processors if type(processor) in PREFIX_FREE]
        scores = logits.float() if free else logits
        for processor in free:
            scores = processor(None, scores)
        return scores

    def apply(self, logits_RV: Tensor, prefixes: Prefixes) -> Tensor:
        """[R, V] float32 scores whose softmax is p at each scored position."""
        scores = logits_RV.float()
        for processor in self.processors:
            if type(processor) in PREFIX_FREE:
                scores = processor(None, scores)
            elif type(processor) in ACTS_AT_LENGTH:
                scores = _apply_at_lengths(processor, scores, prefixes)
            elif type(processor) is hf.ExponentialDecayLengthPenalty:
                scores = _decayed(processor, scores, prefixes)
            elif type(processor) is hf.RepetitionPenaltyLogitsProcessor:
                scores = self._penalise(processor, scores, prefixes)
            else:
                scores = _apply_by_length(processor, scores, prefixes)
        return scores

    def _penalise(self, processor, scores: Tensor, prefixes: Prefixes) -> Tensor:
        # One more column, and prefixes right-padded with its id, let all lengths share one call.
        lengths = _sent(prefixes.lengths, scores.device)
        columns = torch.arange(prefixes.ids.shape[1], device=scores.device)
        ids = prefixes.ids.masked_fill(columns >= lengths[:, None], self.vocab_size)
        wider = torch.nn.functional.pad(scores, (0, 1))
        return _for_requests(processor, prefixes, slice(None))(ids, wider)[:, : self.vocab_size].contiguous()


def _apply_at_lengths(processor, scores: Tensor, prefixes: Prefixes) -> Tensor:
    """One call for all positions at which a processor of ACTS_AT_LENGTH does anything, none if there is none."""
    lengths = prefixes.layout_lengths.tolist()
    active = np.flatnonzero([ACTS_AT_LENGTH[type(processor)](processor, n) for n in lengths])
    if len(active) == 0:
        return scores
    index = _sent(active, scores.device)
    any_prefix = index.new_zeros(1, 1).expand(len(active), lengths[active[0]])
    return scores.index_copy(0, index, processor(any_prefix, scores[index]))


def _decayed(processor, scores: Tensor, prefixes: Prefixes) -> Tensor:
    """One call per length in HF's layout, which is what it counts from the prompts' on; it looks at nothing else."""
    result = torch.empty_like(scores)
    for length in np.unique(prefixes.layout_lengths).tolist():
        index = _sent(np.flatnonzero(prefixes.layout_lengths == length), scores.device)
        any_prefix = index.new_zeros(1, 1).expand(len(index), length)
        result.index_copy_(0, index, processor(any_prefix, scores[index]))
    return result


def _apply_by_length(processor, scores: Tensor, prefixes: Prefixes) -> Tensor:
    """One HF call per prefix length; through a list, for HF's own check of the arguments a processor asks for."""
    result = torch.empty_like(scores)
    for index, length in prefixes.groups:
        call = LogitsProcessorList([_for_requests(processor, prefixes, prefixes.lengths == length)])
        result.index_copy_(0, index, call(prefixes.ids[index, :length], scores[index]).float())
    return result


def _for_rows(processor, rows: int | None):
    """A processor that holds data of the batch as given, with that of the batch as expanded to `rows`."""
    if type(processor) is hf.EncoderRepetitionPenaltyLogitsProcessor:
        given = processor.encoder_input_ids
        processor = copy.copy(processor)
        processor.encoder_input_ids = given.repeat_interleave((rows or len(given)) // len(given), dim=0)
    elif type(processor) is hf.EncoderNoRepeatNGramLogitsProcessor:
        copies = (rows or processor.batch_size) // processor.batch_size
        processor = copy.copy(processor)
        processor.generated_ngrams = [ngrams for ngrams in processor.generated_ngrams for _ in range(copies)]
    return processor


def _for_requests(processor, prefixes: Prefixes, chosen: np.ndarray | slice):
    """A processor that holds data per row of the user's batch, as one for the `chosen` of the R scored positions."""
    batch_rows = prefixes.batch_rows[chosen]
    if type(processor) is hf.RepetitionPenaltyLogitsProcessor and torch.is_tensor(processor.prompt_ignore_length):
        processor = copy.copy(processor)
        ignored = processor.prompt_ignore_length  # of each request's columns in HF's layout, the padding
        rows, unseen = (_sent(a, ignored.device) for a in (batch_rows, prefixes.unseen_columns[chosen]))
        processor.prompt_ignore_length = ignored[rows] - unseen
    elif type(processor) is hf.EncoderRepetitionPenaltyLogitsProcessor:
        processor = copy.copy(processor)
        given = processor.encoder_input_ids
        processor.encoder_input_ids = given[_sent(batch_rows, given.device)]
    elif type(processor) is hf.EncoderNoRepeatNGramLogitsProcessor:
        processor = copy.copy(processor)
        processor.generated_ngrams = [processor.generated_ngrams[row] for row in batch_rows]
        processor.batch_size = len(batch_rows)
    elif type(processor) is hf.PrefixConstrainedLogitsProcessor:
        allowed, beams = processor._prefix_allowed_tokens_fn, processor._num_beams
        return hf.PrefixConstrainedLogitsProcessor(lambda row, ids: allowed(int(batch_rows[row]) // beams, ids), 1)
    return processor


def _sent(values: np.ndarray, device: torch.device) -> Tensor:
    """A host array on the device, without waiting for it."""
    return torch.from_numpy(values).to(device, non_blocking=True)
