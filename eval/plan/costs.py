"""costs.json: the step costs of one model on one device, measured by `specdec plan measure` or written by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eval.plan.acceptance import Acceptance
from eval.plan.curve import Curve
from eval.plan.predict import LinearCost
from eval.plan.roofline import Device, Point, Roofline, fit
from eval.plan.shape import AttentionLayers, ModelShape


@dataclass(frozen=True)
class MeasuredDrafter:
    """A drafter on the costs' device: what its drafts cost, and how much of them was accepted."""

    draft: LinearCost
    acceptance: Acceptance


@dataclass(frozen=True)
class Costs:
    """shape: of the measured model.   device: bandwidth and compute of a copy and a matrix product.   points: its
    forwards.   rest: of everything else in a step but the drafter.   drafters: by their name on the command line.
    """

    environment: Mapping[str, Any]
    shape: ModelShape
    device: Device
    points: tuple[Point, ...]
    rest: LinearCost
    drafters: Mapping[str, MeasuredDrafter]

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError("step costs hold no measured forward: measure or give at least one")

    def fitted(self) -> Device:
        """The device as the measured forwards show it."""
        return fit(self.points, self.shape, self.device)

    def curve(self) -> Curve:
        """The measured model's forward."""
        return Curve(self.points, Roofline(self.shape, self.fitted()))

    def rest_of(self, shape: ModelShape) -> LinearCost:
        """`rest` for another model: what it does per token is read that model's logits."""
        return LinearCost(self.rest.per_step, self.rest.per_row, self.rest.per_token * shape.vocab / self.shape.vocab)

    def drafter(self, name: str | None) -> MeasuredDrafter:
        """The measured drafter of that name (None: the only one). Raises ValueError that lists the measured ones."""
        if name is None and len(self.drafters) == 1:
            return next(iter(self.drafters.values()))
        if name not in self.drafters:
            asked = "no --drafter was named" if name is None else f"none is {name!r}"
            raise ValueError(
                f"the costs hold the drafters {', '.join(self.drafters) or '(none)'} and {asked}: name one"
            )
        return self.drafters[name]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @staticmethod
    def read(path: Path) -> Costs:
        """Raises FileNotFoundError, or ValueError that says what is wrong, for a file that does not hold step costs."""
        if not path.is_file():
            raise FileNotFoundError(f"{path} is not a file: write step costs with `specdec plan measure`")
        try:
            found = json.loads(path.read_text())
            return Costs(
                environment=dict(found["environment"]),
                shape=_shape(found["shape"]),
                device=Device(**found["device"]),
                points=tuple(Point(**point) for point in found["points"]),
                rest=LinearCost(**found["rest"]),
                drafters={name: _drafter(drafter) for name, drafter in found["drafters"].items()},
            )
        except KeyError as error:
            raise ValueError(f"{path} has no {error}: write it with `specdec plan measure`") from None
        except (json.JSONDecodeError, UnicodeDecodeError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} does not hold step costs ({error}): write it with `specdec plan measure`"
            ) from None


def _shape(found: dict[str, Any]) -> ModelShape:
    return ModelShape(**found | {"attention": tuple(AttentionLayers(**layers) for layers in found["attention"])})


def _drafter(found: dict[str, Any]) -> MeasuredDrafter:
    acceptance = Acceptance(tuple(found["acceptance"]["accepted"]), tuple(found["acceptance"]["drafted"]))
    return MeasuredDrafter(LinearCost(**found["draft"]), acceptance)
