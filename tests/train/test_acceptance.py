"""Acceptance in the engine: numbers of a drafter whose mistakes are known, and rows that are on disk as they come."""

import json

import pytest
import torch

from specdec.contracts import BaseDrafter, Draft
from specdec.models import LoadedModel
from tests.tiny_models import tiny
from train.acceptance import evaluate_acceptance
from train.data import TrainPrompt

NEW = 9
PROMPTS = [TrainPrompt("a", [5, 6, 7]), TrainPrompt("b", [8, 9])]


class Scripted(BaseDrafter):
    """Drafts the target's own greedy output, with a mistake at every drafted depth in `wrong` (counted from 1)."""

    name = "scripted"

    def __init__(self, model, wrong=()):
        self.model, self.wrong = model, wrong

    def propose(self, rows, budget, draws):
        tokens = torch.zeros(len(budget), max(budget), dtype=torch.long)
        for b, (text, limit) in enumerate(zip(rows.tokens, budget, strict=True)):
            known = text.tolist()
            for depth in range(limit):
                known.append(self.model(torch.tensor([known])).logits[0, -1].argmax().item())
                tokens[b, depth] = (known[-1] + (depth + 1 in self.wrong)) % rows.vocab_size
        return Draft(tokens, list(budget))


@pytest.fixture
def loaded():
    return LoadedModel(tiny("llama"), None, "tiny")


def evaluate(loaded, drafters, out, **changes):
    settings = {"max_new_tokens": NEW, "batch_sizes": (2,), "temperatures": (0.0,)} | changes
    return evaluate_acceptance(loaded, drafters, PROMPTS, out=out, **settings)


def test_numbers_of_known_mistakes(loaded, tmp_path):
    # Each row emits 1 token with its prompt. Always right: 3 + 1 tokens in each of 2 steps.
    # Wrong at depth 2: 1 + 1 tokens in each of 4 steps, which draft 3, 3, 3 and, with 2 tokens to go, 1.
    drafters = {"right": (Scripted(loaded.model), 3), "wrong at 2": (Scripted(loaded.model, {2}), 3)}
    right, wrong = evaluate(loaded, drafters, tmp_path)
    assert (right["mean_accepted_length"], right["acceptance_rate"]) == (4.0, 1.0)
    assert right["conditional_acceptance"] == [1.0, 1.0, 1.0]
    assert (wrong["mean_accepted_length"], wrong["acceptance_rate"]) == (2.0, 0.4)
    assert wrong["conditional_acceptance"] == [1.0, 0.0]
    assert right["tokens"] == wrong["tokens"] == 2 * NEW
    assert (right["drafter"], right["draft_length"], right["requests"], right["verifier"]) == ("right", 3, 2, "greedy")
    assert (right["dtype"], right["max_new_tokens"]) == ("float64", NEW)


def test_one_row_per_temperature_drafter_and_batch_size(loaded, tmp_path):
    drafters = {"x": (Scripted(loaded.model), 2), "y": (Scripted(loaded.model, {1}), 2)}
    rows = evaluate(loaded, drafters, tmp_path, batch_sizes=(1, 2), temperatures=(0.0, 0.7))
    assert [(row["temperature"], row["drafter"], row["batch_size"]) for row in rows] == [
        (temperature, drafter, size) for temperature in (0.0, 0.7) for drafter in "xy" for size in (1, 2)
    ]
    assert {row["verifier"] for row in rows if row["temperature"]} == {"rejection"}
    assert [json.loads(line) for line in (tmp_path / "acceptance.jsonl").read_text().splitlines()] == rows
    assert evaluate(loaded, drafters, tmp_path) == [row for row in rows if row["batch_size"] == 2][:2]
    assert len((tmp_path / "acceptance.jsonl").read_text().splitlines()) == 2, "of the last evaluation alone"


def test_rows_are_written_as_they_come(loaded, tmp_path):
    class Fails(Scripted):
        def propose(self, rows, budget, draws):
            raise RuntimeError("out of order")

    with pytest.raises(RuntimeError, match="out of order"):
        evaluate(loaded, {"works": (Scripted(loaded.model), 2), "fails": (Fails(loaded.model), 2)}, tmp_path)
    [line] = (tmp_path / "acceptance.jsonl").read_text().splitlines()
    assert json.loads(line)["drafter"] == "works"


def test_a_prompt_without_room_is_refused_before_anything_is_run(loaded, tmp_path):
    with pytest.raises(ValueError, match="prompt 'a' has 3 tokens"):
        evaluate(loaded, {"x": (Scripted(loaded.model), 2)}, tmp_path, max_new_tokens=254)
    assert not (tmp_path / "acceptance.jsonl").exists()
