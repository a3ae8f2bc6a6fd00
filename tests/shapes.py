"""Kernels whose results depend on every shape that is not the model's own, on any machine and in any dtype."""

import math

import pytest
import torch

from specdec import attention


def depend_on_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, matrix products depend on their number of rows, and the engine's attention on its batch, its queries
    and, within blocks of 512, its keys: what real kernels do in the last bits, but at the first."""
    linear, attend = torch.nn.functional.linear, attention.scaled_dot_product_attention

    def shaped_linear(x, *args):
        return linear(x, *args) * (1 + math.sin(x[..., 0].numel()) / 4)

    def shaped_attention(q, k, v, **kwargs):
        n, _, T, _ = q.shape
        return attend(q, k, v, **kwargs) * (1 + math.sin(n + 10 * T + 100 * (k.shape[2] % 512)) / 4)

    monkeypatch.setattr("torch.nn.functional.linear", shaped_linear)
    monkeypatch.setattr("specdec.attention.scaled_dot_product_attention", shaped_attention)
