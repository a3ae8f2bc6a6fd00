"""The ladder: the same prompts and seed, from plain decoding in high precision to speculation in a batch.

    0  plain, reference precision, one by one      3  the tokens of 1 scored at the width of a verification
    1  plain, one by one                           4  speculative, one by one
    2  plain, in batches                           5  speculative, in batches

Each rung differs from an earlier one in one thing only, so that what changes the output can be told. The control of a
speculative rung is plain decoding at the same batch size. What is looked at on a rung is in `eval.fidelity.observe`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel

import specdec
from eval.fidelity.recorder import Keep, KeptStep, Recorder
from eval.fidelity.rescore import at_width, hf_processors, processed
from eval.fidelity.results import JobKey
from eval.methods import EncodedPrompt, left_padded
from eval.runner import batches
from specdec.contracts import Drafter, Verifier
from specdec.invariant import target_for
from specdec.stats import Stats

TINY = 1_000_000  # parameters, below which the reference precision is float64


@dataclass(frozen=True)
class Rung:
    number: int
    name: str
    reference: bool = False
    batched: bool = False
    speculative: bool = False


REFERENCE, PLAIN, PLAIN_BATCHED, WIDTH, SPECULATIVE, BATCHED = RUNGS = (
    Rung(0, "plain, reference precision", reference=True),
    Rung(1, "plain"),
    Rung(2, "plain, batched", batched=True),
    Rung(3, "teacher-forced at verification width"),
    Rung(4, "speculative", speculative=True),
    Rung(5, "speculative, batched", batched=True, speculative=True),
)
CONTROL = {SPECULATIVE.number: PLAIN.number, BATCHED.number: PLAIN_BATCHED.number}


@dataclass(frozen=True)
class Job:
    """A batch of prompts on a rung, with the run's seed plus `sample`."""

    rung: Rung
    sample: int
    batch: int
    prompts: Sequence[EncodedPrompt]

    @property
    def key(self) -> JobKey:
        return self.rung.number, self.sample, self.batch


@dataclass(frozen=True)
class Watched:
    """A finished call: its recorder with one log per row, its statistics and its host seconds."""

    recorder: Recorder
    stats: Stats
    seconds: float


@dataclass(frozen=True, eq=False)
class Ladder:
    """What is held against what.

    verifier: makes the rule anew for each call, since a rule may remember its last draft.
    sampling: keyword arguments of `generate`.   stops: ids that end a request.   pad: fills up shorter rows.
    samples:  seeds of the last rung, from `seed` on.   invariant: run every rung in specdec's invariant mode.
    compile:  run every rung through compiled forwards; what they are rescored by stays the model's own.
    """

    model: PreTrainedModel
    prompts: Sequence[EncodedPrompt]
    drafter: Drafter
    verifier: Callable[[], Verifier]
    draft_length: int
    batch_size: int
    max_new_tokens: int
    sampling: dict[str, Any]
    stops: frozenset[int]
    pad: int
    seed: int = 0
    samples: int = 1
    invariant: bool = False
    compile: bool = False

    @property
    def compares_tokens(self) -> bool:
        """Whether speculative and plain outputs must be the same tokens: not where each draws in its own way."""
        return self.verifier().draws != "fresh"

    @cached_property
    def reference(self) -> PreTrainedModel:
        """The same weights in float64 where the model is tiny, else in float32, so that only arithmetic differs."""
        tiny = sum(weight.numel() for weight in self.model.parameters()) < TINY
        dtype = torch.float64 if tiny else torch.float32
        return self.model if self.model.dtype == dtype else copy.deepcopy(self.model).to(dtype)

    @property
    def reference_is_wider(self) -> bool:
        """Whether the reference precision is higher than the one that serves."""
        return torch.finfo(self.reference.dtype).bits > torch.finfo(self.model.dtype).bits

    def jobs(self) -> Iterator[Job]:
        """In the order of the rungs; only the last one is sampled with more than one seed."""
        for rung in RUNGS:
            size = self.batch_size if rung.batched else 1
            for sample in range(self.samples if rung is BATCHED else 1):
                for batch, rows in enumerate(batches(self.prompts, size)):
                    yield Job(rung, sample, batch, rows)

    def watch(self, job: Job, keep: Keep) -> Watched:
        """Run the job with its verifier watched."""
        model = self.reference if job.rung.reference else self.model
        drafter = self.drafter if job.rung.speculative else None
        return self.decode(model, job.prompts, drafter, keep, self.seed + job.sample)

    def again(self, job: Job, wanted: Collection[tuple[int, int]]) -> dict[tuple[int, int], KeptStep]:
        """Run the job once more and keep the steps `wanted` in full, as {(row, step): kept}."""
        recorder = self.watch(job, lambda row, step: (row, step) in wanted).recorder
        return {(row, kept.step): kept for row, log in enumerate(recorder.rows) for kept in log.kept}

    def decode(
        self, model: PreTrainedModel, prompts: Sequence[EncodedPrompt], drafter: Drafter | None, keep: Keep, seed: int
    ) -> Watched:
        """One call of the engine, plain where `drafter` is None."""
        recorder = Recorder(self.verifier(), len(prompts), keep)
        input_ids, mask = self.columns(prompts)
        started = time.perf_counter()
        _, stats = specdec.generate(
            model,
            input_ids,
            attention_mask=mask,
            drafter=drafter,
            draft_length=self.draft_length,
            verifier=recorder,
            on_commit=recorder.on_commit,
            seed=seed,
            request_ids=[prompt.number for prompt in prompts],
            return_stats=True,
            invariant=self.invariant,
            compile=self.compile,
            **self._generate_arguments,
        )
        return Watched(recorder, stats, time.perf_counter() - started)

    def columns(self, prompts: Sequence[EncodedPrompt]) -> tuple[torch.Tensor, torch.Tensor]:
        """input_ids and attention_mask [B, columns] of a batch."""
        return left_padded([prompt.tokens for prompt in prompts], self.pad, self.model.device)

    def processors(self, prompts: Sequence[EncodedPrompt], row: int = 0) -> LogitsProcessorList:
        """HF's own for one row of a batch: some hold data by row, and all of its columns count, padding too."""
        input_ids, mask = (columns[row : row + 1] for columns in self.columns(prompts))
        return hf_processors(self.model, input_ids, attention_mask=mask, **self._generate_arguments)

    def scores_at_width(self, prompt: EncodedPrompt, tokens: Sequence[int]) -> torch.Tensor:
        """[T, V] processed scores before each of `tokens`, from forwards as wide as a verification's."""
        target = target_for(self.model, self.invariant)
        target.compile(self.compile)
        raw = at_width(target, prompt.tokens, tokens, self.draft_length + 1)
        return processed(self.processors([prompt]), prompt.tokens, tokens, raw)

    @property
    def _generate_arguments(self) -> dict[str, Any]:
        return {"max_new_tokens": self.max_new_tokens, "pad_token_id": self.pad, **self.sampling}
