"""The table on the terminal and report.md, from the same columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from rich.table import Table

from eval.divergence import TIE
from specdec.stats import PHASES

Row = dict[str, Any]


def _number(key: str, places: int, suffix: str = "") -> Callable[[Row], str]:
    return lambda row: "-" if row[key] is None else f"{row[key]:.{places}f}{suffix}"


def _percent(key: str) -> Callable[[Row], str]:
    return lambda row: "-" if row[key] is None else f"{row[key]:.1%}"


def _speedup(key: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        if row[key] is None:
            return "-"
        low, high = row[f"{key}_quartiles"]
        return f"{row[key]:.2f}x [{low:.2f}, {high:.2f}]"

    return cell


COLUMNS: dict[str, Callable[[Row], str]] = {
    "method": lambda row: row["method"] if row["lossless"] else f"{row['method']} (LOSSY)",
    "batch": lambda row: str(row["batch_size"]),
    "accepted length": _number("mean_accepted_length", 2),
    "acceptance": _percent("acceptance_rate"),
    "tokens/s": _number("tokens_per_second", 1),
    "vs plain": _speedup("speedup_vs_plain"),
    "vs HF": _speedup("speedup_vs_hf"),
    "same as plain": _percent("exact_match_rate"),
    "differ": lambda row: "-" if row["divergences"] is None else f"{row['divergences']} of {row['requests']}",
}
MEANINGS = """\
- **method**: `hf` is Hugging Face `generate`; `plain` is this engine without a drafter; the others are drafters.
- **accepted length**: accepted drafted tokens + 1 per decode step and row, prefill excluded, before any cut at a stop.
- **acceptance**: accepted / drafted tokens.
- **tokens/s**: emitted tokens (stop token included) / seconds, prefill included; median over repeats of each batch.
- **vs plain**, **vs HF**: ratio of tokens/s on the same batch, timed in turns; median over batches and repeats
  [quartiles].
- **same as plain**: requests whose tokens all equal plain decoding's at the same batch size; `-` for plain itself and
  where sampled outputs differ by design.
- **differ**: requests that do not, in the first pass; each is listed below."""


def terminal_table(rows: Sequence[Row]) -> Table:
    """The main table for rich."""
    table = Table()
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "method" else "right")
    for row, following in zip_longest(rows, rows[1:]):
        last = following is None or following["batch_size"] != row["batch_size"]
        table.add_row(*(cell(row) for cell in COLUMNS.values()), end_section=last)
    return table


def phases_line(row: Row) -> str:
    """Where one row's decode steps spend their time."""
    return f"{row['method']}, batch {row['batch_size']}: " + ", ".join(
        f"{phase} {row['phase_shares'][phase]:.1%}" for phase in PHASES
    )


def memory_line(memory: Row) -> str:
    """Tensor bytes of one method."""
    size = {part: f"{memory[part] / 2**20:.1f} MiB" for part in ("weights", "cache", "decode", "prefill")}
    return (
        f"{memory['method']}, batch {memory['batch_size']}, {memory['context']} tokens of context: weights "
        f"{size['weights']}, cache {size['cache']}, everything else at a decode step's peak {size['decode']} "
        f"({memory['share']:.1%} of weights + cache), at a prefill step's peak {size['prefill']}"
    )


def markdown(summary: dict[str, Any]) -> str:
    """report.md as text, from the content of summary.json."""
    rows, environment = summary["rows"], summary["environment"]
    sections = [
        *_lossy(rows),
        "# Evaluation",
        f"Command: `{environment['command']}`",
        *([] if summary["complete"] else ["**Interrupted: the numbers below are of the batches that were finished.**"]),
        markdown_table(list(COLUMNS), [[cell(row) for cell in COLUMNS.values()] for row in rows]),
        MEANINGS,
        "## Where decode steps spend their time",
        "Share of draft (propose and observe), forward (the target), verify (processors and rule) and loop (the rest).",
        "\n".join(f"- {phases_line(row)}" for row in rows if row["phase_shares"]),
        "## First divergences from plain decoding",
        _divergences(summary["divergences"]),
        *map(_across, summary["plain_across_batch_sizes"]),
        *_memory(summary["memory"]),
        "## Environment",
        "\n".join(f"- {key}: {value}" for key, value in environment.items() if key != "command"),
    ]
    return "\n\n".join(sections) + "\n"


def _memory(measured: Sequence[Row]) -> list[str]:
    return ["## Memory", "\n".join(f"- {memory_line(memory)}" for memory in measured)] if measured else []


def _lossy(rows: Sequence[Row]) -> list[str]:
    lossy = sorted({f"{row['method']} (verifier {row['verifier']})" for row in rows if not row["lossless"]})
    return [f"**LOSSY: the output of {', '.join(lossy)} does not follow the target model.**"] if lossy else []


def _divergences(divergences: Sequence[Row]) -> str:
    if not divergences:
        return "None."
    measured = [divergence for divergence in divergences if divergence["gap"] is not None]
    ties = sum(divergence["tie"] for divergence in measured)
    explanation = (
        f"{len(divergences)} in all. Margin is the target's top logit minus its second after the shared prefix, gap "
        f"its top logit minus that of the less probable of the two tokens, both from one forward without a cache. In "
        f"float32 a gap below {TIE:g} is a tie: {ties} of the {len(measured)} measured."
    )
    names = ("method", "batch_size", "id", "position", "token", "control_token")
    cells = [
        [*(str(found[name]) for name in names), _small(found["margin"]), _small(found["gap"])] for found in divergences
    ]
    header = ["method", "batch", "request", "position", "token", "plain's token", "margin", "gap"]
    return f"{explanation}\n\n{markdown_table(header, cells)}"


def _across(found: dict[str, int]) -> str:
    return (
        f"For comparison, the batch size alone: plain decoding at batch {found['batch_size']} differs from plain "
        f"decoding at batch {found['reference_batch_size']} in {found['different']} of {found['requests']} requests."
    )


def _small(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def markdown_table(header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A table as Markdown writes it."""
    lines = [header, ["---"] * len(header), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
