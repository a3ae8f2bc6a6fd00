"""Compiled forwards against eager ones. Where the compiler itself is not the point, torch's "eager" backend stands in
for it, which traces and guards alike."""

import gc
import logging
import threading
import weakref

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

import specdec
from specdec import compiled
from specdec.contracts import Draft
from specdec.step import Segment
from specdec.target import Target
from tests.specdec import test_target
from tests.specdec.test_generation import RandomDrafter, prompts, real_outputs
from tests.tiny_models import tiny

SETTINGS = {"do_sample": False, "max_new_tokens": 20}


@pytest.fixture
def traced_only(monkeypatch):
    monkeypatch.setattr(compiled, "BACKEND", "eager")


@pytest.fixture
def scenario(monkeypatch):
    """Call with a model: the scenario of test_target (ragged rows, chunks, trees, a growing cache), compiled; and how
    many graphs torch made in it."""

    class Compiled(Target):
        def __init__(self, model, padded):
            super().__init__(model, padded)
            self.compile()
            assert self.graph is not None

    monkeypatch.setattr(test_target, "Target", Compiled)

    def run(model):
        before = graphs_made()
        rows = test_target.scenario(model, None)
        return rows.worst, graphs_made() - before

    return run


def graphs_made():
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_steps_of_every_shape_run_one_graph(family, traced_only, scenario):
    worst, graphs = scenario(tiny(family))
    assert worst <= 1e-9 and graphs == 1


def test_a_graph_of_fixed_sizes_would_be_made_again(traced_only, scenario, monkeypatch, controls):
    monkeypatch.setattr(torch._dynamo, "mark_dynamic", torch._dynamo.mark_static)
    assert scenario(tiny("llama"))[1] > 1
    controls("a graph of fixed sizes", "graphs made for steps of several shapes")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_the_compiler_computes_the_same(family, scenario):
    worst, graphs = scenario(tiny(family, dtype=torch.float32))
    assert worst <= 2e-3 and graphs == 1  # logits of whole units, rounded in another order


def forward(target, length, hidden):
    """Logits [2, V] after a prompt and a drafted token, and the states of all tokens."""
    cache = target.new_cache()
    cache.admit([0])
    step = target.pack([Segment(0, np.arange(length), 0, True)], Draft(torch.tensor([[7]]), [1]), cache)
    return target.forward(step, cache, hidden)


def test_states_come_out_of_the_one_graph(traced_only):
    model = tiny("llama")
    compiled_target, before = Target(model), graphs_made()
    compiled_target.compile()
    for length in (5, 9):  # the hooks that fill them are there only in the forward that is traced
        for hidden in ("post_norm", "pre_norm"):
            logits, states = forward(compiled_target, length, hidden)
            expected_logits, expected = forward(Target(model), length, hidden)
            torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-9)
            torch.testing.assert_close(states, expected, rtol=0, atol=1e-9)
        assert forward(compiled_target, length, None)[1] is None
    assert graphs_made() == before + 1
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_without_a_final_norm_has_states_after_it_alone(traced_only, monkeypatch):
    model = tiny("llama")
    monkeypatch.setattr("specdec.capture._final_norm", lambda decoder: None)
    target = Target(model)
    target.compile()
    torch.testing.assert_close(forward(target, 5, "post_norm")[1], forward(Target(model), 5, "post_norm")[1])
    with pytest.raises(NotImplementedError, match="no final norm under a known name: use needs_hidden='post_norm'"):
        forward(target, 5, "pre_norm")


def test_states_come_out_of_a_graph_that_torch_makes_again(traced_only, monkeypatch, controls):
    def worst(model):
        target = Target(model.eval())
        target.compile()
        forward(target, 5, "post_norm")
        torch.use_deterministic_algorithms(True)  # torch guards on it
        try:
            states, expected = forward(target, 9, "post_norm")[1], forward(Target(model), 9, "post_norm")[1]
        finally:
            torch.use_deterministic_algorithms(False)
        return torch.inf if states is None else (states - expected).abs().max()

    before = graphs_made()
    assert worst(tiny("llama")) <= 1e-9 and graphs_made() == before + 2
    hidden = iter(["post_norm"])
    only_first = lambda model, _, mine, captured=compiled.captured: captured(model, next(hidden, None), mine)  # noqa: E731
    monkeypatch.setattr(compiled, "captured", only_first)
    with pytest.raises(IndexError):
        worst(tiny("llama"))
    controls("a hook for the states only in the first forward", "no states from the graph made again")


def test_autocast_and_threads_have_a_graph_of_their_own(traced_only):
    model = tiny("llama", dtype=torch.float32)
    plain, target = Target(model), Target(model)
    target.compile()
    outside, threads = target.graph, torch.get_num_threads()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        target.compile()
        assert target.graph is not outside
        expected, found = (forward(each, 9, None)[0].float() for each in (plain, target))
    assert (found - forward(plain, 9, None)[0]).abs().max() > 0  # autocast, not float32
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02 * expected.abs().max().item())
    torch.set_num_threads(threads + 1)
    try:
        target.compile()
        assert target.graph is not outside
    finally:
        torch.set_num_threads(threads)
    target.compile()
    assert target.graph is outside


def test_another_threads_hook_for_states_is_no_change(traced_only):
    model = tiny("llama")
    target, later = Target(model), Target(model)
    with target.capture("post_norm"):  # as while it decodes eagerly with heads
        target.compile()
    later.compile()
    with later.capture("post_norm"):
        assert target.graph is not None and later.graph is target.graph and not target.graph.is_stale(model)


def small(**kwargs):
    """A model of one layer."""
    model = tiny("llama", **kwargs)
    del model.model.layers[1:]
    model.config.num_hidden_layers = 1
    return model


def generated(model, **settings):
    return specdec.generate(model, **prompts(), return_stats=True, **SETTINGS | settings)


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_generate_emits_the_same_and_compiles_once(tree, traced_only):
    model, before = small(), graphs_made()
    expected, _ = generated(model, drafter=None)
    implementation = model.config._attn_implementation
    for _ in range(2):
        drafter = RandomDrafter(real_outputs(model, max_new_tokens=20), tree)
        output, stats = generated(model, drafter=drafter, compile=True)
        assert torch.equal(output, expected) and stats.compile_seconds > 0
        assert stats.compile_seconds not in stats.seconds.values()
    assert graphs_made() == before + 1
    assert model.config._attn_implementation == implementation
    assert generated(model, compile="auto")[1].compile_seconds == 0  # without a GPU


def test_a_draft_model_is_compiled_too_and_only_when_asked(traced_only):
    model, before = tiny("llama"), graphs_made()
    decode = specdec.speculate(drafter="draft_model:layers=1", compile=True)
    expected, _ = generated(model, drafter=None)
    assert torch.equal(model.generate(**prompts(), custom_generate=decode, **SETTINGS), expected)
    assert graphs_made() == before + 2
    drafter = decode._made[1]
    assert drafter.model.graph is not None
    generated(model, drafter=drafter)
    assert drafter.model.graph is None


def test_invariant_mode_shares_the_graph(traced_only):
    model = small()
    generated(model, compile=True)
    before = graphs_made()
    generated(model, compile=True, invariant=True)
    assert graphs_made() == before


def test_stream_batch_compiles(traced_only):
    model, before = small(), graphs_made()
    ids = [list(range(1, n)) for n in (9, 30, 4, 17, 22)]
    settings = SETTINGS | {"max_batch": 2, "prefill_chunk_size": 8}
    eager, ours = (
        {done.index: done.tokens.tolist() for done in specdec.stream_batch(model, ids, compile=on, **settings)}
        for on in (False, True)
    )
    assert ours == eager and graphs_made() == before + 1


@pytest.mark.parametrize("first", [False, True])
def test_inference_mode_shares_the_graph(first, traced_only):
    model, before = small(), graphs_made()
    expected, _ = generated(model)
    for mode in (first, not first):
        with torch.inference_mode(mode):
            assert torch.equal(generated(model, compile=True)[0], expected)
    assert graphs_made() == before + 1


def test_a_changed_model_is_noticed(traced_only):
    model = small()
    weight = model.model.layers[0].mlp.up_proj.weight

    @torch.no_grad()
    def in_place():
        weight.mul_(1.5)

    def uncounted():
        weight.data.mul_(1.5)

    def replaced():
        model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(weight.clone())

    def hooked():
        model.model.layers[0].register_forward_hook(lambda module, args, out: None)

    target = Target(model)
    target.compile()
    graph = target.graph

    def scaled():
        model.model.layers[0].self_attn.scaling *= 2

    def configured():
        model.config.rms_norm_eps *= 2

    for change in (in_place, uncounted, replaced, hooked, scaled, configured, model.train):
        graph._state = graph._state_of(model)
        assert not graph.is_stale(model)
        change()
        assert graph.is_stale(model)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_changed_weights_are_compiled_again(monkeypatch, caplog):
    model = small(dtype=torch.float32)
    before, _ = generated(model, compile=True)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.neg_()  # laid out anew in the graph; lm_head, 97 wide, is not
    expected, _ = generated(model)
    assert not torch.equal(expected, before)
    with monkeypatch.context() as control:
        control.setattr(compiled.Graph, "is_stale", lambda self, model: False)
        assert torch.equal(generated(model, compile=True)[0], before)  # frozen: the old weights'
    assert torch.equal(generated(model, compile=True)[0], expected)
    assert "compiling it again" in caplog.text


@pytest.fixture
def no_compiler():
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        yield


@pytest.mark.parametrize("family", ["llama", "mixtral", "falcon"], ids=["no compiler", "experts", "no packed forward"])
def test_what_cannot_be_compiled_runs_eagerly_and_says_so_once(family, no_compiler, caplog):
    model = tiny(family, dtype=torch.float32)
    expected, _ = generated(model)
    with caplog.at_level(logging.WARNING, logger="specdec"):
        for _ in range(2):
            assert torch.equal(generated(model, compile=True)[0], expected)
    assert caplog.text.count("runs eagerly") == 1


def test_threads_share_one_graph(traced_only):
    model, before = small(), graphs_made()
    expected, _ = generated(model)
    outputs = {}

    def run(name, **settings):
        outputs[name] = [generated(model, **settings)[0] for _ in range(2)]

    kinds = {"one": {"compile": True}, "two": {"compile": True, "drafter": None}, "eager": {}}
    threads = [threading.Thread(target=run, args=(name,), kwargs=settings) for name, settings in kinds.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(output, expected) for name in kinds for output in outputs[name])
    assert graphs_made() == before + 1


def test_a_graph_goes_with_its_model(traced_only):
    model = small()
    target = Target(model)
    target.compile()
    graph, alive = weakref.ref(target.graph), weakref.ref(model)
    del target, model
    gc.collect()
    assert alive() is None and graph() is None
