"""The report's plots, as matplotlib figures and as SVG that takes on the page's colours and needs nothing else."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.cells import conditions, label
from eval.sections import by_cause

Row = dict[str, Any]

INK = "#010203"  # a colour that nothing else has: the page's own text colour takes its place
COLORS = ("#0a84d0", "#e07b00", "#1a9e77", "#cc5f9e", "#8f7fd6", "#b08900", "#d0503c", "#5a9fb0")  # on light and dark
MARKERS = "osD^vPX*"
SIZE = (4.6, 3.2)  # inches: about a phone's width, so that the text stays readable there
STYLE = {
    "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": INK, "grid.alpha": 0.15,
    "font.size": 10, "legend.frameon": False, "legend.fontsize": 9, "lines.linewidth": 1.8, "lines.markersize": 5,
    "axes.prop_cycle": matplotlib.cycler(color=COLORS, marker=list(MARKERS)), "figure.constrained_layout.use": True,
    "svg.fonttype": "path", "svg.hashsalt": "specdec",
}  # fmt: skip


def figures(summary: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    """Title and figure of every plot that the summary has numbers for."""
    rows = [row for row in summary["rows"] if row["error"] is None]
    drafted = [row for row in rows if any(p["conditional"] is not None for p in row["acceptance_by_position"])]
    with matplotlib.rc_context(STYLE):
        if drafted:
            yield "Acceptance by position, of the tokens whose position was reached", acceptance_by_position(drafted)
        for conditions_, kept in _by_conditions(drafted).items():
            if len({row["batch_size"] for row in kept}) > 1:
                yield f"Speed-up of decoding by batch size{conditions_}", speedup_by_batch_size(kept)
        if runs := summary["fidelity"]:
            yield (
                f"Divergences by cause, of {len(runs)} run(s) of specdec fidelity",
                divergences_by_cause(by_cause(runs)),
            )


def acceptance_by_position(rows: Sequence[Row]) -> Figure:
    """One line per method at the first batch size: the others draft the same but for rounding."""
    size = rows[0]["batch_size"]
    shown = [row for row in rows if row["batch_size"] == size]
    figure, axes = _axes("drafted position", "conditional acceptance")
    for row in shown:
        shares = [position["conditional"] for position in row["acceptance_by_position"]]
        axes.plot(range(1, len(shares) + 1), shares, label=label(row, rows).replace(f", batch {size}", ""))
    axes.set_ylim(0, 1.02)
    axes.xaxis.get_major_locator().set_params(integer=True)
    _legend(figure, axes)
    return figure


def speedup_by_batch_size(rows: Sequence[Row]) -> Figure:
    """Measured decode speed-up of each method, and dashed what its step times would ideally give."""
    figure, axes = _axes("batch size", "x plain decoding")
    for place, method in enumerate(dict.fromkeys(row["method"] for row in rows)):
        ours = sorted((row for row in rows if row["method"] == method), key=lambda row: row["batch_size"])
        sizes, style = [row["batch_size"] for row in ours], {"color": COLORS[place % len(COLORS)]}
        values = [_nan(row["decode_speedup_vs_plain"]) for row in ours]
        axes.plot(sizes, values, label=method, marker=MARKERS[place % len(MARKERS)], **style)
        ideal = [_nan(row["ideal_speedup"]) for row in ours]
        axes.plot(sizes, ideal, linestyle="--", marker="", label=f"{method}, ideal", **style)
    axes.axhline(1, color=INK, linewidth=0.8, marker="")
    axes.set_xscale("log", base=2)
    ticks = sorted({row["batch_size"] for row in rows})
    axes.set_xticks(ticks, [str(size) for size in ticks])
    axes.set_ylim(bottom=0)
    _legend(figure, axes)
    return figure


def divergences_by_cause(causes: Mapping[str, int]) -> Figure:
    """A bar per cause, those that never occurred too."""
    figure, axes = _axes("requests", "")
    names = list(causes)
    bars = axes.barh(names[::-1], [causes[name] for name in names[::-1]], color=COLORS[0])
    axes.bar_label(bars, padding=3)
    axes.set_xlim(0, 1.12 * max(1, *causes.values()))
    axes.grid(axis="y", visible=False)
    axes.xaxis.get_major_locator().set_params(integer=True)
    return figure


def svg(figure: Figure) -> str:
    """The figure as an `<svg>` element in the page's text colour."""
    buffer = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :].replace(INK, "currentColor")


def _axes(x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=SIZE)
    axes = figure.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    return figure, axes


def _legend(figure: Figure, axes: Axes) -> None:
    """Below the plot, where no line can be under it."""
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=1)


def _by_conditions(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by temperature and dtype, under what tells these apart in words."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        words = "".join(f", {name} {cell(row)}" for name, cell in conditions(rows).items())
        found.setdefault(words, []).append(row)
    return found


def _nan(value: float | None) -> float:
    return float("nan") if value is None else value
