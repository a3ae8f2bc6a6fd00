"""What is measured, and on what: a target, prompts, and how long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eval.environment import described
from eval.plan.calibrate import calibrate
from eval.plan.costs import Costs, MeasuredDrafter
from eval.plan.measure import measure_device, measure_forwards
from eval.plan.shape import shape_of
from specdec.contracts import Drafter
from specdec.models import LoadedModel, load_target
from specdec.prompts import encode, load_prompts


@dataclass(frozen=True)
class Workload:
    """prompts: a JSONL file, or None for the built-in ones, of which `limit` are taken, in turn from each category;
    `raw` leaves out the chat template.
    steps: decode steps per run of the loop.   repeats: how often each forward of the grid is measured.
    """

    target: str
    dtype: str
    device: str
    prompts: str | None
    raw: bool
    limit: int
    steps: int
    repeats: int

    def __post_init__(self) -> None:
        check_positive("limit, steps and repeats", [self.limit, self.steps, self.repeats])

    def load(self) -> tuple[LoadedModel, list[list[int]]]:
        """The target, and the prompts' token ids."""
        sources = load_prompts(self.prompts, self.limit)
        loaded = load_target(self.target, self.dtype, self.device)
        return loaded, encode(sources, loaded.tokenizer, self.raw)

    def measured(
        self,
        loaded: LoadedModel,
        texts: Sequence[Sequence[int]],
        drafters: Mapping[str, tuple[Drafter, int]],
        batch_sizes: Sequence[int],
        contexts: Sequence[int],
    ) -> Costs:
        """The device, the forwards over `batch_sizes`, `contexts` and widths up to the longest draft, and the loop and
        each drafter, given with its draft length, on `texts`."""
        model = loaded.model
        lengths = [length for _, length in drafters.values()]
        widths = sorted({1, 2, *(1 + length // 2 for length in lengths), *(1 + length for length in lengths)})
        points = measure_forwards(model, batch_sizes, widths, contexts, self.repeats)
        found = {name: calibrate(model, *drafter, texts, self.steps) for name, drafter in drafters.items()}
        loop = next(iter(found.values())) if found else calibrate(model, None, 0, texts, self.steps)
        return Costs(
            environment=described(loaded, {name: drafter for name, (drafter, _) in drafters.items()}),
            shape=shape_of(model, loaded.description),
            device=measure_device(model.device, model.dtype),
            points=tuple(points),
            rest=loop.rest,
            drafters={name: MeasuredDrafter(of.draft, of.acceptance) for name, of in found.items()},
        )


def check_positive(name: str, values: Sequence[int]) -> None:
    """Raises ValueError where there is none, or one below 1."""
    if not values or min(values) < 1:
        raise ValueError(f"{name} are {list(values)}: give positive numbers")
