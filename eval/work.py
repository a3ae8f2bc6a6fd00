"""Counted work: what running some torch code asks of a device, by phase of the decode loop. No clock is read.

Counted on the CPU as it would be with the model on a GPU: kernel launches, reads of the device, copies to it, memory.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eval.memory import storages
from specdec.loop import Batch
from specdec.stats import Clock

READS = {"cpu", "numpy", "tolist", "item", "__array__", "__bool__", "__int__", "__float__", "__index__"}
BUILT_ON_HOST = {"tensor", "as_tensor"}
DATA_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
INDEXING = {"index", "index_put", "index_put_"}
ON_HOST = "specdec_on_host"  # attribute of a tensor that would lie in host memory


@dataclass(frozen=True)
class Counts:
    """kernels: calls of aten operations that are no views.
    reads:   device-to-host reads, each of which waits for the device: `.cpu()`, `.item()`, `bool(tensor)`, ..., and
             operations whose output's shape depends on values, such as `nonzero` or indexing by a mask.
    copies:  host-to-device copies: a tensor built from a list or an array, handed to a device.
    waits:   those of the copies that wait for the device, as they do without `non_blocking`.
    tensors, bytes: memory newly allocated for results, freed in the meantime or not.
    """

    kernels: int = 0
    reads: int = 0
    copies: int = 0
    waits: int = 0
    tensors: int = 0
    bytes: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


class Work:
    """`with Work() as work: ...` counts the block, in `work.by[phase]` for each phase that `lap` closed.

    Whatever a module given to `apart` does in its forward is counted as phase "model" instead."""

    def __init__(self) -> None:
        self.by: defaultdict[str, Counts] = defaultdict(Counts)
        self._open = Counts()
        self._stack = ExitStack()

    def __enter__(self) -> Work:
        for context in (_Functions(self), _Operations(self), mock.patch.object(torch, "from_numpy", _from_numpy)):
            self._stack.enter_context(context)
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.close()

    def add(self, **counts: int) -> None:
        self._open += Counts(**counts)

    def lap(self, phase: str) -> None:
        """What was counted since the last lap belongs to `phase`."""
        self.by[phase] += self._open
        self._open = Counts()

    def apart(self, model: nn.Module) -> None:
        """Count forwards of `model` apart, until the block ends."""
        outside: list[Counts] = []

        def before(*_: Any) -> None:
            outside.append(self._open)
            self._open = Counts()

        def after(*_: Any) -> None:
            self.lap("model")
            self._open = outside.pop()

        self._stack.callback(model.register_forward_pre_hook(before).remove)
        self._stack.callback(model.register_forward_hook(after).remove)

    @property
    def total(self) -> Counts:
        """All phases."""
        return sum(self.by.values(), Counts())


def count_step(batch: Batch) -> Work:
    """One step of `batch`, by the phases of `specdec.stats` and "model", the target's own forward: "forward" is what
    the engine does around it."""
    clock = batch._clock
    with Work() as work:
        work.apart(batch.target.model)
        batch._clock = _CountingClock(batch.stats, work)
        try:
            batch.step()
        finally:
            batch._clock = clock
        work.lap("loop")
    return work


class _CountingClock(Clock):
    def __init__(self, stats: Any, work: Work) -> None:
        super().__init__(stats)
        self.work = work

    def start(self) -> None:
        super().start()
        self.work.lap("loop")

    def lap(self, phase: str) -> None:
        super().lap(phase)
        self.work.lap(phase)


class _Functions(TorchFunctionMode):
    """Counts reads and copies where Python asks for them, since on a CPU most of them reach no aten operation."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in READS and not _on_host(args[0]):
            self.work.add(reads=1)
        result = func(*args, **kwargs)
        if name == "cpu":
            return _marked(result.view(result.shape))  # on a CPU the tensor itself came back, which stays on its device
        if name in BUILT_ON_HOST:
            if kwargs.get("device") is None:
                return _marked(result)
            self.work.add(copies=1, waits=1)
        if name == "to" and _on_host(args[0]) and _names_device(args[1:], kwargs):
            self.work.add(copies=1, waits=not kwargs.get("non_blocking"))
            return result.view(result.shape)
        return result


class _Operations(TorchDispatchMode):
    """Counts what reaches aten."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {storage._cdata for storage in storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        new = {s._cdata: s.nbytes() for s in storages(result) if s._cdata not in before}
        self.work.add(
            kernels=not func.is_view, tensors=len(new), bytes=sum(new.values()), reads=_depends_on_values(func, args)
        )
        return result


def _depends_on_values(func: Any, args: Any) -> bool:
    """Whether an operation has to read the device to know its output; `.item()` was counted where it was called."""
    name = func.overloadpacket.__name__
    if name in INDEXING:
        return any(index.dtype in (torch.bool, torch.uint8) for index in tree_leaves(args[1]) if index is not None)
    return name != "_local_scalar_dense" and bool(DATA_DEPENDENT & set(func.tags))


_real_from_numpy = torch.from_numpy


def _from_numpy(array: Any) -> torch.Tensor:
    return _marked(_real_from_numpy(array))


def _marked(tensor: torch.Tensor) -> torch.Tensor:
    setattr(tensor, ON_HOST, True)
    return tensor


def _on_host(tensor: Any) -> bool:
    return getattr(tensor, ON_HOST, False)


def _names_device(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether `tensor.to` was given a device."""
    return "device" in kwargs or any(isinstance(arg, torch.device | str) for arg in args)
