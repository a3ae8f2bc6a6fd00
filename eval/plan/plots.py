"""The plan's plots: speed-up and best draft length by batch size, and requests/s by number of devices."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

Row = Mapping[str, Any]


def plot_prediction(rows: Sequence[Row], title: str, path: Path) -> None:
    """Two panels over batch size, a line per context; `rows` as `predict.table` makes them."""
    figure = Figure(figsize=(7, 6), layout="constrained")
    speed, length = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for context, group in itertools.groupby(rows, key=lambda row: row["context"]):
        found = list(group)
        batches = [row["batch_size"] for row in found]
        speed.plot(batches, [row["speedup"] for row in found], marker="o", label=f"{context:,} tokens of context")
        length.plot(batches, [row["best_draft_length"] for row in found], drawstyle="steps-post", marker="o")
    speed.axhline(1, color="grey", linewidth=1)
    speed.set(ylabel="speed-up at the best length", title=textwrap.fill(title, 70), xscale="log")
    speed.set_ylim(bottom=0)
    speed.legend()
    length.set(ylabel="best draft length", xlabel="batch size")
    batches = sorted({row["batch_size"] for row in rows})
    length.set_xticks(batches, [str(batch) for batch in batches])
    length.minorticks_off()
    length.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, dpi=150)


def plot_check(rows: Sequence[Row], tolerance: float, path: Path) -> None:
    """Predicted over measured speed-up with the tolerance as a band; `rows` as `check.compare` makes them."""
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.subplots()
    top = 1.2 * max(max(row["predicted_speedup"], row["measured_speedup"]) for row in rows)
    axes.fill_between([0, top], [0, (1 - tolerance) * top], [0, (1 + tolerance) * top], alpha=0.15)
    axes.plot([0, top], [0, top], color="grey", linewidth=1)
    for size, group in itertools.groupby(rows, key=lambda row: row["batch_size"]):
        found = list(group)
        axes.scatter(
            [row["measured_speedup"] for row in found],
            [row["predicted_speedup"] for row in found],
            label=f"batch {size}",
        )
    axes.set(xlabel="measured speed-up", ylabel="predicted speed-up", xlim=(0, top), ylim=(0, top))
    axes.legend()
    figure.savefig(path, dpi=150)


def plot_split(rows: Sequence[Row], balanced: Mapping[str, float], path: Path) -> None:
    """Requests/s per device by number of devices, without and with speculation, and what no split exceeds.

    rows: as `split.plan` makes them.   balanced: requests/s per device under "plain" and "speculative"."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    devices = [row["devices"] for row in rows]
    for color, (name, limit) in zip(("C0", "C1"), balanced.items(), strict=True):
        per_device = [row[f"{name}_requests_per_device"] for row in rows]
        axes.plot(devices, per_device, marker="o", color=color, label=f"{name}, best split")
        axes.axhline(limit, color=color, linestyle="--", linewidth=1, label=f"{name}, limit")
    axes.set(xlabel="devices", ylabel="requests/s per device")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=150)
