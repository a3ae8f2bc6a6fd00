"""Text comes out whole, character by character, whatever the tokens' boundaries."""

import pytest

from specdec.streaming import IncrementalText, TokenPrinter
from tests.toy_tokenizer import toy_tokenizer

TEXTS = ["plain text, two  spaces\n", "Zürich 東京 🍌🍔 e\u0301", ""]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_whole_characters_and_add_up(text):
    tokenizer = toy_tokenizer()
    incremental = IncrementalText(tokenizer)
    pieces = [incremental.add(token) for token in tokenizer(text)["input_ids"]]
    assert "".join(pieces) == text
    assert incremental.end() == ""
    assert [len(piece.encode()) for piece in pieces if piece] == [len(character.encode()) for character in text]


def test_a_replacement_character_that_was_meant_is_printed():
    tokenizer = toy_tokenizer()
    incremental = IncrementalText(tokenizer)
    assert "".join(map(incremental.add, tokenizer("a\ufffdb")["input_ids"])) == "a\ufffdb"


def test_token_by_token_decoding_would_not_do():
    """The control: what the class is for."""
    tokenizer = toy_tokenizer()
    assert "".join(tokenizer.decode(token) for token in tokenizer("é")["input_ids"]) != "é"


def test_an_unfinished_character_waits_for_the_end():
    tokenizer = toy_tokenizer()
    incremental = IncrementalText(tokenizer)
    assert [incremental.add(token) for token in tokenizer("x🍌")["input_ids"][:-1]] == ["x", "", "", ""]
    assert incremental.end() == "\ufffd"


def test_special_tokens_are_silent():
    tokenizer = toy_tokenizer()
    incremental = IncrementalText(tokenizer)
    tokens = [*tokenizer("ab")["input_ids"], tokenizer.eos_token_id, *tokenizer("c")["input_ids"]]
    assert "".join(map(incremental.add, tokens)) == "abc"


def printed(color: bool, capsys) -> str:
    tokenizer = toy_tokenizer()
    printer = TokenPrinter(tokenizer, color)
    printer.on_commit(0, tokenizer("abc")["input_ids"], 2)
    printer.on_commit(0, tokenizer("é")["input_ids"], 0)
    printer.end()
    return capsys.readouterr().out


def test_color_marks_accepted_tokens_and_nothing_else(capsys):
    assert printed(True, capsys) == "\x1b[32ma\x1b[0m\x1b[32mb\x1b[0mcé\n"


def test_no_color_unless_asked(capsys):
    assert printed(False, capsys) == "abcé\n"
