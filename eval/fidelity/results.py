"""One request on one rung of the ladder: what is known of each of its tokens, in a line of results.jsonl."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from eval.fidelity.samples import Samples

JobKey = tuple[int, int, int]


@dataclass(frozen=True)
class Result:
    """One request on one rung: a line of results.jsonl.

    rung, sample, batch: the job; `seed` is the run's plus `sample`.   rows: requests of the job.
    tokens:     emitted, the stop token included.   steps, drafted: tokens emitted and drafted by each verdict.
    scores:     the processed score of each token where the engine chose it.
    shifts:     that minus the same score by plain teacher forcing; None where the latter is -inf.
    outside:    [position, how far the token's logit is below the lowest kept one] of tokens that teacher forcing gives
                no probability.
    samples:    what the distribution tests need, empty where nothing is sampled.
    replays:    [step, rule, violation] of the steps replayed in float64.
    seconds, collecting: of the whole job, and of it for watching the verifier.
    error:      traceback of what the job raised; all its rows then have no tokens.
    """

    rung: int
    sample: int
    batch: int
    rows: int
    seed: int
    id: str
    number: int
    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    shifts: list[float | None] = field(default_factory=list)
    outside: list[list[float]] = field(default_factory=list)
    samples: Samples = field(default_factory=dict)
    replays: list[list[Any]] = field(default_factory=list)
    verifier: str = ""
    lossless: bool = True
    seconds: float = 0.0
    collecting: float = 0.0
    error: str | None = None

    @property
    def job(self) -> JobKey:
        return self.rung, self.sample, self.batch

    def step_of(self, position: int) -> tuple[int, int]:
        """The verdict that emitted the token at `position`, and the token's place among those of that verdict."""
        for step, count in enumerate(self.steps):
            if position < count:
                return step, position
            position -= count
        raise IndexError(f"request {self.id} has no token at that position")
