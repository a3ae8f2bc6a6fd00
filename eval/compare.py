"""Several runs side by side: the same row of each run's table next to each other, and in what the runs differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eval.cells import MAIN, NONE, Column, conditions, method
from eval.sections import Section, warnings

Row = dict[str, Any]
SHOWN = ("accepted length", "tokens/s", "vs plain", "same as plain")


def comparison(summaries: Mapping[str, dict[str, Any]], configs: Mapping[str, dict[str, Any]]) -> list[Section]:
    """Sections for report.md and report.html, from the runs' summaries and configurations by the runs' names."""
    names = list(summaries)
    letters = dict(zip(names, "ABCDEFGHIJKLMNOPQRSTUVWXYZ", strict=False))
    if len(letters) < len(names):
        raise ValueError(f"{len(names)} runs are given: compare at most {len(letters)} side by side")
    environments = {name: summary["environment"] for name, summary in summaries.items()}
    return [
        Section("Runs", items=[f"{letter}: {name}" for name, letter in letters.items()]),
        *_warnings(summaries, letters),
        Section("Side by side", *_side_by_side(summaries, letters)),
        _differing("Settings that differ", configs, letters),
        _differing("Environments that differ", environments, letters),
        Section(
            "Fidelity",
            items=[
                f"{letters[name]}, {found['run']}: {found['verdict']}"
                for name in names
                for found in summaries[name]["fidelity"]
            ],
        ),
    ]


def _warnings(summaries: Mapping[str, dict[str, Any]], letters: Mapping[str, str]) -> list[Section]:
    """What must be read before any number, if there is something."""
    items = [f"{letters[name]}: {warning}" for name, summary in summaries.items() for warning in warnings(summary)]
    return [Section("Warnings", items=items)] if items else []


def _side_by_side(
    summaries: Mapping[str, dict[str, Any]], letters: Mapping[str, str]
) -> tuple[str, list[str], list[list[str]]]:
    """A section's text, header and cells: a line per method, batch size, temperature and dtype that any run has."""
    every = [row for summary in summaries.values() for row in summary["rows"]]
    by_key = {name: {_key(row): row for row in summary["rows"]} for name, summary in summaries.items()}
    fixed: dict[str, Column] = {"method": method, "batch": MAIN["batch"], **conditions(every)}
    header = [*fixed, *(f"{column} {letter}" for column in SHOWN for letter in letters.values())]
    lines = []
    sound_last = sorted(every, key=lambda row: row["error"] is None)  # FAILED is said of what failed in all runs
    rows = {_key(row): None for row in every} | {_key(row): row for row in sound_last}
    for key, row in rows.items():
        found = [by_key[name].get(key) for name in letters]
        shown = [NONE if one is None else MAIN[column](one) for column in SHOWN for one in found]
        lines.append([*(cell(row) for cell in fixed.values()), *shown])
    return "A run without such a row, or in which it failed, has - there.", header, lines


def _differing(title: str, values: Mapping[str, Mapping[str, Any]], letters: Mapping[str, str]) -> Section:
    """What the runs do not have in common."""
    keys = list(dict.fromkeys(key for mapping in values.values() for key in mapping))
    lines = [[key, *(str(values[name].get(key, NONE)) for name in letters)] for key in keys]
    different = [line for line in lines if len(set(line[1:])) > 1]
    if not different:
        return Section(title, "None.")
    return Section(title, "", ["", *letters.values()], different)


def _key(row: Row) -> tuple[Any, ...]:
    return row["dtype"], row["temperature"], row["batch_size"], row["method"]
