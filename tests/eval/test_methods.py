"""All methods see the same request, and outputs are cut at the same place."""

import pytest
import torch

import specdec
from drafters.ngram import NGramDrafter
from eval.hf import assisted, hf_method, prompt_lookup
from eval.methods import FirstTokens, Request, engine_method, left_padded, through_stop
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
    assert outcome.stats is None and outcome.seconds > outcome.prefill_seconds > 0
    assert outcome.prefill_tokens == 2


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

    def engine(model, input_ids, attention_mask, drafter, on_commit, **keywords):
        on_commit(0, [1], 0)
        shown = {"shape": tuple(input_ids.shape), "mask": attention_mask.sum().item(), "drafter": drafter.__wrapped__}
        seen.update(keywords, **shown)
        return torch.cat([input_ids, torch.tensor([[1], [2]])], 1), Stats("x", "greedy", True, forwards=9)

    drafter = NGramDrafter()
    method = engine_method("x:length=3", model, request, drafter, 3, "auto", engine)
    assert (method.temperature, method.dtype, method.draft_length, method.drafter) == (0, "float64", 3, "x:length=3")
    outcome = method.generate(prompts_of(2, 4), 5)
    assert outcome.tokens == [[1], [2]] and outcome.target_forwards == 9 and not outcome.trees
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


def test_prefill_ends_when_every_row_has_a_token():
    first = FirstTokens(3)
    first.on_commit(0, [5], 0)
    first.on_commit(0, [5, 6], 1)
    early = first.seconds
    first.on_commit(1, [7], 0)
    first.on_commit(2, [8], 0)
    assert first.tokens == 5 and first.seconds > early
    last = first.seconds
    first.on_commit(0, [5, 6, 7], 2)
    assert (first.tokens, first.seconds) == (5, last)


def test_a_long_prompt_beside_short_ones_is_prefilled_in_chunks():
    """The engine reads 512 prompt tokens a step, so the short row decodes one step before the long one has a token."""
    model = tiny("llama")
    model.config.max_position_embeddings = 1024
    request = Request.of(model, GREEDY, 0)
    outcome = engine_method("plain", model, request, None, 0, "auto", specdec.generate).generate(prompts_of(3, 600), 4)
    assert outcome.prefill_tokens == 3 and 0 < outcome.prefill_seconds < outcome.seconds


def test_hf_drafts_change_forwards_and_not_tokens():
    model = tiny("llama")
    prompts = prompts_of(12)
    alone = greedy_alone(model, prompts[0].tokens, 24)
    request = Request.of(model, GREEDY, 0)
    plain = hf_method(model, request).generate(prompts, 24)
    lookup = prompt_lookup(model, request, 4)
    helped = assisted("draft_model:x", model, request, tiny("llama"), 4)  # the target's equal: every draft is right
    for method in (lookup, helped):
        outcome = method.generate(prompts, 24)
        assert outcome.tokens == [alone] and method.largest_batch == 1 and method.drafter is None
        assert outcome.prefill_tokens >= 1 and 0 < outcome.prefill_seconds < outcome.seconds
        assert outcome.target_forwards <= plain.target_forwards == 24
    assert outcome.target_forwards <= 12
    assert [lookup.name, helped.name] == ["hf + prompt lookup", "hf + draft_model:x"]


def test_hf_drafts_with_the_length_of_its_row_where_rows_share_the_assistant():
    """A sure assistant that equals the target: length k gives k + 1 tokens per forward."""
    model, assistant, prompts = tiny("llama"), tiny("llama"), prompts_of(12)
    assistant.generation_config.assistant_confidence_threshold = 0
    request = Request.of(model, GREEDY, 0)
    short, long = (assisted("draft_model:x", model, request, assistant, length) for length in (2, 5))
    assert [method.generate(prompts, 24).target_forwards for method in (short, long)] == [24 / 3, 24 / 6]
    assert assistant.generation_config.num_assistant_tokens is None  # the drafter's model stays as it was
