"""The report's tables and plots as a Weights & Biases run."""

from __future__ import annotations

import io
from typing import Any

import PIL.Image
import wandb
from matplotlib.figure import Figure

from eval.cells import label
from eval.folder import Folder
from eval.plots import figures
from eval.sections import sections

PROJECT = "specdec"
NUMBERS = ("mean_accepted_length", "acceptance_rate", "tokens_per_second", "speedup_vs_plain", "exact_match_rate")


def log(summary: dict[str, Any], folder: Folder) -> None:
    """One run named after the folder. Whether it goes online or stays on disk is wandb's own setting (WANDB_MODE)."""
    run = wandb.init(project=PROJECT, name=folder.path.name, config=folder.read_json("config.json"))
    try:
        for section in sections(summary):
            if section.header:
                run.log({section.title: wandb.Table(columns=section.header, data=section.cells)})
        for title, figure in figures(summary):
            run.log({title: wandb.Image(_pixels(figure), caption=title)})
        for row in summary["rows"]:
            name = label(row, summary["rows"])
            run.summary.update({f"{name}/{key}": row[key] for key in NUMBERS if row[key] is not None})
        run.summary["complete"] = summary["complete"]
    finally:
        run.finish()


def _pixels(figure: Figure) -> PIL.Image.Image:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=200)
    return PIL.Image.open(buffer)
