"""Tensors and configurations of other projects' files, read so that nothing is missed and nothing is left over."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


class Checkpoint(Mapping[str, Tensor]):
    """Name -> tensor of a folder's safetensors files, sharded or not; a tensor is read when it is asked for.

    Raises FileNotFoundError for a folder without such files, ValueError for a damaged one or a shard that is missing.
    """

    def __init__(self, folder: Path):
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            self._files = {
                name: folder / file for name, file in setting(read_config(index), "weight_map", index).items()
            }
        else:
            files = sorted(folder.glob("*.safetensors"))
            if not files:
                raise FileNotFoundError(f"{folder} has no .safetensors file: give the folder of a checkpoint")
            self._files = {name: file for file in files for name in _names_in(file)}

    def __getitem__(self, name: str) -> Tensor:
        with _opened(self._files[name]) as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def only(self, names: Iterable[str]) -> Checkpoint:
        """The same with these tensors alone."""
        part = copy.copy(self)
        part._files = {name: self._files[name] for name in names}
        return part


def _names_in(file: Path) -> list[str]:
    with _opened(file) as tensors:
        return list(tensors.keys())


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read ({error}): copy or download it again") from None


def read_pt(file: Path) -> dict[str, Tensor]:
    """The state dictionary in a `.pt` file; no other object in it is ever run or built."""
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{file} cannot be read as plain tensors ({reason}): copy or download it again") from None
    if not isinstance(tensors, Mapping) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ValueError(f"{file} is not a dictionary of tensors: give one that torch.save(module.state_dict()) wrote")
    return dict(tensors)


def read_config(file: Path) -> dict[str, Any]:
    """A JSON file. Raises FileNotFoundError or ValueError that names it."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist: give the folder of a checkpoint, its {file.name} included")
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}): copy or download it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__} and no object: copy or download it again")
    return content


def setting(config: Mapping[str, Any], name: str, file: Path) -> Any:
    """What `name` is in `config`, read from `file`. Raises ValueError where it says nothing."""
    if name not in config:
        raise ValueError(f"{file} has no {name}: it is not a file of this format")
    return config[name]


def fill(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Copy a file's tensors into ours, `own`, which carry the file's names.

    Raises ValueError that names the file's keys: what is missing, what is left over, what has another shape."""
    missing, unknown = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    if missing or unknown:
        raise ValueError(
            f"{folder} does not hold the head that its configuration and the target describe: missing "
            f"{_listed(missing)}, unknown {_listed(unknown)}"
        )
    for name, mine in own.items():
        if (theirs := tensors[name]).shape != mine.shape:
            raise ValueError(
                f"{folder} has {name} of shape {tuple(theirs.shape)} where the target asks for {tuple(mine.shape)}: "
                f"give the target that it was trained for"
            )
        mine.detach().copy_(theirs)


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}" if names else "none"


def save_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write `tensors`, which may be views of each other's memory, as safetensors."""
    whole = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    save_file(whole, file, metadata={"format": "pt"})


def save_config(config: Mapping[str, Any], folder: Path) -> None:
    """Write `config` as `folder`'s config.json."""
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into that becomes `folder` when the block ends without an error, and else leaves no trace.

    Raises FileExistsError where `folder` is there already and not empty."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise FileExistsError(f"{folder} is there already: give a new folder, or remove it first")
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield made
        made.chmod(0o755)  # mkdtemp keeps others out
        os.replace(made, folder)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
