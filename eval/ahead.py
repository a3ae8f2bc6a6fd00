"""Compiling before anything is timed, for the benches' `--compile`."""

from __future__ import annotations

import time

from transformers import PreTrainedModel

from specdec.contracts import BaseDrafter, Drafter
from specdec.target import Target


def compile_ahead(model: PreTrainedModel, drafter: Drafter | None, on: bool) -> float:
    """Seconds of compiling what decoding with `model` runs, plainly and with `drafter`, whose draft model is then used
    compiled; 0 unless `on`. The graphs stay with the models, where `Target.compile` finds them.

    Raises NotImplementedError where the target cannot be compiled: every figure would be of eager forwards."""
    if not on:
        return 0.0
    started, target = time.perf_counter(), Target(model)
    target.compile()
    if target.graph is None:
        raise NotImplementedError(
            f"{type(model).__name__} cannot be compiled here, for the reason that is logged: leave --compile out"
        )
    if isinstance(drafter, BaseDrafter):
        drafter.compile(True)
    return time.perf_counter() - started


def with_seconds(target: str, compile_seconds: float) -> str:
    """The description of a target for a person, with what compiling took, if it was."""
    return f"{target}, compiled in {compile_seconds:.0f} s" if compile_seconds else target
