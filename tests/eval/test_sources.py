"""Prompts from a data set's column, loaded from disk by `datasets` as one from the Hub would be."""

import json

import pytest

from eval.sources import load_sources
from specdec.prompts import Prompt

ROWS = [
    {"question": "one", "category": "x", "talk": ["a", "b"], "chat": [{"role": "user", "content": "hi"}]},
    {"question": "two", "category": "x", "talk": ["c"], "chat": [{"role": "user", "content": "ho"}]},
    {"question": "three", "category": "y", "talk": ["d"], "chat": [{"role": "user", "content": "he"}]},
]


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    folder.mkdir()
    for split in ("train", "test"):
        rows = ROWS if split == "train" else ROWS[:1]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def user(text):
    return ({"role": "user", "content": text},)


def test_a_column_of_texts_turns_or_chats(data):
    texts, turns, chats = (load_sources(str(data), name, "train", None, False) for name in ("question", "talk", "chat"))
    assert texts == [Prompt(str(n), row["category"], user(row["question"])) for n, row in enumerate(ROWS)]
    assert turns[0] == Prompt("0", "x", user("a"), ("b",))
    assert chats[1].messages == user("ho")


def test_limit_takes_in_turn_from_each_category(data):
    assert [prompt.text for prompt in load_sources(str(data), "question", "train", 2, False)] == ["one", "three"]


@pytest.mark.parametrize(
    ("column", "split", "message"),
    [
        ("question", None, "has the splits .*test.*: choose one with --split"),
        ("question", "dev", "has no split 'dev': it has"),
        ("nope", "train", "has no column 'nope': it has question, category"),
    ],
)
def test_what_is_not_there_is_named_with_what_is(data, column, split, message):
    with pytest.raises(ValueError, match=message):
        load_sources(str(data), column, split, None, False)


def test_a_missing_data_set_and_a_column_of_nothing_are_refused(tmp_path):
    with pytest.raises(ValueError, match="could not be loaded"):
        load_sources(str(tmp_path / "nowhere"), "question", None, None, False)
    with pytest.raises(ValueError, match="--column question belongs to a data set"):
        load_sources(None, "question", None, None, False)


def test_a_damaged_data_set_is_refused_in_one_sentence(data):
    (data / "train.jsonl").write_text('{"question": "one"}\n{broken\n')
    with pytest.raises(ValueError, match="could not be loaded: DatasetGenerationError"):
        load_sources(str(data), "question", "train", None, False)


def test_rows_without_text_are_named_or_skipped(data, caplog):
    (data / "train.jsonl").write_text('{"question": "one"}\n{"question": ""}\n')
    (data / "test.jsonl").unlink()
    with pytest.raises(ValueError, match="row 1: the prompt is empty or not a text; leave such rows out"):
        load_sources(str(data), "question", None, None, False)
    assert [prompt.text for prompt in load_sources(str(data), "question", None, None, True)] == ["one"]
    assert "left out 1 bad row(s) of the data set" in caplog.text
