"""Prompts: what each kind of row becomes, which rows are refused, and how they are encoded."""

import json
import logging
from collections import Counter

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec.prompts import Prompt, encode, load_prompts

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
WORDS = ["user", "assistant", "system", "tell", "me", "more"]


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def word_tokenizer(chat_template=TEMPLATE):
    """Token id = place in WORDS."""
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="more"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = chat_template
    return fast


def user(text):
    return ({"role": "user", "content": text},)


def test_built_in_prompts_are_ten_distinct_ones_in_each_of_six_categories():
    prompts = load_prompts()
    assert len({prompt.id for prompt in prompts}) == len({prompt.text for prompt in prompts}) == 60
    assert Counter(prompt.category for prompt in prompts) == dict.fromkeys(
        ["writing", "summarising", "question-answering", "extraction", "code-editing", "maths"], 10
    )


def test_texts_to_summarise_have_120_to_250_words():
    texts = [prompt.text.partition("\n\n")[2] for prompt in load_prompts() if prompt.category == "summarising"]
    assert len(texts) == 10 and all(120 <= len(text.split()) <= 250 for text in texts)


def test_each_kind_of_row_and_where_its_id_comes_from(tmp_path):
    chat = [{"role": "system", "content": "tell"}, {"role": "user", "content": "me"}]
    file = write(
        tmp_path / "p.jsonl",
        {"id": "a", "turns": ["first", "second"], "category": "x"},
        "",
        '{"question_id": 7, "prompt": "two\u2028lines"}',  # a line separator that does not end a JSONL row
        {"messages": chat},
    )
    assert load_prompts(file) == [
        Prompt("a", "x", user("first"), later_turns=("second",)),
        Prompt("7", "", user("two\u2028lines")),
        Prompt("4", "", tuple(chat)),  # the file's fourth line
    ]


def test_limit_takes_in_turn_from_each_category_in_order_of_appearance(tmp_path):
    categories = ["x", "x", "x", "y", "z", "z"]
    rows = [{"id": i, "category": category, "prompt": "text"} for i, category in enumerate(categories)]
    file = write(tmp_path / "p.jsonl", *rows)
    assert [prompt.id for prompt in load_prompts(file, limit=5)] == ["0", "3", "4", "1", "5"]
    assert [prompt.id for prompt in load_prompts(file)] == ["0", "1", "2", "3", "4", "5"]
    assert len(load_prompts(file, limit=100)) == 6


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{broken", "not JSON"),
        ('["a"]', "a list where an object is needed"),
        ({"text": "a"}, "it has no turns"),
        ({"turns": []}, "it has no turns"),
        ({"messages": [{"content": "a"}]}, "it has no turns"),
        ({"prompt": "  "}, "the prompt is empty"),
        ({"turns": [3]}, "the prompt is empty or not a text"),
        ({"turns": ["a", ""]}, "the prompt is empty or not a text"),
        ({"messages": [{"role": "user", "content": None}]}, "the prompt is empty or not a text"),
        ('{"prompt": "half \\ud800"}', "the prompt holds half a surrogate pair"),
        ("[" * 100_000, "not JSON that can be read"),
    ],
)
def test_bad_row_is_named_by_file_and_line_or_skipped_and_counted(tmp_path, caplog, row, reason):
    file = write(tmp_path / "p.jsonl", {"prompt": "good"}, row, {"prompt": "also good"}, row)
    with pytest.raises(ValueError, match=rf"p\.jsonl, line 2: {reason}.*--skip-bad"):
        load_prompts(file)
    with caplog.at_level(logging.WARNING):
        assert [prompt.text for prompt in load_prompts(file, skip_bad=True)] == ["good", "also good"]
    assert len(caplog.messages) == 1 and "left out 2 bad" in caplog.messages[0] and "line 2" in caplog.messages[0]


def test_unusable_files_and_a_limit_of_zero(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.jsonl does not exist"):
        load_prompts(tmp_path / "nowhere.jsonl")
    with pytest.raises(IsADirectoryError, match=f"prompts {tmp_path} is a folder"):
        load_prompts(tmp_path)
    with pytest.raises(ValueError, match="has no usable prompt"):
        load_prompts(write(tmp_path / "empty.jsonl", ""))
    with pytest.raises(ValueError, match="has no usable prompt"):
        load_prompts(write(tmp_path / "bad.jsonl", "{"), skip_bad=True)
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    with pytest.raises(ValueError, match="latin.jsonl is not UTF-8"):
        load_prompts(tmp_path / "latin.jsonl")
    with pytest.raises(ValueError, match="limit is 0"):
        load_prompts(limit=0)


def test_encode_applies_the_template_with_the_answers_opening_unless_raw():
    prompts = [Prompt("a", "", user("tell me")), Prompt("b", "", user("more"))]
    assert encode(prompts, word_tokenizer(), raw=False) == [[0, 3, 4, 1], [0, 5, 1]]
    assert encode(prompts, word_tokenizer(), raw=True) == [[3, 4], [5]]


def test_encode_needs_a_template_and_tokens():
    with pytest.raises(ValueError, match="has no chat template: use --raw"):
        encode([Prompt("a", "", user("tell"))], word_tokenizer(chat_template=None), raw=False)
    with pytest.raises(ValueError, match="prompt 'b' has no tokens"):
        encode([Prompt("a", "", user("tell")), Prompt("b", "", user(" "))], word_tokenizer(), raw=True)
