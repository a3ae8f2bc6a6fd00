"""`specdec bench verify`: the bytes that it counts, and what it prints where there is no GPU."""

import json

import pytest
import torch

from eval import bench_verify
from eval.bench_verify import floor_bytes

B, N, V = 64, 5, 131_072


@pytest.mark.parametrize(
    ("rule", "accepted", "dtype", "rows"),
    [
        ("greedy", N, torch.bfloat16, 384),  # every place of the target
        ("greedy", N, torch.float32, 384),
        ("rejection, one-hot", 0, torch.bfloat16, 64),  # the first place alone
        ("rejection, q", 0, torch.bfloat16, 128),  # and the draft's row of the rejected token
        ("rejection, q", N, torch.bfloat16, 384),  # nothing rejected
        ("block, q", 0, torch.bfloat16, 1088),  # 2 * 384 + 320, whatever is accepted
        ("coupled", 1, torch.float32, 128),
    ],
)
def test_floor_counts_the_rows_that_the_rule_needs(rule, accepted, dtype, rows):
    got = floor_bytes(rule, torch.full((B,), accepted), N, V, dtype)
    assert got == rows * V * (2 if dtype == torch.bfloat16 else 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="states what is printed where there is no GPU")
def test_without_a_gpu_the_references_are_timed(monkeypatch, capsys):
    monkeypatch.setattr(bench_verify, "ON_CPU", (2, 2, 500))
    bench_verify.run()
    assert capsys.readouterr().out.startswith("no GPU here")
    bench_verify.run(as_json=True)
    results = json.loads(capsys.readouterr().out)["results"]
    assert [(r["rule"], r["dtype"]) for r in results] == [
        (rule, dtype) for dtype in ("bfloat16", "float32") for rule in bench_verify.RULES
    ]
    assert all(r["reference_seconds"] > 0 and r["kernel_seconds"] is None for r in results)
