"""How much of a draft is accepted, by depth: given as probabilities, or counted over the steps of an evaluation."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.theory import expected_length
from specdec.disk import reading


@dataclass(frozen=True)
class Acceptance:
    """Of a chain drafter, by depth 1, 2, ...

    accepted: probability that the draft has a token at this depth and that it is accepted, given that all before it
              were (`eval.theory.expected_length`).
    drafted:  share of steps whose draft is at least this long: 1 for models, less for a drafter that finds no match.
    """

    accepted: tuple[float, ...]
    drafted: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.accepted or len(self.accepted) != len(self.drafted):
            raise ValueError(
                f"acceptance has {len(self.accepted)} depths of accepted and {len(self.drafted)} of drafted tokens: "
                f"give as many of both, and at least one"
            )
        expected_length(self.accepted)  # checks that they are probabilities
        if not all(0 <= share <= 1 for share in self.drafted):
            raise ValueError(f"the shares of steps that draft each depth are {self.drafted}: each is between 0 and 1")
        if any(deeper > share for share, deeper in itertools.pairwise(self.drafted)):
            raise ValueError(
                f"the shares of steps that draft each depth are {self.drafted}: a step that drafts a depth drafts all "
                f"before it, so they never rise"
            )

    @staticmethod
    def given(accepted: Sequence[float]) -> Acceptance:
        """Of a drafter that always fills its budget."""
        return Acceptance(tuple(accepted), (1.0,) * len(accepted))

    @staticmethod
    def of_steps(steps: Iterable[tuple[int, int]]) -> Acceptance:
        """Counted over decode steps (drafted, accepted) of any number of rows.

        At a depth that no step reached acceptance counts as 0. Raises ValueError where no step drafted.
        of_steps([(2, 2), (2, 0), (0, 0)]) has accepted = (1/3, 1), drafted = (2/3, 2/3)."""
        counted = list(steps)
        depths = range(1, 1 + max((drafted for drafted, _ in counted), default=0))
        if not depths:
            raise ValueError("no step drafted a token, so there is no acceptance to plan with: give another drafter")
        reached = [sum(a >= k for _, a in counted) for k in (0, *depths)]
        accepted = [after / before if before else 0.0 for before, after in itertools.pairwise(reached)]
        return Acceptance(tuple(accepted), tuple(sum(d >= k for d, _ in counted) / len(counted) for k in depths))

    @property
    def depth(self) -> int:
        """The longest draft that it says something about."""
        return len(self.accepted)

    def length(self, draft_length: int) -> float:
        """Mean accepted length AL with drafts of at most this many tokens."""
        return expected_length(self.accepted[:draft_length])

    def mean_drafted(self, draft_length: int) -> float:
        """Drafted tokens per row and step."""
        return sum(self.drafted[:draft_length])

    def drafted_shares(self, draft_length: int) -> list[float]:
        """Shares of steps that draft exactly 0, 1, ..., `draft_length` tokens of a row.

        drafted (2/3, 2/3) gives (1/3, 0, 2/3)."""
        at_least = [1.0, *self.drafted[:draft_length], 0.0]
        return [share - deeper for share, deeper in itertools.pairwise(at_least)]


def of_folder(folder: Path, method: str | None, temperature: float | None) -> Acceptance:
    """Of one method in an evaluation's summary.json (None: its only drafter), at one temperature (None: its only one).

    Taken from the method's first row: batch size and dtype hardly change what is accepted. Raises FileNotFoundError for
    a folder without a summary, and ValueError where the row is not clear, listing the choices, or holds no draft."""
    path = folder / "summary.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no summary.json: give a folder that `specdec eval` wrote")
    with reading(f"{path} is not the summary of an evaluation"):
        rows = [
            {key: row[key] for key in ("method", "temperature", "acceptance_by_position", "mean_accepted_length")}
            for row in json.loads(path.read_text())["rows"]
            if row["drafter"] is not None and row["error"] is None
        ]
    row = _chosen(_chosen(rows, "method", method, folder), "temperature", temperature, folder)[0]
    return of_positions(row["acceptance_by_position"], row["mean_accepted_length"])


def of_positions(positions: Sequence[Mapping[str, Any]], mean_accepted_length: float) -> Acceptance:
    """From `eval.acceptance.by_position`, with noise-free acceptance where the rule has one.

    positions: per depth that a step reached, the steps that `drafted` it, its acceptance among those that reached it
        (`conditional`, `noise_free`) and among all of these (`unconditional`).
    mean_accepted_length: AL, which tells how many steps there were: accepted tokens / (AL - 1).
    Worked example, steps as in `Acceptance.of_steps`: two of three drafted both positions, one accepted both.
    conditional is 1/2 and 1, unconditional 1/2 and 1/2, AL 5/3; accepted is (2/3 * 1/2, 1 * 1)."""
    if not positions:
        raise ValueError("no step drafted a token, so there is no acceptance to plan with: give another drafter")
    in_all = sum(position["drafted"] * position["unconditional"] for position in positions)
    steps = round(in_all / (mean_accepted_length - 1)) if in_all else positions[0]["drafted"]
    accepted, before = [], steps
    for position in positions:
        count = position["drafted"] * position["unconditional"]
        reached = count / position["conditional"] if count else 0.0
        known = position["conditional"] if position["noise_free"] is None else position["noise_free"]
        accepted.append(min(reached / before, 1.0) * known)
        before = count
        if not count:
            break
    return Acceptance(tuple(accepted), tuple(position["drafted"] / steps for position in positions[: len(accepted)]))


def _chosen(rows: Sequence[Mapping[str, Any]], key: str, wanted: Any, folder: Path) -> list[Mapping[str, Any]]:
    """Rows whose `key` is `wanted`, or all where that is None and all agree."""
    values = sorted({row[key] for row in rows})
    if wanted is None and len(values) == 1:
        return list(rows)
    if wanted not in values:
        asked = "none was named" if wanted is None else f"not {wanted!r}"
        raise ValueError(
            f"{folder} holds drafters of {key} {', '.join(map(str, values)) or '(none)'}, {asked}: name one"
        )
    return [row for row in rows if row[key] == wanted]
