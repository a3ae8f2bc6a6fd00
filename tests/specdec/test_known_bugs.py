"""What other engines' users reported, as calls that must come out right here."""

import pytest
import torch
from transformers import LogitsProcessorList

import specdec
from tests.specdec.argument_grid import Recorder
from tests.specdec.test_generation import RandomDrafter, prompts
from tests.specdec.test_sampling import LENGTH, PROMPT, SAMPLES, VOCAB, WARPERS, exact_law, p_value
from tests.tiny_models import tiny
from tests.toy_tokenizer import toy_tokenizer

GREEDY = {"do_sample": False, "max_new_tokens": 30}
ONE = {name: value[:1] for name, value in prompts().items()}


def all_right(model) -> RandomDrafter:
    """Drafts the first prompt's greedy answer, past wherever a call may stop."""
    return RandomDrafter([model.generate(**ONE, **GREEDY)[0]], wrong=0.0)


def test_no_token_of_a_block_is_emitted_scored_or_streamed_past_its_end_token():
    model = tiny("llama")
    answer = model.generate(**ONE, **GREEDY)[0, 12:].tolist()
    end = next(token for token in answer[7:] if answer.index(token) >= 7)
    committed, streamer = [], Recorder()
    out = specdec.generate(
        model, **ONE, **GREEDY, eos_token_id=end, drafter=all_right(model), draft_length=5, streamer=streamer,
        on_commit=lambda row, tokens, drafted: committed.append(tokens), output_scores=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    kept = answer[: answer.index(end) + 1]
    assert out.sequences[0, 12:].tolist() == sum(committed, []) == kept
    assert len(out.scores) == len(kept) and sum(streamer.values[1:-1], []) == kept
    assert any(len(tokens) > 1 for tokens in committed)


def test_processors_that_leave_no_token_after_the_end_do_no_harm():
    """A block may hold the end token and drafts past it, for which there need not be a next token."""
    model = tiny("llama")
    answer = model.generate(**ONE, **GREEDY)[0, 12:].tolist()
    end = next(token for token in answer[7:] if answer.index(token) >= 7)

    def nothing_after_the_end(input_ids, scores):
        ended = (input_ids[:, 12:] == end).any(1, keepdim=True)
        return scores.masked_fill(ended, -torch.inf)

    settings = GREEDY | {"eos_token_id": end, "logits_processor": LogitsProcessorList([nothing_after_the_end])}
    out, stats = specdec.generate(model, **ONE, **settings, drafter=all_right(model), draft_length=5, return_stats=True)
    assert torch.equal(out, model.generate(**ONE, **settings)) and stats.mean_accepted_length > 1.5
    settings["eos_token_id"] = None
    with pytest.raises(ValueError, match="no next-token distribution"):
        specdec.generate(model, **ONE, **settings, drafter=all_right(model), draft_length=5)


def test_a_stop_string_ends_an_answer_inside_a_block():
    model, tokenizer = tiny("llama"), toy_tokenizer()
    answer = model.generate(**ONE, **GREEDY)[0, 12:]
    for last in (6, 9, 14):
        settings = GREEDY | {"stop_strings": tokenizer.decode(answer[last - 1 : last + 1]), "tokenizer": tokenizer}
        out = specdec.generate(model, **ONE, **settings, drafter=all_right(model), draft_length=5)
        assert torch.equal(out, model.generate(**ONE, **settings)) and out.shape[1] <= 13 + last


@pytest.mark.parametrize("draft_vocab", [97, 110, 128])
def test_padded_vocabularies_of_any_size_draft_for_each_other(draft_vocab):
    """Of a target with 110 logits and a tokenizer with fewer tokens; `generate` asks for equal sizes."""
    model, small = tiny("llama", vocab=110), tiny("qwen3", vocab=draft_vocab)
    out, stats = specdec.generate(model, **prompts(), **GREEDY, assistant_model=small, return_stats=True)
    assert torch.equal(out, model.generate(**prompts(), **GREEDY)) and sum(map(lambda r: sum(r.drafted), stats.rows))
    sampled = specdec.generate(model, **prompts(), do_sample=True, max_new_tokens=30, assistant_model=small, seed=1)
    assert sampled.max() < 110 and sampled.shape == out.shape


def test_prompt_lookup_needs_no_end_token():
    model = tiny("llama")
    assert model.generation_config.eos_token_id is None
    out, stats = specdec.generate(model, **prompts(), **GREEDY, prompt_lookup_num_tokens=4, return_stats=True)
    assert torch.equal(out, model.generate(**prompts(), **GREEDY)) and stats.acceptance_rate > 0


def test_an_assistant_that_is_set_to_greedy_search_leaves_the_law_alone():
    """Its arg-max drafts must not be verified as if they had been drawn from its softmax."""
    model, small = tiny("qwen3", seed=1, vocab=VOCAB), tiny("llama", vocab=VOCAB)
    small.generation_config.do_sample = False
    out, stats = specdec.generate(
        model, PROMPT, do_sample=True, max_new_tokens=LENGTH, num_return_sequences=SAMPLES, assistant_model=small,
        seed=3, return_stats=True, **WARPERS,
    )  # fmt: skip
    assert stats.acceptance_rate > 0
    assert p_value([tuple(row) for row in out[:, PROMPT.shape[1] :].tolist()], exact_law(model)) > 1e-3
