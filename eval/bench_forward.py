"""`specdec bench forward`: the cost T(M) of the packed forward, against what it must read and HF's own forward.

B rows with a width of T tokens each (the last committed one and T - 1 drafted ones) over a context of cached tokens;
M = B * T. The floor is the time that reading weights and cached keys and values takes at the bandwidth of a copy.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from eval.ahead import compile_ahead, with_seconds
from eval.environment import described
from eval.launches import launches, shown
from eval.plan.measure import check_grid, forward_calls, measure_device
from eval.plan.shape import ModelShape, shape_of
from eval.plan.show import Columns, as_table
from eval.report import plain_console
from eval.timing import in_ms, interleaved, spread
from specdec.cache import SlotCache
from specdec.compat import cache_argument
from specdec.models import load_target
from specdec.target import Target

COLUMNS: Columns = {
    "rows": lambda point: str(point["rows"]),
    "width": lambda point: str(point["width"]),
    "M": lambda point: str(point["rows"] * point["width"]),
    "ms": lambda point: in_ms(point["packed"]),
    "of bandwidth": lambda point: f"{point['floor_share']:.0%}",
    "HF's ms": lambda point: in_ms(point["hf"]),
    "HF / packed": lambda point: f"{point['hf']['seconds'] / point['packed']['seconds']:.2f}",
    "launches": lambda point: shown(point["launches"]),
    "syncs": lambda point: shown(point["syncs"]),
    "HF's launches": lambda point: str(point["hf_launches"]),
}


def run(
    *,
    target: str,
    dtype: str,
    device: str,
    batch_sizes: Sequence[int],
    widths: Sequence[int],
    context: int,
    repeats: int,
    bandwidth: float | None,
    compile: bool,
    as_json: bool,
) -> None:
    """Measure and print a table, or with `as_json` one JSON object and nothing else.

    bandwidth: bytes/s that the floor is taken at; None measures a copy (bytes read and written).   compile: our forward
    is compiled; HF's is as ever.
    Raises ValueError for sizes that cannot be measured, and NotImplementedError for a target that cannot be compiled.
    """
    if repeats < 1 or (bandwidth is not None and not bandwidth > 0):
        raise ValueError(f"--repeats is {repeats} and --bandwidth {bandwidth}: give positive numbers")
    loaded = load_target(target, dtype, device)
    model = loaded.model
    check_grid(batch_sizes, widths, [context], Target(model).max_positions)
    compile_seconds = compile_ahead(model, None, compile)
    given = bandwidth or measure_device(model.device, model.dtype).bandwidth
    points = measure(model, batch_sizes, widths, context, repeats, given, compile)
    if as_json:
        settings = {"bandwidth": given, "context": context, "repeats": repeats, "compile": compile}
        about = {"environment": described(loaded, {}), **settings, "compile_seconds": compile_seconds}
        print(json.dumps({**about, "points": points}, indent=2))
        return
    named = with_seconds(loaded.description, compile_seconds)
    print(f"{named}: {context} tokens of context, floor at {given / 1e9:.1f} GB/s")
    plain_console().print(as_table(points, COLUMNS, section="rows"))


@torch.no_grad()
def measure(
    model: PreTrainedModel,
    rows: Sequence[int],
    widths: Sequence[int],
    context: int,
    repeats: int,
    bandwidth: float,
    compile: bool,
) -> list[dict[str, Any]]:
    """Every point of the grid, ours and HF's forward in turn."""
    calls, cache = forward_calls(model, rows, widths, [context], repeats + 4, compile)
    for call in calls.values():  # makes the cache's buffers; on CUDA a graph is slow the first two times at a size
        call()
    ours = {("packed", place): call for place, call in calls.items()}
    theirs = {("hf", place): hf_forward(model, cache, *place) for place in calls}
    seconds = interleaved(ours | theirs, repeats, model.device)
    shape = shape_of(model, "")
    return [
        {
            "rows": place[0],
            "width": place[1],
            **{kind: spread(seconds[kind, place]) for kind in ("packed", "hf")},
            **floor(shape, place, spread(seconds["packed", place])["seconds"], bandwidth),
            **{f"hf_{key}": n for key, n in launches(theirs["hf", place], model.device).items()},
            **launches(ours["packed", place], model.device, compile),
        }
        for place in calls
    ]


def floor(shape: ModelShape, place: tuple[int, int, int], seconds: float, bandwidth: float) -> dict[str, float]:
    """`floor_bytes`: weights, and the keys and values of every row; `floor_share`: of the time that they take, in
    `seconds`: 1 where nothing but reading them takes time."""
    B, T, context = place
    read = shape.weight_bytes(B * T) + B * shape.kv_bytes(context + T)
    return {"floor_bytes": read, "floor_share": read / bandwidth / seconds}


def hf_forward(model: PreTrainedModel, like: SlotCache, B: int, T: int, context: int) -> Callable[[], Any]:
    """HF's own forward over [B, T] tokens and a cache of its own with `context` zeros, of the shapes in `like`."""
    full = DynamicCache(config=model.config)
    for layer, ours in enumerate(like.layers):
        sizes = [(B, buffer.shape[1], context, buffer.shape[3]) for buffer in (ours.keys, ours.values)]
        full.update(*(ours.keys.new_zeros(size) for size in sizes), layer)
    tokens = torch.zeros(B, T, dtype=torch.long, device=model.device)
    mask = torch.ones(B, context + T, dtype=torch.long, device=model.device)  # `generate` hands one over

    def call() -> Any:
        cache = copy.copy(full)  # a forward puts longer tensors in the place of the layers' own, which stay as they are
        cache.layers = [copy.copy(layer) for layer in full.layers]
        return model(tokens, attention_mask=mask, use_cache=True, **{cache_argument(model): cache})

    return call
