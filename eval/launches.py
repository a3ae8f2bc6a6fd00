"""What a call asks of the device it runs on: kernel launches, and how often the host waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from eval.timing import synchronize
from eval.work import Work

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")  # and their variants; a graph is one launch
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")


def launches(call: Callable[[], Any], device: torch.device, compiled: bool = False) -> dict[str, int | None]:
    """`launches` and `syncs` of one call, after one that does not count.

    On CUDA by torch's profiler; on a CPU the aten operations that are no views, and the reads and copies that would
    wait for a device: None of both where the call runs `compiled` code, whose operations do not show."""
    if compiled and device.type != "cuda":
        return {"launches": None, "syncs": None}
    call()
    if device.type != "cuda":
        with Work() as work:
            call()
            work.lap("call")
        return {"launches": work.total.kernels, "syncs": work.total.reads + work.total.waits}
    synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        call()
        synchronize(device)
    return counted({event.key: event.count for event in profiled.key_averages()})


def counted(calls: dict[str, int]) -> dict[str, int]:
    """`launches` and `syncs` among the profiler's events, which are given as how often each name occurred."""
    names = {"launches": LAUNCHES, "syncs": WAITS}
    return {kind: sum(n for key, n in calls.items() if key.startswith(of)) for kind, of in names.items()}


def shown(count: int | None) -> str:
    """For a table."""
    return "-" if count is None else str(count)
