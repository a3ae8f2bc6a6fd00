"""What a number depends on besides the settings: versions, hardware, the command."""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import nn

from heads.saved import fingerprint
from specdec.contracts import Drafter
from specdec.models import LoadedModel

PACKAGES = ("specdec", "torch", "transformers", "numpy")


def environment(target: str, dtype: str, device: torch.device) -> dict[str, str | int]:
    """For summary.json and the report. `target` describes the model that was loaded."""
    return {
        "command": shlex.join(["specdec", *sys.argv[1:]]),
        "target": target,
        "dtype": dtype,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
    }


def described(loaded: LoadedModel, drafters: Mapping[str, Drafter]) -> dict[str, str | int]:
    """`environment` of a loaded model, with fingerprints of its weights and of those of every drafter that has some."""
    found = environment(loaded.description, str(loaded.model.dtype).removeprefix("torch."), loaded.model.device)
    found["weights"] = fingerprint(loaded.model)
    for name, drafter in drafters.items():
        if modules := _modules(drafter):
            found[f"weights of {name}"] = fingerprint(nn.ModuleList(modules))
    return found


def _modules(drafter: Drafter) -> list[nn.Module]:
    """What a drafter drafts with: modules that it holds, itself or in an adapter (`specdec.target.Target`)."""
    held = [getattr(value, "model", value) for value in getattr(drafter, "__dict__", {}).values()]
    return [value for value in held if isinstance(value, nn.Module)]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "not installed"


def _cpu() -> str:
    """The model's name, which `platform.processor` does not give on Linux."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
