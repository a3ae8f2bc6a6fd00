"""Where an evaluation's prompts come from: the built-in set, a JSONL file, or a data set that `datasets` loads."""

from __future__ import annotations

import logging
from typing import Any

from specdec.disk import reading
from specdec.prompts import Prompt, limited, load_prompts, prompt_of

_log = logging.getLogger(__name__)


def load_sources(
    prompts: str | None, column: str | None, split: str | None, limit: int | None, skip_bad: bool
) -> list[Prompt]:
    """As `specdec.prompts.load_prompts` for a file or None; with `column`, `prompts` is a data set, NAME[:CONFIG].

    The column holds a text, a list of texts (the user's turns) or a list of messages per row; `id` and `category` are
    read where the data set has them. Raises ValueError that says what is there where `split` or `column` is not."""
    if column is None:
        return load_prompts(prompts, limit, skip_bad)
    if prompts is None:
        raise ValueError(f"--column {column} belongs to a data set: name it with --prompts")
    rows = _rows(prompts, column, split)
    if limit is not None and "category" not in rows.column_names:
        rows = rows.select(range(min(limit, len(rows))))  # a large set is not read for a few of its rows
    found, errors = [], []
    for number, row in enumerate(rows):
        try:
            found.append(prompt_of(_as_prompt(row, column), number))
        except ValueError as error:
            errors.append(f"data set {prompts}, row {number}: {error}")
    if errors and not skip_bad:
        raise ValueError(f"{errors[0]}; leave such rows out with --skip-bad")
    if not found:
        raise ValueError(f"data set {prompts} has no usable prompt in its column {column!r}")
    if errors:
        _log.warning("left out %d bad row(s) of the data set, the first of them: %s", len(errors), errors[0])
    return limited(found, limit)


def _rows(name: str, column: str, split: str | None) -> Any:
    """The data set's rows (a `datasets.Dataset`)."""
    import datasets  # slow to import

    path, _, config = name.partition(":")
    with reading(f"data set {name!r} could not be loaded"):
        splits = datasets.load_dataset(path, config or None)
    if split is None and len(splits) > 1:
        raise ValueError(f"data set {name!r} has the splits {', '.join(splits)}: choose one with --split")
    if split is not None and split not in splits:
        raise ValueError(f"data set {name!r} has no split {split!r}: it has {', '.join(splits)}")
    rows = next(iter(splits.values())) if split is None else splits[split]
    if column not in rows.column_names:
        raise ValueError(f"data set {name!r} has no column {column!r}: it has {', '.join(rows.column_names)}")
    return rows


def _as_prompt(row: dict[str, Any], column: str) -> dict[str, Any]:
    """A row with its column under the name that a prompts file has for such a value."""
    match row[column]:
        case [str(), *_] as turns:
            value = {"turns": turns}
        case [dict(), *_] as messages:
            value = {"messages": messages}
        case text:
            value = {"prompt": text}
    return {key: row[key] for key in ("id", "question_id", "category") if key in row} | value
