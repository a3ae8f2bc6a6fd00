"""Timing several calls in one process, so that a slow spell of the machine hits all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

Key = TypeVar("Key", bound=Hashable)


def interleaved(calls: Mapping[Key, Callable[[], Any]], repeats: int, device: torch.device) -> dict[Key, list[float]]:
    """Seconds of each call in each of `repeats` rounds, after one that does not count."""
    seconds: dict[Key, list[float]] = {key: [] for key in calls}
    for number in range(repeats + 1):
        for key, call in calls.items():
            started = time.perf_counter()
            call()
            synchronize(device)
            if number:
                seconds[key].append(time.perf_counter() - started)
    return seconds


def synchronize(device: torch.device) -> None:
    """Wait for the device's queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def quartiles(values: Sequence[float]) -> list[float]:
    """25%, median, 75%."""
    return np.quantile(values, [0.25, 0.5, 0.75]).tolist()


def spread(seconds: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles."""
    low, median, high = quartiles(seconds)
    return {"seconds": median, "quartiles": [low, high]}


def in_ms(found: Mapping[str, Any]) -> str:
    """What `spread` gave, for a table: 12.3 (12.1 - 12.8)."""
    low, high = found["quartiles"]
    return f"{1e3 * found['seconds']:.2f} ({1e3 * low:.2f} - {1e3 * high:.2f})"
