"""The C++ attention of decoding rows against `packed_attention` in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from specdec import compiled, cpu_attention
from specdec.attention import packed_attention
from specdec.cache import SlotCache
from specdec.contracts import Draft
from specdec.step import Segment, pack
from specdec.target import Target

STARTS = [3, 200, 64, 129]  # cached tokens per row: within a block, and on both sides of one's end
SHAPES = [(64, 9, 3), (32, 4, 4), (96, 4, 1)]  # D, H, H_kv
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def compiler():
    if cpu_attention.library() is None:
        pytest.skip("no C++ compiler")


def filled(H_kv, D, dtype):
    """A cache of one layer whose rows hold random keys and values, also past their ends."""
    cache = SlotCache(1)
    cache.admit(range(len(STARTS)))
    cache.lengths.update(enumerate(STARTS))
    cache.reserve(300)
    g = torch.Generator().manual_seed(1)
    (layer,) = cache.layers
    layer.lazy_initialization(*torch.zeros(2, 1, H_kv, 1, D, dtype=dtype))
    for buffer in (layer.keys, layer.values):
        buffer.copy_(torch.randn(buffer.shape, generator=g))
    return cache


def step_of(cache, tree):
    draft = Draft(torch.zeros(4, 5, dtype=torch.long), [5, 0, 3, 1])
    if tree:
        draft = Draft(draft.tokens, [5] * 4, parents=torch.tensor([[-1, -1, 0, 1, 2]] * 4))
    segments = [Segment(row, np.zeros(1, dtype=np.int64), start, scored=True) for row, start in enumerate(STARTS)]
    return pack(segments, draft, cache, CPU, one_grid=False)


def compared(dtype, shape, window=None, tree=False, masked=False, change=lambda step: step):
    """Greatest error of the C++ and of torch in `dtype`, and whether both left the same cache. change: of the step that
    the C++ is given."""
    D, H, H_kv = shape
    mine, theirs = filled(H_kv, D, dtype), filled(H_kv, D, dtype)
    if masked:
        mine.masked[1] = theirs.masked[1] = np.arange(70)
    step = change(step_of(mine, tree))
    M, g = step.input_ids.shape[1], torch.Generator().manual_seed(2)
    query, key, value = (
        torch.randn(1, M, heads, D, generator=g).to(dtype).transpose(1, 2) for heads in (H, H_kv, H_kv)
    )
    out = torch.zeros(1, M, H, D, dtype=dtype)
    assert cpu_attention.fits(step, mine.layers[0], query, key, value, None, None)
    cpu_attention.attend(step, mine.layers[0], query, key, value, out, None, window)
    theirs.step = step_of(theirs, tree)
    keys, values = theirs.layers[0].update(key, value)

    def by_torch(dtype):
        inputs = (tensor.to(dtype) for tensor in (query, keys, values))
        return packed_attention(None, *inputs, None, specdec_step=step_of(theirs, tree), sliding_window=window)[0]

    expected = by_torch(torch.float64)
    ours, torchs = ((found.double() - expected).abs().max().item() for found in (out, by_torch(dtype)))
    same = all(
        torch.equal(getattr(mine.layers[0], name), getattr(theirs.layers[0], name)) for name in ("keys", "values")
    )
    return ours, torchs, same


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("tree, masked", [(False, False), (True, False), (False, True)])
def test_it_is_packed_attention(shape, window, tree, masked):
    ours, torchs, same = compared(torch.float32, shape, window, tree, masked)
    assert ours <= 2e-6 and same
    ours, torchs, same = compared(torch.bfloat16, shape, window, tree, masked)
    assert ours <= 1.1 * torchs and same  # both round once at the end


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_rows_are_cut_in_pieces_for_any_number_of_threads(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ours, _, same = compared(torch.float32, SHAPES[0])
    finally:
        torch.set_num_threads(before)
    assert ours <= 2e-6 and same


def test_a_row_that_sees_one_slot_more_is_caught(controls):
    def moved(step):
        return replace(step, rows=step.rows + [0, 0, 0, 1])

    assert compared(torch.float32, SHAPES[0], change=moved)[0] > 1e-2
    controls("rows that see one slot too many", "another attention")


@pytest.mark.parametrize(
    "case",
    [
        {"step": {"apart": [0]}},
        {"query": torch.float64},
        {"value": torch.bfloat16},  # as under autocast
        {"cached": torch.bfloat16},
        {"D": 48},
        {"softcap": 30.0},
        {"sinks": torch.zeros(4)},
    ],
    ids=str,
)
def test_what_it_cannot_do_is_left_to_torch(case):
    def fits(step=None, query=torch.float32, value=torch.float32, cached=torch.float32, D=32, softcap=None, sinks=None):
        cache = filled(1, D, cached)
        q, k, v = (torch.zeros(1, 4, 13, D, dtype=dtype) for dtype in (query, query, value))
        step = replace(step_of(cache, tree=False), **(step or {}))
        return cpu_attention.fits(step, cache.layers[0], q, k, v, softcap, sinks)

    assert fits() and not fits(**case)


def test_compiled_forwards_run_it(monkeypatch):
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    calls = []
    monkeypatch.setattr(
        compiled.cpu_attention, "attend", lambda *inputs, run=cpu_attention.attend: calls.append(1) or run(*inputs)
    )
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, head_dim=32, num_hidden_layers=2, vocab_size=97)
    model = AutoModelForCausalLM.from_config(config).eval()
    target = Target(model)
    target.compile()
    results = []
    for each in (target, Target(model)):
        cache = each.new_cache()
        cache.admit([0])
        prompt = Segment(0, np.arange(9), 0, scored=True)
        each.forward(each.pack([prompt], Draft.empty(1, CPU), cache), cache)
        cache.lengths[0] = 9
        step = each.pack([Segment(0, np.array([5]), 9, scored=True)], Draft(torch.tensor([[7]]), [1]), cache)
        results.append(each.forward(step, cache)[0])
    torch.testing.assert_close(*results, rtol=0, atol=1e-4)
    assert len(calls) == 3 * model.config.num_hidden_layers  # of the forward that compiles, the prompt, the step
