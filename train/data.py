"""Prompts to train on: from a JSONL file or a `datasets` dataset to token ids, and the share held out of training."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
from transformers import PreTrainedTokenizerBase

from specdec.prompts import Prompt, encode, load_prompts

logger = logging.getLogger("specdec")


@dataclass(frozen=True)
class TrainPrompt:
    """tokens: ids up to where the target's answer starts, chat template and the answer's opening included."""

    id: str
    tokens: list[int]


def load(
    source: str,
    column: str | None,
    tokenizer: PreTrainedTokenizerBase,
    raw: bool,
    limit: int | None,
    max_prompt_tokens: int,
) -> list[TrainPrompt]:
    """The prompts of `source`, encoded. Prompts longer than `max_prompt_tokens` are left out, their number logged.

    source: a JSONL file as `specdec.prompts.load_prompts` reads it; or a folder that `save_to_disk` wrote or the name
            of a dataset, of which the split "train" is taken. A dataset's rows have their number as id.
    column: of a dataset, the one with a text or a chat (objects with "role" and "content") per row; None for a file.
    raw:    the bare text, without the chat template.
    limit:  take this many: of a file in turn from each category, of a dataset the first.

    Of a chat, what comes before the first answer is the prompt: the target gives an answer of its own, from which the
    later turns would not follow. Raises ValueError or FileNotFoundError, in one sentence, for what cannot be read.
    """
    prompts = _prompts(source, column, limit)
    repeated = [name for name, count in Counter(prompt.id for prompt in prompts).items() if count > 1]
    if repeated:
        raise ValueError(f"several prompts of {source} have the id {repeated[0]!r}: give each its own")
    prompts = [_before_first_answer(prompt) for prompt in prompts]
    encoded = zip(prompts, encode(prompts, tokenizer, raw), strict=True)
    kept = [TrainPrompt(prompt.id, tokens) for prompt, tokens in encoded if len(tokens) <= max_prompt_tokens]
    if not kept:
        raise ValueError(f"no prompt of {source} has at most {max_prompt_tokens} tokens: raise max_prompt_tokens")
    if len(kept) < len(prompts):
        logger.warning(
            "left out %d of %d prompts, which are longer than %d tokens",
            len(prompts) - len(kept), len(prompts), max_prompt_tokens,
        )  # fmt: skip
    return kept


def split(prompts: Sequence[TrainPrompt], share: float) -> tuple[list[TrainPrompt], list[TrainPrompt]]:
    """(to train on, held out). Whether a prompt is held out depends on its id alone: on no order and no other prompt.

    share: the share to hold out, 0 <= share < 1. Training prompts that equal a held-out one are dropped.
    Raises ValueError where either part would be empty (the held-out one may be for a share of 0).
    """
    if not 0 <= share < 1:
        raise ValueError(f"the held-out share is {share}: give a number of at least 0 and below 1")
    held_out = [prompt for prompt in prompts if _place(prompt.id) < share]
    texts = {tuple(prompt.tokens) for prompt in held_out}
    train = [prompt for prompt in prompts if tuple(prompt.tokens) not in texts]
    if not train or (share > 0 and not held_out):
        raise ValueError(
            f"a held-out share of {share} leaves {len(train)} of {len(prompts)} prompts to train on and "
            f"{len(held_out)} held out: give more prompts or another share"
        )
    return train, held_out


def _place(prompt_id: str) -> float:
    """Where in [0, 1) an id falls, the same in every process."""
    return int.from_bytes(hashlib.sha256(prompt_id.encode()).digest()[:6]) / 2**48


def _prompts(source: str, column: str | None, limit: int | None) -> list[Prompt]:
    path = Path(source).expanduser()
    if path.is_dir():
        return _rows(_from_disk(path), source, column, limit)
    if path.is_file() or path.suffix == ".jsonl":
        if column is not None:
            raise ValueError(
                f"column {column!r} was given for the file {source}: leave it out, a file's rows have turns, prompt or "
                f"messages"
            )
        return load_prompts(path, limit)
    return _rows(_by_name(source), source, column, limit)


def _from_disk(path: Path) -> datasets.Dataset:
    try:
        found = datasets.load_from_disk(str(path))
    except FileNotFoundError:
        raise ValueError(f"folder {path} holds no dataset: give one that save_to_disk wrote") from None
    if isinstance(found, datasets.Dataset):
        return found
    if "train" not in found:
        raise ValueError(f"{path} has no split 'train' but {', '.join(found)}: give the folder of one of them")
    return found["train"]


def _by_name(name: str) -> datasets.Dataset:
    try:
        return datasets.load_dataset(name, split="train")
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{name!r} is no file or folder, and as a dataset could not be loaded: {reason}") from error


def _rows(rows: datasets.Dataset, source: str, column: str | None, limit: int | None) -> list[Prompt]:
    if column not in rows.column_names:
        problem = "needs a column named" if column is None else f"has no column {column!r}"
        raise ValueError(f"dataset {source} {problem}: choose one of {', '.join(rows.column_names)}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}: give at least 1 prompt")
    values = rows[column] if limit is None else rows[column][:limit]
    return [Prompt(str(number), "", _messages(value, number, column)) for number, value in enumerate(values)]


def _messages(value: Any, number: int, column: str) -> tuple[dict[str, str], ...]:
    """A row's value as a chat. Raises ValueError that names the row."""
    if isinstance(value, str) and value.strip():
        return ({"role": "user", "content": value},)
    if isinstance(value, list) and value and all(_is_message(message) for message in value):
        return tuple({"role": message["role"], "content": message["content"]} for message in value)
    raise ValueError(
        f"row {number} of column {column!r} is neither a text nor a list of messages with role and content: choose "
        f"another column or leave such rows out of the dataset"
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _before_first_answer(prompt: Prompt) -> Prompt:
    roles = [message["role"] for message in prompt.messages]
    count = roles.index("assistant") if "assistant" in roles else len(roles)
    if "user" not in roles[:count]:
        raise ValueError(f"prompt {prompt.id!r} has no message of the user before its first answer: leave it out")
    return replace(prompt, messages=prompt.messages[:count])
