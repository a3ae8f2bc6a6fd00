"""`--compile` of the benches: all is compiled before anything is timed, and no forward of ours is eager then."""

import json
import re
import time

import pytest
import torch
from torch._dynamo.utils import counters
from typer.testing import CliRunner

from eval import bench_budget, bench_context, bench_forward, bench_schedule, bench_step
from eval.ahead import compile_ahead
from eval.bench_budget import RANDOM
from specdec import compiled
from specdec.cache import SlotLayer
from specdec.cli import app
from specdec.models import LoadedModel
from specdec.target import Target
from tests.tiny_models import tiny
from tests.toy_tokenizer import VOCAB, toy_tokenizer

BENCHES = {"forward": bench_forward, "step": bench_step, "schedule": bench_schedule, "budget": bench_budget}
OPTIONS = {
    "forward": "--batch-sizes 1,3 --widths 1,4 --context 16 --repeats 1 --bandwidth 2",
    "step": "--batch-sizes 1,3 --contexts 16,40 --draft-length 2 --steps 3 --repeats 1 --raw",
    "schedule": "--limit 3 --max-batch 2 --max-new-tokens 4 --repeats 1 --raw",
    "budget": "--batch-sizes 2 --max-new-tokens 4 --repeats 1 --raw",
}


def graphs_made():
    return counters["stats"]["unique_graphs"]


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(compiled, "BACKEND", "eager")  # traces and guards as the compiler does
    model = tiny("llama", dtype=torch.float32, vocab=VOCAB)
    model.config.max_position_embeddings = 4096  # the built-in prompts are long for a tokenizer of single bytes
    return model


@pytest.fixture
def bench(model, tmp_path, monkeypatch):
    """Call with the name of a bench and further options."""
    monkeypatch.setattr(bench_budget, "by_category", lambda *_: {"copies": [[1, 2, 3] * 4], RANDOM: [[9, 8, 7]]})
    for module in BENCHES.values():
        monkeypatch.setattr(module, "load_target", lambda *_: LoadedModel(model, toy_tokenizer(), "tiny"))

    def run(name, *options):
        out = ["--out", str(tmp_path / "out")] if name == "budget" else []
        return CliRunner().invoke(app, ["bench", name, *OPTIONS[name].split(), *out, *options])

    return run


@pytest.mark.parametrize("name", BENCHES)
def test_nothing_is_eager_or_compiled_while_it_is_timed(name, bench, monkeypatch):
    made = []

    def watched(*arguments):
        seconds = compile_ahead(*arguments)
        made.append(graphs_made())
        monkeypatch.setattr(Target, "_run", None)  # an eager forward, of the target or of the draft model
        return seconds

    monkeypatch.setattr(BENCHES[name], "compile_ahead", watched)
    before = graphs_made()
    drafter = [] if name == "forward" else ["--drafter", "draft_model:layers=1"]
    result = bench(name, "--compile", "--json", *drafter)
    assert result.exit_code == 0, (result.output, result.exception)
    found = json.loads(result.stdout)
    assert found["compile"] and found["compile_seconds"] > 0
    assert made == [graphs_made()] == [before + (1 if name == "forward" else 2)]


@pytest.mark.parametrize("name", BENCHES)
def test_what_compiling_took_is_said_to_a_person(name, bench):
    assert re.match(r"tiny, compiled in \d+ s: ", bench(name, "--compile").stdout)


@pytest.mark.parametrize("name", BENCHES)
def test_a_target_that_cannot_be_compiled_is_refused(name, bench, model, monkeypatch):
    model._supports_attention_backend = False
    result = bench(name, "--compile")
    assert result.exit_code == 2 and "LlamaForCausalLM cannot be compiled here" in result.stderr


def test_calls_find_the_graph_that_was_compiled_ahead(model):
    before = graphs_made()
    compile_ahead(model, None, True)
    Target(model).compile()
    assert graphs_made() == before + 1


def test_a_killed_budget_run_keeps_what_compiling_took(bench, tmp_path):
    first = json.loads(bench("budget", "--compile", "--json").stdout)
    again = json.loads(bench("budget", "--compile", "--json", "--resume").stdout)
    assert again["compile_seconds"] == first["compile_seconds"] > 0  # nothing was left to compile for
    refused = bench("budget", "--resume")
    assert refused.exit_code == 2 and "holds a run with compile=True, not False" in refused.stderr


def test_compiled_attention_is_timed_and_left_as_it_was(model, monkeypatch):
    """With a cache that takes 20 ms to store a layer's keys and values, which the graph's operator does."""
    batch = bench_context.filled(model, 2, 2, 40, 4, compile=True)
    operator, update = compiled.attend, SlotLayer.update
    monkeypatch.setattr(SlotLayer, "update", lambda *args, **kwargs: time.sleep(0.02) or update(*args, **kwargs))
    parts = bench_context.timed_step(batch)
    assert parts["attention"] > 2 * 0.02 and parts["rest of the forward"] > 0
    assert compiled.attend is operator


def test_what_does_not_show_in_compiled_code_is_left_out(bench):
    found = json.loads(bench("step", "--compile", "--json").stdout)
    assert {row["step_bytes"] for row in found["contexts"]} == {None}
    assert {(row["launches"], row["syncs"]) for row in found["decode"]} == {(None, None)}
    out = bench("step", "--compile").stdout
    assert "attention is the graph's operator, which stores keys and values too" in out
