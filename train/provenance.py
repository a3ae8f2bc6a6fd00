"""What a folder's contents were made from: recorded beside them, and compared before they are used or added to."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from specdec.disk import make_folder

META = "meta.json"


def digest(value: Any) -> str:
    """16 hex digits of `value`, which is made of strings, numbers, lists, tuples and None."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def claim(folder: Path, made_from: dict[str, Any]) -> None:
    """Record in `folder`/meta.json what its contents are made from; where that is there already, compare.

    made_from: everything that the contents depend on, as JSON holds it. Several processes may claim a folder at once.
    Raises ValueError, which names the first entry that differs, where the contents were made from something else, and
    where that cannot be told.
    """
    make_folder(folder)
    names = os.listdir(folder)
    if META not in names:
        if any(not name.startswith(".") for name in names):
            raise ValueError(f"{folder} holds other files and no {META}: give another folder")
        made = folder / f".{META}-{os.getpid()}"
        made.write_text(json.dumps(made_from, indent=2) + "\n")
        os.replace(made, folder / META)
        return
    try:
        before = json.loads((folder / META).read_bytes())
    except ValueError:
        before = None
    if not isinstance(before, dict):
        raise ValueError(f"{folder / META} is damaged: give another folder, or remove this one")
    for key in [*made_from, *(before.keys() - made_from.keys())]:
        if before.get(key) != made_from.get(key):
            raise ValueError(
                f"{folder} holds what was made with {key}={before.get(key)!r}, not {made_from.get(key)!r}: ask for the "
                f"same again, or give another folder"
            )
