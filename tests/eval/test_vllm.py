"""vLLM's rows, with a stand-in for vLLM in a Python of its own, which decodes the copied weights by HF alone."""

import sys

import pytest

from tests.eval.outputs import results, summary

STAND_IN = """
from types import SimpleNamespace
import torch
from transformers import AutoModelForCausalLM


class SamplingParams(SimpleNamespace):
    pass


class LLM:
    def __init__(self, model, dtype, skip_tokenizer_init, enable_prefix_caching, disable_log_stats,
                 speculative_config=None):
        assert skip_tokenizer_init and not enable_prefix_caching and not disable_log_stats
        print("a line of its own", speculative_config)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)

    def generate(self, inputs, settings, use_tqdm):
        assert settings.temperature == 0 and (settings.ignore_eos or settings.stop_token_ids)
        if {FAILS} and settings.max_tokens > 8:
            raise RuntimeError("boom")
        return [self.row(one["prompt_token_ids"], settings) for one in inputs]

    def row(self, prompt, settings):
        tokens = list(prompt)
        with torch.no_grad():
            for _ in range(settings.max_tokens):
                tokens.append(self.model(torch.tensor([tokens])).logits[0, -1].argmax().item())
                if tokens[-1] in settings.stop_token_ids:
                    break
        output = SimpleNamespace(token_ids=tuple(tokens[len(prompt):]))
        return SimpleNamespace(outputs=[output], metrics=SimpleNamespace(first_token_latency=1e-6))
"""


@pytest.fixture
def vllm(tmp_path):
    """Makes an executable that is a Python with the stand-in; `fails`: it raises at its first request of a batch."""

    def make(fails: bool = False) -> str:
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / "vllm.py").write_text(STAND_IN.replace("{FAILS}", str(fails)))
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "site"} exec {sys.executable} "$@"\n')
        python.chmod(0o755)
        return str(python)

    return make


def test_its_rows_stand_beside_the_others(tmp_path, evaluate, vllm):
    assert evaluate("--limit", "2", "--vllm", vllm()).exit_code == 0
    rows = {(row["method"], row["batch_size"]): row for row in summary(tmp_path)["rows"]}
    for name in ("vllm", "vllm + ngram"):
        for size in (1, 2):
            row = rows[name, size]
            assert row["exact_match_rate"] == 1.0 and row["tokens"] == 20 and row["tokens_per_second"] > 0
            assert row["mean_accepted_length"] is None and row["target_forwards"] is None
    assert rows["ngram", 2]["speedup_vs_vllm"] > 0
    log = (tmp_path / "out" / "vllm.log").read_text()
    assert "'num_speculative_tokens': 5, 'prompt_lookup_max': 4, 'prompt_lookup_min': 2" in log
    assert "| vs vLLM |" in (tmp_path / "out" / "report.md").read_text()


def test_an_engine_that_fails_is_a_failed_row(tmp_path, evaluate, vllm):
    result = evaluate("--limit", "2", "--batch-sizes", "1", "--vllm", vllm(fails=True))
    assert result.exit_code == 1
    errors = {row["method"]: row["error"] for row in summary(tmp_path)["rows"]}
    assert "vLLM ended with status 1" in errors["vllm"] and "vllm.log" in errors["vllm"] and errors["ngram"] is None
    assert "boom" in (tmp_path / "out" / "vllm.log").read_text()


def test_without_it_nothing_is_said_of_it(tmp_path, evaluate):
    assert evaluate("--limit", "2").exit_code == 0
    assert "vs vLLM |" not in (tmp_path / "out" / "report.md").read_text()


def test_a_python_that_is_not_there_is_refused_before_the_run(tmp_path, evaluate):
    result = evaluate("--vllm", str(tmp_path / "nowhere"))
    assert result.exit_code == 2 and "environment that has vLLM" in result.stderr
    assert not (tmp_path / "out").exists()


def test_ignored_ends_end_no_request(tmp_path, evaluate, model):
    evaluate("--limit", "2", "--batch-sizes", "1")
    model.generation_config.eos_token_id = results(tmp_path)[0].tokens[3]
    (tmp_path / "out").rename(tmp_path / "whole")
    evaluate("--limit", "2", "--batch-sizes", "1")
    assert min(len(record.tokens) for record in results(tmp_path)) <= 4  # the control
    (tmp_path / "out").rename(tmp_path / "ended")
    assert evaluate("--limit", "2", "--batch-sizes", "1", "--ignore-eos").exit_code == 0
    assert {len(record.tokens) for record in results(tmp_path)} == {10}
