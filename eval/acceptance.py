"""What a drafter's tokens were worth, as `specdec.stats` defines it, with intervals by prompt.

A decode step of a row that drafted nothing counts in the accepted length (as 1) and in nothing else here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from eval.bootstrap import ratio_interval
from eval.runner import Record


@dataclass
class Counts:
    """Sums over the decode steps of one conversation.

    probability, reached: sum of the acceptance probabilities at reached positions that have one, and their number.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    probability: float = 0.0
    reached: int = 0

    def add(self, record: Record) -> None:
        known = [p for step in record.accept_prob or () for p in step if p is not None]
        self.steps += len(record.accepted)
        self.drafted += sum(record.drafted)
        self.accepted += sum(record.accepted)
        self.probability += sum(known)
        self.reached += len(known)


@dataclass
class Position:
    """Decode steps that drafted a token at one position: how many, how many reached it, how many accepted it."""

    drafted: int = 0
    reached: int = 0
    accepted: int = 0
    probabilities: list[float] = field(default_factory=list)

    def as_row(self) -> dict[str, float | int | None]:
        return {
            "drafted": self.drafted,
            "conditional": _ratio(self.accepted, self.reached),
            "unconditional": _ratio(self.accepted, self.drafted),
            "noise_free": _ratio(sum(self.probabilities), len(self.probabilities)),
        }


def acceptance(records: Sequence[Record]) -> dict[str, Any]:
    """Accepted length and acceptance of one row of the table; each None where nothing was counted.

    noise_free_acceptance: mean over reached positions of the probability with which the drafted token was accepted:
        min(1, p/q), whose mean over q is sum min(p, q); p for one-hot drafts; 0 or 1 for greedy and coupled rules.
    *_interval: 95% bootstrap intervals over conversations.
    """
    by_conversation: dict[str, Counts] = defaultdict(Counts)
    for record in records:
        if record.accepted is not None:
            by_conversation[record.conversation].add(record)
    counts = list(by_conversation.values())

    def ratio(name: str, above: str, below: str, plus: int = 0) -> dict[str, Any]:
        values = [[getattr(count, key) for count in counts] for key in (above, below)]
        estimate, interval = _ratio(sum(values[0]), sum(values[1])), ratio_interval(*values)
        return {
            name: None if estimate is None else plus + estimate,
            f"{name}_interval": interval and [plus + end for end in interval],
        }

    return {
        **ratio("mean_accepted_length", "accepted", "steps", plus=1),
        **ratio("acceptance_rate", "accepted", "drafted"),
        **ratio("noise_free_acceptance", "probability", "reached"),
        "drafted_per_step": _ratio(sum(count.drafted for count in counts), sum(count.steps for count in counts)),
    }


def by_position(records: Iterable[Record]) -> list[dict[str, float | int | None]]:
    """Per drafted position from the first on: the steps that drafted it, its acceptance among those that reached it
    (conditional) and among all of these (unconditional), and the mean acceptance probability where reached.

    In a tree position k is depth k, and a path that ends at a leaf counts as rejected there.
    Example: steps that drafted [2, 2, 1] and accepted [2, 0, 1]: conditional 2/3 and 1/1, unconditional 2/3 and 1/2."""
    positions: list[Position] = []
    for record in records:
        if record.accepted is None:
            continue
        probabilities = record.accept_prob or [()] * len(record.accepted)
        for drafted, accepted, known in zip(record.drafted, record.accepted, probabilities, strict=True):
            positions += [Position() for _ in range(drafted - len(positions))]
            for k, position in enumerate(positions[:drafted]):
                position.drafted += 1
                position.reached += accepted >= k
                position.accepted += accepted > k
            for position, p in zip(positions, known, strict=False):
                if p is not None:
                    position.probabilities.append(p)
    return [position.as_row() for position in positions if position.reached]


def _ratio(above: float, below: float) -> float | None:
    return above / below if below else None
