"""`specdec bench step`: its parts, and shares that follow from its own seconds."""

import json

import pytest
import torch

from eval import bench_step, timing
from specdec.models import LoadedModel
from tests.tiny_models import POSITIONS, tiny


@pytest.fixture
def loaded(monkeypatch):
    model = tiny("llama", dtype=torch.float32)
    monkeypatch.setattr(bench_step, "load_target", lambda *_: LoadedModel(model, None, "tiny"))


SETTINGS = {"target": "", "dtype": "", "device": "", "draft_length": 2, "context": 16}


def test_every_part_is_timed_and_shares_are_of_the_forward(loaded, capsys):
    bench_step.run(**SETTINGS, batch_size=2, repeats=3, as_json=True)
    parts = {part["part"]: part for part in json.loads(capsys.readouterr().out)["parts"]}
    assert set(parts) == {
        bench_step.FORWARD,
        *(f"verify: {rule}" for rule in bench_step.RULES),
        *(f"processors: {name}" for name in bench_step.PROCESSORS),
    }
    forward = parts[bench_step.FORWARD]["seconds"]
    for part in parts.values():
        low, high = part["quartiles"]
        assert 0 < low <= part["seconds"] <= high
        assert part["of_forward"] == pytest.approx(part["seconds"] / forward)


def test_the_first_round_does_not_count():
    calls = []
    seconds = timing.interleaved(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2, torch.device("cpu")
    )
    assert "".join(calls) == "ababab"
    assert {part: len(found) for part, found in seconds.items()} == {"a": 2, "b": 2}


@pytest.mark.parametrize("name", ["batch_size", "repeats"])
def test_sizes_below_one_are_refused(loaded, name):
    with pytest.raises(ValueError, match=r"is 0: give at least 1"):
        bench_step.run(**SETTINGS, **{"batch_size": 1, "repeats": 1, "as_json": False} | {name: 0})


def test_more_context_than_positions_is_refused(loaded):
    with pytest.raises(ValueError, match="--context is 254 and --draft-length 2: .* 256 positions"):
        bench_step.run(**SETTINGS | {"context": POSITIONS - 2}, batch_size=1, repeats=1, as_json=False)
