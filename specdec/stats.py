"""What a generation did: counted work, accepted lengths per row and step, and where the time went.

Definitions (used by every report): a *decode step* of a row is a step in which it was scored with its prompt already
in the cache, so the step that ends its prefill is not one. Mean accepted length (AL) = accepted drafted tokens + 1
per decode step and row, before any cut at a stop. Acceptance rate = accepted / drafted tokens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

PHASES = ("draft", "forward", "verify", "loop")


@dataclass
class RowStats:
    """One request. `drafted`, `accepted` and `accept_prob` have one entry per decode step; an entry of `accept_prob`
    lists, per reached drafted position, the probability with which its token was accepted (None where the rule
    defines none)."""

    request_id: int
    prompt_tokens: int
    emitted: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    accept_prob: list[list[float | None]] = field(default_factory=list)

    def record(self, drafted: int, accepted: int, accept_prob: np.ndarray) -> None:
        """One decode step; `accept_prob` [N] as in `Verdict`."""
        reached = accept_prob[: min(drafted, accepted + 1)].tolist()
        self.drafted.append(drafted)
        self.accepted.append(accepted)
        self.accept_prob.append([None if p != p else p for p in reached])


@dataclass
class Stats:
    """A whole call. `rows` are in the order of the output's rows.

    forwards:         target forwards, those that only prefill included.
    decode_forwards:  steps with no prompt token in them, each of which is one forward but where shapes are fixed.
    packed_tokens:    tokens run through the target in all forwards, with what fills fixed shapes up.
    syncs:            device-to-host reads of the loop.
    compile_seconds:  wall time of compiling forwards, before the first step; in no phase.
    seconds:          host wall time by phase: "draft" (propose and observe), "forward" (the target), "verify"
                      (processors and verification), "loop" (all the rest), over steps without prompt tokens; and
                      "prefill", every phase of the steps with prompt tokens.
    """

    drafter: str
    verifier: str
    lossless: bool
    rows: list[RowStats] = field(default_factory=list)
    forwards: int = 0
    decode_forwards: int = 0
    packed_tokens: int = 0
    syncs: int = 0
    compile_seconds: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*PHASES, "prefill"), 0.0))

    @property
    def emitted(self) -> int:
        """Tokens emitted in all rows, after the cut at stops."""
        return sum(row.emitted for row in self.rows)

    @property
    def mean_accepted_length(self) -> float | None:
        """AL, or None where no decode step ran."""
        steps = sum(len(row.accepted) for row in self.rows)
        return 1 + sum(sum(row.accepted) for row in self.rows) / steps if steps else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted tokens, or None where nothing was drafted."""
        drafted = sum(sum(row.drafted) for row in self.rows)
        return sum(sum(row.accepted) for row in self.rows) / drafted if drafted else None

    def summary(self) -> str:
        """One line for a person."""
        rate = "-" if self.acceptance_rate is None else f"{self.acceptance_rate:.0%}"
        length = "-" if self.mean_accepted_length is None else f"{self.mean_accepted_length:.2f}"
        seconds = sum(self.seconds.values())
        compiled = f" after {self.compile_seconds:.0f} s of compiling" if self.compile_seconds >= 1 else ""
        lossy = "" if self.lossless else "LOSSY RULE, output does not follow the target; "
        return (
            f"{lossy}{self.emitted} tokens in {seconds:.1f} s{compiled} ({self.emitted / max(seconds, 1e-9):.1f} "
            f"tokens/s), mean accepted length {length}, acceptance rate {rate}, {self.forwards} target forwards "
            f"(drafter {self.drafter}, verifier {self.verifier})"
        )


class Clock:
    """Adds the host time since the last lap to a phase of the statistics, and of this step."""

    def __init__(self, stats: Stats):
        self.seconds = stats.seconds
        self.step = dict.fromkeys(PHASES, 0.0)
        self.prefill = False
        self.last = time.perf_counter()

    def start(self) -> None:
        """A step begins; `prefill` is to be set before its first lap."""
        self.step = dict.fromkeys(PHASES, 0.0)
        self.last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.step[phase] += now - self.last
        self.seconds["prefill" if self.prefill else phase] += now - self.last
        self.last = now
