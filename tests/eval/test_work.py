"""Counts against code whose work is plain to see."""

import numpy as np
import pytest
import torch

from eval.work import Counts, Work

x = torch.arange(6.0).view(2, 3)


def counted(call) -> Counts:
    with Work() as work:
        call()
        work.lap("all")
    return work.by["all"]


@pytest.mark.parametrize(
    ("call", "reads"),
    [
        (lambda: x[0, 0].item(), 1),
        (lambda: bool(x.sum() > 1), 1),
        (lambda: int(x[0, 0]) + float(x[0, 1]), 2),
        (lambda: x.tolist(), 1),
        (lambda: x.cpu().numpy().tolist(), 1),  # after .cpu() it is on the host
        (lambda: [x.cpu(), x.numpy()], 2),  # but the tensor itself stays where it is
        (lambda: np.asarray(x), 1),
        (lambda: x.nonzero(), 1),
        (lambda: x[x > 1], 1),
        (lambda: x.clone().masked_fill_(x > 1, 0), 0),
        (lambda: x.clone()[torch.zeros(1, dtype=torch.long)], 0),
        (lambda: torch.equal(x, x), 1),
        (lambda: x.unique(), 1),
        (lambda: x.repeat_interleave(2), 0),
        (lambda: torch.tensor([1, 2]).tolist(), 0),  # never was on the device
        (lambda: (x + x).argmax(), 0),
    ],
)
def test_reads(call, reads):
    assert counted(call).reads == reads


@pytest.mark.parametrize(
    ("call", "copies", "waits"),
    [
        (lambda: torch.tensor([1, 2], device=x.device), 1, 1),
        (lambda: torch.tensor([1, 2]).to(x.device), 1, 1),
        (lambda: torch.from_numpy(np.ones(3)).to(x.device, non_blocking=True), 1, 0),
        (lambda: torch.zeros(3, device=x.device).to(x.device), 0, 0),  # already there
        (lambda: x.to(torch.float64), 0, 0),
        (lambda: torch.tensor([1, 2]).to(x.device).to(x.device), 1, 1),
    ],
)
def test_copies(call, copies, waits):
    found = counted(call)
    assert (found.copies, found.waits) == (copies, waits)


@pytest.mark.parametrize(
    ("call", "kernels", "tensors", "size"),
    [
        (lambda: x.view(3, 2)[0].t(), 0, 0, 0),
        (lambda: x + 1, 1, 1, 24),
        (lambda: (x + 1).mul_(2), 2, 1, 24),
        (lambda: x.new_zeros(100, dtype=torch.int8), 2, 1, 100),  # empty, then filled
        (lambda: x.topk(2), 1, 2, 2 * 2 * (4 + 8)),
    ],
)
def test_kernels_and_memory(call, kernels, tensors, size):
    found = counted(call)
    assert found.tensors == tensors and found.bytes == size
    assert found.kernels <= kernels and (found.kernels > 0) == (kernels > 0)


def test_phases_and_a_model_apart():
    linear = torch.nn.Linear(3, 5, bias=False)
    with Work() as work, torch.no_grad():
        work.apart(linear)
        x + 1
        work.lap("before")
        y = x * 2
        linear(y) - 1
        work.lap("after")
    linear(x)
    assert {phase: counts.bytes for phase, counts in work.by.items()} == {"before": 24, "model": 40, "after": 24 + 40}
    assert work.total.bytes == 24 + 40 + 64
    assert not linear._forward_hooks and not linear._forward_pre_hooks
