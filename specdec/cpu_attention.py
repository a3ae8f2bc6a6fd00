"""Attention on a CPU as one C++ function, for compiled forwards (which need a C++ compiler anyway).

Beside `packed_attention`, whose result it has: that one spends most of a short row's time between torch's operators,
and in bfloat16 multiplies at half of float32's rate where a processor has AVX512-BF16 but no AMX. The function, in
cpu_attention.cpp, writes the step's keys and values to their slots and attends for all rows and prompt chunks.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from specdec.cache import SlotLayer
from specdec.own_cpp import loaded
from specdec.step import Step

SOURCE = Path(__file__).with_name("cpu_attention.cpp")
PAIR = 32  # head sizes are multiples of it
_TENSOR, _COUNT = ctypes.c_void_p, ctypes.c_int64
ARGUMENTS = [_TENSOR, _COUNT, _COUNT] * 5 + [_COUNT] * 5 + [ctypes.c_double, _TENSOR] + [_COUNT] * 3 + [_TENSOR] * 3
ARGUMENTS += [_COUNT, _COUNT, _TENSOR]


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled functions, which torch keeps on disk; None, logged once, where they cannot be compiled."""
    found = loaded(SOURCE, "attention runs through torch's operators")
    if found is None:
        return None
    for function in (found.attend_float32, found.attend_bfloat16):
        function.argtypes, function.restype = ARGUMENTS, None
    return found


def fits(
    step: Step,
    layer: SlotLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    softcap: float | None,
    sinks: Tensor | None,
) -> bool:
    """Whether `attend` can run this step: on a CPU, with rows that need not be run one by one, all in one dtype and of
    head sizes that it has."""
    held = [layer.keys, layer.values] if layer.is_initialized else []
    return (
        query.device.type == "cpu"
        and query.dtype in (torch.float32, torch.bfloat16)
        and all(tensor.dtype == query.dtype for tensor in (key, value, *held))
        and softcap is None
        and sinks is None
        and step.apart is None
        and query.shape[3] % PAIR == value.shape[3] % PAIR == 0
        and library() is not None
    )


def attend(
    step: Step,
    layer: SlotLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    scaling: float | None,
    window: int | None,
) -> None:
    """Writes key and value [1, H_kv, M, D or Dv] to their slots of `layer`, then the attention of query [1, H, M, D] to
    out [1, M or more, H, Dv].   scaling: None for 1 / sqrt(D).   window: see `Step.visible`."""
    if window is not None:
        step.windows.add(window)
    if not layer.is_initialized:
        layer.lazy_initialization(key, value)
    query, key, value = (tensor if tensor.stride(3) == 1 else tensor.contiguous() for tensor in (query, key, value))
    H_kv, D, Dv = key.shape[1], key.shape[3], value.shape[3]
    causal = step.only_chunks or (step.parents is None and step.masked is None)
    visible = None if causal else step.visible(window).contiguous()
    function = getattr(library(), f"attend_{str(query.dtype).removeprefix('torch.')}")
    function(
        query.data_ptr(), query.stride(1), query.stride(2),
        key.data_ptr(), key.stride(1), key.stride(2),
        value.data_ptr(), value.stride(1), value.stride(2),
        layer.keys.data_ptr(), layer.keys.stride(0), layer.keys.stride(1),
        layer.values.data_ptr(), layer.values.stride(0), layer.values.stride(1),
        H_kv, query.shape[1] // H_kv, D, Dv, window or 0, D**-0.5 if scaling is None else scaling,
        None if visible is None else visible.data_ptr(), step.width, step.slots,
        len(step.token_places), step.token_places.data_ptr(), step.token_slots.data_ptr(),
        step.rows.ctypes.data, len(step.rows), len(step.rows) - len(step.chunks), out.data_ptr(),
    )  # fmt: skip
