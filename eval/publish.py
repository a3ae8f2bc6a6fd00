"""From a folder's results to its summary and reports, and the table on standard output."""

from __future__ import annotations

import json
from typing import Any

from eval.cells import memory_line, phases_line
from eval.divergence import divergences
from eval.folder import Folder
from eval.html import html
from eval.report import markdown, plain_console, terminal_table
from eval.runs import sound
from eval.summary import categories, compile_seconds, plain_across_batch_sizes, table

SUMMARY = "summary.json"


def summarise(folder: Folder, complete: bool | None = None) -> dict[str, Any]:
    """summary.json's content, from the results and what was measured beside them.

    complete: whether the whole grid was run; None takes it from the last summary, where a killed run has left none."""
    # As one process would have left them: another's, or those before a kill, may begin in the middle of a turn.
    results = sorted(folder.read(), key=lambda result: (result.batch, result.repeat))
    records = sound(results)
    if complete is None:
        complete = folder.read_json(SUMMARY, {}).get("complete", False)
    unmeasured = [one.as_row() for one in ([] if complete else divergences(records, None))]
    return {
        "rows": table(results),
        "complete": complete,
        "compile_seconds": compile_seconds(results),
        "categories": categories(records),
        "plain_across_batch_sizes": plain_across_batch_sizes(records),
        "divergences": folder.read_json("divergences.json", unmeasured) if complete else unmeasured,
        "memory": folder.read_json("memory.json", []),
        "environment": folder.read_json("environment.json", {}),
        "fidelity": _fidelity(folder),
    }


def publish(folder: Folder, complete: bool | None, to_wandb: bool) -> dict[str, Any]:
    """Write the summary, report.md and report.html, and with `to_wandb` log them there. Returns the summary."""
    summary = summarise(folder, complete)
    traces = folder.read_json("traces.json", [])
    folder.write_json(SUMMARY, summary)
    folder.write_text("report.md", markdown(summary))
    folder.write_text("report.html", html(summary, traces))
    if to_wandb:
        from eval.to_wandb import log  # slow to import

        log(summary, folder)
    return summary


def _fidelity(folder: Folder) -> list[dict[str, Any]]:
    """What `specdec fidelity` found, where its folder is inside this one."""
    files = [file.relative_to(folder.path) for file in sorted(folder.path.glob("*/fidelity.json"))]
    found = [(file.parent.name, folder.read_json(str(file))) for file in files]
    return [{"run": run, "verdict": one["verdict"], "causes": one["causes"]} for run, one in found]


def show(summary: dict[str, Any], as_json: bool) -> None:
    """On standard output the rows as JSON, or the table and below it where decode steps spend their time and memory."""
    rows = summary["rows"]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    console = plain_console()
    console.print(terminal_table(rows))
    for row in rows:
        if row["phase_shares"]:
            console.print(f"decode time of {phases_line(row, rows)}")
    for memory in summary["memory"]:
        console.print(f"memory of {memory_line(memory)}")
