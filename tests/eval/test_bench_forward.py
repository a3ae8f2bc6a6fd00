"""`specdec bench forward`: what is timed is what it says, and the floor is the bytes worked out by hand."""

import json

import pytest
import torch

from eval import bench_forward
from eval.launches import counted, launches
from eval.plan.shape import shape_of
from specdec.models import LoadedModel
from specdec.target import Target
from tests.tiny_models import POSITIONS, tiny

SETTINGS = {"target": "", "dtype": "", "device": "", "context": 16, "repeats": 2, "bandwidth": 2e9, "compile": False}


@pytest.fixture
def model(monkeypatch):
    model = tiny("llama", dtype=torch.float32)
    monkeypatch.setattr(bench_forward, "load_target", lambda *_: LoadedModel(model, None, "tiny"))
    return model


def points(capsys, **changes):
    bench_forward.run(**SETTINGS | {"batch_sizes": [1, 3], "widths": [1, 4]} | changes, as_json=True)
    return json.loads(capsys.readouterr().out)["points"]


def test_a_point_is_against_the_bytes_that_it_must_read(model, capsys):
    found = points(capsys)
    assert [(point["rows"], point["width"]) for point in found] == [(1, 1), (1, 4), (3, 1), (3, 4)]
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48  # q and o, k and v, the MLP
    weights = 4 * (2 * layer + 97 * 32)  # float32; the embeddings are only looked up
    for point in found:
        kept = 4 * 2 * 2 * 16 * point["rows"] * (16 + point["width"])  # two layers of keys and values, 16 numbers each
        assert point["floor_bytes"] == weights + kept
        assert point["floor_share"] == pytest.approx((weights + kept) / 2e9 / point["packed"]["seconds"])
        for timed in point["packed"], point["hf"]:
            low, high = timed["quartiles"]
            assert 0 < low <= timed["seconds"] <= high
        assert point["syncs"] == 0 and 50 < point["launches"] < 200 and 50 < point["hf_launches"] < 200


def test_twice_the_bandwidth_is_half_the_floor():
    shape = shape_of(tiny("llama"), "")
    one, two = (bench_forward.floor(shape, (2, 3, 100), 0.5, bandwidth)["floor_share"] for bandwidth in (1e6, 2e6))
    assert one == 2 * two


def test_what_is_timed(model, capsys):
    """Ours: [1, M] tokens. HF's: [B, T] after the context, every time anew."""
    seen = []

    def watch(module, args, kwargs):
        ids = kwargs.get("input_ids", args[0] if args else None)
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        seen.append((tuple(ids.shape), cache.get_seq_length()))

    with model.register_forward_pre_hook(watch, with_kwargs=True):
        points(capsys, batch_sizes=[3], widths=[4], repeats=1)
    assert {shape for shape, _ in seen} == {(1, 12), (3, 4)}
    assert {length for shape, length in seen if shape == (3, 4)} == {16}


def test_hf_attends_to_the_context_and_computes_every_token(model):
    cache = Target(model).new_cache()
    cache.admit([0, 1, 2])
    cache.reserve(20)
    calls, cache = bench_forward.forward_calls(model, [3], [4], [16], 1)
    with torch.no_grad():
        calls[3, 4, 16]()
        out = bench_forward.hf_forward(model, cache, 3, 4, 16)()
    assert out.logits.shape == (3, 4, 97)
    kept = getattr(out, "cache", None) or out.past_key_values
    assert kept.layers[0].keys.shape == (3, 2, 20, 8)
    assert not kept.layers[0].keys[:, :, :16].any() and kept.layers[0].keys[:, :, 16:].all()


def test_launches_on_a_cpu_are_operations_and_reads():
    x = torch.arange(4.0)
    assert launches(lambda: bool((x + 1).view(2, 2).sum() > 0), x.device) == {"launches": 4, "syncs": 1}


def test_launches_on_cuda_are_the_profilers_events():
    events = {
        "cudaLaunchKernel": 10, "cudaLaunchKernelExC": 2, "cuLaunchKernel": 1, "cudaGraphLaunch": 1, "aten::add": 99,
        "cudaStreamSynchronize": 3, "cudaDeviceSynchronize": 7, "cudaMemcpyAsync": 5,
    }  # fmt: skip
    assert counted(events) == {"launches": 14, "syncs": 3}


@pytest.mark.gpu
def test_a_gpu_waits_once_for_a_read():
    x = torch.ones(8, device="cuda")
    found = launches(lambda: (x + 1).sum().item(), x.device)
    assert found["launches"] >= 2 and found["syncs"] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repeats": 0}, "--repeats is 0"),
        ({"bandwidth": -1.0}, "--bandwidth -1.0"),
        ({"batch_sizes": [0]}, "batch sizes"),
        ({"context": POSITIONS}, "256 positions"),
    ],
)
def test_what_cannot_be_measured_is_refused(model, capsys, changes, message):
    with pytest.raises(ValueError, match=message):
        points(capsys, **changes)


def test_the_table_names_the_yardstick(model, capsys):
    bench_forward.run(**SETTINGS | {"repeats": 1}, batch_sizes=[2], widths=[3], as_json=False)
    out = capsys.readouterr().out
    assert "floor at 2.0 GB/s" in out and "HF / packed" in out
