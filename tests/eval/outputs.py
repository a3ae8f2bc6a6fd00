"""What `specdec eval` left in `tmp_path / "out"`."""

import json
from pathlib import Path

from eval.folder import Folder
from eval.runner import Record


def results(tmp_path: Path) -> list[Record]:
    return Folder(tmp_path / "out").read()


def summary(tmp_path: Path) -> dict:
    return json.loads((tmp_path / "out" / "summary.json").read_text())
