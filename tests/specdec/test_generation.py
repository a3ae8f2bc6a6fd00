"""The drop-in against Hugging Face's own `generate`, on tiny models in float64."""

import threading

import numpy as np
import pytest
import torch
from accelerate import cpu_offload
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList, TextStreamer

import specdec
from drafters.draft_model import DraftModelDrafter, check_same_tokens, first_layers
from drafters.ngram import NGramDrafter
from specdec import loop
from specdec.cache import SlotCache
from specdec.compat import CACHE_FIELD
from specdec.contracts import BaseDrafter, Draft
from tests.tiny_models import tiny

FAMILIES = ["llama", "gpt2", "qwen3", "mistral", "gemma3", "mixtral", "deepseek_v3", "falcon"]
VOCAB = 97


def prompts(rows=4, width=12, seed=0):
    """Left-padded prompts of different lengths, with repetitions so that n-grams match."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 12, (rows, width), generator=random)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : (3 * row) % (width - 2)] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


class RandomDrafter(BaseDrafter):
    """Drafts tokens of which some are right: the model's own greedy output with mistakes, as chains or trees."""

    name = "random"

    def __init__(self, outputs, tree=False, needs_hidden=None, wrong=0.3):
        self.outputs, self.tree, self.needs_hidden = outputs, tree, needs_hidden
        self.random, self.wrong = np.random.default_rng(0), wrong
        self.seen = {}
        self.live = set()

    def admit(self, ids):
        self.live |= set(ids)

    def release(self, ids):
        self.live -= set(ids)

    def propose(self, rows, budget, draws):
        assert set(rows.ids) <= self.live
        lengths = [int(self.random.integers(0, limit + 1)) for limit in budget]
        width = max(lengths)
        tokens = torch.randint(0, VOCAB, (len(budget), width))
        parents = torch.zeros(len(budget), width, dtype=torch.long)
        for b, (row, text) in enumerate(zip(rows.ids, rows.tokens, strict=True)):
            future = self.outputs[row][len(text) :]
            depth = [-1] * width
            for node in range(lengths[b]):
                parent = int(self.random.integers(max(-1, node - 3), node)) if self.tree else node - 1
                parents[b, node], depth[node] = parent, 0 if parent < 0 else depth[parent] + 1
                if depth[node] < len(future) and self.random.random() > self.wrong:
                    tokens[b, node] = int(future[depth[node]])
        return Draft(tokens, lengths, parents if self.tree else None)

    def observe(self, rows, verdict, hidden):
        for b, row in enumerate(rows.ids):
            if hidden is not None:
                self.seen.setdefault(row, []).append(hidden[b])


def hf(model, **kwargs):
    return model.generate(**prompts(), do_sample=False, **kwargs)


def real_outputs(model, **kwargs):
    """Per row, the real tokens of HF's greedy output."""
    batch = prompts()
    out = hf(model, **kwargs)
    return [row[(batch["attention_mask"][b] == 0).sum() :] for b, row in enumerate(out)]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate(family):
    model = tiny(family)
    expected = hf(model, max_new_tokens=40)
    outputs = real_outputs(model, max_new_tokens=40)
    settings = {"do_sample": False, "max_new_tokens": 40, "draft_length": 5, "return_stats": True}
    settings["prefill_chunk_size"] = 7  # prompts enter over several steps, beside rows that decode
    for drafter in (None, "ngram", RandomDrafter(outputs), RandomDrafter(outputs, tree=True)):
        out, stats = specdec.generate(model, **prompts(), drafter=drafter, **settings)
        assert torch.equal(out, expected)
        assert stats.emitted == 160
        if isinstance(drafter, RandomDrafter):
            assert stats.mean_accepted_length > 1.5 and not drafter.live


def test_wrong_rollback_is_caught(monkeypatch):
    """Broken control of the test above: a cache rolled back one token too few changes the output."""
    model = tiny("llama")
    outputs = real_outputs(model, max_new_tokens=40)
    commit = loop.Batch.commit

    def one_too_few(self, segments, scored, draft, verdict, read):
        commit(self, segments, scored, draft, verdict, read)
        for b, request in enumerate(scored):  # keep one rejected token, forget one committed one
            if read.n_accepted[b] < draft.lengths[b] and not request.done:
                place, length = self.cache.place(request.row), self.cache.lengths[request.row]
                for layer in self.cache.layers:
                    layer.move_slots(*(torch.tensor([[i]]) for i in (place, length, length - 1)))

    monkeypatch.setattr(loop.Batch, "commit", one_too_few)
    out = specdec.generate(
        model, **prompts(), do_sample=False, max_new_tokens=40, draft_length=5, drafter=RandomDrafter(outputs)
    )
    assert not torch.equal(out, hf(model, max_new_tokens=40))


@pytest.mark.parametrize(
    "kwargs",
    [
        {"eos_token_id": 5},
        {"eos_token_id": [5, 17, 60], "pad_token_id": 3},
        {"eos_token_id": torch.tensor([5, 17])},
        {"eos_token_id": [5, 17, 60, 2, 9], "min_new_tokens": 12},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[5], [7, 8]]},
        {"num_return_sequences": 1, "max_length": 30},
        {"forced_eos_token_id": 4},
        {"suppress_tokens": [5, 6], "sequence_bias": [[[8], 3.0]]},
    ],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_arguments_of_generate(kwargs):
    model = tiny("llama")
    settings = {"max_new_tokens": 30, "do_sample": False} | kwargs
    if "max_length" in settings:
        del settings["max_new_tokens"]
    expected = model.generate(**prompts(), **settings)
    outputs = real_outputs(model, max_new_tokens=30)
    for drafter in ("ngram", RandomDrafter(outputs)):
        assert torch.equal(specdec.generate(model, **prompts(), drafter=drafter, **settings), expected)
    decode = specdec.speculate(drafter="ngram")
    assert torch.equal(model.generate(**prompts(), custom_generate=decode, **settings), expected)
    output = specdec.generate(model, **prompts(), return_dict_in_generate=True, **settings)
    assert torch.equal(output.sequences, expected) and output.stats.forwards > 0


def test_a_drafter_by_name_is_made_for_the_model_at_hand():
    settings = {"max_new_tokens": 8, "do_sample": False}
    decode = specdec.speculate(drafter="draft_model:layers=1,length=2")
    for model in (tiny("llama"), tiny("qwen3")):
        expected = model.generate(**prompts(), **settings)
        assert torch.equal(model.generate(**prompts(), custom_generate=decode, **settings), expected)
        assert {length for row in decode.stats.rows for length in row.drafted[:1]} == {2}
    with pytest.raises(ValueError, match="needs the target's tokenizer"):
        specdec.generate(model, **prompts(), drafter="draft_model:model=somewhere", **settings)


class StopAt(StoppingCriteria):
    """Stops where the last two ids add up to a multiple of seven: true at many places inside a block."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -2:].sum(1) % 7 == 0


def test_on_commit_tells_drafted_from_fresh_tokens():
    model = tiny("llama")
    outputs = real_outputs(model, max_new_tokens=25)
    calls = {row: [] for row in range(4)}
    out, stats = specdec.generate(
        model, **prompts(), do_sample=False, max_new_tokens=25, draft_length=5, drafter=RandomDrafter(outputs),
        return_stats=True, on_commit=lambda row, tokens, drafted: calls[row].append((tokens, drafted)),
    )  # fmt: skip
    for row, steps in calls.items():
        assert sum((tokens for tokens, _ in steps), []) == out[row, 12:].tolist()
        assert [drafted for _, drafted in steps[1:]] == [
            min(accepted, len(tokens))
            for accepted, (tokens, _) in zip(stats.rows[row].accepted, steps[1:], strict=True)
        ]


@pytest.mark.parametrize("contract", ["post_norm", "pre_norm"])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "falcon"])
def test_drafters_see_the_state_of_every_committed_token(family, tree, contract):
    model = tiny(family)
    drafter = RandomDrafter(real_outputs(model, max_new_tokens=30), tree, needs_hidden=contract)
    settings = {"do_sample": False, "max_new_tokens": 30, "draft_length": 5, "prefill_chunk_size": 7}
    out = specdec.generate(model, **prompts(), **settings, drafter=drafter)
    norm = model.get_decoder().norm if hasattr(model.get_decoder(), "norm") else model.get_decoder().ln_f
    for row, states in drafter.seen.items():
        tokens = out[row, (prompts()["attention_mask"][row] == 0).sum() : -1][None]
        torch.testing.assert_close(torch.cat(states), state(model, norm, tokens, contract), atol=1e-9, rtol=0)


@torch.no_grad()
def state(model, norm, tokens, contract):
    """[T, D] what goes into or comes out of the final norm in a plain forward."""
    found = {}
    hook = norm.register_forward_hook(lambda _, args, result: found.update(pre_norm=args[0], post_norm=result))
    model(tokens)
    hook.remove()
    return found[contract][0]


def test_counted_work():
    """One read per step; every drafted token and every committed token but the last goes through the target once."""
    model = tiny("llama")
    for drafter in (None, "ngram", RandomDrafter(real_outputs(model, max_new_tokens=40))):
        _, stats = specdec.generate(
            model, **prompts(), do_sample=False, max_new_tokens=40, draft_length=5, drafter=drafter, return_stats=True
        )
        assert stats.syncs == stats.forwards == 1 + max(len(row.accepted) for row in stats.rows)
        steps = sum(len(row.accepted) for row in stats.rows)
        drafted = sum(sum(row.drafted) for row in stats.rows)
        assert stats.packed_tokens == prompts()["attention_mask"].sum() + steps + drafted
        assert stats.emitted <= 4 + steps + sum(sum(row.accepted) for row in stats.rows)


def test_cache_grows_with_the_text_and_not_with_max_new_tokens(monkeypatch):
    capacities = []
    resize = SlotCache._resize
    monkeypatch.setattr(
        SlotCache,
        "_resize",
        lambda self, places, capacity: capacities.append(capacity) or resize(self, places, capacity),
    )
    model = tiny("llama")
    first = int(hf(model, max_new_tokens=1)[0, -1])
    specdec.generate(model, **prompts(), do_sample=False, max_new_tokens=200, eos_token_id=first, drafter=None,
                     stopping_criteria=StoppingCriteriaList([StopAt()]))  # fmt: skip
    assert 0 < max(capacities) <= 128


def test_model_is_left_as_it_was_found_even_when_something_raises():
    model = tiny("gemma3")
    before = (model.config.to_dict(), model.config._attn_implementation, model.generation_config.to_dict())

    class Failing(RandomDrafter):
        def propose(self, rows, budget, draws):
            if len(rows.tokens[0]) > 15:
                raise RuntimeError("drafter broke")
            return super().propose(rows, budget, draws)

    with pytest.raises(RuntimeError, match="drafter broke"):
        specdec.generate(model, **prompts(), do_sample=False, max_new_tokens=20, draft_length=5,
                         drafter=Failing(real_outputs(model, max_new_tokens=20), needs_hidden="post_norm"))  # fmt: skip
    assert before == (model.config.to_dict(), model.config._attn_implementation, model.generation_config.to_dict())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_threads_share_a_model():
    """Two speculating threads and one of plain generate on the same model: each gets its own right answer."""
    model = tiny("gemma3")
    batches = [prompts(seed=seed) for seed in range(3)]
    expected = [model.generate(**batch, do_sample=False, max_new_tokens=40) for batch in batches]
    results = [[] for _ in batches]

    def run(i):
        for _ in range(3):
            if i == 2:
                results[i].append(model.generate(**batches[i], do_sample=False, max_new_tokens=40))
            else:
                results[i].append(specdec.generate(model, **batches[i], do_sample=False, max_new_tokens=40))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, outs in enumerate(results):
        assert len(outs) == 3 and all(torch.equal(out, expected[i]) for out in outs)


def sample(model, batch=None, **kwargs):
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": 25, "drafter": "ngram", "seed": 11} | kwargs
    return specdec.generate(model, **(batch or prompts()), **settings)


def test_a_request_samples_the_same_alone_and_in_any_batch_or_order():
    model = tiny("llama")
    together = sample(model, request_ids=[3, 1, 4, 15])
    order = [2, 0, 3, 1]
    shuffled = sample(model, {k: v[order] for k, v in prompts().items()}, request_ids=[[3, 1, 4, 15][i] for i in order])
    assert torch.equal(shuffled, together[order])
    for row, request in enumerate([3, 1, 4, 15]):
        alone = sample(model, {k: v[row : row + 1] for k, v in prompts().items()}, request_ids=[request])
        assert torch.equal(alone[0], together[row])
    assert not torch.equal(sample(model, request_ids=[3, 1, 4, 15], seed=12), together)
    assert torch.equal(sample(model, request_ids=np.array([3, 1, 4, 15]), seed=np.int64(11)), together)


def test_seed_none_follows_torch_and_greedy_leaves_torch_alone():
    model = tiny("llama")
    outs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outs.append(sample(model, seed=None))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    state = torch.get_rng_state()
    specdec.generate(model, **prompts(), do_sample=False, max_new_tokens=5)
    assert torch.equal(state, torch.get_rng_state())


def test_draft_model_is_exact_and_reuses_its_cache():
    model = tiny("llama")
    expected = hf(model, max_new_tokens=40)
    other_size = tiny("gpt2", vocab=110)  # padded vocabulary of another size
    for draft in (first_layers(model, 1), tiny("llama"), other_size, tiny("llama", vocab=80)):
        drafter = DraftModelDrafter(draft)
        fed = []
        forward = drafter.model.forward
        drafter.model.forward = lambda step, cache, f=forward, fed=fed: (
            fed.append(step.input_ids.numel()) or f(step, cache)
        )
        out, stats = specdec.generate(
            model, **prompts(), do_sample=False, max_new_tokens=40, draft_length=5, drafter=drafter, return_stats=True
        )
        assert torch.equal(out, expected)
        drafted = sum(sum(row.drafted) for row in stats.rows)
        steps = sum(len(row.accepted) for row in stats.rows)
        # prompts once; per step and row the drafts but the last, and one or two tokens to catch up
        assert sum(fed) <= prompts()["attention_mask"].sum() + drafted + steps + 4
        assert not drafter.cache.lengths
    _, same = specdec.generate(
        model, **prompts(), do_sample=False, max_new_tokens=41, draft_length=5, drafter=DraftModelDrafter(model),
        return_stats=True,
    )  # fmt: skip
    assert same.acceptance_rate == 1.0


def test_a_draft_vocabulary_is_the_drafters_own_affair():
    """The caller's model keeps its head; where the processors suppress every id that can be drafted, none is
    accepted and the output is the target's."""
    model, draft = tiny("llama"), first_layers(tiny("llama"), 1)
    draft.config.draft_ids = [0, 2, 4]
    head = draft.get_output_embeddings()
    drafter = DraftModelDrafter(draft)
    assert draft.get_output_embeddings() is head and head.weight.shape[0] == VOCAB
    assert drafter.model.vocab_size == 3 and DraftModelDrafter(draft).model.vocab_size == 3
    settings = {"drafter": drafter, "draft_length": 3, "return_stats": True, "suppress_tokens": [0, 2, 4]}
    out, stats = sample(model, max_new_tokens=8, **settings)
    assert not torch.isin(out[:, 12:], torch.tensor([0, 2, 4])).any()
    assert all(sum(row.drafted) and not sum(row.accepted) for row in stats.rows)


def test_draft_model_long_prompts_enter_in_chunks(monkeypatch):
    import drafters.draft_model

    monkeypatch.setattr(drafters.draft_model, "CHUNK", 5)
    model = tiny("llama")
    out, stats = specdec.generate(model, **prompts(), do_sample=False, max_new_tokens=20, draft_length=5,
                                  drafter=DraftModelDrafter(model), return_stats=True)  # fmt: skip
    assert torch.equal(out, hf(model, max_new_tokens=20)) and stats.acceptance_rate == 1.0


class Vocabulary:
    def __init__(self, tokens):
        self.tokens = tokens

    def get_vocab(self):
        return self.tokens


def test_tokenizers_are_compared_on_what_both_know():
    target = Vocabulary({"a": 0, "b": 1, "c": 2})
    check_same_tokens(Vocabulary({"a": 0, "b": 1, "c": 2, "pad": 3}), target)
    check_same_tokens(Vocabulary({"a": 0, "b": 1}), target)
    with pytest.raises(ValueError, match="at id 1: the target has 'b'"):
        check_same_tokens(Vocabulary({"a": 0, "c": 1, "b": 2}), target)
    with pytest.raises(ValueError, match="at id 2: the target has 'c' there, the draft 'x'"):
        check_same_tokens(Vocabulary({"a": 0, "b": 1, "x": 2}), target)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"input_ids": torch.zeros(0, 4, dtype=torch.long)}, r"shape \(0, 4\)"),
        ({"input_ids": torch.zeros(2, 0, dtype=torch.long)}, r"shape \(2, 0\)"),
        ({"input_ids": torch.ones(1, 4, dtype=torch.long), "attention_mask": torch.ones(1, 5)}, r"\(1, 5\).*\(1, 4\)"),
        (
            {"input_ids": torch.ones(2, 4, dtype=torch.long), "attention_mask": torch.tensor([[1] * 4, [0] * 4])},
            "row 1",
        ),
        ({"input_ids": torch.ones(1, 300, dtype=torch.long)}, "300 tokens.*256 positions"),
        ({"draft_length": -1}, "draft_length is -1"),
        ({"draft_length": True}, "draft_length is True"),
        ({"drafter": "nonsense"}, "unknown drafter 'nonsense': known are draft_model, medusa, mtp, ngram"),
        ({"drafter": "draft_model"}, "needs model=NAME or layers=K"),
        ({"drafter": object()}, "lacks some of"),
        ({"drafter": NGramDrafter}, "give an instance"),
        ({"verifier": None}, "verifier is None"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"verifier": "nonsense"}, "unknown verifier"),
        ({"verifier": "rejection"}, "does not fit do_sample=False"),
        ({"request_ids": [1]}, "1 entries for 4 rows"),
        ({"request_ids": [0, 1, 2, "a"]}, "request_ids is 'a'"),
        ({"request_ids": [0, 1, 2, 1.5]}, "request_ids is 1.5"),
        ({"request_ids": [0, 1, 2, -1]}, "request_ids is -1"),
        ({"request_ids": [0, 1, 2, 2**32]}, "request id 4294967296"),
        ({"max_batch": "2"}, "max_batch is '2'"),
        ({"max_batch": 1.5}, "max_batch is 1.5"),
        ({"prefill_chunk_size": -1}, "prefill_chunk_size is -1"),
        ({"prefill_chunk_size": 0}, "prefill_chunk_size is 0"),
        ({"input_ids": [[1, 2]]}, "input_ids is of list"),
        ({"input_ids": torch.ones(1, 2)}, "input_ids is of torch.float32"),
        ({"input_ids": torch.tensor([[1, 2], [1, 97]])}, "row 1 of the prompts holds token id 97"),
        ({"input_ids": torch.tensor([[1, -2]])}, "row 0 of the prompts holds token id -2"),
        ({"stop_strings": "x"}, "without tokenizer"),
        ({CACHE_FIELD: ((1, 2),)}, "cache passed in is a tuple"),
        ({"position_ids": torch.zeros(4, 5, dtype=torch.long)}, "position_ids has 5 columns for 12"),
    ],
)
def test_bad_input_is_one_sentence(kwargs, message):
    settings = {**prompts(), "do_sample": False, "max_new_tokens": 4} | kwargs
    if "input_ids" in kwargs and "attention_mask" not in kwargs:
        del settings["attention_mask"]
    with pytest.raises(ValueError, match=message) as caught:
        specdec.generate(tiny("llama"), **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kwargs", "name"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"cache_implementation": "quantized"}, "cache_implementation='quantized'"),
    ],
)
def test_what_is_not_supported_is_named(kwargs, name):
    settings = {**prompts(), "do_sample": False, "max_new_tokens": 4} | kwargs
    with pytest.raises(NotImplementedError, match=name):
        specdec.generate(tiny("llama"), **settings)


@pytest.mark.parametrize("columns", [1, 12])
def test_a_model_that_goes_past_its_cache_says_so(columns):
    """GPT-2's layers get none with gradient checkpointing in training mode, even without gradients."""
    model = tiny("gpt2").train()
    model.gradient_checkpointing_enable()
    ids = prompts()["input_ids"][:, -columns:]
    with pytest.raises(NotImplementedError, match="goes past its cache, as some do with gradient checkpointing"):
        specdec.generate(model, ids, do_sample=False, max_new_tokens=4)
    model.eval()
    expected = model.generate(ids, do_sample=False, max_new_tokens=4)
    assert torch.equal(specdec.generate(model, ids, do_sample=False, max_new_tokens=4), expected)


def test_prompts_under_the_name_that_generate_gives_them():
    model, batch = tiny("llama"), prompts()
    expected = hf(model, max_new_tokens=6)
    batch["inputs"] = batch.pop("input_ids")
    assert torch.equal(specdec.generate(model, **batch, do_sample=False, max_new_tokens=6), expected)


def test_weights_that_are_elsewhere_until_they_are_used():
    """With accelerate's offloading the parameters, the embeddings' too, are on the meta device between forwards."""
    model = tiny("llama")
    expected = hf(model, max_new_tokens=6)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.get_input_embeddings().weight.device.type == "meta"
    assert torch.equal(specdec.generate(model, **prompts(), do_sample=False, max_new_tokens=6), expected)
    (done,) = specdec.stream_batch(model, [prompts()["input_ids"][0]], do_sample=False, max_new_tokens=6)
    assert torch.equal(done.tokens, expected[0, 12:])


def test_a_quantised_head_has_as_many_logits_as_outputs():
    """Its weight may be packed to another shape, or be no tensor, as torch's own dynamically quantised layers'."""
    model = tiny("llama", dtype=torch.float32)
    model.lm_head = torch.ao.nn.quantized.dynamic.Linear(32, 97)
    settings = {"do_sample": False, "max_new_tokens": 6}
    out = specdec.generate(model, prompts()["input_ids"], drafter=None, **settings)
    assert torch.equal(out, model.generate(prompts()["input_ids"], **settings))


def test_draft_length_zero_is_plain_decoding():
    model = tiny("llama")
    out, stats = specdec.generate(
        model, **prompts(), do_sample=False, max_new_tokens=10, draft_length=0, return_stats=True
    )
    assert torch.equal(out, hf(model, max_new_tokens=10)) and stats.acceptance_rate is None
    assert stats.mean_accepted_length == 1


class Broken(BaseDrafter):
    def __init__(self, draft):
        self.draft = draft

    def propose(self, rows, budget, draws):
        return self.draft(rows, budget)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (lambda rows, budget: Draft(torch.full((len(budget), 5), 97), budget), "outside the target's vocabulary of 97"),
        (lambda rows, budget: Draft(torch.full((len(budget), 9), 1), [9] * len(budget)), "drafted 9 tokens in row 0"),
        (lambda rows, budget: Draft(torch.full((1, 5), 1), [5]), r"tokens of torch.int64 \(1, 5\) for 4 rows"),
    ],
)
def test_a_broken_drafter_is_named(draft, message):
    with pytest.raises(ValueError, match=message):
        specdec.generate(
            tiny("llama"), **prompts(), do_sample=False, max_new_tokens=20, draft_length=5, drafter=Broken(draft)
        )


def test_generation_config_object_is_honoured_and_unchanged():
    model = tiny("llama")
    config = GenerationConfig(max_new_tokens=15, do_sample=False, eos_token_id=5, pad_token_id=0)
    before = config.to_dict()
    out = specdec.generate(model, **prompts(), generation_config=config)
    assert torch.equal(out, model.generate(**prompts(), generation_config=config)) and config.to_dict() == before


def test_trees_are_checked_and_junk_past_the_lengths_is_ignored():
    model = tiny("llama")
    expected = hf(model, max_new_tokens=12)

    def forest(rows, budget):  # two children of the root; what is past the lengths is far out of range
        tokens, parents = torch.full((len(budget), 9), 10**6), torch.full((len(budget), 9), 10**6)
        tokens[:, :2], parents[:, :2] = torch.tensor([3, 8]), -1
        return Draft(tokens, [min(2, limit) for limit in budget], parents)

    settings = {**prompts(), "do_sample": False, "max_new_tokens": 12}
    assert torch.equal(specdec.generate(model, **settings, drafter=Broken(forest)), expected)

    def own_parent(rows, budget):
        return Draft(torch.full((len(budget), 2), 3), [min(2, n) for n in budget], torch.tensor([[0, 1]] * len(budget)))

    with pytest.raises(ValueError, match="a parent does not come before its child"):
        specdec.generate(model, **settings, drafter=Broken(own_parent))


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (lambda B: None, "returned a NoneType"),
        (lambda B: Draft(torch.ones(B, 2), [2] * B), "torch.float32"),
        (lambda B: Draft(torch.ones(B, 2, dtype=torch.int32), [2] * B), "torch.int32"),
        (lambda B: Draft([[1, 2]] * B, [2] * B), "tokens of list"),
        (lambda B: Draft(torch.ones(B, 2, dtype=torch.long), 2), "returned lengths 2"),
        (lambda B: Draft(torch.ones(B, 2, dtype=torch.long), [2] * B, grades=[1]), r"returned grades \[1\]"),
        (lambda B: Draft(torch.ones(B, 2, dtype=torch.long), [2] * B, grades=torch.ones(B)), "returned grades tensor"),
        (lambda B: Draft(torch.ones(B, 2, dtype=torch.long, device="meta"), [2] * B), "tokens on meta"),
        (lambda B: Draft(torch.ones(B, 2, dtype=torch.long), [2] * B, torch.ones(B, 1)), "returned parents"),
        (lambda B: Draft(torch.ones(B, 2, dtype=torch.long), [2] * B, -torch.ones(B, 2)), "parents of torch.float32"),
        (lambda B: Draft(torch.ones(B, 2, dtype=torch.long), [2] * B, q_logits=torch.ones(B, 2, 97)), "without q_logz"),
        (lambda B: Draft(torch.ones(B, 2, dtype=torch.long), [2] * B, q_logits=torch.ones(B, 2, 96)), "one column per"),
    ],
)
def test_a_draft_of_the_wrong_form_is_one_sentence(draft, message):
    settings = {**prompts(), "do_sample": True, "max_new_tokens": 12}
    with pytest.raises(ValueError, match=message):
        specdec.generate(tiny("llama"), **settings, drafter=Broken(lambda rows, budget: draft(len(budget))))


def test_arguments_of_the_model_itself_are_honoured_or_named():
    model = tiny("gpt2")
    mask = prompts()["attention_mask"]
    settings = {**prompts(), "do_sample": False, "max_new_tokens": 8}
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    assert torch.equal(specdec.generate(model, **settings, position_ids=positions), hf(model, max_new_tokens=8))
    with pytest.raises(NotImplementedError, match="token_type_ids"):
        specdec.generate(model, **settings, token_type_ids=mask)


def test_rotary_embeddings_that_change_with_the_length_are_refused_past_that_length():
    model = tiny("llama")
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model.config.max_position_embeddings = 30
    specdec.generate(model, **prompts(), do_sample=False, max_new_tokens=18)
    with pytest.raises(NotImplementedError, match="31 tokens, but past 30"):
        specdec.generate(model, **prompts(), do_sample=False, max_new_tokens=19)


def test_a_drafter_object_survives_errors_modes_and_dtypes():
    model, draft = tiny("llama"), tiny("llama", seed=3)
    drafter = DraftModelDrafter(draft)
    settings = {**prompts(), "do_sample": False, "max_new_tokens": 12, "drafter": drafter}
    expected = hf(model, max_new_tokens=12)
    with pytest.raises(ValueError, match="only supports batch size 1"):
        specdec.generate(model, **settings, streamer=TextStreamer(None))
    with torch.inference_mode():
        assert torch.equal(specdec.generate(model, **settings), expected)
    assert torch.equal(specdec.generate(model, **settings), expected)
    draft.float()
    assert torch.equal(specdec.generate(model, **settings), expected)


def test_a_draft_model_with_fewer_positions_drafts_up_to_them():
    from transformers import GPT2Config, GPT2LMHeadModel

    draft = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2, n_positions=20)).eval()
    model = tiny("llama")
    settings = {**prompts(), "do_sample": False, "max_new_tokens": 30, "draft_length": 5, "return_stats": True}
    out, stats = specdec.generate(model, **settings, drafter=DraftModelDrafter(draft.double()))
    assert torch.equal(out, hf(model, max_new_tokens=30))
    drafted = stats.rows[0].drafted  # a prompt of 12 tokens, so some drafts fit and later ones do not
    assert drafted[0] == 5 and drafted[-1] == 0


def test_stop_strings_may_come_with_the_generation_config():
    from tests.toy_tokenizer import toy_tokenizer

    model, tokenizer = tiny("llama"), toy_tokenizer()
    one = {name: value[:1] for name, value in prompts().items()}
    plain = specdec.generate(model, **one, do_sample=False, max_new_tokens=20)
    stop = tokenizer.decode(plain[0, 15:17])
    config = GenerationConfig(max_new_tokens=20, do_sample=False, stop_strings=[stop], pad_token_id=0)
    out = specdec.generate(model, **one, generation_config=config, tokenizer=tokenizer)
    assert torch.equal(out, model.generate(**one, generation_config=config, tokenizer=tokenizer))
    assert out.shape[1] < plain.shape[1] and config.stop_strings == [stop]
    model.generation_config.stop_strings = [stop]
    assert torch.equal(specdec.generate(model, **one, do_sample=False, max_new_tokens=20, tokenizer=tokenizer), out)
    config.stop_strings = None
    assert torch.equal(specdec.generate(model, **one, generation_config=config, tokenizer=tokenizer), out)
    assert model.generation_config.stop_strings == [stop]
    with pytest.raises(ValueError, match="without tokenizer"):
        specdec.generate(model, **one, do_sample=False, max_new_tokens=20)
