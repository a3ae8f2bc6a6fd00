"""Invariant mode: the same bits for a token whatever its batch, its place, the drafts, the order and the cache."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import specdec
from drafters.medusa import MedusaDrafter
from drafters.mtp import MTPDrafter
from drafters.ngram import NGramDrafter
from eval.methods import left_padded
from specdec import cpu_attention, cpu_linear, invariant, loop
from specdec.invariant import CHUNK, LONGEST_DRAFT, TOKENS, WIDTH, InvariantTarget
from tests.heads.test_medusa import random_heads
from tests.heads.test_mtp import random_head
from tests.shapes import depend_on_shapes
from tests.tiny_models import tiny

VOCAB = 11  # so small that drafts are often right
DRAFTERS = {
    "ngram": lambda model: "ngram",
    "draft_model": lambda model: "draft_model:layers=1",
    "medusa": lambda model: MedusaDrafter(random_heads(model, vocab_size=VOCAB)),
    "mtp": lambda model: MTPDrafter(random_head(model, vocab_size=VOCAB)),
}


def prompts(*lengths):
    return [torch.randint(1, VOCAB, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]


PROMPTS = prompts(3, 40, 1, 17, 9, 60)
REAL = ("The capital of France is", "1 2 3 4 1 2 3 4 1 2 3", "Once upon a time, in a small")
SETTINGS = [  # each is held against plain decoding, one prompt at a time
    {"max_batch": 3, "drafter": None},
    {"max_batch": 8, "drafter": None},
    {"max_batch": 8, "drafter": "ngram", "draft_length": 4, "order": (2, 0, 4, 1, 3, 5)},
    {"max_batch": 3, "drafter": "draft_model:layers=1", "draft_length": 7, "order": (5, 4, 3, 2, 1, 0)},
    *({"max_batch": 8, "drafter": "draft_model:layers=1", "draft_length": n} for n in range(1, LONGEST_DRAFT + 1)),
]


class Recorded(loop.Batch):
    """Keeps the scores before every emitted token, as {(request, position): [V]}."""

    found: dict

    def verify(self, scored, draft, scores, draws):
        self.scores = scores
        return super().verify(scored, draft, scores, draws)

    def commit(self, segments, scored, draft, verdict, read):
        for b, request in enumerate(scored):
            nodes = [0, *(verdict.path[b, : read.n_accepted[b]] + 1).tolist()][: request.room]
            for position, node in enumerate(nodes, start=len(request.tokens)):
                self.found[request.index, position] = self.scores.logits[self.scores.index[b, node]].clone()
        super().commit(segments, scored, draft, verdict, read)


@pytest.fixture
def run(monkeypatch):
    """Scores by prompt and position, and the mean accepted length, of generating for `texts` in the order given."""
    monkeypatch.setattr("specdec.speculation.Batch", Recorded)

    def run(model, texts=PROMPTS, order=None, **settings):
        order = range(len(texts)) if order is None else order
        Recorded.found = {}
        given = {"max_new_tokens": 10, "do_sample": False, "invariant": True, "seed": 5} | settings
        stats = [
            each.stats
            for each in specdec.stream_batch(model, [texts[i] for i in order], request_ids=list(order), **given)
        ]
        accepted = sum(sum(row.accepted) for row in stats) / sum(len(row.accepted) for row in stats)
        return {(order[index], position): row for (index, position), row in Recorded.found.items()}, accepted

    return run


def differing(one, other):
    """How many positions have other scores; texts that part have other scores wherever the tokens are others."""
    assert one.keys() == other.keys()
    return sum(not torch.equal(row, other[key]) for key, row in one.items())


def moved(run, model, settings=SETTINGS, **common):
    """How many scores each of `settings` changes."""
    plain, _ = run(model, max_batch=1, drafter=None, **common)
    return [differing(plain, run(model, **each, **common)[0]) for each in settings]


@pytest.fixture
def shape_dependent(monkeypatch):
    depend_on_shapes(monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_scores_are_the_same_bits(run, family, dtype):
    assert moved(run, tiny(family, dtype=dtype, vocab=VOCAB)) == [0] * len(SETTINGS)


@pytest.mark.slow
@pytest.mark.timeout(900)  # seconds; it compiles two models
def test_compiled_scores_are_the_same_bits(run):
    model, settings = tiny("llama", dtype=torch.bfloat16, vocab=VOCAB), SETTINGS[:4]
    assert moved(run, model, settings, compile=True) == [0] * len(settings)


def model_of_whole_panels(dtype):
    """One whose products and heads are of sizes that specdec's own C++ takes."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, head_dim=32, num_hidden_layers=2, vocab_size=32, max_position_embeddings=256)
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


needs_own_kernels = pytest.mark.skipif(
    not (cpu_linear.available() and cpu_attention.library()), reason="not a machine for specdec's own C++"
)


@needs_own_kernels
@pytest.mark.timeout(600)  # seconds; it compiles
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_batch_invariant_graph_needs_no_fixed_shapes(run, dtype):
    model = model_of_whole_panels(dtype)
    target = invariant.target_for(model, True)
    target.compile()
    assert not target.fixed
    assert moved(run, model, SETTINGS[:5], compile=True) == [0] * 5
    stats = [
        specdec.generate(model, PROMPTS[1][None], invariant=on, compile=True, max_new_tokens=9, return_stats=True)[1]
        for on in (False, True)
    ]
    assert stats[0].packed_tokens == stats[1].packed_tokens


class WithStates(NGramDrafter):
    """Asks for states, as heads do."""

    def __init__(self, hidden):
        super().__init__()
        object.__setattr__(self, "needs_hidden", hidden)


@needs_own_kernels
@pytest.mark.timeout(600)
def test_a_drafter_that_asks_for_states_changes_no_bit(run):
    model = model_of_whole_panels(torch.bfloat16)
    settings = [{"max_batch": 8, "drafter": WithStates(hidden)} for hidden in ("post_norm", "pre_norm")]
    assert moved(run, model, settings, compile=True) == [0, 0]


@needs_own_kernels
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_graph_that_depends_on_shapes_is_noticed(run, monkeypatch, controls):
    def by_length(step, layer, query, key, value, out, scaling, window, run=cpu_attention.attend):
        run(step, layer, query, key, value, out, query.shape[3] ** -0.5 * (1 + 1e-5 * query.shape[2]), window)

    monkeypatch.setattr(cpu_attention, "attend", by_length)
    model = model_of_whole_panels(torch.float32)
    target = invariant.target_for(model, True)
    target.compile()
    assert target.fixed
    monkeypatch.setattr(InvariantTarget, "fixed", property(lambda self: False, lambda self, fixed: None))
    assert any(moved(run, model, SETTINGS[:3], compile=True))
    controls("a compiled graph that depends on shapes", "other bits than plain decoding")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_depend_on_no_shape(run, shape_dependent, dtype, controls):
    model = tiny("llama", dtype=dtype, vocab=VOCAB)
    assert moved(run, model) == [0] * len(SETTINGS)
    assert all(moved(run, model, SETTINGS[:3], invariant=False))
    controls("forwards as long as the step's tokens", "other bits than plain decoding")


def packed_by_batch(self, segments, draft, cache, length, scored, end, fixed=InvariantTarget._fixed):
    """The width of a row is fixed, the number of rows is not."""
    rows = WIDTH * len(segments)
    return fixed(self, segments, draft, cache, *((rows, range(rows)) if length == 64 else (length, scored)), end)


def scored_by_batch(self, segments, draft, cache, length, scored, end, fixed=InvariantTarget._fixed):
    return fixed(self, segments, draft, cache, length, range(WIDTH * len(segments)) if length == 64 else scored, end)


@pytest.mark.parametrize(
    ("name", "target", "broken"),
    [
        ("decode forwards as long as the batch", "specdec.invariant.InvariantTarget._fixed", packed_by_batch),
        ("as many scored tokens as the batch has", "specdec.invariant.InvariantTarget._fixed", scored_by_batch),
        ("attention over buckets of 64 slots", "specdec.invariant.SLOTS", 64),
        ("experts that are not refused", "specdec.invariant.refuse_mixing", lambda model: None),
    ],
)
def test_a_shape_that_is_not_fixed_is_caught(run, shape_dependent, monkeypatch, controls, name, target, broken):
    model = tiny("mixtral" if "experts" in name else "llama", dtype=torch.float32, vocab=VOCAB)
    monkeypatch.setattr(target, broken)
    assert any(moved(run, model, [SETTINGS[1]]))
    controls(name, "other bits than plain decoding")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", DRAFTERS)
def test_speculation_emits_what_plain_decoding_does(run, name, dtype):
    model = tiny("llama", dtype=dtype, vocab=VOCAB)
    drafter = DRAFTERS[name](model)
    for sampling in ({}, {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "verifier": "coupled"}):
        plain, _ = run(model, max_batch=1, drafter=None, **sampling)
        for max_batch in (1, 8):
            scores, accepted = run(model, max_batch=max_batch, drafter=drafter, draft_length=7, **sampling)
            assert differing(plain, scores) == 0
            assert accepted > 0


def test_a_growing_cache_changes_nothing(run, shape_dependent):
    """Prompts of more than one chunk, beside rows that decode, and attention over one and then two blocks of keys."""
    model = tiny("llama", dtype=torch.float32, vocab=VOCAB)
    model.config.max_position_embeddings = 2048
    texts = prompts(300, 506, 4, 257, 256, 90)
    settings = [
        {"max_batch": 2, "drafter": "ngram", "draft_length": 7, "order": (2, 5, 1, 0, 3, 4)},
        {"max_batch": 6, "drafter": "draft_model:layers=1", "draft_length": 3, "prefill_chunk_size": 300},
    ]
    assert moved(run, model, settings, texts=texts) == [0, 0]


class States(MTPDrafter):
    """Keeps the states that it is told, by row."""

    def observe(self, rows, verdict, hidden):
        self.__dict__.setdefault("states", {row: [] for row in range(3)})
        for row, states in zip(rows.ids, hidden, strict=True):
            self.states[row].append(states)
        super().observe(rows, verdict, hidden)


def test_heads_get_the_states_of_the_real_tokens():
    """Against the default mode's states, up to rounding; of a prompt whose last token runs with what decodes, too."""
    model = tiny("llama", vocab=VOCAB)
    model.config.max_position_embeddings = 512
    default, fixed = (States(random_head(model, vocab_size=VOCAB)) for _ in range(2))
    for drafter in (default, fixed):
        settings = {"draft_length": 3, "max_new_tokens": 6, "do_sample": False, "invariant": drafter is fixed}
        list(specdec.stream_batch(model, prompts(257, 5, 40), drafter=drafter, **settings))
    for row in range(3):
        assert len(default.states[row]) > 2
        torch.testing.assert_close(torch.cat(fixed.states[row]), torch.cat(default.states[row]), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("family", "reason"),
    [("mixtral", "expert"), ("gemma2", "caps"), ("falcon", "packed forward"), ("gpt_oss", "expert")],
)
def test_models_that_mix_tokens_are_refused(family, reason):
    with pytest.raises(NotImplementedError, match=f"{reason}.*leave invariant"):
        specdec.generate(tiny(family), PROMPTS[0][None], max_new_tokens=4, invariant=True)


def test_what_does_not_fit_is_refused():
    model, ids = tiny("llama"), PROMPTS[0][None]
    for wrong in ({"draft_length": 8}, {"drafter": "ngram:length=12"}):
        with pytest.raises(ValueError, match="invariant mode give at most 7"):
            specdec.generate(model, ids, max_new_tokens=4, invariant=True, **wrong)
    with pytest.raises(ValueError, match="prefill_chunk_size is 100: .* 256 or more"):
        specdec.generate(model, ids, max_new_tokens=4, invariant=True, prefill_chunk_size=100)
    with pytest.raises(NotImplementedError, match="reads prompts itself"):
        specdec.generate(model, inputs_embeds=model.get_input_embeddings()(ids), max_new_tokens=4, invariant=True)
    with pytest.raises(NotImplementedError, match="drafts trees"):
        specdec.generate(model, ids, drafter=MTPDrafter(random_head(model), top_k=2), max_new_tokens=4, invariant=True)
    _, stats = specdec.generate(
        model, ids, drafter="ngram", max_new_tokens=30, do_sample=False, invariant=True, return_stats=True
    )
    assert max(max(row.drafted) for row in stats.rows) <= invariant.LONGEST_DRAFT  # a learned length too


def test_rows_that_end_early_are_padded_as_in_the_default_mode():
    """The columns after a row's end, which no bit depends on, may be more than a forward of fixed width holds."""
    model = tiny("llama", vocab=VOCAB)
    ids = torch.stack([PROMPTS[1][:9], PROMPTS[4]])
    settings = {
        "do_sample": False, "max_new_tokens": 24, "eos_token_id": 3, "pad_token_id": 0, "output_logits": True,
        "return_dict_in_generate": True,
    }  # fmt: skip
    one, other = (specdec.generate(model, ids, invariant=mode, **settings) for mode in (False, True))
    assert torch.equal(one.sequences, other.sequences)
    for a, b in zip(one.logits, other.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_the_real_model_in_bfloat16(run, demo, controls):
    """Sampled with n-grams beside each other, and plainly alone; in the default mode a batch moves scores there."""
    model = copy.deepcopy(demo.model).bfloat16()
    texts = [demo.tokenizer(text, return_tensors="pt").input_ids[0] for text in REAL]
    common = {"texts": texts, "max_new_tokens": 6, "do_sample": True, "temperature": 0.8, "verifier": "coupled"}
    plain, _ = run(model, max_batch=1, drafter=None, **common)
    scores, _ = run(model, max_batch=3, drafter="ngram", draft_length=7, order=(2, 0, 1), **common)
    assert differing(plain, scores) == 0
    default = common | {"drafter": None, "invariant": False}
    assert differing(*(run(model, max_batch=n, **default)[0] for n in (1, 3)))
    controls("the default mode in bfloat16, demo model", "other bits in a batch than alone")


def test_work_is_counted_as_the_model_meets_it():
    model, lengths = tiny("llama", vocab=VOCAB), []
    model.model.register_forward_hook(lambda module, args, out: lengths.append(out[0].shape[-2]))
    ids, mask = left_padded([prompt.tolist() for prompt in (*PROMPTS, *PROMPTS)], 0, model.device)
    settings = {"invariant": True, "max_new_tokens": 5, "do_sample": False, "return_stats": True}
    stats = specdec.generate(model, ids, attention_mask=mask, pad_token_id=0, **settings)[1]
    assert stats.forwards == len(lengths) and stats.packed_tokens == sum(lengths)
    assert set(lengths) == {TOKENS, CHUNK}
