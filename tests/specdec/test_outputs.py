"""What `generate` returns beside the tokens, against Hugging Face's own, on tiny models in float64."""

import pytest
import torch
from transformers import DynamicCache

import specdec
from specdec.compat import CACHE_FIELD
from specdec.prompt_reader import PromptReader
from specdec.score_recorder import ScoreRecorder
from tests.specdec.test_generation import RandomDrafter, hf, prompts, real_outputs
from tests.tiny_models import tiny

EVERYTHING = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


def ends(model, **processors):
    """End tokens that end rows 0 and 1 at tokens 5 and 10 at the latest, and the others by chance."""
    plain = hf(model, max_new_tokens=20, **processors)[:, 12:]
    return {"eos_token_id": [plain[0, 4].item(), plain[1, 9].item()], "pad_token_id": 3}


def both(model, drafter="ngram", **settings):
    settings = {"do_sample": False, "max_new_tokens": 20} | settings
    theirs = model.generate(**prompts(), **settings)
    return specdec.generate(model, **prompts(), drafter=drafter, draft_length=5, **settings), theirs


def same_columns(ours, theirs):
    """Whether two tuples of [B, V], one per emitted token, agree to 1e-5."""
    return len(ours) == len(theirs) and all(
        torch.allclose(a, b, atol=1e-5, rtol=0) and a.dtype == b.dtype for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral", "falcon"])
@pytest.mark.parametrize("processors", [{}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}], ids=["raw", "two"])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_scores_and_logits_are_those_of_generate(family, processors, tree):
    """Also those of the padding after a row's end."""
    model = tiny(family)
    settings = EVERYTHING | ends(model, **processors) | processors
    drafter = RandomDrafter(real_outputs(model, max_new_tokens=20, **processors), tree)
    ours, theirs = both(model, drafter, **settings)
    assert torch.equal(ours.sequences, theirs.sequences)
    lengths = {(row == 3).sum().item() for row in ours.sequences[:, 12:]}
    assert len(lengths) > 1  # some rows are padded, some are not
    assert same_columns(ours.scores, theirs.scores) and same_columns(ours.logits, theirs.logits)


def test_scores_of_the_wrong_node_are_caught(monkeypatch):
    """Broken control: every accepted token with the scores of the node before its own."""
    add = ScoreRecorder.add

    def shifted(self, scored, path, index, logits, scores):
        add(self, scored, (path - 1).clamp(min=-1), index, logits, scores)

    monkeypatch.setattr(ScoreRecorder, "add", shifted)
    model = tiny("llama")
    ours, theirs = both(model, RandomDrafter(real_outputs(model, max_new_tokens=20)), **EVERYTHING)
    assert torch.equal(ours.sequences, theirs.sequences) and not same_columns(ours.scores, theirs.scores)


def test_only_what_was_asked_for_is_returned():
    model = tiny("llama")
    for name in ("output_scores", "output_logits"):
        ours, theirs = both(model, **{"return_dict_in_generate": True, name: True})
        assert [key for key in ours if key != CACHE_FIELD] == [key for key in theirs if key != CACHE_FIELD]
    ours, _ = both(model, output_scores=True)  # without the dict, nobody would see them
    assert isinstance(ours, torch.Tensor)
    ours, theirs = both(model, use_cache=False, **EVERYTHING)
    assert torch.equal(ours.sequences, theirs.sequences) and CACHE_FIELD not in theirs and CACHE_FIELD not in ours
    assert same_columns(ours.scores, theirs.scores)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "mistral", "deepseek_v3", "falcon"])
def test_the_returned_cache_is_the_one_generate_returns(family):
    """Of all columns but the last, with the same keys and values wherever a row has no left padding."""
    model = tiny(family)
    ours, theirs = both(model, return_dict_in_generate=True, **ends(model))
    ours_cache, theirs_cache = ours[CACHE_FIELD], theirs[CACHE_FIELD]
    assert isinstance(ours_cache, DynamicCache)
    assert ours_cache.get_seq_length() == theirs_cache.get_seq_length() == ours.sequences.shape[1] - 1
    for mine, other in zip(ours_cache.layers, theirs_cache.layers, strict=True):
        assert mine.keys.shape == other.keys.shape
        for b, pads in enumerate((prompts()["attention_mask"] == 0).sum(1).tolist()):
            first = max(0, pads - (ours.sequences.shape[1] - 1 - mine.keys.shape[2]))  # a window kept the last columns
            limits = {"atol": 1e-5, "rtol": 0}
            torch.testing.assert_close(mine.keys[b, :, first:], other.keys[b, :, first:], **limits)
            torch.testing.assert_close(mine.values[b, :, first:], other.values[b, :, first:], **limits)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_generate_goes_on_from_the_returned_cache(family):
    model = tiny(family)
    ours, _ = both(model, return_dict_in_generate=True)
    expected = hf(model, max_new_tokens=32)
    mask = torch.cat([prompts()["attention_mask"], torch.ones(4, 20, dtype=torch.long)], dim=1)
    settings = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 12}
    more = model.generate(ours.sequences, **{CACHE_FIELD: ours[CACHE_FIELD]}, **settings)
    assert torch.equal(more, expected)


def same_layers(ours, theirs):
    """Whether two tuples, by emitted token, of tuples, by layer, agree in every shape and to 1e-4."""
    return len(ours) == len(theirs) and all(
        len(a) == len(b)
        and all(x.shape == y.shape and torch.allclose(x, y, atol=1e-4, rtol=0) for x, y in zip(a, b, strict=True))
        for a, b in zip(ours, theirs, strict=True)
    )


LAYERS = {"return_dict_in_generate": True, "output_hidden_states": True, "output_attentions": True}


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "mistral", "mixtral"])
@pytest.mark.parametrize("settings", [{}, {"use_cache": False}, {"cache_implementation": "static"}], ids=str)
def test_hidden_states_and_attentions_are_those_of_generate(family, settings):
    model = tiny(family, dtype=torch.float32)  # in float64, transformers' eager mask makes NaN of padding
    model.set_attn_implementation("eager")
    ours, theirs = both(model, max_new_tokens=12, **ends(model), **LAYERS, **settings)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert same_layers(ours.hidden_states, theirs.hidden_states)
    assert same_layers(ours.attentions, theirs.attentions)
    assert list(ours) == list(theirs)
    if CACHE_FIELD in theirs:
        assert int(ours[CACHE_FIELD].get_seq_length()) == int(theirs[CACHE_FIELD].get_seq_length())


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_hidden_states_after_a_cache_and_of_embeddings(family):
    model = tiny(family, dtype=torch.float32)  # in float64, transformers' eager mask makes NaN of padding
    model.set_attn_implementation("eager")
    settings = {"do_sample": False, "max_new_tokens": 8} | LAYERS
    embeds = {"inputs_embeds": model.get_input_embeddings()(prompts()["input_ids"])}
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    for cache in caches:
        model(**{name: value[:, :7] for name, value in prompts().items()}, **{CACHE_FIELD: cache})
    for ours, theirs in [(embeds, embeds), *[tuple({CACHE_FIELD: cache} | prompts() for cache in caches)]]:
        out, expected = specdec.generate(model, **ours, **settings), model.generate(**theirs, **settings)
        assert same_layers(out.hidden_states, expected.hidden_states)
        assert same_layers(out.attentions, expected.attentions)


def test_layers_of_the_wrong_token_are_caught(monkeypatch):
    """Broken control: the tokens after the prompt are run one off."""
    read = PromptReader.read
    monkeypatch.setattr(PromptReader, "read", lambda self, ids: read(self, ids.roll(1, dims=1)))
    model = tiny("llama")
    ours, theirs = both(model, return_dict_in_generate=True, output_hidden_states=True)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert not same_layers(ours.hidden_states, theirs.hidden_states)


def test_nothing_is_copied_for_a_call_that_asks_for_tokens(monkeypatch):
    """Counted: no logits are kept, finished rows leave the cache, and no forward follows the last row's end."""
    model = tiny("llama")
    _, stats = specdec.generate(
        model, **prompts(), do_sample=False, max_new_tokens=20, drafter=None, return_stats=True, **ends(model)
    )
    _, more = specdec.generate(
        model,
        **prompts(),
        do_sample=False,
        max_new_tokens=20,
        drafter=None,
        return_stats=True,
        **ends(model),
        **EVERYTHING,
    )
    assert more.forwards == stats.forwards + 1
    monkeypatch.setattr(ScoreRecorder, "__init__", lambda *_: pytest.fail("scores were kept"))
    specdec.generate(model, **prompts(), do_sample=False, max_new_tokens=5, return_dict_in_generate=True)
