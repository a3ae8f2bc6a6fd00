"""Requests that outnumber the rows: what is emitted, in which order, and what the rows and steps hold meanwhile."""

import pytest
import torch

import specdec
from drafters.draft_model import DraftModelDrafter, first_layers
from specdec import loop
from tests.tiny_models import tiny
from tests.toy_tokenizer import toy_tokenizer

LENGTHS = (3, 40, 1, 17, 9, 28, 2, 5)
PROMPTS = [torch.randint(1, 97, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
FAMILIES = ("llama", "gpt2", "gemma3", "deepseek_v3", "falcon")


def alone(model, prompt, **settings):
    return model.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), **settings)[0, len(prompt) :]


class Watched(loop.Batch):
    """Records what every step ran."""

    steps: list = []

    def schedule(self):
        segments = super().schedule()
        prompt = sum(len(s.tokens) for s in segments if self.live[s.row].steps == 0)
        Watched.steps.append((len(self.live), prompt, self.cache.places))
        return segments


@pytest.fixture
def steps(monkeypatch):
    monkeypatch.setattr("specdec.speculation.Batch", Watched)
    Watched.steps = []
    return Watched.steps


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("drafter", ["ngram", "draft_model:layers=1", None])
def test_every_request_is_answered_as_if_it_were_alone(family, drafter):
    model = tiny(family)
    settings = {"max_new_tokens": 12, "do_sample": False}
    found = {
        done.index: done.tokens
        for done in specdec.stream_batch(model, PROMPTS, max_batch=3, drafter=drafter, **settings)
    }
    assert sorted(found) == list(range(len(PROMPTS)))
    for index, prompt in enumerate(PROMPTS):
        assert torch.equal(found[index], alone(model, prompt, **settings)), index


def ends_on_repetition(ids, scores, **kwargs):
    """A stopping criterion that reads the whole text, so that it would notice padding (id 0)."""
    return torch.tensor([len(set(row.tolist())) < len(row) - 3 for row in ids])


TEXT_DEPENDENT = [
    {"no_repeat_ngram_size": 2},
    {"repetition_penalty": 1.5},
    {"bad_words_ids": [[0, 3], [5]]},
    {"min_new_tokens": 8, "eos_token_id": list(range(40)), "pad_token_id": 0},
    {"begin_suppress_tokens": list(range(1, 60))},
    {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": [31, 68], "pad_token_id": 0},
    {"stopping_criteria": [ends_on_repetition], "eos_token_id": 96, "pad_token_id": 0},
]


def answers_beside_each_other(model, settings):
    found = specdec.stream_batch(model, PROMPTS, max_batch=3, drafter="draft_model:layers=1", **settings)
    return {done.index: done.tokens.tolist() for done in found}


@pytest.mark.parametrize("chosen", TEXT_DEPENDENT, ids=lambda chosen: next(iter(chosen)))
def test_processors_and_criteria_see_a_request_alone(chosen):
    """Prompts of other lengths are there, but neither as padding nor as columns that are counted."""
    model = tiny("llama")
    settings = {"max_new_tokens": 12, "do_sample": False} | chosen
    found = answers_beside_each_other(model, settings)
    assert found == {i: alone(model, prompt, **settings).tolist() for i, prompt in enumerate(PROMPTS)}


def test_padding_that_is_seen_is_caught(monkeypatch, controls):
    """The control of the test above: it fails where requests keep their left pads."""
    monkeypatch.setattr("specdec.requests.Request.leave_pads", lambda self: None)
    model, failed = tiny("llama"), 0
    for chosen in TEXT_DEPENDENT:
        settings = {"max_new_tokens": 12, "do_sample": False} | chosen
        found = answers_beside_each_other(model, settings)
        failed += found != {i: alone(model, prompt, **settings).tolist() for i, prompt in enumerate(PROMPTS)}
    assert failed
    controls("requests that keep their left pads", f"answers under {failed} of {len(TEXT_DEPENDENT)} settings")


@pytest.mark.parametrize("verifier", ["rejection", "block", "tree_rejection", "traversal", "coupled", "typical"])
def test_a_sample_does_not_depend_on_how_its_prompt_entered(verifier):
    """A step of prompt chunks only scores nothing and draws nothing."""
    model, prompt = tiny("llama"), PROMPTS[1][None]
    settings = {"max_new_tokens": 12, "do_sample": True, "seed": 3, "verifier": verifier}
    whole = specdec.generate(model, prompt, **settings)
    assert torch.equal(whole, specdec.generate(model, prompt, prefill_chunk_size=7, **settings))


def test_rows_and_prompt_tokens_stay_within_their_limits(steps):
    settings = {"max_new_tokens": 10, "do_sample": False, "prefill_chunk_size": 16}
    list(specdec.stream_batch(tiny("llama"), PROMPTS, max_batch=3, **settings))
    rows, prompt_tokens, places = zip(*steps, strict=True)
    assert max(rows) == 3 == max(places)
    assert max(prompt_tokens) == 16 and sum(prompt_tokens) == sum(LENGTHS)
    full = [n for n, _, _ in steps[: -max(settings["max_new_tokens"], 1)]]
    assert set(full) == {3}  # a place is never left free while somebody waits


def test_the_shortest_answers_come_first():
    """Requests that end at their first token make place for the rest at once."""
    model = tiny("llama")
    first = [alone(model, prompt, max_new_tokens=1, do_sample=False).item() for prompt in PROMPTS]
    stop = first[1]
    expected = {index for index, token in enumerate(first) if token == stop}
    order = [
        (done.index, len(done.tokens))
        for done in specdec.stream_batch(
            model, PROMPTS[:4], max_batch=4, max_new_tokens=20, do_sample=False, eos_token_id=stop, pad_token_id=0
        )
    ]
    assert order[0][0] in expected and order[0][1] == 1
    assert [length for _, length in order] == sorted(length for _, length in order)


@pytest.mark.parametrize("verifier", ["auto", "coupled"])
def test_samples_do_not_depend_on_the_order_of_arrival(verifier):
    model = tiny("llama")
    settings = {"max_new_tokens": 12, "do_sample": True, "seed": 5, "verifier": verifier}
    ids = list(range(100, 100 + len(PROMPTS)))
    one = {
        ids[done.index]: done.tokens.tolist()
        for done in specdec.stream_batch(model, PROMPTS, max_batch=2, request_ids=ids, **settings)
    }
    other = {
        ids[::-1][done.index]: done.tokens.tolist()
        for done in specdec.stream_batch(model, PROMPTS[::-1], max_batch=5, request_ids=ids[::-1], **settings)
    }
    assert one == other
    assert len({tuple(tokens) for tokens in one.values()}) > 4  # streams do differ between requests


class Counting(specdec.BaseDrafter):
    """Drafts nothing and records which rows it was told of."""

    def __init__(self):
        self.rows, self.most, self.seen = set(), 0, []

    def propose(self, rows, budget, draws):
        assert set(rows.ids) <= self.rows
        return specdec.Draft.empty(len(rows.ids))

    def admit(self, ids):
        assert not self.rows & set(ids)
        self.rows |= set(ids)
        self.seen += ids
        self.most = max(self.most, len(self.rows))

    def release(self, ids):
        self.rows -= set(ids)


def test_a_drafter_meets_rows_only_while_they_run():
    drafter = Counting()
    settings = {"max_batch": 3, "drafter": drafter, "max_new_tokens": 4, "do_sample": False}
    running = specdec.stream_batch(tiny("llama"), PROMPTS, **settings)
    next(running)
    running.close()  # nobody asks for the rest
    assert not drafter.rows and len(drafter.seen) < len(PROMPTS)
    list(specdec.stream_batch(tiny("llama"), PROMPTS, **settings))
    assert not drafter.rows and drafter.most == 3


def test_a_drafter_in_use_is_refused_and_nobody_is_harmed():
    model = tiny("llama")
    drafter = DraftModelDrafter(first_layers(model, 1))
    settings = {"max_batch": 3, "drafter": drafter, "max_new_tokens": 6, "do_sample": False}
    expected = {i: alone(model, prompt, max_new_tokens=6, do_sample=False).tolist() for i, prompt in enumerate(PROMPTS)}
    first = specdec.stream_batch(model, PROMPTS, **settings)
    found = [next(first)]
    with pytest.raises(ValueError, match="drafter 'draft_model' is in use by another generation"):
        next(specdec.stream_batch(model, PROMPTS, **settings))
    found += first
    assert {done.index: done.tokens.tolist() for done in found} == expected
    again = specdec.stream_batch(model, PROMPTS, **settings)
    assert {done.index: done.tokens.tolist() for done in again} == expected


def test_a_drafter_in_use_stays_compiled_when_another_call_asks_for_it():
    class Compiled(Counting):
        on = None

        def compile(self, on):
            self.on = on

    model, drafter = tiny("llama"), Compiled()
    drafting = specdec.stream_batch(model, PROMPTS, max_batch=3, drafter=drafter, max_new_tokens=4, do_sample=False)
    next(drafting)
    drafter.on = "as the first call wants it"
    with pytest.raises(ValueError, match="drafter 'custom' is in use by another generation"):
        specdec.generate(model, PROMPTS[1][None], drafter=drafter, max_new_tokens=4, do_sample=False)
    assert drafter.on == "as the first call wants it"


def test_what_a_drafter_raises_at_the_door_is_what_the_caller_sees():
    class Full(Counting):
        def admit(self, ids):
            if self.most:
                raise RuntimeError("no room")
            super().admit(ids)

        def release(self, ids):
            for row in ids:
                self.rows.remove(row)  # KeyError for a row that was never admitted

    drafter = Full()
    with pytest.raises(RuntimeError, match="no room"):
        list(specdec.stream_batch(tiny("llama"), PROMPTS, max_batch=3, drafter=drafter, max_new_tokens=4))
    assert not drafter.rows


def test_stop_strings_end_a_request():
    model, tokenizer = tiny("llama"), toy_tokenizer()
    settings = {"max_new_tokens": 12, "do_sample": False}
    plain = alone(model, PROMPTS[0], **settings)
    stop = tokenizer.decode(plain[4:6])
    expected = alone(model, PROMPTS[0], **settings, stop_strings=[stop], tokenizer=tokenizer)
    found = next(specdec.stream_batch(model, PROMPTS[:1], **settings, stop_strings=[stop], tokenizer=tokenizer))
    assert torch.equal(found.tokens, expected) and len(expected) < len(plain)


def test_generate_with_fewer_rows_than_prompts():
    """`max_batch` holds for a whole batch given to `generate` as well."""
    model = tiny("llama")
    ids, mask = torch.zeros(2, 3, 6, dtype=torch.long)
    for b, n in enumerate((2, 6, 4)):
        ids[b, 6 - n :], mask[b, 6 - n :] = torch.arange(1, n + 1), 1
    settings = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False}
    assert torch.equal(specdec.generate(model, ids, max_batch=1, **settings), model.generate(ids, **settings))


def test_what_is_refused():
    model = tiny("llama")
    assert list(specdec.stream_batch(model, [])) == []
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        specdec.stream_batch(model, [[3], []], max_new_tokens=4)
    with pytest.raises(ValueError, match="max_batch is 0"):
        specdec.stream_batch(model, PROMPTS, max_batch=0, max_new_tokens=4)
    with pytest.raises(ValueError, match="max_new_tokens was not given"):
        specdec.stream_batch(model, PROMPTS, max_length=60)
    with pytest.raises(ValueError, match="min_length is 9"):
        specdec.stream_batch(model, PROMPTS, min_length=9, max_new_tokens=4)
    with pytest.raises(ValueError, match="prompt 0 is of torch.float32"):
        specdec.stream_batch(model, [[1.5]], max_new_tokens=4)
    for prompts, what in (("abc", "prompts is a str"), (5, "prompts is a int"), ([[1, [2]]], "prompts is a list")):
        with pytest.raises(ValueError, match=f"{what} of which torch .*: give one sequence of token ids per request"):
            specdec.stream_batch(model, prompts, max_new_tokens=4)
    for prompts, shape in (([[[1, 2], [3, 4]]], r"\[2, 2\]"), ([7], r"\[\]")):
        with pytest.raises(ValueError, match=f"prompt 0 has shape {shape}: give one sequence of token ids"):
            specdec.stream_batch(model, prompts, max_new_tokens=4)
    with pytest.raises(ValueError, match="row 1 of the prompts holds token id 97"):
        specdec.stream_batch(model, [[3], [97]], max_new_tokens=4)
    with pytest.raises(NotImplementedError, match="num_return_sequences is 2.*give the prompt as many times"):
        specdec.stream_batch(model, PROMPTS, num_return_sequences=2, do_sample=True, max_new_tokens=4)
    for name in ("streamer", "on_commit", "attention_mask", "custom_generate", "past_key_values", "assistant_model"):
        with pytest.raises(NotImplementedError, match=f"{name} is not supported by specdec.stream_batch"):
            specdec.stream_batch(model, PROMPTS, max_new_tokens=4, **{name: object()})
    with pytest.raises(NotImplementedError, match="output_scores is not supported by specdec.stream_batch"):
        specdec.stream_batch(model, PROMPTS, max_new_tokens=4, output_scores=True, return_dict_in_generate=True)
    with pytest.raises(NotImplementedError, match="encoder_repetition_penalty"):
        specdec.stream_batch(model, PROMPTS, max_new_tokens=4, encoder_repetition_penalty=1.5)
    with pytest.raises(NotImplementedError, match="num_beams"):
        specdec.stream_batch(model, PROMPTS, num_beams=2, max_new_tokens=4)
