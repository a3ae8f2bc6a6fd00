"""Prompts: the built-in set, a JSONL file of one's own, and their token ids.

The built-in set has ten prompts in each of six categories: writing, summarising, question-answering, extraction,
code-editing and maths. In three of them (summarising, extraction, code-editing) the answer repeats much of the prompt.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

BUILT_IN = Path(__file__).parent / "data" / "prompts.jsonl"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """One request: a chat (`messages`, each with "role" and "content") that may be a single user message.

    later_turns: user messages that follow, each after the model's own answer to what is before it."""

    id: str
    category: str
    messages: tuple[dict[str, str], ...]
    later_turns: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The messages' contents alone: what the model sees where no chat template is applied."""
        return "\n\n".join(message["content"] for message in self.messages)


def load_prompts(source: str | Path | None = None, limit: int | None = None, skip_bad: bool = False) -> list[Prompt]:
    """The prompts of a JSONL file, or the built-in ones for `source=None`.

    Each row has one of `turns` (a list of user messages, of which all but the first are `later_turns`), `prompt` (a
    text) or `messages` (a chat). Its id is `id`, `question_id` or the line number.
    limit: take this many, in turn from each category in the order the categories appear.
    skip_bad: leave out rows that cannot be read, with one warning that counts them, instead of raising.

    Raises FileNotFoundError for a missing file, IsADirectoryError for a folder, and ValueError for a bad row (named by
    file and line), a file without prompts and a limit below 1.
    """
    path = BUILT_IN if source is None else Path(source)
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}: give at least 1 prompt")
    prompts, errors = [], []
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            try:
                prompts.append(_parse(line, number))
            except ValueError as error:
                errors.append(f"{path}, line {number}: {error}")
    if errors and not skip_bad:
        raise ValueError(f"{errors[0]}; mend the line or leave such lines out with --skip-bad")
    if not prompts:
        raise ValueError(f"prompts file {path} has no usable prompt")
    if errors:
        _log.warning("left out %d bad line(s) of the prompts, the first of them: %s", len(errors), errors[0])
    return limited(prompts, limit)


def limited(prompts: list[Prompt], limit: int | None) -> list[Prompt]:
    """`limit` prompts, the first of each category before the second of any; all of them as they are for None."""
    if limit is None:
        return prompts
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    return [prompt for prompt in chain.from_iterable(zip_longest(*by_category.values())) if prompt is not None][:limit]


def encode(prompts: Iterable[Prompt], tokenizer: PreTrainedTokenizerBase, raw: bool) -> list[list[int]]:
    """Token ids of each prompt: through the chat template with the answer's opening, or the bare text if `raw`.

    Raises ValueError where the tokenizer has no chat template, and for a prompt without tokens."""
    if not raw and tokenizer.chat_template is None:
        raise ValueError(f"the tokenizer of {tokenizer.name_or_path!r} has no chat template: use --raw")
    encoded = []
    for prompt in prompts:
        encoded.append(_encode(prompt, tokenizer, raw))
        if not encoded[-1]:
            raise ValueError(f"prompt {prompt.id!r} has no tokens: the tokenizer drops all of its text")
    return encoded


def _encode(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, raw: bool) -> list[int]:
    if raw:
        return tokenizer(prompt.text)["input_ids"]
    return tokenizer.apply_chat_template(list(prompt.messages), add_generation_prompt=True, return_dict=False)


def _lines(path: Path) -> list[str]:
    if path.is_dir():
        raise IsADirectoryError(f"prompts {path} is a folder: give a JSONL file in it, or none for the built-in set")
    if not path.is_file():
        raise FileNotFoundError(f"prompts file {path} does not exist: give a JSONL file, or none for the built-in set")
    try:
        return path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"prompts file {path} is not UTF-8 text: save it as such") from error


def _parse(line: str, number: int) -> Prompt:
    """One row as a prompt. Raises ValueError that says what is wrong with it."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at character {error.pos})") from error
    except RecursionError as error:
        raise ValueError("not JSON that can be read (nested too deep)") from error
    if not isinstance(row, dict):
        raise ValueError(f"a {type(row).__name__} where an object is needed")
    return prompt_of(row, number)


def prompt_of(row: dict[str, Any], number: int) -> Prompt:
    """A row that was read, as a prompt; `number` names it where it has no id. Raises ValueError for what it lacks."""
    messages, later = _messages(row), _later_turns(row)
    texts = [text for message in messages for text in message.values()]
    if not all(isinstance(text, str) and text.strip() for text in (*texts, *later)):
        raise ValueError("the prompt is empty or not a text")
    if any("\ud800" <= char <= "\udfff" for text in (*texts, *later) for char in text):
        raise ValueError("the prompt holds half a surrogate pair, which is not text")
    name = str(row.get("id", row.get("question_id", number)))
    return Prompt(name, str(row.get("category", "")), messages, later)


def _messages(row: dict[str, Any]) -> tuple[dict[str, str], ...]:
    match row:
        case {"messages": [*messages]} if messages and all(_is_message(message) for message in messages):
            return tuple(messages)
        case {"turns": [first, *_]} | {"prompt": first}:
            return ({"role": "user", "content": first},)
    raise ValueError("it has no turns (a list of texts), prompt (a text) or messages (objects with role and content)")


def _later_turns(row: dict[str, Any]) -> tuple[Any, ...]:
    match row:
        case {"messages": _}:
            return ()
        case {"turns": [_, *later]}:
            return tuple(later)
    return ()


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and message.keys() == {"role", "content"}
