"""A run's metrics read back: loss and accuracy against training tokens, as numbers and as a picture."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter


@dataclass(frozen=True)
class Point:
    """tokens: trained on so far; loss: per token; top1: [K] share of tokens that each depth's arg-max hits."""

    tokens: int
    loss: float
    top1: list[float]


@dataclass(frozen=True)
class Curves:
    """train: a point per step; held_out: one per evaluation.   seconds: of the steps, without evaluations."""

    train: list[Point]
    held_out: list[Point]
    seconds: float

    @property
    def kept(self) -> Point:
        """The evaluation whose weights were kept: the first with the lowest loss."""
        return min(self.held_out, key=lambda point: point.loss)


class Line(dict):
    """A line of a JSONL file; what it lacks is an error that says where."""

    def __init__(self, values: dict[str, Any], where: str):
        super().__init__(values)
        self.where = where

    def __missing__(self, name: str) -> None:
        raise ValueError(f"{self.where} has no {name!r}, which the card needs: run the evaluation again")

    def number(self, name: str) -> float:
        """A finite number."""
        [value] = self._finite(name, [self[name]])
        return value

    def numbers(self, name: str) -> list[float]:
        """Finite numbers, one per depth."""
        return self._finite(name, self[name])

    def _finite(self, name: str, values: list[float]) -> list[float]:
        if not values or not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
            raise ValueError(
                f"{self.where} has {name} = {self[name]!r} where the card needs numbers: run the evaluation again"
            )
        return values


def read_lines(path: Path) -> list[Line]:
    """The lines of a file that a run wrote. Raises ValueError where there is none."""
    lines = path.read_text().splitlines() if path.exists() else []
    if not lines:
        raise ValueError(f"{path} holds nothing, and the card needs it: train and evaluate first")
    return [Line(json.loads(line), f"{path}, line {number}") for number, line in enumerate(lines, start=1)]


def read_curves(path: Path) -> Curves:
    """The curves in a metrics.jsonl, which `train.log` wrote.

    Raises ValueError, which names file, line and metric, where one is missing or no number."""
    tokens, seconds = 0, 0.0
    found: dict[str, list[Point]] = {"train": [], "held_out": []}
    for line in read_lines(path):
        if line["split"] == "train":
            tokens += round(line.number("tokens"))
            seconds += line.number("tokens") / line.number("tokens_per_second")
        found[line["split"]].append(Point(tokens, line.number("loss"), line.numbers("top1")))
    for split, points in found.items():
        if not points:
            raise ValueError(f"{path} has no line of split {split!r}, which the card needs: train and evaluate first")
    return Curves(**found, seconds=seconds)


def plot(curves: Curves) -> Figure:
    """Loss, and accuracy by depth, against training tokens."""
    figure = Figure(figsize=(8, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    tokens = [point.tokens for point in curves.held_out]
    left.plot([p.tokens for p in curves.train], [p.loss for p in curves.train], linewidth=0.5, label="training")
    left.plot(tokens, [point.loss for point in curves.held_out], marker=".", label="held out")
    for depth, shares in enumerate(zip(*(point.top1 for point in curves.held_out), strict=True), start=1):
        right.plot(tokens, shares, marker=".", label=f"depth {depth}")
    for axes, title in ((left, "loss per token"), (right, "top-1 accuracy, held out")):
        axes.set(title=title, xlabel="response tokens trained on")
        axes.grid(alpha=0.3)
        axes.legend()
    right.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    return figure
