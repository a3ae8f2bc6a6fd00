"""`specdec bench verify`: how long verification takes, against the bytes that its rule has to read.

On a GPU: each kernel, its torch reference, and a copy whose bandwidth is the yardstick, timed in turn. Without one, the
torch references alone, at a size for a CPU. Every operation is replayed from a captured graph on a GPU, so that what is
timed is the device's work and not Python's.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from specdec.contracts import Draft, Scores
from specdec.registry import imported

FULL = (64, 5, 131_072)  # B, gamma, V
SMALL = (8, 5, 32_768)
ON_CPU = (8, 5, 49_152)
REPEATS = 20
COPY_BYTES = 2**30
FLUSH_BYTES = 2**28  # more than any device's L2: a step's logits come from the forward, not from the last repeat
RULES = ("greedy", "rejection, one-hot", "rejection, with q", "block, with q", "coupled")


@dataclass(frozen=True)
class Measured:
    """One rule at one dtype. Seconds are medians; what was not measured is None.

    floor_bytes: what the rule must read of the logits, each row once or, for block, the target's twice.
    """

    rule: str
    dtype: str
    rows: int
    draft_length: int
    vocabulary: int
    floor_bytes: int
    accepted: float
    reference_seconds: float
    kernel_seconds: float | None = None
    copy_bytes_per_second: float | None = None

    @property
    def bytes_per_second(self) -> float | None:
        """Of the floor's bytes in the kernel's time."""
        return self.kernel_seconds and self.floor_bytes / self.kernel_seconds

    @property
    def times_floor(self) -> float | None:
        """The kernel's time over that of copying as many bytes."""
        return self.kernel_seconds and self.copy_bytes_per_second / self.bytes_per_second

    def as_row(self) -> dict[str, Any]:
        """For JSON."""
        derived = {"bytes_per_second": self.bytes_per_second, "times_floor": self.times_floor}
        return asdict(self) | derived


def run(*, small: bool = False, as_json: bool = False) -> None:
    """Measure every rule in bfloat16 and float32 and print a table, or with `as_json` one JSON object and no more."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    shape = SMALL if small else FULL if cuda else ON_CPU
    results = [result for dtype in (torch.bfloat16, torch.float32) for result in measure(*shape, dtype, device)]
    if as_json:
        name = torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine()
        about = {"device": name, "kernels": cuda, "torch": torch.__version__, "repeats": REPEATS}
        print(json.dumps(about | {"results": [result.as_row() for result in results]}, indent=2))
        return
    if not cuda:
        print("no GPU here: the torch references are timed at a smaller size, the Triton kernels are not")
    Console().print(table(results))


def measure(B: int, N: int, V: int, dtype: torch.dtype, device: torch.device) -> list[Measured]:
    """All rules on the same random logits, their repeats interleaved, so that a slow spell of the machine hits all."""
    calls, accepted = {}, {}
    for rule in RULES:
        kernel, reference = operations(rule, *example(rule, B, N, V, dtype, device))
        accepted[rule] = reference().n_accepted.double().mean().item()
        calls[rule, "reference"] = reference
        if device.type == "cuda":
            calls[rule, "kernel"] = kernel
    if device.type == "cuda":
        source = torch.empty(COPY_BYTES // 2, dtype=torch.uint8, device=device)
        calls["copy", "kernel"] = partial(torch.empty_like(source).copy_, source)
    seconds = timed(calls, device)
    copy = seconds.get(("copy", "kernel"))
    return [
        Measured(
            rule=rule,
            dtype=str(dtype).removeprefix("torch."),
            rows=B,
            draft_length=N,
            vocabulary=V,
            floor_bytes=floor_bytes(rule, B, N, V, dtype, accepted[rule]),
            accepted=accepted[rule],
            reference_seconds=seconds[rule, "reference"],
            kernel_seconds=seconds.get((rule, "kernel")),
            copy_bytes_per_second=copy and COPY_BYTES / copy,
        )
        for rule in RULES
    ]


def floor_bytes(rule: str, B: int, N: int, V: int, dtype: torch.dtype, accepted: float) -> int:
    """Bytes that no implementation of the rule can do without, given how many tokens were accepted on average.

    Rules that stop at the first rejection need the places up to there and, with q, the draft's row of the rejected
    place; block needs every place of the target twice and of the draft once."""
    if rule.startswith("block"):
        rows = B * (2 * (N + 1) + N)
    else:
        rows = B * (accepted + 1 + (rule == "rejection, with q"))
    return round(rows * V * dtype.itemsize)


def example(
    rule: str, B: int, N: int, V: int, dtype: torch.dtype, device: torch.device
) -> tuple[Draft, Scores, Tensor, Tensor]:
    """A step of B full drafts: q is p with noise, which accepts about 70 % per token; one-hot drafts hold p's top token.

    """
    g = torch.Generator(device).manual_seed(0)
    logits = torch.randn(B * (N + 1), V, generator=g, device=device, dtype=torch.float32)
    logits[:, 0] = torch.full((), V, device=device).log() + 1.35  # its probability is 0.7
    index = torch.arange(B * (N + 1), device=device).view(B, N + 1)
    tokens = torch.zeros(B, N, dtype=torch.long, device=device)
    u = torch.rand(B, N, generator=g, device=device, dtype=torch.float64)
    pick_u = torch.rand(B, generator=g, device=device, dtype=torch.float64)
    draft = Draft(tokens, [N] * B)
    if rule.endswith("with q"):
        q_logits = torch.randn(B, N, V, generator=g, device=device, dtype=torch.float32)
        q_logits[:, :, 0] = torch.full((), V, device=device).log() + 10  # nearly one-hot: min(1, p / q) is p's 0.7
        draft = Draft(tokens, [N] * B, q_logits=q_logits.to(dtype), q_logz=q_logits.to(dtype).float().logsumexp(-1))
    return draft, Scores(logits.to(dtype), index), u, pick_u
