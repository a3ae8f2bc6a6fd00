"""`specdec.patch`: scripts that call `model.generate` speculate, get what they got before, and leave no trace."""

import copy
import inspect
import io
import logging
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import GenerationConfig, TextStreamer, pipeline

import specdec
from drafters.draft_model import DraftModelDrafter
from tests.specdec.argument_grid import Recorder
from tests.specdec.test_generation import prompts
from tests.tiny_models import tiny
from tests.toy_tokenizer import VOCAB, toy_tokenizer

GREEDY = {"do_sample": False, "max_new_tokens": 24}
FOUR_TEXTS = ["one two one two one", "a b", "round and round and", "x"]


def attributes(model) -> dict:
    """All that the model and its modules hold, by identity, and its settings."""
    held = {f"{name}.{key}": id(value) for name, module in model.named_modules() for key, value in vars(module).items()}
    return held | {"config": model.config.to_dict(), "generation": model.generation_config.to_dict()}


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Call for what specdec has logged."""
    caplog.set_level(logging.WARNING, logger="specdec")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "specdec"]


def test_calls_within_the_block_speculate_and_nothing_stays_behind(log):
    model = tiny("llama")
    expected, before = model.generate(**prompts(), **GREEDY), attributes(model)
    with specdec.patch(model, drafter="ngram", draft_length=3) as patched:
        assert patched.stats is None
        assert torch.equal(model.generate(**prompts(), **GREEDY), expected)
        assert patched.stats.drafter == "ngram" and patched.stats.acceptance_rate > 0
        assert inspect.signature(model.generate) == inspect.signature(type(model).generate.__get__(model))
    assert attributes(model) == before and not log()
    with pytest.raises(KeyError), specdec.patch(model):
        raise KeyError
    assert attributes(model) == before


def test_every_way_to_hand_over_the_prompt_and_the_settings():
    model, batch = tiny("llama"), prompts()
    ids, mask = batch["input_ids"], batch["attention_mask"]
    config = GenerationConfig(pad_token_id=0, **GREEDY)
    expected = model.generate(**batch, **GREEDY)
    with specdec.patch(model) as patched:
        for args, kwargs in [
            ((ids, config), {"attention_mask": mask}),
            ((), {"inputs": ids, "attention_mask": mask, **GREEDY}),
            ((), {**batch, "generation_config": config}),
        ]:
            patched.stats = None
            assert torch.equal(model.generate(*args, **kwargs), expected) and patched.stats is not None
        assert torch.equal(specdec.generate(model, **batch, **GREEDY), expected)
        own = specdec.speculate(drafter=None)
        assert torch.equal(model.generate(**batch, **GREEDY, custom_generate=own), expected) and own.stats is not None


def test_a_streamer_and_stop_strings_of_a_call_work():
    model, tokenizer = tiny("llama", vocab=VOCAB), toy_tokenizer()
    one = {name: value[:1] for name, value in prompts().items()}
    plain = model.generate(**one, **GREEDY)
    settings = GREEDY | {"stop_strings": [tokenizer.decode(plain[0, 20:22])], "tokenizer": tokenizer}
    theirs, ours, printed = Recorder(), Recorder(), io.StringIO()
    expected = model.generate(**one, **settings, streamer=theirs)
    assert expected.shape[1] < plain.shape[1]
    with specdec.patch(model) as patched:
        assert torch.equal(model.generate(**one, **settings, streamer=ours), expected)
        assert patched.stats.emitted == expected.shape[1] - 12
        stream = TextStreamer(tokenizer)
        stream.on_finalized_text = lambda text, stream_end=False: printed.write(text)
        model.generate(**one, **GREEDY, streamer=stream)
        assert torch.equal(model.generate(**one, **GREEDY), plain)  # neither is kept for the next call
    assert ours.values == theirs.values and ours.values[-1] == "end"
    assert printed.getvalue() == tokenizer.decode(plain[0])


def test_what_a_call_says_about_drafting_goes_first(log):
    model, batch = tiny("llama"), prompts()
    expected = model.generate(**batch, **GREEDY)
    with specdec.patch(model, drafter=None) as patched:
        for said, drafts in [
            ({"assistant_model": tiny("llama")}, "draft_model"),
            ({"prompt_lookup_num_tokens": 3}, "ngram"),
        ]:
            assert torch.equal(model.generate(**batch, **GREEDY, **said), expected)
            assert patched.stats.drafter == drafts and patched.stats.acceptance_rate > 0
        assert torch.equal(model.generate(**batch, **GREEDY), expected) and patched.stats.drafter == "none"
    assert not log()


def test_what_cannot_be_speculated_goes_to_generate_with_a_line_per_reason(log):
    model = tiny("llama")
    beams = {**prompts(), **GREEDY, "num_beams": 2}
    expected = model.generate(**beams)
    recorder, far_too_long = Recorder(), torch.ones(1, 300, dtype=torch.long)
    with specdec.patch(model) as patched:
        for _ in range(3):
            assert torch.equal(model.generate(**beams), expected)
        assert patched.stats is None and len(log()) == 1 and "num_beams" in log()[0]
        for width in (0, 1):
            model.generate(far_too_long[:, width:], **GREEDY, streamer=recorder)
            assert recorder.values[-1] == "end" and len(recorder.values) == 26
            recorder.values = []
        assert len(log()) == 2 and "300 tokens" in log()[1]
        with pytest.raises(ValueError, match="contradictory_argument"):
            model.generate(**prompts(), **GREEDY, contradictory_argument=1)


class Failing(DraftModelDrafter):
    def observe(self, rows, verdict, hidden):
        raise ValueError("the drafter is broken")


def test_an_error_while_decoding_is_raised_and_not_hidden_by_a_second_try(log):
    model = tiny("llama")
    expected, before = model.generate(**prompts(), **GREEDY), attributes(model)
    with pytest.raises(ValueError, match="drafter is broken"), specdec.patch(model, drafter=Failing(tiny("gpt2"))):
        model.generate(**prompts(), **GREEDY)
    assert not log() and attributes(model) == before
    assert torch.equal(model.generate(**prompts(), **GREEDY), expected)


def test_bad_arguments_are_told_when_patching():
    model, before = tiny("llama"), attributes(tiny("llama")).keys()
    for arguments, message in [
        ({"drafter": "nonsense"}, "unknown drafter"),
        ({"drafter": "draft_model:model=somewhere"}, "tokenizer"),
        ({"draft_length": -1}, "draft_length is -1"),
    ]:
        with pytest.raises(ValueError, match=message):
            specdec.patch(model, **arguments)
    with pytest.raises(ValueError, match="is a Linear"):
        specdec.patch(torch.nn.Linear(1, 1))
    with pytest.raises(NotImplementedError, match="ALiBi"):
        specdec.patch(tiny("bloom"))
    with specdec.patch(model), pytest.raises(ValueError, match="patched already"):
        specdec.patch(model)
    assert attributes(model).keys() == before


def test_undo_with_other_wrappers_below_and_above(log):
    model, calls = tiny("llama"), []

    def wrapped(*args, inner=model.generate, **kwargs):
        calls.append("below")
        return inner(*args, **kwargs)

    model.generate = wrapped
    patched = specdec.patch(model)
    patched.undo()
    patched.undo()
    assert vars(model)["generate"] is wrapped
    patched = specdec.patch(model)

    def over(*args, inner=model.generate, **kwargs):
        calls.append("above")
        return inner(*args, **kwargs)

    model.generate = over
    expected = model.generate(**prompts(), **GREEDY)
    assert patched.stats is not None
    patched.stats = None
    patched.undo()
    assert torch.equal(model.generate(**prompts(), **GREEDY), expected)
    assert vars(model)["generate"] is over and patched.stats is None and calls == ["above", "below"] * 2
    assert not log()


def test_a_copy_of_a_patched_model_is_its_own():
    model = tiny("llama")
    expected = model.generate(**prompts(), **GREEDY)
    with specdec.patch(model) as patched:
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            other.lm_head.weight.data.neg_()
            answer = other.generate(**prompts(), **GREEDY)
            assert not torch.equal(answer, expected) and other.generate.__self__ is other
        assert patched.stats is None and torch.equal(model.generate(**prompts(), **GREEDY), expected)


def test_a_pipeline_answers_batches_as_before(log):
    tokenizer = toy_tokenizer()
    model = tiny("llama", vocab=VOCAB)
    texts = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu", batch_size=4)
    settings = {"do_sample": False, "max_new_tokens": 20, "return_full_text": False}
    expected = texts(FOUR_TEXTS, **settings)
    with specdec.patch(model) as patched:
        assert texts(FOUR_TEXTS, **settings) == expected
        assert len(patched.stats.rows) == 4 and patched.stats.emitted == 80 and not log()


@pytest.mark.parametrize("drafter", ["ngram", "draft_model:layers=1"])
def test_a_loop_that_trains_and_generates_gets_the_present_weights(drafter, log):
    """As online trainers do: generate, step, generate, ... on one model that `train` and `eval` switch."""
    model, seen = tiny("qwen3"), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    with specdec.patch(model, drafter=drafter) as patched:
        for _ in range(4):
            model.eval()
            ours = model.generate(**prompts(), **GREEDY)
            assert torch.equal(ours, patched._plain(**prompts(), **GREEDY)) and patched.stats.emitted == 4 * 24
            seen.append(ours)
            model.train()
            model(input_ids=ours, labels=ours).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not log() and all(not torch.equal(one, other) for one, other in zip(seen, seen[1:], strict=False))


@pytest.mark.parametrize("name", ["ngram", "draft_model:layers=1", "object"])
def test_threads_share_a_patched_model(name, log):
    model = tiny("llama")
    batches = [prompts(seed=seed) for seed in range(4)]
    expected = [model.generate(**batch, **GREEDY) for batch in batches]
    outs = [[] for _ in batches]

    def run(i):
        outs[i] += [model.generate(**batches[i], **GREEDY) for _ in range(3)]

    with specdec.patch(model, drafter=DraftModelDrafter(tiny("gpt2")) if name == "object" else name):
        threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for answers, right in zip(outs, expected, strict=True):
        assert len(answers) == 3 and all(torch.equal(answer, right) for answer in answers)
    assert not log()


def lora():
    """A LoRA-wrapped model whose adapter changes its output."""
    model = get_peft_model(tiny("llama"), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    return model.eval()


def test_a_peft_model_speculates_with_its_adapter(log):
    model = lora()
    expected, before = model.generate(**prompts(), **GREEDY), attributes(model)
    assert not torch.equal(expected, tiny("llama").generate(**prompts(), **GREEDY))
    for which in (model, model.get_base_model()):
        with specdec.patch(which) as patched:
            assert torch.equal(model.generate(**prompts(), **GREEDY), expected) and patched.stats is not None
            with model.disable_adapter():
                assert torch.equal(model.generate(**prompts(), **GREEDY), tiny("llama").generate(**prompts(), **GREEDY))
        assert attributes(model) == before
    assert torch.equal(specdec.generate(model, **prompts(), **GREEDY), expected)
    assert not log()


def test_a_peft_model_with_virtual_tokens_goes_to_generate(log):
    model = get_peft_model(tiny("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    expected = model.generate(**prompts(), **GREEDY)
    with specdec.patch(model) as patched:
        assert torch.equal(model.generate(**prompts(), **GREEDY), expected)
        assert patched.stats is None and "virtual tokens" in log()[0]
    with pytest.raises(NotImplementedError, match="virtual tokens"):
        specdec.generate(model, **prompts(), **GREEDY)


def test_rows_with_adapters_of_their_own_go_to_generate(log):
    """PEFT's `adapter_names`, which its layers apply row by row: a packed forward has no rows."""
    model = lora()
    model.add_adapter("other", LoraConfig(target_modules=["k_proj"], init_lora_weights=False))
    rows = {"adapter_names": ["default", "other", "__base__", "default"]}
    plain, expected = model.generate(**prompts(), **GREEDY), model.generate(**prompts(), **GREEDY, **rows)
    assert not torch.equal(plain, expected)
    with specdec.patch(model) as patched:
        assert torch.equal(model.generate(**prompts(), **GREEDY, **rows), expected)
        assert patched.stats is None and "adapters of their own" in log()[0]
    with pytest.raises(NotImplementedError, match="adapter_names is not supported by specdec.generate"):
        specdec.generate(model, **prompts(), **GREEDY, **rows)
    assert torch.equal(specdec.generate(model, **prompts(), **GREEDY), plain)  # no hook of PEFT's is left
