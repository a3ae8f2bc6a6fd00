"""report.html: the report's sections, plots and traces in one file that needs no network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from eval.plots import figures, svg
from eval.sections import sections, warnings

TEMPLATES = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Chip:
    """A token of a trace. kind: accepted, rejected, unreached, replaced (the target's in a rejected one's place), added
    (the target's after its whole draft, or without one) or cut (after a stop). tip: what is shown on hover."""

    text: str
    kind: str
    tip: str


def html(summary: dict[str, Any], traces: Sequence[dict[str, Any]]) -> str:
    """report.html as text, from the content of summary.json and of traces.json."""
    environment = summary["environment"]
    return page(
        title="Evaluation",
        target=environment.get("target"),
        command=environment.get("command"),
        warnings=warnings(summary),
        sections=sections(summary),
        plots=[(title, svg(figure)) for title, figure in figures(summary)],
        traces=list(map(shown_trace, traces)),
    )


def page(**content: Any) -> str:
    """The template, filled: title and sections, and where there are any target, command, warnings, plots and traces."""
    return _template().render(**content)


def shown_trace(trace: dict[str, Any]) -> dict[str, Any]:
    """A trace with its steps as lists of chips."""
    title = f"{trace['id']}: {trace['method']}, {trace['verifier']}, T {trace['temperature']:g}, {trace['dtype']}"
    return {"title": title, "error": trace["error"], "steps": [list(chips(step)) for step in trace["steps"]]}


def chips(step: dict[str, Any]) -> Iterator[Chip]:
    """A step's drafted tokens in their order, then the target's own."""
    drafted, added, left = step["drafted"], step["next"], step["emitted"]
    taken = [-1, *(place for place, token in enumerate(drafted) if token["accepted"])]
    for token in drafted:
        if token["accepted"]:
            kind, left = ("accepted" if left > 0 else "cut"), left - 1
        else:  # only the children of the path's tokens are judged
            kind = "rejected" if token["parent"] in taken else "unreached"
        chance = "" if token["accept_prob"] is None else f", accepted with probability {token['accept_prob']:.3f}"
        yield Chip(_visible(token["text"]), kind, f"{kind}: p {token['p']:.3g}, q {token['q']:.3g}{chance}")
    kind = "replaced" if any(token["parent"] == taken[-1] for token in drafted) else "added"
    kind = kind if left > 0 else "cut"
    words = {"cut": "cut after a stop", "replaced": "replaced by the target", "added": "added by the target"}
    yield Chip(_visible(added["text"]), kind, f"{words[kind]}: p {added['p']:.3g}")


def _visible(text: str) -> str:
    return text.replace("\n", "\u21b5") or "\u2205"


@cache
def _template() -> jinja2.Template:
    loader = jinja2.FileSystemLoader(TEMPLATES)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("report.html")
