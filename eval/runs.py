"""Records put together again: one run per timed call, runs by batch size and method, and pairs to compare."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from eval.runner import Failure, Record

Kind = TypeVar("Kind", bound=Record | Failure)

CONTROL = "plain"
COUPLED_CONTROL = "plain (coupled)"
DEFAULT_MODE = "plain (default mode)"


@dataclass(frozen=True)
class Run:
    """One timed call: the records of one method's pass over one batch."""

    records: list[Record]

    @property
    def seconds(self) -> float:
        return self.records[0].batch_seconds

    @property
    def tokens(self) -> int:
        return sum(len(record.tokens) for record in self.records)

    @property
    def speed(self) -> float:
        """Tokens per second, prefill included."""
        return self.tokens / self.seconds

    @property
    def decode_speed(self) -> float | None:
        """Tokens per second from when every row has its first token; None where none were left to emit then."""
        first = self.records[0]
        seconds, tokens = self.seconds - first.batch_prefill_seconds, self.tokens - first.batch_prefill_tokens
        return tokens / seconds if tokens > 0 and seconds > 0 else None


Runs = dict[tuple[int, int], Run]  # by batch and repeat


def sound(results: Iterable[Record | Failure]) -> list[Record]:
    """The records of rows of which no job raised."""
    kept = list(results)
    broken = {result.row for result in kept if isinstance(result, Failure)}
    return [result for result in kept if result.row not in broken]


def conditions(records: Iterable[Kind]) -> dict[tuple[str, float], list[Kind]]:
    """Records, or failures, by dtype and temperature, in the order of the first of each."""
    found: dict[tuple[str, float], list[Kind]] = defaultdict(list)
    for record in records:
        found[record.dtype, record.temperature].append(record)
    return dict(found)


def grouped(records: Iterable[Record]) -> dict[int, dict[str, Runs]]:
    """Runs of one dtype and temperature by batch size and method, in the order of their first record."""
    found: dict[int, dict[str, dict[tuple[int, int], list[Record]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for record in records:
        found[record.batch_size][record.method][record.batch, record.repeat].append(record)
    return {
        size: {method: {key: Run(rows) for key, rows in runs.items()} for method, runs in methods.items()}
        for size, methods in found.items()
    }


def control_of(method: str, found: dict[str, Runs]) -> Runs:
    """The plain runs whose outputs a method's should equal: coupled ones for the coupled rule where there are both."""
    if COUPLED_CONTROL in found and _verifier(found[method]) == "coupled":
        return found[COUPLED_CONTROL]
    return found.get(CONTROL, {})


def paired(runs: Runs, control: Runs) -> list[tuple[Record, Record]]:
    """Each request of the first pass with the same request of the control's."""
    return [
        pair
        for key, run in runs.items()
        if key[1] == 0 and key in control
        for pair in zip(run.records, control[key].records, strict=True)
    ]


def compared_methods(records: Iterable[Record]) -> set[str]:
    """Methods, of one dtype and temperature, whose outputs should equal plain decoding's token by token.

    All of them without sampling. With it HF draws other random numbers, and so does every rule but the coupled one, by
    design: there only coupled methods are compared."""
    return {
        record.method
        for record in records
        if record.method not in (CONTROL, COUPLED_CONTROL) and (record.temperature == 0 or record.verifier == "coupled")
    }


def _verifier(runs: Runs) -> str | None:
    return next(iter(runs.values())).records[0].verifier
