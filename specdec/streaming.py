"""Text on the terminal as tokens are committed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import typer
from transformers import PreTrainedTokenizerBase


class IncrementalText:
    """Turns tokens into text as they come, never giving out part of a UTF-8 character.

    A token's text may depend on the tokens before it, so that a short window is decoded with and without the new one
    and the difference is the new text. A trailing replacement character means that a character's bytes are not all
    there yet; its text is held back until they are, or until `end`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._decode = partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        self._window: list[int] = []
        self._given = 0  # tokens at the window's start whose text was given out; the rest are new

    def add(self, token: int) -> str:
        """The text that `token` completes, '' while it completes none."""
        self._window.append(token)
        text = self._decode(self._window)
        return "" if text.endswith("\ufffd") else self._give(text)

    def end(self) -> str:
        """What is still held back: at most one incomplete character, as a replacement character."""
        return self._give(self._decode(self._window))

    def _give(self, text: str) -> str:
        given = len(self._decode(self._window[: self._given]))
        self._window = self._window[self._given :]
        self._given = len(self._window)
        return text[given:]


class TokenPrinter:
    """Prints one row's tokens; with `color`, those that were drafted and accepted are green."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, color: bool) -> None:
        self._text = IncrementalText(tokenizer)
        self._color = color

    def on_commit(self, row: int, tokens: Sequence[int], n_drafted_accepted: int) -> None:
        """The engine's callback after each step: `tokens` were emitted, the first n of them drafted and accepted."""
        for place, token in enumerate(tokens):
            self._print(self._text.add(token), drafted=place < n_drafted_accepted)

    def end(self) -> None:
        self._print(self._text.end() + "\n", drafted=False)

    def _print(self, text: str, drafted: bool) -> None:
        if self._color and drafted and text:
            typer.secho(text, fg="green", nl=False, color=True)  # --color was asked for, also into a pipe or a file
        else:
            typer.echo(text, nl=False)
