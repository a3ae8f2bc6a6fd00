"""Tables and sentences of the plan for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table

from eval.plan.costs import Costs
from eval.plan.predict import LARGEST_BATCH

Row = Mapping[str, Any]
Columns = Mapping[str, Callable[[Row], str]]

PREDICTION: Columns = {
    "context": lambda row: str(row["context"]),
    "batch": lambda row: str(row["batch_size"]),
    "plain tokens/s": lambda row: f"{row['plain_tokens_per_second']:,.0f}",
    "best length": lambda row: str(row["best_draft_length"] or "none"),
    "AL": lambda row: f"{row['mean_accepted_length']:.2f}",
    "speed-up": lambda row: f"{row['speedup']:.2f}x",
    "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
    "weights + KV": lambda row: f"{row['memory_bytes'] / 1e9:,.1f} GB",
}
CHECK: Columns = {
    "batch": lambda row: str(row["batch_size"]),
    "length": lambda row: str(row["draft_length"]),
    "AL predicted": lambda row: f"{row['predicted_length']:.2f}",
    "AL measured": lambda row: f"{row['measured_length']:.2f}",
    "step predicted": lambda row: f"{row['predicted_step_ms']:.1f} ms",
    "step measured": lambda row: f"{row['measured_step_ms']:.1f} ms",
    "plain predicted": lambda row: f"{row['predicted_plain_step_ms']:.1f} ms",
    "plain measured": lambda row: f"{row['measured_plain_step_ms']:.1f} ms",
    "speed-up predicted": lambda row: f"{row['predicted_speedup']:.2f}x",
    "speed-up measured": lambda row: f"{row['measured_speedup']:.2f}x",
    "error": lambda row: f"{row['error']:+.0%}",
}
SPLIT: Columns = {
    "devices": lambda row: str(row["devices"]),
    **{
        f"{name}{what}": cell
        for name, key in {"": "plain", "with speculation: ": "speculative"}.items()
        for what, cell in {
            "prefill + decode": lambda row, key=key: f"{row[f'{key}_prefill']} + {row[f'{key}_decode']}",
            "requests/s": lambda row, key=key: f"{row[f'{key}_requests']:.2f}",
            "per device": lambda row, key=key: f"{row[f'{key}_requests_per_device']:.2f}",
            "idle": lambda row, key=key: row[f"{key}_waiting"],
        }.items()
    },
}


def as_table(rows: Sequence[Row], columns: Columns, section: str) -> Table:
    """`rows` with a line wherever `section` changes."""
    shown = Table()
    for column in columns:
        shown.add_column(column, justify="right")
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        last = following is None or following[section] != row[section]
        shown.add_row(*(cell(row) for cell in columns.values()), end_section=last)
    return shown


def stops_paying(paying: Sequence[tuple[int, int]]) -> int | None:
    """From which batch size on speculation does not pay, given `Planner.paying`; None = not up to LARGEST_BATCH."""
    last = paying[-1][1] if paying else 0
    return None if last == LARGEST_BATCH else last + 1


def verdict(context: int, paying: Sequence[tuple[int, int]]) -> str:
    """At which batch sizes speculation is worth it, given `Planner.paying`."""
    said = f"with {context} tokens of context speculation"
    if not paying:
        return f"{said} does not pay at any batch size up to {LARGEST_BATCH}"
    if len(paying) > 1 or paying[0][0] > 1:
        sizes = ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in paying)
        return f"{said} pays at batch {sizes} alone, of sizes up to {LARGEST_BATCH}"
    stop = stops_paying(paying)
    return f"{said} stops paying at batch {stop}" if stop else f"{said} pays at every batch size up to {LARGEST_BATCH}"


def fitted_line(costs: Costs) -> str:
    """What was measured, and how well the roofline model describes it."""
    fitted, curve = costs.fitted(), costs.curve()
    errors = [abs(curve.model(p.rows, p.width, p.context) / p.seconds - 1) for p in costs.points]
    return (
        f"{costs.shape.name}: {len(costs.points)} forwards; a copy moves {costs.device.bandwidth / 1e9:.1f} GB/s, a "
        f"matrix product computes {costs.device.compute / 1e12:.2f} TFLOP/s; the forwards look like "
        f"{fitted.bandwidth / 1e9:.1f} GB/s, {fitted.compute / 1e12:.2f} TFLOP/s and {1e6 * fitted.layer_overhead:.0f} "
        f"us per layer, within {sum(errors) / len(errors):.0%} on average and {max(errors):.0%} at worst"
    )


def limits_line(limits: Mapping[str, float], speedup: float) -> str:
    """What no split exceeds."""
    return (
        f"no split gives more than {limits['plain']:.2f} requests/s per device, or {limits['speculative']:.2f} with "
        f"decode {speedup:g} times as fast"
    )
