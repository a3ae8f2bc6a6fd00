"""Responses are the target's own, follow their prompt alone, and survive kills, other processes and other settings."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import train.responses
from specdec.models import LoadedModel, load_target
from tests.tiny_models import POSITIONS, tiny
from tests.toy_tokenizer import VOCAB, toy_tokenizer
from train.data import TrainPrompt
from train.provenance import claim
from train.responses import ResponseSettings, fixed_batches, made_from, read, respond

GREEDY = ResponseSettings(temperature=0.0, max_new_tokens=6, batch_size=2, seed=0)
SAMPLED = replace(GREEDY, temperature=1.5)
PROMPTS = [TrainPrompt(f"p{n}", [(7 * n + 3 * place) % 200 for place in range(2 + n % 4)]) for n in range(7)]


@pytest.fixture
def loaded():
    return LoadedModel(tiny("llama", vocab=VOCAB), toy_tokenizer(), "tiny")


def greedy_alone(model, prompt, count):
    """The definition: one row, no cache, arg-max."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(model(torch.tensor([tokens])).logits[0, -1].argmax().item())
    return tokens[len(prompt) :]


def responses(loaded, settings, folder, prompts=PROMPTS):
    respond(loaded, prompts, settings, folder)
    return {e.id: e.tokens[e.response_start :] for e in read(loaded, prompts, settings, folder)}


def test_greedy_responses_end_with_the_end_token_or_without_one(loaded, tmp_path):
    alone = {prompt.id: greedy_alone(loaded.model, prompt.tokens, 6) for prompt in PROMPTS}
    end = alone["p0"][2]
    loaded.model.generation_config.eos_token_id = end
    expected = {name: tokens[: tokens.index(end) + 1] if end in tokens else tokens for name, tokens in alone.items()}
    found = responses(loaded, GREEDY, tmp_path)
    assert found == expected
    assert found["p0"][-1] == end and len(found["p0"]) <= 3
    assert any(len(tokens) == 6 and end not in tokens for tokens in found.values())


def test_examples_hold_prompt_and_response(loaded, tmp_path):
    respond(loaded, PROMPTS, GREEDY, tmp_path)
    examples = read(loaded, PROMPTS, GREEDY, tmp_path)
    prompts = {prompt.id: prompt.tokens for prompt in PROMPTS}
    assert [e.tokens[: e.response_start] for e in examples] == [prompts[e.id] for e in examples]
    assert [e.id for e in examples] == [p.id for batch in fixed_batches(PROMPTS, 2) for p in batch]
    assert {e.id for e in examples} == prompts.keys()


def test_a_sampled_response_follows_its_prompt_and_seed_alone(loaded, tmp_path):
    first = responses(loaded, SAMPLED, tmp_path / "2")
    assert responses(loaded, replace(SAMPLED, batch_size=3), tmp_path / "3") == first
    assert responses(loaded, SAMPLED, tmp_path / "some", PROMPTS[:2:-1]) == {
        prompt.id: first[prompt.id] for prompt in PROMPTS[3:]
    }
    assert first != responses(loaded, replace(SAMPLED, seed=1), tmp_path / "seed")
    assert first != responses(loaded, GREEDY, tmp_path / "greedy")
    twins = [TrainPrompt("a", [5, 6]), TrainPrompt("b", [5, 6])]
    answers = responses(loaded, SAMPLED, tmp_path / "twins", twins)
    assert answers["a"] != answers["b"]  # each has noise of its own


def test_only_the_temperature_shapes_sampling(loaded, tmp_path):
    greedy = responses(loaded, GREEDY, tmp_path / "greedy")
    assert responses(loaded, replace(SAMPLED, temperature=1e-4), tmp_path / "cold") == greedy
    loaded.model.generation_config.top_k = 1  # of which nothing is taken over
    assert responses(loaded, SAMPLED, tmp_path / "sampled") != greedy


def test_batches_are_sorted_within_windows_only(monkeypatch):
    monkeypatch.setattr(train.responses, "WINDOW", 2)
    lengths = [5, 1, 4, 1, 9, 2, 3]  # windows of two batches of two: 5 1 4 1, then 9 2 3
    prompts = [TrainPrompt(str(n), [0] * length) for n, length in enumerate(lengths)]
    batches = [[prompt.id for prompt in batch] for batch in fixed_batches(prompts, 2)]
    assert batches == [["1", "3"], ["2", "0"], ["5", "6"], ["4"]]


def cut_to(folder, whole, bytes_kept):
    (folder / "responses.jsonl").write_bytes(whole[:bytes_kept])


def test_a_cut_file_is_completed_to_what_it_would_have_been(loaded, tmp_path, monkeypatch):
    respond(loaded, PROMPTS, SAMPLED, tmp_path)
    whole = (tmp_path / "responses.jsonl").read_bytes()
    line = whole.index(b"\n") + 1
    cuts = (0, 1, line - 1, line, line + 1, line + 9, len(whole) - 1, len(whole))
    for kept in cuts:
        cut_to(tmp_path, whole, kept)
        respond(loaded, PROMPTS, SAMPLED, tmp_path)
        assert (tmp_path / "responses.jsonl").read_bytes() == whole, kept
    monkeypatch.setattr(train.responses, "_drop_cut_line", lambda path: None)
    cut_to(tmp_path, whole, line + 9)
    respond(loaded, PROMPTS, SAMPLED, tmp_path)
    assert (tmp_path / "responses.jsonl").read_bytes() != whole  # what the test above would have caught


def test_finished_batches_are_not_run_again(loaded, tmp_path, monkeypatch):
    respond(loaded, PROMPTS, SAMPLED, tmp_path)
    whole = (tmp_path / "responses.jsonl").read_bytes()
    ran, answer = [], train.responses._answer
    monkeypatch.setattr(
        train.responses, "_answer", lambda method, batch, n: ran.append(batch[0].id) or answer(method, batch, n)
    )
    cut_to(tmp_path, whole, len(whole) - 5)
    respond(loaded, PROMPTS, SAMPLED, tmp_path)
    assert ran == [fixed_batches(PROMPTS, 2)[-1][0].id]


SCRIPT = """
import sys
import torch
from pathlib import Path
from specdec.models import load_target
from tests.train.test_responses import KILLED, many_prompts
from train.responses import respond
torch.set_num_threads(1)
respond(load_target(sys.argv[1], "float32", "cpu"), many_prompts(), KILLED, Path(sys.argv[2]))
"""
KILLED = replace(SAMPLED, batch_size=1, max_new_tokens=12)


def many_prompts():
    return [TrainPrompt(f"p{n}", [n % 200, 1 + n % 7]) for n in range(20)]


def test_a_run_ended_by_sigkill_is_completed_to_what_it_would_have_been(tmp_path):
    tiny("llama", vocab=VOCAB, dtype=torch.float32).save_pretrained(tmp_path / "model")
    toy_tokenizer().save_pretrained(tmp_path / "model")
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "model"), str(tmp_path / "killed")],
        cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, stderr=subprocess.PIPE,
    )  # fmt: skip
    file = tmp_path / "killed" / "responses.jsonl"
    while not file.exists() or file.read_bytes().count(b"\n") < 2:
        assert process.poll() is None, process.stderr.read().decode()
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.stderr.close()
    before = file.read_bytes()
    assert 2 <= before.count(b"\n") < 20

    loaded = load_target(str(tmp_path / "model"), "float32", "cpu")
    respond(loaded, many_prompts(), KILLED, tmp_path / "whole")
    respond(loaded, many_prompts(), KILLED, tmp_path / "killed")
    assert file.read_bytes() == (tmp_path / "whole" / "responses.jsonl").read_bytes()
    assert file.read_bytes().startswith(before[: before.rindex(b"\n") + 1])


def test_several_processes_share_the_batches_and_any_number_can_go_on(loaded, tmp_path):
    respond(loaded, PROMPTS, SAMPLED, tmp_path / "one")
    expected = read(loaded, PROMPTS, SAMPLED, tmp_path / "one")
    for rank in (1, 0):
        respond(loaded, PROMPTS, SAMPLED, tmp_path / "two", rank, world=2)
    numbers = [
        [json.loads(line)["batch"] for line in (tmp_path / "two" / f"responses-{rank}.jsonl").read_text().splitlines()]
        for rank in (0, 1)
    ]
    assert numbers == [[0, 2], [1, 3]]
    assert read(loaded, PROMPTS, SAMPLED, tmp_path / "two") == expected

    cut = tmp_path / "two" / "responses-1.jsonl"
    cut.write_bytes(cut.read_bytes()[:-4])  # a kill during batch 3; then one process finishes alone
    with pytest.raises(ValueError, match="lacks 1 of 4 batches of responses, the first of them batch 3"):
        read(loaded, PROMPTS, SAMPLED, tmp_path / "two")
    respond(loaded, PROMPTS, SAMPLED, tmp_path / "two")
    assert read(loaded, PROMPTS, SAMPLED, tmp_path / "two") == expected
    assert len((tmp_path / "two" / "responses.jsonl").read_text().splitlines()) == 1


def test_responses_made_otherwise_are_refused_by_what_differs(loaded, tmp_path):
    respond(loaded, PROMPTS, GREEDY, tmp_path)
    whole = (tmp_path / "responses.jsonl").read_bytes()
    template = toy_tokenizer()
    template.chat_template += " "
    ended = tiny("llama", vocab=VOCAB)
    ended.generation_config.eos_token_id = 5
    others = {
        "target": (replace(loaded, model=tiny("llama", seed=1, vocab=VOCAB)), PROMPTS, GREEDY),
        "dtype": (replace(loaded, model=tiny("llama", vocab=VOCAB).float()), PROMPTS, GREEDY),
        "end_tokens": (replace(loaded, model=ended), PROMPTS, GREEDY),
        "chat_template": (replace(loaded, tokenizer=template), PROMPTS, GREEDY),
        "prompts": (loaded, PROMPTS[::-1], GREEDY),
        "temperature": (loaded, PROMPTS, SAMPLED),
        "max_new_tokens": (loaded, PROMPTS, replace(GREEDY, max_new_tokens=5)),
        "batch_size": (loaded, PROMPTS, replace(GREEDY, batch_size=3)),
        "seed": (loaded, PROMPTS, replace(GREEDY, seed=1)),
    }
    for key, arguments in others.items():
        for use in (respond, read):
            with pytest.raises(ValueError, match=f"{tmp_path} holds what was made with {key}="):
                use(*arguments, tmp_path)
    assert (tmp_path / "responses.jsonl").read_bytes() == whole


@pytest.mark.parametrize(
    "broken",
    [
        b"{",
        b"[]",
        b'{"batch": 0}',
        b"",
        b"\xff",
        b'{"batch": 1, "responses": [1]}',
        b'{"batch": 1, "responses": {"a": [1.5]}}',
    ],
)
def test_a_broken_line_is_named(loaded, tmp_path, broken):
    respond(loaded, PROMPTS, GREEDY, tmp_path)
    lines = (tmp_path / "responses.jsonl").read_bytes().splitlines()
    (tmp_path / "responses.jsonl").write_bytes(b"\n".join([lines[0], broken, *lines[2:]]) + b"\n")
    with pytest.raises(ValueError, match="responses.jsonl, line 2, is not a batch"):
        respond(loaded, PROMPTS, GREEDY, tmp_path)


@pytest.mark.parametrize("answers", [{}, {prompt.id: [VOCAB] for prompt in PROMPTS}], ids=["missing", "no token"])
def test_a_batch_without_an_answer_of_the_targets_is_named(loaded, tmp_path, answers):
    respond(loaded, PROMPTS, GREEDY, tmp_path)
    first, *others = (tmp_path / "responses.jsonl").read_text().splitlines(keepends=True)
    number = json.loads(first)["batch"]
    line = json.dumps({"batch": number, "responses": answers}) + "\n"
    (tmp_path / "responses.jsonl").write_text("".join([line, *others]))
    with pytest.raises(ValueError, match=f"no answer in the target's tokens to prompt .* in batch {number}: remove"):
        read(loaded, PROMPTS, GREEDY, tmp_path)


def test_a_full_disk_is_one_sentence(loaded, tmp_path, monkeypatch):
    claim(tmp_path, made_from(loaded, PROMPTS, GREEDY))
    (tmp_path / "responses.jsonl").symlink_to("/dev/full")  # which never ends where it is read
    monkeypatch.setattr(train.responses, "_drop_cut_line", lambda path: None)
    monkeypatch.setattr(train.responses, "_finished", lambda folder: {})
    with pytest.raises(ValueError, match=r"responses.jsonl cannot be written \(No space left on device\).*--resume"):
        respond(loaded, PROMPTS, GREEDY, tmp_path)


def test_a_prompt_without_room_for_its_answer_is_refused_before_anything_is_made(loaded, tmp_path):
    prompts = [*PROMPTS, TrainPrompt("long", [1] * (POSITIONS - 5))]
    with pytest.raises(ValueError, match=f"prompt 'long' has {POSITIONS - 5} tokens, which with 6 new ones"):
        respond(loaded, prompts, GREEDY, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    respond(loaded, prompts, replace(GREEDY, max_new_tokens=5), tmp_path / "out")


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -0.1}, {"temperature": float("nan")}, {"max_new_tokens": 0}, {"batch_size": 0}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_settings_are_validated(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} .*{next(iter(wrong.values()))}"):
        replace(GREEDY, **wrong)


def test_progress_is_shown_by_the_main_process_on_standard_error(loaded, tmp_path, capsys):
    respond(loaded, PROMPTS, GREEDY, tmp_path, rank=1, world=2)
    assert capsys.readouterr() == ("", "")
    respond(loaded, PROMPTS, GREEDY, tmp_path, rank=0, world=2)
    shown = capsys.readouterr()
    assert shown.out == "" and "4/4" in shown.err and "tokens/s" in shown.err
