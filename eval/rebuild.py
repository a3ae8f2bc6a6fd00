"""`specdec report`: the reports of finished or killed runs, made again from their folders, and runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eval.compare import comparison
from eval.folder import Folder
from eval.html import page
from eval.publish import publish, show
from eval.report import section_text

COMPARED = "Comparison"


def run(folders: Sequence[Path], out: Path | None = None, as_json: bool = False, to_wandb: bool = False) -> None:
    """Rebuild every folder's summary and reports; of several also write the comparison to `out`.

    Raises ValueError for a folder without results, a folder given twice, and several folders without `out`."""
    if len(set(folders)) < len(folders):
        raise ValueError(f"a folder is given more than once among {', '.join(map(str, folders))}: name each once")
    if len(folders) > 1 and out is None:
        raise ValueError(f"{len(folders)} folders are compared: say where the comparison goes with --out")
    if len(folders) == 1 and out is not None:
        raise ValueError(f"--out {out} is for comparing several folders: one folder's report is written into it")
    opened = [Folder(path) for path in folders]
    for folder in opened:
        if not folder.read():
            raise ValueError(f"{folder.path} holds no results: give a folder that specdec eval wrote")
    summaries = {str(folder.path): publish(folder, None, to_wandb) for folder in opened}
    if out is None:
        show(next(iter(summaries.values())), as_json)
        return
    sections = comparison(summaries, {str(folder.path): folder.read_json("config.json") for folder in opened})
    compared = Folder(out)
    out.mkdir(parents=True, exist_ok=True)
    text = "\n\n".join([f"# {COMPARED}", *map(section_text, sections)]) + "\n"
    compared.write_text("report.md", text)
    compared.write_text("report.html", page(title=COMPARED, sections=sections))
    print(text)
