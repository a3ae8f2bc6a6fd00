"""What a number depends on besides the settings: versions, hardware, the command."""

from __future__ import annotations

import hashlib
import platform
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from transformers import PreTrainedModel

PACKAGES = ("specdec", "torch", "transformers", "numpy")
SAMPLES = 1024  # values per parameter that its digest is made of


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


def weights_digest(model: PreTrainedModel) -> str:
    """16 hex digits that tell one set of weights from another: of a stride through every parameter, in float32."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        values = parameter.detach().flatten()
        sample = values[:: 1 + len(values) // SAMPLES].float().cpu()
        digest.update(f"{name} {tuple(parameter.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:16]


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
