"""metrics.jsonl, the progress bar, and Weights & Biases' own file of an offline run."""

import json
import struct
from pathlib import Path

import pytest

from tests.train.toy import ToySettings
from train.log import Log

BLOCK, FULL, FIRST, MIDDLE, LAST = 32768, 1, 2, 3, 4  # of the record format, which is LevelDB's log


def settings(out: Path, **changes: object) -> ToySettings:
    return ToySettings(target="toy", prompts="toy", out=str(out), **changes)


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def filled(out: Path, steps: range) -> None:
    with Log(settings(out), main=True, done=steps.start - 1, total=10) as log:
        for step in steps:
            log.step(step, {"loss": 1 / step, "tokens": 100, "top1": [0.5, 0.25]})
            if step % 2 == 0:
                log.held_out(step, {"loss": 2 / step, "tokens": 50})


def test_a_line_per_step_and_evaluation(tmp_path: Path) -> None:
    filled(tmp_path, range(1, 3))
    speeds = [line.pop("tokens_per_second") for line in lines(tmp_path) if line["split"] == "train"]
    assert min(speeds) > 0
    found = [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in lines(tmp_path)]
    assert found == [
        {"step": 1, "split": "train", "loss": 1.0, "tokens": 100, "top1": [0.5, 0.25]},
        {"step": 2, "split": "train", "loss": 0.5, "tokens": 100, "top1": [0.5, 0.25]},
        {"step": 2, "split": "held_out", "loss": 1.0, "tokens": 50},
    ]


def test_lines_are_there_before_the_run_ends(tmp_path: Path) -> None:
    with Log(settings(tmp_path), main=True, done=0, total=10) as log:
        log.step(1, {"loss": 1.0, "tokens": 100})
        assert [line["step"] for line in lines(tmp_path)] == [1]


@pytest.mark.parametrize("cut", ["", '{"step": 7, "sp'])
def test_a_resumed_run_has_no_step_twice(cut: str, tmp_path: Path) -> None:
    """Killed in step 7, resumed from the checkpoint of step 4."""
    filled(tmp_path, range(1, 7))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(cut)
    filled(tmp_path, range(5, 11))
    assert [line["step"] for line in lines(tmp_path) if line["split"] == "train"] == [*range(1, 11)]
    assert [line["step"] for line in lines(tmp_path) if line["split"] == "held_out"] == [2, 4, 6, 8, 10]


def test_a_run_from_the_start_keeps_nothing(tmp_path: Path) -> None:
    filled(tmp_path, range(1, 7))
    filled(tmp_path, range(1, 2))
    assert [line["step"] for line in lines(tmp_path)] == [1]


def test_only_the_main_process_reports(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Log(settings(tmp_path, wandb=True), main=False, done=0, total=10) as log:
        log.step(1, {"loss": 1.0, "tokens": 100})
        log.held_out(1, {"loss": 1.0, "tokens": 100})
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_progress_goes_to_standard_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(tmp_path, range(1, 4))
    shown = capsys.readouterr()
    assert shown.out == ""
    text = " ".join(shown.err.split())
    assert "3/10" in text and "loss 0.333" in text and "tokens/s" in text


@pytest.mark.timeout(600)  # seconds; its service starts slowly on a busy machine
def test_wandb_s_offline_file_holds_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb  # takes long, and no other test needs it

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with Log(settings(tmp_path, wandb=True, epochs=3), main=True, done=0, total=2) as log:
        for step in (1, 2):
            log.step(step, {"loss": 1 / step, "tokens": 100, "top1": [0.5, 0.25]})
        log.held_out(2, {"loss": 0.75, "tokens": 50})
    wandb.teardown()  # waits for its service, which writes the file
    [file] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    config, history = wandb_run(file)
    assert config["epochs"] == 3 and config["target"] == "toy"
    assert [row["_step"] for row in history] == [1, 2]
    assert history[0]["train/loss"] == 1.0 and history[1]["train/loss"] == 0.5
    assert history[1]["train/top1/1"] == 0.5 and history[1]["train/top1/2"] == 0.25
    assert "held_out/loss" not in history[0] and history[1]["held_out/loss"] == 0.75


def wandb_run(file: Path) -> tuple[dict, list[dict]]:
    """Configuration and logged rows of an offline run."""
    from wandb.proto.wandb_internal_pb2 import Record

    config, history = {}, []
    for data in records(file.read_bytes()):
        record = Record.FromString(data)
        for item in [*record.run.config.update, *record.config.update]:
            config[item.key] = json.loads(item.value_json)
        if record.HasField("history"):
            items = record.history.item
            history.append({"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
    return config, history


def records(data: bytes) -> list[bytes]:
    """The file's records: after 7 bytes of header, fragments of checksum (4 bytes), length (2) and kind (1), none of
    which crosses the end of a block."""
    assert data[:4] == b":W&B"
    found, parts, place = [], b"", 7
    while place + 7 <= len(data):
        if BLOCK - place % BLOCK < 7:
            place += BLOCK - place % BLOCK
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        parts = (
            data[place + 7 : place + 7 + size] if kind in (FULL, FIRST) else parts + data[place + 7 : place + 7 + size]
        )
        if kind in (FULL, LAST):
            found.append(parts)
        place += 7 + size
    return found


@pytest.mark.parametrize("line", [b"{oops", b"[1]", b"{}", b"\x00\x00", b"\xff"])
def test_a_damaged_line_is_named(line: bytes, tmp_path: Path) -> None:
    filled(tmp_path, range(1, 2))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(ValueError, match="metrics.jsonl, line 2, is damaged: remove the line"):
        filled(tmp_path, range(2, 4))
