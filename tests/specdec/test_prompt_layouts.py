"""Prompts other than left-padded token ids, against Hugging Face's own `generate`, on tiny models in float64."""

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

import specdec
from drafters.draft_model import DraftModelDrafter, first_layers
from specdec import layout
from specdec.cache import SlotCache
from specdec.compat import CACHE_FIELD
from specdec.prompt_reader import PromptReader
from tests.specdec.test_generation import RandomDrafter, prompts
from tests.tiny_models import tiny

FAMILIES = ["llama", "gpt2", "qwen3", "mistral", "gemma3", "mixtral", "deepseek_v3", "falcon"]
SETTINGS = {"do_sample": False, "max_new_tokens": 20}


def masks():
    """By name, masks [4, 12]: padding on the right, holes, both and none at once, and pads on both sides."""
    right, holed, mixed = torch.ones(3, 4, 12, dtype=torch.long)
    for row in range(4):
        right[row, 12 - 2 * row :] = 0
    holed[0, 3:5], holed[2, 1], holed[3, 0], holed[3, 9:11] = 0, 0, 0, 0
    mixed[0, :4], mixed[1, 11:], mixed[2, 2:9] = 0, 0, 0
    both = right.clone()
    both[1, :2], both[3, :3] = 0, 0
    return {"right": right, "holed": holed, "mixed": mixed, "both": both}


def drafters_for(model, out):
    """Chains and trees with right and wrong tokens, n-grams, and a draft model; `out`: what generate returns."""
    return [RandomDrafter(out), RandomDrafter(out, tree=True), "ngram", DraftModelDrafter(first_layers(model, 1))]


@pytest.mark.parametrize("name", list(masks()))
@pytest.mark.parametrize("family", FAMILIES)
def test_masks_that_are_no_left_padding(family, name):
    model = tiny(family)
    ids, mask = prompts()["input_ids"] + 1, masks()[name]
    expected = model.generate(ids, attention_mask=mask, **SETTINGS)
    for drafter in drafters_for(model, expected):
        out = specdec.generate(model, ids, attention_mask=mask, drafter=drafter, draft_length=4, **SETTINGS)
        assert torch.equal(out, expected)


def test_a_mask_that_is_forgotten_after_the_prompt_is_caught(monkeypatch):
    """Broken control: decoding sees the masked columns' slots."""
    model = tiny("llama")
    ids, mask = prompts()["input_ids"] + 1, masks()["holed"]
    expected = model.generate(ids, attention_mask=mask, **SETTINGS)
    admit = SlotCache.admit

    class Forgetful(dict):
        def __setitem__(self, row, slots):
            pass

    def forgetting(self, rows):
        admit(self, rows)
        self.masked = Forgetful()

    monkeypatch.setattr(SlotCache, "admit", forgetting)
    assert not torch.equal(specdec.generate(model, ids, attention_mask=mask, **SETTINGS), expected)


def test_positions_that_ignore_the_mask_are_caught(monkeypatch):
    """Broken control: a right-padded prompt goes on at the position of its column, as if it had no padding."""
    model = tiny("llama")
    ids, mask = prompts()["input_ids"] + 1, masks()["right"]
    expected = model.generate(ids, attention_mask=mask, **SETTINGS)
    requests = layout.Layout.requests

    def unshifted(self, *arguments):
        made = requests(self, *arguments)
        for request in made:
            request.shift = 0
        return made

    monkeypatch.setattr(layout.Layout, "requests", unshifted)
    assert not torch.equal(specdec.generate(model, ids, attention_mask=mask, **SETTINGS), expected)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_positions_of_ones_own(family):
    model = tiny(family)
    batch = prompts()
    positions = 2 * (batch["attention_mask"].cumsum(1) - 1).clamp(min=0) + torch.arange(4)[:, None]
    expected = model.generate(**batch, position_ids=positions, **SETTINGS)
    assert not torch.equal(expected, model.generate(**batch, **SETTINGS))
    for drafter in drafters_for(model, expected):
        out = specdec.generate(model, **batch, position_ids=positions, drafter=drafter, draft_length=4, **SETTINGS)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "mixtral"])
@pytest.mark.parametrize("with_ids", [False, True])
def test_embeddings_as_prompts(family, with_ids):
    """The sequences hold the emitted tokens alone where no ids were given; processors see those alone, too."""
    model = tiny(family)
    batch = prompts()
    embeds = model.get_input_embeddings()(batch["input_ids"].flip(0))
    inputs = {"inputs_embeds": embeds, "attention_mask": batch["attention_mask"]}
    if with_ids:
        inputs["input_ids"] = batch["input_ids"]
    for settings in (SETTINGS, SETTINGS | {"repetition_penalty": 1.3}):
        expected = model.generate(**inputs, **settings)
        assert expected.shape[1] == 20 + 12 * with_ids
        for drafter in ("ngram", DraftModelDrafter(first_layers(model, 1))):
            assert torch.equal(specdec.generate(model, **inputs, drafter=drafter, **settings), expected)


def new_cache(kind, model):
    return StaticCache(config=model.config, max_cache_len=60) if kind == "static" else DynamicCache(config=model.config)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_goes_on_from_a_cache(family, kind):
    """Two turns: the cache object is updated as generate updates it, and either can go on from the other's."""
    model = tiny(family)
    batch, more = prompts(), torch.randint(1, 12, (4, 5), generator=torch.Generator().manual_seed(5))
    ours, theirs = new_cache(kind, model), new_cache(kind, model)
    settings = {"do_sample": False, "max_new_tokens": 9}
    for turn in range(3):
        expected = model.generate(**batch, **{CACHE_FIELD: theirs}, **settings)
        out = specdec.generate(model, **batch, **{CACHE_FIELD: ours}, drafter="ngram", **settings)
        assert torch.equal(out, expected)
        assert int(ours.get_seq_length()) == int(theirs.get_seq_length()) == out.shape[1] - 1
        text = torch.cat([out, more], dim=1)
        mask = torch.cat([batch["attention_mask"], torch.ones(4, 14, dtype=torch.long)], dim=1)
        batch = {"input_ids": text, "attention_mask": mask}
        if turn == 1:
            ours, theirs = theirs, ours


def test_only_the_new_part_of_the_text_beside_a_mask_of_it_all():
    model = tiny("llama")
    batch, settings = prompts(), {"do_sample": False, "max_new_tokens": 9, "return_dict_in_generate": True}
    first = specdec.generate(model, **batch, **settings)
    new = torch.cat([first.sequences[:, -1:], torch.full((4, 3), 7)], dim=1)
    mask = torch.cat([batch["attention_mask"], torch.ones(4, 12, dtype=torch.long)], dim=1)
    inputs = {"input_ids": new, "attention_mask": mask}
    theirs, ours = copy.deepcopy(first[CACHE_FIELD]), copy.deepcopy(first[CACHE_FIELD])
    expected = model.generate(**inputs, **{CACHE_FIELD: theirs}, **settings, output_scores=True)
    out = specdec.generate(model, **inputs, **{CACHE_FIELD: ours}, **settings, output_scores=True)
    assert torch.equal(out.sequences, expected.sequences) and out[CACHE_FIELD] is ours
    assert ours.get_seq_length() == theirs.get_seq_length()
    torch.testing.assert_close(torch.stack(out.scores), torch.stack(expected.scores), atol=1e-5, rtol=0)


def test_a_cache_read_one_column_off_is_caught(monkeypatch):
    """Broken control: the slots hold the columns before their own."""
    model = tiny("llama")
    load = PromptReader._load

    def shifted(self, cache, rows):
        load(self, cache, rows)
        for slots in cache.layers:
            slots.keys.copy_(slots.keys.roll(1, dims=2))

    monkeypatch.setattr(PromptReader, "_load", shifted)
    expected = model.generate(**prompts(), **SETTINGS)
    past = DynamicCache(config=model.config)
    model(**{name: value[:, :6] for name, value in prompts().items()}, **{CACHE_FIELD: past})
    assert not torch.equal(specdec.generate(model, **prompts(), **{CACHE_FIELD: past}, **SETTINGS), expected)


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_cache_implementations(implementation):
    model = tiny("llama")
    settings = SETTINGS | {"cache_implementation": implementation, "return_dict_in_generate": True}
    ours, theirs = specdec.generate(model, **prompts(), **settings), model.generate(**prompts(), **settings)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert type(ours[CACHE_FIELD]) is type(theirs[CACHE_FIELD])
    assert int(ours[CACHE_FIELD].get_seq_length()) == int(theirs[CACHE_FIELD].get_seq_length())


def test_what_cannot_be_read_is_named():
    model = tiny("llama")
    past = DynamicCache(config=model.config)
    model(prompts()["input_ids"], **{CACHE_FIELD: past})
    with pytest.raises(ValueError, match="cache holds 12 tokens and the text has 12"):
        specdec.generate(model, **prompts(), **{CACHE_FIELD: past}, **SETTINGS)
    one = DynamicCache(config=model.config)
    model(prompts()["input_ids"][:1, :6], **{CACHE_FIELD: one})
    with pytest.raises(ValueError, match="cache holds 1 rows and the batch has 4"):
        specdec.generate(model, **prompts(), **{CACHE_FIELD: one}, **SETTINGS)
    with pytest.raises(NotImplementedError, match="cache_implementation='quantized'"):
        specdec.generate(model, **prompts(), cache_implementation="quantized", **SETTINGS)
    with pytest.raises(NotImplementedError, match="max_batch is 2 for 4 prompts"):
        specdec.generate(model, prompts()["input_ids"], attention_mask=masks()["right"], max_batch=2, **SETTINGS)
    needy = RandomDrafter([], needs_hidden="post_norm")
    embeds = model.get_input_embeddings()(prompts()["input_ids"])
    with pytest.raises(NotImplementedError, match="'random' needs the target's state of every token"):
        specdec.generate(model, inputs_embeds=embeds, drafter=needy, **SETTINGS)
