"""`specdec bench verify`: how long verification takes, against the bytes that its rule has to read.

On a GPU: each kernel, its torch reference, and a copy whose bandwidth is the yardstick, timed in turn and replayed from
captured graphs, so that the device's work is timed and not Python's. Without a GPU, the torch references alone, at a
size for a CPU.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from eval.environment import environment
from eval.timing import interleaved
from specdec.contracts import Draft, Scores, Verdict
from verifiers.kernels.block import block, block_reference
from verifiers.kernels.choice import coupled, coupled_reference, greedy, greedy_reference
from verifiers.kernels.rejection import rejection, rejection_reference

FULL = (64, 5, 131_072)  # B, gamma, V
SMALL = (8, 5, 32_768)
ON_CPU = (8, 5, 49_152)
REPEATS = {"cuda": 21, "cpu": 3}
COPY_BYTES = 2**31  # read and written
FLUSH_BYTES = 2**28  # more than a device's L2: in use, the logits come from the forward and not from the last repeat
ACCEPTED = 0.7  # probability of the drafted tokens in the benchmark's p

Operation = Callable[[], Verdict]
RULES: dict[str, tuple[Callable, Callable]] = {
    "greedy": (greedy, greedy_reference),
    "rejection, one-hot": (rejection, rejection_reference),
    "rejection, q": (rejection, rejection_reference),
    "block, q": (block, block_reference),
    "coupled": (coupled, coupled_reference),
}


@dataclass(frozen=True)
class Measured:
    """One rule at one dtype. Seconds are medians; what was not measured is None.

    floor_bytes: see `floor_bytes`. accepted: tokens per row. copy_bytes_per_second: read and written.
    """

    rule: str
    dtype: str
    shape: tuple[int, int, int]
    floor_bytes: int
    accepted: float
    reference_seconds: float
    kernel_seconds: float | None
    copy_bytes_per_second: float | None

    @property
    def bytes_per_second(self) -> float | None:
        return self.kernel_seconds and self.floor_bytes / self.kernel_seconds

    @property
    def share_of_copy(self) -> float | None:
        """1 where the kernel takes no longer than copying as many bytes."""
        return self.kernel_seconds and self.bytes_per_second / self.copy_bytes_per_second


def run(*, small: bool = False, as_json: bool = False) -> None:
    """Measure every rule in bfloat16 and float32; print a table, or with `as_json` one JSON object and nothing else."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    shape = SMALL if small else FULL if cuda else ON_CPU
    results = [found for dtype in (torch.bfloat16, torch.float32) for found in measure(*shape, dtype, device)]
    if as_json:
        about = environment("none: random logits", "bfloat16 and float32", device) | {"repeats": REPEATS[device.type]}
        print(json.dumps({"environment": about, "results": [as_row(found) for found in results]}, indent=2))
        return
    if not cuda:
        print("no GPU here: the torch references are timed, at a size for a CPU, and the Triton kernels are not")
    print(f"{shape[0]} rows, {shape[1]} drafted tokens, vocabulary {shape[2]}; medians of {REPEATS[device.type]}")
    Console().print(table(results))


def measure(B: int, N: int, V: int, dtype: torch.dtype, device: torch.device) -> list[Measured]:
    """All rules on logits of the same law, their repeats interleaved, so that a slow spell of the machine hits all."""
    calls: dict[tuple[str, str], Callable] = {}
    n_accepted = {}
    for rule in RULES:
        kernel, reference = operations(rule, B, N, V, dtype, device)
        n_accepted[rule] = reference().n_accepted
        calls[rule, "reference"] = reference
        if device.type == "cuda":
            calls[rule, "kernel"] = kernel
    if device.type == "cuda":
        source = torch.empty(COPY_BYTES // 2, dtype=torch.uint8, device=device)
        calls["copy", "kernel"] = partial(torch.empty_like(source).copy_, source)
    seconds = on_gpu(calls) if device.type == "cuda" else on_cpu(calls)
    copy = seconds.get(("copy", "kernel"))
    return [
        Measured(
            rule=rule,
            dtype=str(dtype).removeprefix("torch."),
            shape=(B, N, V),
            floor_bytes=floor_bytes(rule, n_accepted[rule], N, V, dtype),
            accepted=n_accepted[rule].double().mean().item(),
            reference_seconds=seconds[rule, "reference"],
            kernel_seconds=seconds.get((rule, "kernel")),
            copy_bytes_per_second=copy and COPY_BYTES / copy,
        )
        for rule in RULES
    ]


def floor_bytes(rule: str, n_accepted: Tensor, N: int, V: int, dtype: torch.dtype) -> int:
    """Bytes of logits that the rule cannot do without when it accepts `n_accepted` [B] of N tokens.

    Rules that stop at the first rejection: the target's places up to there, once, and with q the draft's row of the
    rejected token. Block: every place of the target twice and every row of the draft once."""
    if rule == "block, q":
        rows = len(n_accepted) * (2 * (N + 1) + N)
    else:
        rows = (n_accepted + 1).sum().item() + (rule == "rejection, q") * (n_accepted < N).sum().item()
    return rows * V * dtype.itemsize


def operations(
    rule: str, B: int, N: int, V: int, dtype: torch.dtype, device: torch.device
) -> tuple[Operation, Operation]:
    """A rule's kernel and reference, bound to B full drafts of one and the same token, of p = ACCEPTED and q near 1."""
    logits, q_logits = peaked(B, N, V, device)
    draft = Draft(torch.zeros(B, N, dtype=torch.long, device=device), [N] * B)
    if rule.endswith(", q"):
        q_logits = q_logits.to(dtype)
        draft = Draft(draft.tokens, [N] * B, q_logits=q_logits, q_logz=q_logits.float().logsumexp(-1))
    scores = Scores(logits.to(dtype), torch.arange(B * (N + 1), device=device).view(B, N + 1))
    if rule == "greedy":
        inputs = ()
    elif rule == "coupled":
        inputs = (0, torch.arange(B, device=device), torch.zeros(B, dtype=torch.long, device=device))
    else:
        g = torch.Generator(device).manual_seed(1)
        inputs = torch.rand(B, N + 1, generator=g, device=device, dtype=torch.float64).split([N, 1], dim=1)
        inputs = inputs[0].contiguous(), inputs[1].flatten()
    kernel, reference = RULES[rule]
    return partial(kernel, draft, scores, *inputs), partial(reference, draft, scores, *inputs)


def peaked(B: int, N: int, V: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """float32 logits [B * (N + 1), V] in which token 0 has probability ACCEPTED, and q_logits [B, N, V] that are nearly
    sure of it, so that about as much is rejected as in use."""
    g = torch.Generator(device).manual_seed(0)
    others = math.log(V) + 0.5  # log-normaliser of V standard normal logits
    logits = torch.randn(B * (N + 1), V, generator=g, device=device)
    logits[:, 0] = others + math.log(ACCEPTED / (1 - ACCEPTED))
    q_logits = torch.randn(B, N, V, generator=g, device=device)
    q_logits[:, :, 0] = others + 10
    return logits, q_logits


def on_cpu(calls: Mapping[Hashable, Callable]) -> dict[Hashable, float]:
    """Median seconds of each call."""
    seconds = interleaved(calls, REPEATS["cpu"], torch.device("cpu"))
    return {key: statistics.median(values) for key, values in seconds.items()}


def on_gpu(calls: Mapping[Hashable, Callable]) -> dict[Hashable, float]:
    """Median seconds of each call's device work, with a cold L2."""
    graphs = {key: captured(call) for key, call in calls.items()}
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    events: dict[Hashable, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {key: [] for key in calls}
    for _ in range(REPEATS["cuda"]):
        for key, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            graph.replay()
            end.record()
            events[key].append((start, end))
    torch.cuda.synchronize()
    return {key: statistics.median(s.elapsed_time(e) for s, e in pairs) / 1000 for key, pairs in events.items()}


def captured(call: Callable) -> torch.cuda.CUDAGraph:
    """The call as a graph; it has run before, on a side stream, so that its kernels are compiled."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def as_row(found: Measured) -> dict[str, Any]:
    """For JSON."""
    return asdict(found) | {"bytes_per_second": found.bytes_per_second, "share_of_copy": found.share_of_copy}


def table(results: list[Measured]) -> Table:
    """For a terminal; without the kernels' columns where they were not measured."""
    columns: dict[str, Callable[[Measured], str]] = {
        "rule": lambda found: found.rule,
        "dtype": lambda found: found.dtype,
        "accepted": lambda found: f"{found.accepted:.2f}",
        "floor": lambda found: f"{found.floor_bytes / 1e6:.0f} MB",
        "torch": lambda found: f"{found.reference_seconds * 1e3:.2f} ms",
    }
    if results[0].kernel_seconds is not None:
        columns |= {
            "kernel": lambda found: f"{found.kernel_seconds * 1e6:.1f} us",
            "speedup": lambda found: f"{found.reference_seconds / found.kernel_seconds:.1f}x",
            "GB/s": lambda found: f"{found.bytes_per_second / 1e9:.0f}",
            "of copy": lambda found: f"{found.share_of_copy:.0%}",
        }
    shown = Table()
    for column in columns:
        shown.add_column(column, justify="left" if column in ("rule", "dtype") else "right")
    for found in results:
        shown.add_row(*(cell(found) for cell in columns.values()), end_section=found.rule == list(RULES)[-1])
    return shown
