"""A model split over two processes (tp_plan="auto", gloo): both emit what one process emits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import specdec
from drafters.draft_model import DraftModelDrafter
from tests.specdec.tensor_parallel import GREEDY, SAMPLED, SEED
from tests.specdec.test_generation import prompts
from tests.tiny_models import tiny

ROOT = Path(__file__).parents[2]
FAMILIES = ["llama", "qwen3", "mistral", "gemma3"]


@pytest.mark.slow
def test_two_processes_emit_what_one_does(tmp_path):
    for family in FAMILIES:
        tiny(family).save_pretrained(tmp_path / family)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *launcher, "-m", "tests.specdec.tensor_parallel", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert set(first) == set(FAMILIES) and sum(map(sum, first["llama"]["accepted"])) > 0
    for family, found in first.items():
        model = tiny(family)
        expected = model.generate(**prompts(), **GREEDY).tolist()
        assert found["hf"] == found["ngram"] == found["draft model"] == expected, family
        torch.manual_seed(SEED)
        alone = specdec.generate(model, **prompts(), **SAMPLED, drafter=DraftModelDrafter(tiny("llama")))
        assert found["sampled"] == alone.tolist(), family
