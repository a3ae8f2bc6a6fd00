"""Several processes share the batches and leave one folder with the results of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eval.folder import Folder
from eval.methods import Method
from eval.processes import Processes
from eval.publish import summarise
from eval.runner import schedule
from tests.eval.samples import prompts_of, record

ROOT = Path(__file__).parent.parent.parent


def test_batches_are_shared_whole_and_none_is_left_out():
    method = Method("a", None, 0.0, "float32", None, None)
    jobs = list(schedule(prompts_of(*range(1, 8)), [method], [1, 2], repeats=2))
    shares = [Processes(rank, 3).of(jobs) for rank in range(3)]
    assert sorted(job.key for share in shares for job in share) == sorted(job.key for job in jobs)
    assert {job.batch for job in shares[1]} == {1, 4}


def test_alone_where_nothing_was_launched(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    here = Processes.here("cpu")
    assert here == Processes(0, 1, "cpu") and here.is_first and here.share is None
    here.wait()


def evaluate(out: Path, prompts: Path, processes: int, *options: str) -> None:
    # What `accelerate launch` runs on several GPUs; on CPUs it asks for MPI.
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *(launch if processes > 1 else []), str(ROOT / "tests" / "eval" / "launched.py")]
    command += ["eval", "--prompts", str(prompts), "--batch-sizes", "1,2", "--max-new-tokens", "8", "--raw"]
    command += ["--device", "cpu", "--out", str(out), *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=out.parent)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_table_has_one_order_whichever_process_wrote_first(tmp_path):
    """The second process's batch starts with another method, and after a kill its results alone were left."""
    folder = Folder(tmp_path)
    for batch, methods in ((1, ("ngram", "plain")), (0, ("plain", "ngram"))):
        folder.append([record(method, batch=batch, rows=1) for method in methods])
    assert [row["method"] for row in summarise(folder)["rows"]] == ["plain", "ngram"]


@pytest.mark.slow
def test_two_processes_give_what_one_gives(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"turns": ["abcabc", "de"]}, *({"prompt": text} for text in ("xyz", "aaaa", "12121212", "no"))]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluate(tmp_path / "one", prompts, 1)
    evaluate(tmp_path / "two", prompts, 2)

    def outputs(name: str) -> dict:
        return {(r.method, r.batch_size, r.id): (r.tokens, r.accepted) for r in Folder(tmp_path / name).read()}

    assert outputs("two") == outputs("one") and len(outputs("two")) == 6 * (4 + 3)
    assert not list((tmp_path / "two").glob("results-*"))
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("one", "two")]
    assert [s["environment"]["processes"] for s in summaries] == [1, 2]
    counted = ("method", "batch_size", "mean_accepted_length", "tokens", "requests", "exact_match_rate")
    table = [[[row[key] for key in counted] for row in summary["rows"]] for summary in summaries]
    assert table[0] == table[1]
    lines = (tmp_path / "two" / "results.jsonl").read_text().splitlines(keepends=True)
    left = [line for line in lines if json.loads(line)["batch"] == 1]  # of the second process alone
    (tmp_path / "two" / "results.jsonl").write_text("".join(left[:9]))
    evaluate(tmp_path / "two", prompts, 2, "--resume")  # a killed run goes on, with any number of processes
    assert outputs("two") == outputs("one")
    rows = json.loads((tmp_path / "two" / "summary.json").read_text())["rows"]
    assert [[row[key] for key in counted] for row in rows] == table[0]
