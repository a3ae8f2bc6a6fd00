"""Every other setting of `GenerationConfig` that greedy search and sampling honour, and how assisted generation is
spelled, against Hugging Face's own `generate`."""

import copy

import pytest
import torch
from transformers import GenerationConfig, WatermarkingConfig
from transformers.generation import logits_process

import specdec
from specdec import processors
from tests.specdec.test_generation import RandomDrafter, prompts, real_outputs
from tests.tiny_models import tiny
from tests.toy_tokenizer import VOCAB, toy_tokenizer

EOS = {"eos_token_id": [5, 17], "pad_token_id": 0}
SETTINGS = {
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.7},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2},
    "both, expanded": {
        "encoder_repetition_penalty": 0.6,
        "encoder_no_repeat_ngram_size": 2,
        "do_sample": True,
        "top_k": 1,
    },
    "watermarking": {"watermarking_config": WatermarkingConfig(bias=4.0, seeding_scheme="selfhash", context_width=2)},
    "exponential_decay": {"exponential_decay_length_penalty": (4, 1.4), **EOS},
    "renormalize": {"renormalize_logits": True, "remove_invalid_values": True},
    "forced_bos": {"forced_bos_token_id": 6},
    "begin_suppress": {"begin_suppress_tokens": [1, 43]},
    "min_length": {"min_length": 20, **EOS},
    "guidance of 1": {"guidance_scale": 1.0},
    "prefix_allowed": {"prefix_allowed_tokens_fn": lambda row, ids: [row + 1, 2 * row + int(ids[-1]) % 7 + 3]},
    "beams' own": {"length_penalty": 2.0, "early_stopping": True, "num_beams": 1},
    "compilation": {"disable_compile": True},
}

# Before it was, transformers applied an encoder penalty to the first rows alone.
penalty = logits_process.EncoderRepetitionPenaltyLogitsProcessor(0.5, torch.tensor([[1]]))
PENALTY_IS_EXPANDED = bool((penalty(None, torch.ones(2, 2))[:, 1] == penalty(None, torch.ones(1, 2))[0, 1]).all())


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_honoured(name):
    model = tiny("llama")
    settings = {"do_sample": False, "max_new_tokens": 20} | SETTINGS[name]
    copies = (
        {"num_return_sequences": 3} if settings["do_sample"] and PENALTY_IS_EXPANDED else {}
    )  # top_k = 1: all equal
    expected = model.generate(**prompts(), **settings, **copies)
    for drafter in (None, RandomDrafter(real_outputs(model, max_new_tokens=20) * 3), "ngram"):
        out = specdec.generate(model, **prompts(), drafter=drafter, draft_length=4, **settings, **copies)
        assert torch.equal(out, expected)


def test_an_encoder_penalty_of_another_row_is_caught(monkeypatch):
    """Broken control: every position is held to the first row's prompt."""
    model = tiny("llama")
    settings = {"do_sample": False, "max_new_tokens": 20, "encoder_repetition_penalty": 1.7}
    expected = model.generate(**prompts(), **settings)
    for_requests = processors._for_requests

    def first_row(processor, prefixes, chosen):
        processor = copy.copy(for_requests(processor, prefixes, chosen))
        rows = len(processor.encoder_input_ids)
        processor.encoder_input_ids = prompts()["input_ids"][:1].expand(rows, -1)
        return processor

    monkeypatch.setattr(processors, "_for_requests", first_row)
    assert not torch.equal(specdec.generate(model, **prompts(), **settings), expected)


def test_every_processor_of_transformers_is_known():
    """A new one is looked at before it is taken for a function of the prefix."""
    known = {*processors.PREFIX_FREE, *processors.ACTS_AT_LENGTH, *processors.REFUSED} | {
        getattr(logits_process, f"{name}LogitsProcessor")
        for name in (
            "RepetitionPenalty", "EncoderRepetitionPenalty", "EncoderNoRepeatNGram", "NoRepeatNGram", "NoBadWords",
            "PrefixConstrained", "SequenceBias", "Watermark",
        )
    } | {logits_process.ExponentialDecayLengthPenalty}  # fmt: skip
    made = {
        type_
        for type_ in vars(logits_process).values()
        if isinstance(type_, type) and issubclass(type_, logits_process.LogitsProcessor)
    }
    others = {type_.__name__ for type_ in made - known - {logits_process.LogitsProcessor}}
    audio = {
        "WhisperTimeStamp",
        "WhisperNoSpeechDetection",
        "AlternatingCodebooks",
        "BarkEosPrioritizer",
        "HammingDiversity",
    }
    assert {name for name in others if not any(word in name for word in (*audio, "Dia"))} == set()


@pytest.mark.parametrize(
    ("kwargs", "name"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
        ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, "num_beam"),
        ({"dola_layers": "low"}, "dola_layers"),
        ({"force_words_ids": [[5]]}, "force_words_ids"),
        ({"assistant_early_exit": 1}, "assistant_early_exit"),
        ({"use_mtp": True}, "use_mtp"),
        ({"custom_generate": "a/b"}, "custom_generate"),
    ],
)
def test_other_searches_are_refused_by_name(kwargs, name):
    with pytest.raises(NotImplementedError, match=name) as caught:
        specdec.generate(tiny("llama"), **prompts(), max_new_tokens=4, **kwargs)
    assert "\n" not in str(caught.value)


def test_guidance_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="guidance_scale"):
        specdec.generate(tiny("llama"), **prompts(), max_new_tokens=4, guidance_scale=1.5)


def test_an_assistant_model_drafts():
    model, assistant = tiny("llama"), tiny("llama", seed=3)
    settings = {"do_sample": False, "max_new_tokens": 20}
    expected = model.generate(**prompts(), **settings)
    for small, rate in ((model, 1.0), (assistant, None)):
        out, stats = specdec.generate(
            model, **prompts(), assistant_model=small, num_assistant_tokens=3, return_stats=True, **settings
        )
        assert torch.equal(out, expected)
        assert stats.drafter == "draft_model" and {row.drafted[0] for row in stats.rows} == {3}
        assert rate is None or stats.acceptance_rate == rate
    config = GenerationConfig(do_sample=False, max_new_tokens=20, num_assistant_tokens=2)
    _, stats = specdec.generate(
        model, **prompts(), assistant_model=assistant, generation_config=config, return_stats=True
    )
    assert {row.drafted[0] for row in stats.rows} == {2}


def test_an_assistant_with_other_tokens_is_named():
    model, assistant = tiny("llama", vocab=VOCAB), tiny("llama", vocab=VOCAB + 3)
    ours, theirs = toy_tokenizer(), toy_tokenizer()
    theirs.get_vocab = lambda: {token: (index + 1) % VOCAB for token, index in ours.get_vocab().items()}
    with pytest.raises(ValueError, match="at id"):
        specdec.generate(model, **prompts(), max_new_tokens=4, tokenizer=ours, assistant_model=assistant,
                         assistant_tokenizer=theirs)  # fmt: skip


def test_prompt_lookup_drafts_with_ngrams():
    model = tiny("llama")
    settings = {"do_sample": False, "max_new_tokens": 40}
    expected = model.generate(**prompts(), **settings)
    config = GenerationConfig(**settings, prompt_lookup_num_tokens=3, max_matching_ngram_size=1)
    for call in (settings | {"prompt_lookup_num_tokens": 3}, {"generation_config": config}):
        out, stats = specdec.generate(model, **prompts(), return_stats=True, **call)
        assert torch.equal(out, expected)
        drafted = {count for row in stats.rows for count in row.drafted}
        assert stats.drafter == "ngram" and max(drafted) == 3
    assert config.prompt_lookup_num_tokens == 3


def test_two_drafters_are_one_too_many():
    model = tiny("llama")
    for both in (
        {"drafter": None, "prompt_lookup_num_tokens": 3},
        {"assistant_model": model, "prompt_lookup_num_tokens": 3},
    ):
        with pytest.raises(ValueError, match="more than one of drafter"):
            specdec.generate(model, **prompts(), max_new_tokens=4, **both)
