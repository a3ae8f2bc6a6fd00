"""From the command line's options to a `Planner`: whose costs, which model, what is accepted, what drafting costs."""

from __future__ import annotations

from pathlib import Path

import torch

from eval.plan.acceptance import Acceptance, of_folder
from eval.plan.costs import Costs
from eval.plan.curve import Curve
from eval.plan.predict import CostRatio, DraftCost, DraftModel, LinearCost, MeasuredCost, Planner
from eval.plan.roofline import Device, ForwardCost, Roofline
from eval.plan.shape import ModelShape, planned_shape
from specdec.models import resolve_dtype

LOGIT_BYTES = 2 * 4  # verification reads a float32 logit twice: for the normaliser, and for the rule


def planner_of(
    *,
    costs: Path | None,
    bandwidth: float | None,
    compute: float | None,
    model: str | None,
    dtype: str | None,
    acceptance: str | None,
    drafter: str | None,
    temperature: float | None,
    draft_ratio: float | None,
    draft_model: str | None,
) -> tuple[Planner, ModelShape, str]:
    """The planner, the planned model's shape, and one line that says what was planned.

    costs:      costs.json of a measured device; without it the device is given by `bandwidth` (bytes/s) and `compute`
                (FLOP/s).
    model:      configuration of the model to plan for; without it the one that `costs` measured.
    dtype:      of what is not measured; without it that of `costs`, whose FLOP/s hold for it, or bfloat16.
    acceptance: per-depth conditional probabilities separated by commas, or a folder that `specdec eval` wrote; without
                it what `costs` counted for `drafter`.
    drafter, temperature: which drafter of `costs`, and which rows of the folder.
    draft_ratio, draft_model: the drafter's cost per token over the target's, or its configuration; without either the
                cost that `costs` measured for `drafter`.

    Raises ValueError or FileNotFoundError, in one sentence, for options that do not add up to a plan."""
    if (costs is None) == (bandwidth is None and compute is None) or (bandwidth is None) != (compute is None):
        raise ValueError("the device is not clear: give either --costs, or both --bandwidth and --compute")
    if costs is None and model is None:
        raise ValueError("there is no model to plan for: give --model with --bandwidth and --compute, or --costs")
    if draft_ratio is not None and draft_model is not None:
        raise ValueError("--draft-ratio and --draft-model are both given: the drafter has one cost, give one of them")
    measured = Costs.read(costs) if costs else None
    known = measured.environment.get("dtype", "bfloat16") if measured else "bfloat16"
    weights = resolve_dtype(dtype or known, torch.device("cpu"))
    device = measured.fitted() if measured else Device(bandwidth, compute)
    shape = planned_shape(model, weights) if model else measured.shape
    forward = Roofline(shape, device) if model else measured.curve()
    rest = measured.rest_of(shape) if measured else LinearCost(0, 0, LOGIT_BYTES * shape.vocab / bandwidth)
    planner = Planner(
        forward,
        rest,
        _draft_cost(measured, drafter, draft_ratio, draft_model, forward, device, weights),
        _acceptance(measured, drafter, acceptance, temperature),
    )
    return planner, shape, _described(shape, device, forward)


def _draft_cost(
    measured: Costs | None,
    drafter: str | None,
    ratio: float | None,
    model: str | None,
    forward: ForwardCost,
    device: Device,
    dtype: torch.dtype,
) -> DraftCost:
    if ratio is not None:
        return CostRatio(ratio, forward)
    if model is not None:
        return DraftModel(Roofline(planned_shape(model, dtype), device))
    if measured is None:
        raise ValueError("nothing says what drafting costs: give --draft-ratio or --draft-model, or measured --costs")
    return MeasuredCost(measured.drafter(drafter).draft)


def _acceptance(
    measured: Costs | None, drafter: str | None, given: str | None, temperature: float | None
) -> Acceptance:
    if given and Path(given).is_dir():
        return of_folder(Path(given), drafter, temperature)
    if temperature is not None:
        raise ValueError("--temperature chooses among the rows of an evaluation: give its folder as --acceptance")
    if given is None:
        if measured is None:
            raise ValueError(
                "nothing says what is accepted: give --acceptance with probabilities or an evaluation's folder"
            )
        return measured.drafter(drafter).acceptance
    try:
        probabilities = [float(part) for part in given.split(",")]
    except ValueError:
        raise ValueError(
            f"--acceptance is {given!r}: give probabilities such as 0.8,0.7,0.6, one per depth, or the folder of an "
            f"evaluation"
        ) from None
    return Acceptance.given(probabilities)


def _described(shape: ModelShape, device: Device, forward: ForwardCost) -> str:
    described = f"{shape.name} on {device.bandwidth / 1e9:,.0f} GB/s and {device.compute / 1e12:,.2f} TFLOP/s"
    if not isinstance(forward, Curve):
        return described
    rows, width, context = forward.largest
    return f"{described}; measured up to batch {rows}, {width} tokens per row and a context of {context}"
