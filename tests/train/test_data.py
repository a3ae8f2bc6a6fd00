"""What a source's rows become, what is refused, and that held-out prompts stay out of training."""

import json
import logging

import datasets
import pytest

from tests.toy_tokenizer import toy_tokenizer
from train.data import TrainPrompt, load, split

OPENING = "{% if add_generation_prompt %}answer: {% endif %}"
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "more"},
]


@pytest.fixture
def tokenizer():
    tokenizer = toy_tokenizer()
    tokenizer.chat_template += OPENING
    return tokenizer


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def save(path, **columns):
    datasets.Dataset.from_dict(columns).save_to_disk(path)
    return str(path)


def texts(prompts, tokenizer):
    return {prompt.id: tokenizer.decode(prompt.tokens) for prompt in prompts}


def test_rows_of_a_file_go_through_the_chat_template_up_to_the_answers_opening(tmp_path, tokenizer):
    file = write(tmp_path / "p.jsonl", {"id": "a", "turns": ["hi", "later"]}, {"messages": CHAT})
    prompts = load(file, None, tokenizer, False, None, 100)
    assert texts(prompts, tokenizer) == {
        "a": "user: hi\nanswer: ",
        "2": "system: be brief\nuser: hi\nanswer: ",  # nothing from the first answer on
    }
    raw = load(file, None, tokenizer, True, None, 100)
    assert texts(raw, tokenizer) == {"a": "hi", "2": "be brief\n\nhi"}


def test_a_chat_without_a_question_is_refused(tmp_path, tokenizer):
    file = write(tmp_path / "p.jsonl", {"id": "x", "messages": CHAT[:1] + CHAT[2:]})
    with pytest.raises(ValueError, match="prompt 'x' has no message of the user before its first answer"):
        load(file, None, tokenizer, False, None, 100)


def test_a_broken_line_and_a_repeated_id_are_named(tmp_path, tokenizer):
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    with pytest.raises(ValueError, match="broken.jsonl, line 2: not JSON"):
        load(str(tmp_path / "broken.jsonl"), None, tokenizer, False, None, 100)
    file = write(
        tmp_path / "twice.jsonl", {"id": "a", "prompt": "x"}, {"id": "b", "prompt": "y"}, {"id": "a", "prompt": "z"}
    )
    with pytest.raises(ValueError, match="several prompts .* have the id 'a'"):
        load(file, None, tokenizer, False, None, 100)


def test_long_prompts_are_left_out_and_counted_once(tmp_path, tokenizer, caplog):
    file = write(tmp_path / "p.jsonl", *({"id": str(n), "prompt": "x" * n} for n in (3, 6, 5, 7, 4)))
    with caplog.at_level(logging.WARNING, logger="specdec"):
        kept = load(file, None, tokenizer, True, None, 5)
    assert {prompt.id: len(prompt.tokens) for prompt in kept} == {"3": 3, "5": 5, "4": 4}
    assert [record.getMessage() for record in caplog.records] == [
        "left out 2 of 5 prompts, which are longer than 5 tokens"
    ]
    with pytest.raises(ValueError, match="no prompt .* has at most 2 tokens"):
        load(file, None, tokenizer, True, None, 2)


def test_columns_of_a_dataset_on_disk(tmp_path, tokenizer):
    text = save(tmp_path / "text", question=["one", "two", "three"], other=[1, 2, 3])
    assert texts(load(text, "question", tokenizer, False, 2, 100), tokenizer) == {
        "0": "user: one\nanswer: ",
        "1": "user: two\nanswer: ",
    }
    chat = save(tmp_path / "chat", messages=[CHAT, CHAT[1:2]])
    assert texts(load(chat, "messages", tokenizer, True, None, 100), tokenizer) == {"0": "be brief\n\nhi", "1": "hi"}


@pytest.mark.parametrize(("column", "problem"), [("text", "has no column 'text'"), (None, "needs a column named")])
def test_a_missing_column_lists_those_there_are(tmp_path, tokenizer, column, problem):
    folder = save(tmp_path / "d", question=["one"], answer=["two"])
    with pytest.raises(ValueError, match=f"{problem}: choose one of question, answer$"):
        load(folder, column, tokenizer, False, None, 100)


@pytest.mark.parametrize("value", [None, " ", [{"role": "user", "content": None}], [{"role": "user"}], []])
def test_a_row_without_a_prompt_is_named(tmp_path, tokenizer, value):
    good = [{"role": "user", "content": "x"}] if isinstance(value, list) else "x"
    folder = save(tmp_path / "d", prompt=[good, value])
    with pytest.raises(ValueError, match="row 1 of column 'prompt' is neither a text nor a list of messages"):
        load(folder, "prompt", tokenizer, False, None, 100)


def test_the_train_split_of_several_is_taken(tmp_path, tokenizer):
    both = {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("test", "train")}
    datasets.DatasetDict(both).save_to_disk(tmp_path / "both")
    assert texts(load(str(tmp_path / "both"), "text", tokenizer, True, None, 100), tokenizer) == {"0": "train"}
    datasets.DatasetDict({"test": both["test"], "dev": both["train"]}).save_to_disk(tmp_path / "none")
    with pytest.raises(ValueError, match="no split 'train' but test, dev"):
        load(str(tmp_path / "none"), "text", tokenizer, True, None, 100)


def test_a_dataset_by_name(monkeypatch, tokenizer):
    with pytest.raises(
        ValueError, match="'no/such-dataset' is no file or folder, and as a dataset could not be loaded: ."
    ):
        load("no/such-dataset", "text", tokenizer, True, None, 100)  # tests run offline

    def load_dataset(name, split):
        return datasets.Dataset.from_dict({"text": [f"{name} {split}"]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert texts(load("some/name", "text", tokenizer, True, None, 100), tokenizer) == {"0": "some/name train"}


def test_sources_that_hold_nothing_to_read_are_named(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="holds no dataset"):
        load(str(tmp_path), "text", tokenizer, True, None, 100)
    with pytest.raises(FileNotFoundError, match="gone.jsonl does not exist"):
        load(str(tmp_path / "gone.jsonl"), None, tokenizer, True, None, 100)
    with pytest.raises(ValueError, match="column 'text' was given for the file"):
        load(write(tmp_path / "p.jsonl", {"prompt": "x"}), "text", tokenizer, True, None, 100)
    for source, column in ((tmp_path / "p.jsonl", None), (save(tmp_path / "d", text=["x"]), "text")):
        with pytest.raises(ValueError, match="limit is 0"):
            load(str(source), column, tokenizer, True, 0, 100)


def numbered(count):
    return [TrainPrompt(f"p{n}", [n]) for n in range(count)]


def test_split_holds_out_the_share_whatever_the_order_and_the_others():
    prompts = numbered(1000)
    train, held_out = split(prompts, 0.1)
    assert 70 <= len(held_out) <= 130  # 100 expected, standard deviation 9.5
    assert sorted(train + held_out, key=lambda p: p.tokens) == prompts
    backwards = split(prompts[::-1], 0.1)[1]
    assert backwards == held_out[::-1]  # a share by place would hold out others
    fewer = split(prompts[::2], 0.1)[1]
    assert fewer == [prompt for prompt in held_out if prompt in prompts[::2]]
    larger = split(prompts, 0.2)[1]
    assert {p.id for p in held_out} < {p.id for p in larger}


def test_no_held_out_text_is_trained_on_under_another_id():
    prompts = [TrainPrompt(f"p{n}", [n % 50]) for n in range(500)]  # every text ten times
    train, held_out = split(prompts, 0.05)
    assert len(held_out) > 5 and len(train) > 100
    assert not {tuple(p.tokens) for p in train} & {tuple(p.tokens) for p in held_out}
    by_id_alone = [p for p in prompts if p not in held_out]
    assert {tuple(p.tokens) for p in by_id_alone} & {tuple(p.tokens) for p in held_out}  # what the rule is there for


def test_a_share_that_leaves_a_part_empty_is_refused():
    assert split(numbered(3), 0) == (numbered(3), [])
    with pytest.raises(ValueError, match="leaves 2 of 2 prompts to train on and 0 held out"):
        split(numbered(2), 1e-9)
    with pytest.raises(ValueError, match="leaves 0 of 1 prompts"):
        split(numbered(1), 1 - 1e-12)
    for share in (1.0, -0.1):
        with pytest.raises(ValueError, match=f"share is {share}"):
            split(numbered(2), share)
