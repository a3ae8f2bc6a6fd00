"""Checkpoints: which are kept, and what is left when a write or a file fails."""

import errno
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.train.test_loop import apart, equal, run, settings, toy_data, weights
from train.checkpoints import Checkpoints


def kept(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def test_the_last_two_and_the_best_are_kept(tmp_path: Path) -> None:
    _, outcome = run(settings(tmp_path, held_out=0.1, epochs=20, learning_rate=0.1))
    assert outcome.best_step < 116
    assert kept(tmp_path) == [f"step-{step:08d}.pt" for step in (outcome.best_step, 116, 120)]


def test_without_held_out_data_the_last_two_are_kept(tmp_path: Path) -> None:
    run(settings(tmp_path, save_every=5))
    assert kept(tmp_path) == ["step-00000010.pt", "step-00000012.pt"]


def test_frozen_parameters_are_not_in_the_file(tmp_path: Path) -> None:
    recipe, _ = run(settings(tmp_path))
    content = torch.load(tmp_path / "checkpoints" / "step-00000012.pt", weights_only=True)
    assert set(content["weights"]) == {"trained.mix.weight", "trained.mix.bias"}
    assert torch.equal(content["weights"]["trained.mix.weight"], recipe.module.mix.weight)


class FullDisk:
    """A file on a disk that takes `room` more bytes, and then only part of what is written."""

    def __init__(self, file: Any, room: int):
        self.file, self.room = file, room

    def write(self, data: bytes) -> int:
        taken = self.file.write(memoryview(data).cast("B")[: self.room])
        self.room -= taken
        if taken < memoryview(data).nbytes:
            raise OSError(errno.ENOSPC, "No space left on device")
        return taken

    def __enter__(self) -> "FullDisk":
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    real = Path.open

    def opened(path: Path, mode: str = "r", **options: Any) -> Any:
        file = real(path, mode, **options)
        return FullDisk(file, room) if mode == "wb" else file

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", opened)
        yield


@contextmanager
def quota(room: int) -> Iterator[None]:
    """The system's own limit on a file's size: a write beyond it fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [0, 500, 3000])
@pytest.mark.parametrize("failing", [full_disk, quota])
def test_a_full_disk_leaves_the_checkpoints_before(
    failing: Callable[[int], Any], room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Checkpoints.save

    def save(self: Checkpoints, state: Any) -> None:
        if state.step < 8:
            return real(self, state)
        with failing(room):
            return real(self, state)

    monkeypatch.setattr(Checkpoints, "save", save)
    with pytest.raises(
        OSError, match=r"could not write checkpoint .*step-00000008.pt .*go on with --resume from step 4"
    ):
        run(settings(tmp_path))
    assert kept(tmp_path) == ["step-00000004.pt"]
    monkeypatch.undo()
    resumed, _ = run(settings(tmp_path, resume=True))
    whole, _ = run(settings(tmp_path / "whole"))
    assert equal(weights(whole), weights(resumed))


def test_control_writing_in_place_loses_the_checkpoint_before(tmp_path: Path) -> None:
    """The disk of these tests does fail half-way: what is written to the file's own name is gone."""
    file = tmp_path / "a.pt"
    torch.save(torch.arange(1000), file)
    with full_disk(3000), pytest.raises((OSError, RuntimeError)), file.open("wb") as opened:
        torch.save(torch.arange(1000), opened)
    assert 0 < file.stat().st_size <= 3000
    with pytest.raises(RuntimeError):
        torch.load(file)


@pytest.mark.parametrize("share", [0, 0.3, 0.99])
def test_a_truncated_checkpoint_is_refused_and_named(share: float, tmp_path: Path) -> None:
    run(settings(tmp_path))
    last = tmp_path / "checkpoints" / "step-00000012.pt"
    content = last.read_bytes()
    last.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match=r"step-00000012.pt is damaged .*remove it to resume from step 8") as caught:
        run(settings(tmp_path, resume=True))
    assert "\n" not in str(caught.value)
    last.unlink()
    resumed, _ = run(settings(tmp_path, resume=True))
    whole, _ = run(settings(tmp_path / "whole"))
    assert equal(weights(whole), weights(resumed))


def test_a_checkpoint_of_another_module_is_refused(tmp_path: Path) -> None:
    run(settings(tmp_path))
    path = tmp_path / "checkpoints" / "step-00000012.pt"
    content = torch.load(path, weights_only=True)
    content["weights"]["trained.other"] = content["weights"].pop("trained.mix.bias")
    torch.save(content, path)
    with pytest.raises(ValueError, match="step-00000012.pt holds other weights than are trained"):
        run(settings(tmp_path, resume=True))


def test_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    run(settings(tmp_path))
    path = tmp_path / "checkpoints" / "step-00000012.pt"
    content = torch.load(path, weights_only=True)
    content["random"] *= 2
    torch.save(content, path)
    with pytest.raises(ValueError, match="had 2 processes, not 1: resume it with as many"):
        run(settings(tmp_path, resume=True))


@pytest.mark.parametrize("lost", ["exp_avg", "exp_avg_sq", "step"])
def test_control_losing_a_part_of_the_optimizer_s_state_ends_elsewhere(lost: str, tmp_path: Path) -> None:
    whole, _ = run(settings(tmp_path / "whole"))
    data = toy_data(settings(tmp_path))
    data.batches.calls[9] = lambda: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        run(settings(tmp_path), data)
    path = tmp_path / "checkpoints" / "step-00000008.pt"
    content = torch.load(path, weights_only=True)
    for of_parameter in content["optimizer"]["state"].values():
        value: Tensor = of_parameter[lost]
        of_parameter[lost] = torch.ones_like(value) if lost == "step" else torch.zeros_like(value) + 1e-4
    torch.save(content, path)
    resumed, _ = run(settings(tmp_path, resume=True))
    assert apart(weights(whole), weights(resumed)) > 1e-4


def test_a_checkpoint_is_only_read_as_plain_tensors(tmp_path: Path) -> None:
    """A file may come from elsewhere: what would run code on loading is refused like a damaged one."""
    run(settings(tmp_path))
    torch.save({"weights": print}, tmp_path / "checkpoints" / "step-00000012.pt")
    with pytest.raises(ValueError, match="is damaged"):
        run(settings(tmp_path, resume=True))


@pytest.mark.parametrize("damage", ["flipped bytes", "a list", "a part"])
def test_a_damaged_checkpoint_is_refused_whatever_the_damage(damage: str, tmp_path: Path) -> None:
    run(settings(tmp_path))
    path = tmp_path / "checkpoints" / "step-00000012.pt"
    if damage == "flipped bytes":
        content = bytearray(path.read_bytes())
        for place in range(0, len(content), 97):
            content[place] ^= 255
        path.write_bytes(content)
    else:
        torch.save([1, 2] if damage == "a list" else {"weights": {}}, path)
    with pytest.raises(ValueError, match=r"step-00000012.pt is damaged .*remove it to resume from step 8"):
        run(settings(tmp_path, resume=True))
