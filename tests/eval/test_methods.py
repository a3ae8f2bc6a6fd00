"""All methods see the same request, and outputs are cut at the same place."""

import pytest
import torch

from eval.methods import Request, engine_method, hf_method, left_padded, through_stop
from specdec.stats import Stats
from tests.eval.samples import prompts_of
from tests.tiny_models import tiny

GREEDY = {"do_sample": False}


def greedy_alone(model, prompt: list[int], count: int) -> list[int]:
    """The definition: one row, no cache, arg-max."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(model(torch.tensor([tokens])).logits[0, -1].argmax().item())
    return tokens[len(prompt) :]


def test_left_padding():
    input_ids, mask = left_padded([[5, 6, 7], [8]], 0, torch.device("cpu"))
    assert input_ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


@pytest.mark.parametrize(
    ("tokens", "expected"), [([4, 9, 9], [4, 9]), ([9], [9]), ([4, 5], [4, 5]), ([], []), ([4, 8, 9], [4, 8])]
)
def test_cut_after_the_first_stop(tokens, expected):
    assert through_stop(tokens, frozenset({8, 9})) == expected


@pytest.mark.parametrize(("eos", "stops"), [(None, set()), (7, {7}), ([7, 8], {7, 8})])
def test_stops_of_the_generation_configuration(eos, stops):
    model = tiny("llama")
    model.generation_config.eos_token_id = eos
    assert Request.of(model, GREEDY, 0).stops == stops


def test_hf_method_generates_greedily_and_stops_each_row_at_its_eos():
    model, prompts = tiny("llama"), prompts_of(3, 6)
    alone = [greedy_alone(model, prompt.tokens, 8) for prompt in prompts]
    model.generation_config.eos_token_id = alone[0][2]
    expected = [through_stop(tokens, frozenset({alone[0][2]})) for tokens in alone]
    outcome = hf_method(model, Request.of(model, GREEDY, 0)).generate(prompts, 8)
    assert outcome.tokens == expected
    assert outcome.target_forwards == max(map(len, expected))
    assert outcome.stats is None and outcome.seconds > 0


def test_hf_samples_are_repeatable():
    model = tiny("llama")
    method = hf_method(model, Request.of(model, {"do_sample": True, "temperature": 2.0, "top_k": 0, "top_p": 1.0}, 3))
    first, second = (method.generate(prompts_of(3, 6), 8).tokens for _ in range(2))
    assert first == second


def test_hf_takes_any_seed_as_the_engine_does():
    model, prompts, sampling = tiny("llama"), prompts_of(3), {"do_sample": True, "temperature": 2.0}
    large, small = (hf_method(model, Request.of(model, sampling, seed)).generate(prompts, 4) for seed in (2**64 + 3, 3))
    assert large.tokens == small.tokens


def test_engine_method_hands_over_the_request():
    model = tiny("llama")
    request = Request.of(model, GREEDY, 11)
    seen = {}

    def engine(model, input_ids, attention_mask, **keywords):
        seen.update(keywords, shape=tuple(input_ids.shape), mask=attention_mask.sum().item())
        return torch.cat([input_ids, torch.tensor([[1], [2]])], 1), Stats("x", "greedy", True, forwards=9)

    drafter = object()
    outcome = engine_method("x:length=3", model, request, drafter, 3, "auto", engine).generate(prompts_of(2, 4), 5)
    assert outcome.tokens == [[1], [2]] and outcome.target_forwards == 9
    assert seen == {
        "drafter": drafter,
        "draft_length": 3,
        "verifier": "auto",
        "seed": 11,
        "request_ids": [0, 1],
        "return_stats": True,
        "max_new_tokens": 5,
        "pad_token_id": 0,
        "do_sample": False,
        "shape": (2, 4),
        "mask": 6,
    }
