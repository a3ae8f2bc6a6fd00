"""`specdec report`: the reports of finished or killed runs, made again from their folders, and runs side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.compare import comparison
from eval.folder import Folder
from eval.html import page
from eval.publish import publish, show
from eval.report import section_text
from specdec.disk import make_folder

COMPARED = "Comparison"


def run(folders: Sequence[Path], out: Path | None = None, as_json: bool = False, to_wandb: bool = False) -> None:
    """Rebuild every folder's summary and reports; of several also write the comparison to `out`.

    Raises ValueError for a folder without results or with damaged ones, a folder given twice, several folders without
    `out`, and an `out` that holds a run."""
    if len({path.resolve() for path in folders}) < len(folders):
        raise ValueError(f"a folder is given more than once among {', '.join(map(str, folders))}: name each once")
    if len(folders) > 1 and out is None:
        raise ValueError(f"{len(folders)} folders are compared: say where the comparison goes with --out")
    if len(folders) == 1 and out is not None:
        raise ValueError(f"--out {out} is for comparing several folders: one folder's report is written into it")
    opened = [Folder(path) for path in folders]
    for folder in opened:
        if not folder.read():
            raise ValueError(f"{folder.path} holds no results: give a folder that specdec eval wrote")
    if out is not None and Folder(out).read():
        raise ValueError(f"--out {out} holds a run, whose report the comparison would replace: give another folder")
    summaries = {str(folder.path): _published(folder, to_wandb) for folder in opened}
    if out is None:
        show(next(iter(summaries.values())), as_json)
        return
    sections = comparison(summaries, {str(folder.path): folder.read_json("config.json") for folder in opened})
    make_folder(out)
    compared = Folder(out)
    text = "\n\n".join([f"# {COMPARED}", *map(section_text, sections)]) + "\n"
    compared.write_text("report.md", text)
    compared.write_text("report.html", page(title=COMPARED, sections=sections))
    print(json.dumps({name: summary["rows"] for name, summary in summaries.items()}, indent=2) if as_json else text)


def _published(folder: Folder, to_wandb: bool) -> dict[str, Any]:
    """The folder's summary, with its reports written. Raises ValueError where what lies beside the results lacks what a
    report shows: files of another version, or damaged ones that are JSON still."""
    try:
        return publish(folder, None, to_wandb)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder.path} cannot be reported ({type(error).__name__}: {error}): a file in it is damaged or of "
            f"another version of specdec, take it away or run the evaluation again"
        ) from error
