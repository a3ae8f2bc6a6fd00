"""Runs as processes of their own: killed and resumed, and two at once over gloo."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from safetensors.torch import load_file

from tests.train.toy import ToySettings
from train import parallel
from train.parallel import make_accelerator

ROOT = Path(__file__).parents[2]
FLAGS = ["--target", "toy", "--prompts", "toy", "--epochs", "2", "--learning-rate", "0.03", "--save-every", "4"]


def start(out: Path, *flags: str, processes: int = 1) -> subprocess.Popen:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    command = [sys.executable, *launcher, "-m", "tests.train.toy", *FLAGS, "--out", str(out), *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def finished(out: Path, *flags: str, processes: int = 1) -> dict[str, torch.Tensor]:
    process = start(out, *flags, processes=processes)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    return load_file(out / "head" / "model.safetensors")


def apart(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


def steps(out: Path) -> list[tuple[int, str, float]]:
    path = out / "metrics.jsonl"
    *lines, _ = path.read_text().split("\n") if path.exists() else [""]  # what follows the last end is being written
    rows = [json.loads(line) for line in lines]
    return [(row["step"], row["split"], row["loss"]) for row in rows]


@pytest.mark.slow
def test_a_killed_and_resumed_run_writes_the_same_bytes(tmp_path: Path) -> None:
    """SIGKILL at a random step, twice, with dropout and evaluations; every file of the head is compared."""
    flags = ["--dropout", "0.3", "--eval-every", "5", "--epochs", "4"]
    finished(tmp_path / "whole", *flags)
    first = random.randrange(1, 10)
    for number, step in enumerate((first, random.randrange(first + 1, 17))):  # of 24: time enough to notice and kill
        process = start(tmp_path / "killed", *flags, "--pause", "0.3", *["--resume"] * number)
        while len([s for s in steps(tmp_path / "killed") if s[1] == "train"]) < step and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, f"ended before it was killed at step {step}: {process.stderr.read()}"
    finished(tmp_path / "killed", *flags, "--pause", "0.3", "--resume")
    whole, killed = ((tmp_path / name / "head" / "model.safetensors").read_bytes() for name in ("whole", "killed"))
    assert hashlib.sha256(whole).hexdigest() == hashlib.sha256(killed).hexdigest(), f"killed at step {step}"
    assert steps(tmp_path / "whole") == steps(tmp_path / "killed")


HALVES = ["--batch-size", "2", "--accumulation", "2"]  # of each of two processes: as one with batches of 8


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process."""
    out = tmp_path_factory.mktemp("alone")
    finished(out, "--batch-size", "8", "--eval-every", "5")
    return out


@pytest.mark.slow
@pytest.mark.parametrize("kind", [[], ["--fsdp"]], ids=["ddp", "fsdp"])
def test_two_processes_train_as_one_does(kind: list[str], alone: Path, tmp_path: Path) -> None:
    together = finished(tmp_path, *HALVES, "--eval-every", "5", *kind, processes=2)
    assert apart(load_file(alone / "head" / "model.safetensors"), together) < 1e-6
    ours, theirs = steps(tmp_path), steps(alone)
    assert [step[:2] for step in ours] == [step[:2] for step in theirs]
    assert [step[2] for step in ours] == pytest.approx([step[2] for step in theirs], abs=1e-5)
    content = torch.load(tmp_path / "checkpoints" / "step-00000012.pt", weights_only=True)
    assert content["weights"]["trained.mix.weight"].shape == together["mix.weight"].shape


@pytest.mark.slow
def test_sharded_bfloat16_is_that_of_ddp(tmp_path: Path) -> None:
    """accelerate's own policy for FSDP rounds the loss too: at step 12 to 4.772 where it is 4.771."""
    flags = [*HALVES, "--mixed-precision", "bf16"]
    plain = finished(tmp_path / "ddp", *flags, processes=2)
    assert apart(plain, finished(tmp_path / "fsdp", *flags, "--fsdp", processes=2)) < 1e-6
    ours, theirs = ([step[2] for step in steps(tmp_path / name)] for name in ("fsdp", "ddp"))
    assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [[], ["--fsdp"]], ids=["ddp", "fsdp"])
def test_two_processes_resume_bit_for_bit(kind: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [*HALVES, "--eval-every", "5", "--dropout", "0.3", *kind]
    whole = finished(tmp_path / "whole", *flags, processes=2)
    monkeypatch.setenv("TOY_FAILS_AT", "15")  # in the eighth step
    process = start(tmp_path / "failed", *flags, processes=2)
    _, errors = process.communicate(timeout=600)
    assert process.returncode != 0 and steps(tmp_path / "failed")[-1][0] == 7, errors
    monkeypatch.delenv("TOY_FAILS_AT")
    assert apart(whole, finished(tmp_path / "failed", *flags, "--resume", processes=2)) == 0


@pytest.mark.slow
def test_control_half_of_the_examples_train_to_other_weights(alone: Path, tmp_path: Path) -> None:
    """What two processes would end with that do not exchange gradients."""
    half = finished(tmp_path, "--batch-size", "4", "--epochs", "1")
    assert apart(load_file(alone / "head" / "model.safetensors"), half) > 1e-3


def test_sharding_on_cpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate would train data-parallel instead and not say so."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(ValueError, match="--use_fsdp shards on accelerators only, not on CPU"):
        make_accelerator(ToySettings(target="toy", prompts="toy", out=str(tmp_path), device="cpu"))
    AcceleratorState._reset_state(reset_partial_state=True)


def test_fsdp_1_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(distributed_type=DistributedType.FSDP, is_fsdp2=False)
    monkeypatch.setattr(parallel, "Accelerator", lambda **options: old)
    with pytest.raises(ValueError, match="launch with --fsdp_version 2"):
        make_accelerator(ToySettings(target="toy", prompts="toy", out=str(tmp_path)))
