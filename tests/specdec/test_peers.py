"""`synced_gpus`: two processes whose forwards wait for each other, over gloo."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def launched(*arguments: str) -> subprocess.CompletedProcess:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *launcher, "-m", "tests.specdec.peers_launched", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def test_a_process_that_is_done_runs_along():
    result = launched("synced")
    assert result.returncode == 0, result.stderr


def test_processes_that_go_alone_are_caught():
    """Broken control: the one that ends first leaves the other in a forward that never ends."""
    assert launched("alone").returncode != 0
