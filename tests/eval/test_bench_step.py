"""`specdec bench step`: its parts, where a step's time goes, what context adds; figures follow from its seconds."""

import json

import numpy as np
import pytest
import torch

from eval import bench_context, bench_decode, bench_parts, bench_step, timing
from eval.plan.steady import Steady
from specdec.models import LoadedModel
from specdec.target import Target
from tests.tiny_models import tiny
from tests.toy_tokenizer import VOCAB, toy_tokenizer

SETTINGS = {
    "target": "",
    "drafter": "ngram",
    "dtype": "",
    "device": "",
    "batch_sizes": [1, 3],
    "draft_length": 2,
    "contexts": [16, 150],
    "steps": 3,
    "repeats": 2,
    "raw": True,
    "compile": False,
}


@pytest.fixture
def model(monkeypatch):
    model = tiny("llama", dtype=torch.float32, vocab=VOCAB)
    model.config.max_position_embeddings = 4096  # the built-in prompts are long for a tokenizer of single bytes
    monkeypatch.setattr(bench_step, "load_target", lambda *_: LoadedModel(model, toy_tokenizer(), "tiny"))
    return model


def test_three_tables_as_json_and_for_a_person(model, capsys):
    bench_step.run(**SETTINGS, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["draft_length"] == 2 and len(found["parts"]) == 9
    assert [(row["rows"], row["method"]) for row in found["decode"]] == [
        (1, "plain"), (1, "ngram"), (3, "plain"), (3, "ngram"),
    ]  # fmt: skip
    for row in found["decode"]:
        assert row["syncs"] == 1 and row["launches"] > 100
        assert sum(row["shares"].values()) == pytest.approx(1)
    assert [(row["rows"], row["context"]) for row in found["contexts"]] == [(3, 16), (3, 150)]
    bench_step.run(**SETTINGS | {"repeats": 1}, as_json=False)
    out = capsys.readouterr().out
    assert "of the forward" in out and "of ideal" in out and "from 16 to 150 tokens: attention" in out


def test_every_part_is_timed_and_shares_are_of_the_forward():
    rows = bench_parts.measure(tiny("llama", dtype=torch.float32), 2, 2, 16, 3)
    parts = {row["part"]: row for row in rows}
    assert set(parts) == {
        bench_parts.FORWARD,
        *(f"verify: {rule}" for rule in bench_parts.RULES),
        *(f"processors: {name}" for name in bench_parts.PROCESSORS),
    }
    forward = parts[bench_parts.FORWARD]["seconds"]
    for part in rows:
        low, high = part["quartiles"]
        assert 0 < low <= part["seconds"] <= high
        assert part["of_forward"] == pytest.approx(part["seconds"] / forward)


def test_a_forward_is_timed_with_a_new_step_each_round(monkeypatch):
    """A step keeps its masks: one that is run again would not build them."""
    steps, forward = [], Target.forward
    monkeypatch.setattr(Target, "forward", lambda self, step, *rest: steps.append(step) or forward(self, step, *rest))
    bench_parts.measure(tiny("llama", dtype=torch.float32), 2, 2, 16, 3)
    assert len(steps) == len({id(step) for step in steps}) == 4


def steady_run(length, drafted, accepted, draft, forward, verify, loop):
    seconds = {"draft": draft, "forward": forward, "verify": verify, "loop": loop}
    return Steady(1, length, len(accepted), drafted, accepted, seconds, 10.0)


def test_where_the_time_goes_by_hand():
    """Plain: 2 steps of 1 s. Drafting: 2 steps of 2 s, of which 0.2 s is the loop's, that emit 4 and 2 tokens."""
    plain = steady_run(0, [0, 0], [0, 0], 0.0, 1.8, 0.1, 0.1)
    drafted = steady_run(3, [3, 3], [3, 1], 0.4, 3.0, 0.2, 0.4)
    found = bench_decode.summary([drafted], [plain])
    assert found["mean_accepted_length"] == 3
    assert found["phases"] == {"draft": 0.2, "forward": 1.5, "verify": 0.1, "loop": 0.2}
    assert found["shares"]["loop"] == pytest.approx(0.1)
    assert found["speedup"] == pytest.approx(1.5)  # 3 tokens in 2 s against 1 in 1 s
    assert found["ideal_speedup"] == pytest.approx(3 * 1 / 1.8)
    assert found["achieved_of_ideal"] == pytest.approx(0.9)
    slow = steady_run(3, [3, 3], [3, 1], 0.4, 3.0, 0.2, 4.4)
    assert bench_decode.summary([drafted, slow], [plain, plain])["speedup"] == pytest.approx((1.5 + 0.75) / 2)


def test_context_costs_and_memory_by_hand():
    model = tiny("llama", dtype=torch.float32)
    short, long = bench_context.measure(model, 3, 2, [16, 150], 2)
    per_slot = 2 * 2 * 2 * 8 * 4  # keys and values, 2 layers, 2 heads of 8, 4 bytes
    assert short["bytes_per_slot"] == long["bytes_per_slot"] == per_slot
    assert (short["slots"], long["slots"]) == (64 + 1, 192 + 1)  # buckets of 64 that hold the context and the steps
    assert long["cache_bytes"] == 3 * (192 + 1) * per_slot
    for row in short, long:
        assert all(row[part]["seconds"] > 0 for part in bench_context.PARTS)
    assert f"3 rows x slots x {per_slot} bytes".removeprefix("3 ") in bench_context.growth([short, long])


def test_a_declared_context_is_what_attention_sees(monkeypatch):
    seen = []
    model = tiny("llama", dtype=torch.float32)
    batch = bench_context.filled(model, 3, 2, 100, 4)
    with model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_ids"].flatten().tolist()), with_kwargs=True
    ):
        bench_context.timed_step(batch)
    assert seen == [[100, 101, 102] * 3]  # the last token and two drafted ones, after 100 cached
    lengths = np.array(list(batch.cache.lengths.values()))
    assert ((lengths > 100) & (lengths <= 103)).all()


def test_attention_is_timed_and_left_as_it_was():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from specdec.attention import NAME, packed_attention

    batch = bench_context.filled(tiny("llama", dtype=torch.float32), 2, 2, 40, 4)
    with pytest.raises(ZeroDivisionError), bench_context.attention_timed(batch.target) as spent:
        assert spent() == 0
        batch.step()
        assert 0 < spent() < sum(batch.stats.seconds.values())
        raise ZeroDivisionError
    assert ALL_ATTENTION_FUNCTIONS[NAME] is packed_attention


def test_the_first_round_does_not_count():
    calls = []
    seconds = timing.interleaved(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2, torch.device("cpu")
    )
    assert "".join(calls) == "ababab"
    assert {part: len(found) for part, found in seconds.items()} == {"a": 2, "b": 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_sizes": [1, 0]}, "--batch-sizes are 1, 0: give at least 1"),
        ({"repeats": 0}, "--steps and --repeats are 3, 0"),
        ({"contexts": [16, 4090]}, "a context of 4090 tokens with 12 more for the steps .* 4096 positions"),
    ],
)
def test_sizes_that_cannot_be_measured_are_refused(model, changes, message):
    with pytest.raises(ValueError, match=message):
        bench_step.run(**SETTINGS | changes, as_json=False)
