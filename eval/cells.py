"""How numbers read: the columns of the report's tables, each from one row of the summary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from specdec.stats import PHASES

Row = dict[str, Any]
Column = Callable[[Row], str]
NONE = "-"


def number(key: str, places: int, suffix: str = "") -> Column:
    return lambda row: NONE if row[key] is None else f"{row[key]:.{places}f}{suffix}"


def percent(key: str) -> Column:
    return lambda row: NONE if row[key] is None else f"{row[key]:.1%}"


def with_interval(key: str, format: str) -> Column:
    """A value with its confidence interval, if there is one."""

    def cell(row: Row) -> str:
        if row[key] is None:
            return NONE
        ends = row[f"{key}_interval"]
        return f"{row[key]:{format}}" + ("" if ends is None else f" [{ends[0]:{format}}, {ends[1]:{format}}]")

    return cell


def speedup(key: str) -> Column:
    """A ratio with its quartiles."""

    def cell(row: Row) -> str:
        if row[key] is None:
            return NONE
        low, high = row[f"{key}_quartiles"]
        return f"{row[key]:.2f}x [{low:.2f}, {high:.2f}]"

    return cell


def method(row: Row) -> str:
    """The method's name, with what must be known before any of its numbers is read."""
    if row.get("error") is not None:
        return f"{row['method']} (FAILED)"
    return row["method"] if row["lossless"] else f"{row['method']} (LOSSY)"


def positions(key: str) -> Column:
    """Acceptance position by position: `conditional` on being reached, or `unconditional`."""
    return lambda row: ", ".join(f"{position[key]:.0%}" for position in row["acceptance_by_position"]) or NONE


def conditions(rows: Sequence[Row]) -> dict[str, Column]:
    """Columns for what differs between the rows: temperature and dtype are left out where all have the same."""
    columns = {
        "T": ("temperature", lambda row: f"{row['temperature']:g}"),
        "dtype": ("dtype", lambda row: row["dtype"]),
    }
    return {name: cell for name, (key, cell) in columns.items() if len({row[key] for row in rows}) > 1}


def label(row: Row, rows: Sequence[Row]) -> str:
    """What names a row among `rows`, in words."""
    parts = [row["method"], f"batch {row['batch_size']}"]
    return ", ".join(parts + [f"{name} {cell(row)}" for name, cell in conditions(rows).items()])


VS_VLLM = "vs vLLM"
MAIN: dict[str, Column] = {
    "method": method,
    "batch": lambda row: str(row["batch_size"]),
    "accepted length": number("mean_accepted_length", 2),
    "acceptance": percent("acceptance_rate"),
    "tokens/s": number("tokens_per_second", 1),
    "vs plain": speedup("speedup_vs_plain"),
    "vs HF": speedup("speedup_vs_hf"),
    VS_VLLM: speedup("speedup_vs_vllm"),
    "same as plain": percent("exact_match_rate"),
    "differ": lambda row: NONE if row["divergences"] is None else f"{row['divergences']} of {row['requests']}",
}
ACCEPTANCE: dict[str, Column] = {
    "method": method,
    "batch": lambda row: str(row["batch_size"]),
    "accepted length": with_interval("mean_accepted_length", ".2f"),
    "acceptance": with_interval("acceptance_rate", ".1%"),
    "noise-free": with_interval("noise_free_acceptance", ".1%"),
    "drafted": number("drafted_per_step", 2),
    "by position": positions("conditional"),
    "of drafted": positions("unconditional"),
}
SPEED: dict[str, Column] = {
    "method": method,
    "batch": lambda row: str(row["batch_size"]),
    "prefill tokens/s": number("prefill_tokens_per_second", 0),
    "decode tokens/s": number("decode_tokens_per_second", 1),
    "decode vs plain": speedup("decode_speedup_vs_plain"),
    "step": number("decode_step_ms", 1, " ms"),
    "ideal": number("ideal_speedup", 2, "x"),
    "achieved / ideal": percent("achieved_of_ideal"),
    "ideal / oracle": percent("ideal_of_oracle"),
    "predicted": number("predicted_speedup", 2, "x"),
    "spread": percent("spread"),
}
CATEGORY: dict[str, Column] = {
    "method": method,
    "batch": lambda row: str(row["batch_size"]),
    "category": lambda row: row["category"],
    "accepted length": with_interval("mean_accepted_length", ".2f"),
    "acceptance": with_interval("acceptance_rate", ".1%"),
    "vs plain": number("speedup_vs_plain", 2, "x"),
    "requests": lambda row: str(row["requests"]),
}


def cells(rows: Sequence[Row], columns: dict[str, Column]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of a table, with columns for temperature and dtype after the batch where these differ, and
    without one for vLLM where it did not run."""
    compared = any(row["speedup_vs_vllm"] is not None for row in rows if VS_VLLM in columns)
    names = [name for name in columns if name != VS_VLLM or compared]
    at = names.index("batch") + 1
    every = {name: columns[name] for name in names[:at]} | conditions(rows)
    every |= {name: columns[name] for name in names[at:]}
    return list(every), [[cell(row) for cell in every.values()] for row in rows]


def phases_line(row: Row, rows: Sequence[Row]) -> str:
    """Where one row's decode steps spend their time."""
    shares = ", ".join(f"{phase} {row['phase_shares'][phase]:.1%}" for phase in PHASES)
    audit = "" if row["audit_share"] is None else f"; looking over the drafts {row['audit_share']:.1%} of the call"
    return f"{label(row, rows)}: {shares}{audit}"


def memory_line(memory: Row) -> str:
    """Tensor bytes of one method."""
    size = {key: f"{memory[key] / 2**20:.1f} MiB" for key in ("weights", "cache", "decode", "prefill")}
    return (
        f"{memory['method']}, batch {memory['batch_size']}, {memory['context']} tokens of context: weights "
        f"{size['weights']}, cache {size['cache']}, everything else at a decode step's peak {size['decode']} "
        f"({memory['share']:.1%} of weights + cache), at a prefill step's peak {size['prefill']}"
    )
