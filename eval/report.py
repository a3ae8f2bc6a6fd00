"""The table on the terminal, and report.md."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from rich.console import Console
from rich.table import Table

from eval.cells import MAIN, cells
from eval.sections import Section, sections, warnings


def plain_console() -> Console:
    """Prints text as it is to standard output, tables as wide as the terminal, or 160 where there is none."""
    return Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 160)


def terminal_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The main table for rich, with a line between batch sizes."""
    table = Table()
    header, lines = cells(rows, MAIN)
    for column in header:
        table.add_column(column, justify="left" if column == "method" else "right")
    for line, row, following in zip_longest(lines, rows, rows[1:]):
        table.add_row(*line, end_section=following is None or following["batch_size"] != row["batch_size"])
    return table


def markdown(summary: dict[str, Any]) -> str:
    """report.md as text, from the content of summary.json. A warning comes before everything else."""
    first = [f"**{warning}**" for warning in warnings(summary)]
    parts = [*first, "# Evaluation", f"Command: `{summary['environment'].get('command', 'unknown')}`"]
    return "\n\n".join([*parts, *map(section_text, sections(summary))]) + "\n"


def section_text(section: Section) -> str:
    """A section in Markdown."""
    parts = [f"## {section.title}", section.text]
    if section.header:
        parts.append(markdown_table(section.header, section.cells))
    parts.append("\n".join(f"- **{word}**: {meaning}" for word, meaning in section.terms))
    parts.append("\n".join(f"- {item}" for item in section.items))
    parts += [f"{heading}\n\n```\n{code.rstrip()}\n```" for heading, code in section.code]
    return "\n\n".join(part for part in parts if part)


def markdown_table(header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A table as Markdown writes it."""
    lines = [header, ["---"] * len(header), *cells]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    """On one line, with nothing that ends the cell."""
    return " ".join(text.split()).replace("|", "\\|")
