"""Where the time of a decode step goes, part of `specdec bench step`: drafting, forward, verification and the loop.

The real loop on real prompts, plain and with drafts in turns, no row ending. Ideal speed-up, as in `eval.theory`:
AL x T_plain / (T_draft + T_forward + T_verify), so achieved / ideal is what the loop leaves of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from eval.launches import launches, shown
from eval.plan.show import Columns
from eval.plan.steady import Steady, steady, warm
from eval.theory import ideal_speedup
from eval.timing import quartiles
from specdec.contracts import Drafter
from specdec.stats import PHASES

COLUMNS: Columns = {
    "rows": lambda row: str(row["rows"]),
    "method": lambda row: row["method"],
    "AL": lambda row: f"{row['mean_accepted_length']:.2f}",
    "step ms": lambda row: f"{1e3 * sum(row['phases'].values()):.2f}",
    **{
        phase: lambda row, phase=phase: f"{1e3 * row['phases'][phase]:.2f} ({row['shares'][phase]:.1%})"
        for phase in PHASES
    },
    "speed-up": lambda row: _ratio(row, "speedup"),
    "of ideal": lambda row: _ratio(row, "achieved_of_ideal"),
    "launches": lambda row: shown(row["launches"]),
    "syncs": lambda row: shown(row["syncs"]),
}


def measure(
    model: PreTrainedModel,
    drafter: Drafter,
    draft_length: int,
    prompts: Sequence[Sequence[int]],
    batch_sizes: Sequence[int],
    steps: int,
    repeats: int,
    compile: bool = False,
) -> list[dict[str, Any]]:
    """Two rows per batch size, plain decoding and the drafter, on its first prompts. compile: the target's forwards are
    compiled, the drafter's as it is set to."""
    methods = {"plain": (None, 0), drafter.name: (drafter, draft_length)}
    rows = []
    for B in batch_sizes:
        runs: dict[str, list[Steady]] = {name: [] for name in methods}
        if compile:  # on CUDA a graph is recorded at every size that it meets, which is to happen here
            for method in methods.values():
                steady(model, *method, prompts[:B], steps, compile)
        for _ in range(repeats):
            for name, method in methods.items():
                runs[name].append(steady(model, *method, prompts[:B], steps, compile))
        for name, method in methods.items():
            with warm(model, *method, prompts[:B], 2, compile) as batch:
                calls = launches(batch.step, model.device, compile)
            rows.append({"rows": B, "method": name, **summary(runs[name], runs["plain"]), **calls})
    return rows


def summary(runs: Sequence[Steady], plain: Sequence[Steady]) -> dict[str, Any]:
    """Seconds of a step by phase (means over all steps) and their shares; ratios of the runs to the plain ones that
    they were paired with, median and quartiles."""
    joined = Steady.joined(runs)
    phases = {phase: seconds / joined.steps for phase, seconds in joined.seconds.items()}
    speedups = [run.tokens_per_second / base.tokens_per_second for run, base in zip(runs, plain, strict=True)]
    ideals = [ideal(run, base) for run, base in zip(runs, plain, strict=True)]
    return {
        "mean_accepted_length": joined.mean_accepted_length,
        "phases": phases,
        "shares": {phase: seconds / joined.step_seconds for phase, seconds in phases.items()},
        **_spread("speedup", speedups),
        **_spread("ideal_speedup", ideals),
        **_spread("achieved_of_ideal", [got / most for got, most in zip(speedups, ideals, strict=True)]),
    }


def ideal(run: Steady, plain: Steady) -> float:
    """The speed-up of a loop that takes no time."""
    parts = (run.seconds[phase] / run.steps for phase in ("draft", "forward", "verify"))
    return ideal_speedup(run.mean_accepted_length, plain.step_seconds, *parts)


def _spread(name: str, values: Sequence[float]) -> dict[str, Any]:
    low, median, high = quartiles(values)
    return {name: median, f"{name}_quartiles": [low, high]}


def _ratio(row: dict[str, Any], name: str) -> str:
    low, high = row[f"{name}_quartiles"]
    return f"{row[name]:.2f} ({low:.2f} - {high:.2f})"
