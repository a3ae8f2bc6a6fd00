"""Where a call ends, against Hugging Face's own `generate`: criteria of one's own, times, streamers."""

import time

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList, TextStreamer
from transformers.generation.streamers import BaseStreamer

import specdec
from specdec.columns import Columns
from tests.specdec.test_generation import RandomDrafter, prompts, real_outputs
from tests.specdec.test_outputs import EVERYTHING, ends, same_columns
from tests.tiny_models import tiny


class Recorded(StoppingCriteria):
    """`rule` of (ids, scores), and what it was called with."""

    def __init__(self, rule):
        self.rule, self.calls = rule, []

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append((input_ids.clone(), None if scores is None else len(scores)))
        return self.rule(input_ids, scores, len(self.calls))


RULES = {
    "per row": lambda ids, scores, calls: ids[:, -2:].sum(1) % 7 == 0,
    "one row ends all": lambda ids, scores, calls: bool((ids[:, -2:].sum(1) % 7 == 0).any()),
    "all rows end all": lambda ids, scores, calls: torch.full((len(ids),), bool((ids[:, -1] % 3 == 0).sum() > 2)),
    "length": lambda ids, scores, calls: ids.shape[1] >= 19,
    "count of calls": lambda ids, scores, calls: calls == 6,
    "never": lambda ids, scores, calls: False,
}


def compare(model, rows, rule, drafter, **settings):
    """Output and criterion's calls, ours and theirs."""
    batch = {name: value[:rows] for name, value in prompts().items()}
    settings = {"do_sample": False, "max_new_tokens": 20} | settings
    ours, theirs = Recorded(rule), Recorded(rule)
    expected = model.generate(**batch, stopping_criteria=StoppingCriteriaList([theirs]), **settings)
    out = specdec.generate(
        model, **batch, stopping_criteria=StoppingCriteriaList([ours]), drafter=drafter, draft_length=5, **settings
    )
    return out, expected, ours.calls, theirs.calls


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("ending", [False, True], ids=["no end token", "end token"])
@pytest.mark.parametrize("rows", [1, 4])
def test_criteria_are_asked_as_generate_asks_them(rule, ending, rows):
    """The same output, and the same ids in the same calls: rows that have stopped go on where there is no end token,
    and are padded where there is one."""
    model = tiny("llama")
    settings = ends(model) if ending else {}
    outputs = real_outputs(model, max_new_tokens=20)
    for drafter in (None, RandomDrafter(outputs), RandomDrafter(outputs, tree=True)):
        out, expected, ours, theirs = compare(model, rows, RULES[rule], drafter, **settings)
        assert torch.equal(out, expected)
        assert len(ours) == len(theirs)
        assert all(torch.equal(a[0], b[0]) and a[1] is b[1] is None for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("ending", [False, True], ids=["no end token", "end token"])
@pytest.mark.parametrize("rows", [1, 4])
def test_criteria_see_scores_where_they_were_asked_for(ending, rows):
    model = tiny("llama")
    settings = EVERYTHING | (ends(model) if ending else {})
    seen = lambda ids, scores, calls: (scores[-1].argmax(-1) + ids[:, -2]) % 7 == 0  # noqa: E731
    out, expected, ours, theirs = compare(
        model, rows, seen, RandomDrafter(real_outputs(model, max_new_tokens=20)), **settings
    )
    assert torch.equal(out.sequences, expected.sequences)
    assert [count for _, count in ours] == [count for _, count in theirs] == list(range(1, len(ours) + 1))
    assert same_columns(out.scores, expected.scores) and same_columns(out.logits, expected.logits)


def test_rows_that_each_stop_by_themselves_are_caught(monkeypatch):
    """Broken control: a row ends where its own criterion fires, although generate goes on in it."""
    model = tiny("llama")

    def alone(self, *arguments):
        init(self, *arguments)
        self.pad = 0

    init = Columns.__init__
    monkeypatch.setattr(Columns, "__init__", alone)
    out, expected, *_ = compare(model, 4, RULES["per row"], None)
    assert not torch.equal(out, expected)


def test_time_ends_all_rows_at_once():
    model = tiny("llama")

    class Slow(BaseStreamer):  # the third column takes all the time there is
        columns = 0

        def put(self, value):
            self.columns += 1
            if self.columns == 4:
                time.sleep(1.1)

        def end(self):
            pass

    settings = {"do_sample": False, "max_new_tokens": 100, "max_time": 1.0, "draft_length": 0}
    out = specdec.generate(model, **prompts(), streamer=Slow(), **settings)
    assert out.shape[1] < 112
    assert torch.equal(out, model.generate(**prompts(), do_sample=False, max_new_tokens=out.shape[1] - 12))


class Kept(BaseStreamer):
    def __init__(self):
        self.values, self.ended = [], 0

    def put(self, value):
        assert not self.ended
        self.values.append(value.tolist())

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("rule", [None, "per row", "one row ends all"])
@pytest.mark.parametrize("ending", [False, True], ids=["no end token", "end token"])
def test_streamers_get_what_generate_puts(rows, rule, ending):
    model = tiny("llama")
    batch = {name: value[:rows] for name, value in prompts().items()}
    settings = {"do_sample": False, "max_new_tokens": 20} | (ends(model) if ending else {})
    ours, theirs = Kept(), Kept()
    for streamer in (ours, theirs):
        criteria = StoppingCriteriaList([] if rule is None else [Recorded(RULES[rule])])
        call = settings | {"stopping_criteria": criteria, "streamer": streamer}
        if streamer is theirs:
            model.generate(**batch, **call)
        else:
            specdec.generate(
                model, **batch, drafter=RandomDrafter(real_outputs(model, max_new_tokens=20)), draft_length=5, **call
            )
    assert ours.values == theirs.values and ours.ended == theirs.ended == 1


def test_a_streamer_for_one_row_says_so_itself_and_is_not_ended_by_an_error():
    model = tiny("llama")
    with pytest.raises(ValueError, match="only supports batch size 1"):
        specdec.generate(model, **prompts(), do_sample=False, max_new_tokens=5, streamer=TextStreamer(None))
    streamer, broken = Kept(), Recorded(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        specdec.generate(model, **prompts(), do_sample=False, max_new_tokens=5, streamer=streamer,
                         stopping_criteria=StoppingCriteriaList([broken]))  # fmt: skip
    assert not streamer.ended


def test_rows_that_wait_for_a_place_stop_each_by_itself():
    model = tiny("llama")
    settings = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
    criteria = StoppingCriteriaList([Recorded(RULES["per row"])])
    out = specdec.generate(model, **prompts(), max_batch=2, stopping_criteria=criteria, **settings)
    for row in range(4):
        one = {name: value[row : row + 1] for name, value in prompts().items()}
        expected = model.generate(**one, stopping_criteria=criteria, **settings)[0]
        assert torch.equal(out[row, : len(expected)], expected) and not out[row, len(expected) :].any()
