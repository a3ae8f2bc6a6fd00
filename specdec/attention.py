"""Attention of a packed step over the slot cache, plugged into transformers as the implementation "specdec".

HF's attention layers compute q, k, v with their own norms, rotary embeddings and scaling; the slot cache stores k and
v; this function only decides who sees whom. Query heads of one KV head are folded into the token axis, so keys and
values are never repeated (`repeat_kv` would copy the cache at every layer).
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specdec.step import Step

NAME = "specdec"
_replaced: dict[int, str] = {}  # id of a config -> the implementation it had, while it is switched
_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_locks_guard = threading.Lock()


def configs_of(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configuration objects in which the model's attention layers look up their implementation."""
    found, todo = {}, [model]
    while todo:  # in a third of the time that `modules()` takes, which names them all
        module = todo.pop()
        if isinstance(module, PreTrainedModel):
            found[id(module.config)] = module.config
        todo.extend(child for child in module._modules.values() if child is not None)
    return list(found.values())


@contextmanager
def switched(model: PreTrainedModel, configs: list[PreTrainedConfig]) -> Iterator[None]:
    """Run forwards of `model` with packed attention; its `configs` are as before afterwards, whatever happens.

    The switch is on the model's shared configuration, so a per-model lock is held; plain forwards that other threads
    run in the meantime are handed on to the implementation the model had."""
    with _locks_guard:
        lock = _locks.setdefault(model, threading.RLock())
    with lock:
        before = [(config, config._attn_implementation_internal) for config in configs]
        try:
            for config, name in before:
                _replaced[id(config)] = name or "eager"
                config._attn_implementation_internal = NAME
            yield
        finally:
            for config, name in before:
                config._attn_implementation_internal = name
                del _replaced[id(config)]


def plain_implementation(module: nn.Module) -> Callable:
    """The attention function that `module` runs when its model is not switched."""
    name = _replaced.get(id(module.config), module.config._attn_implementation)
    if name == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[name]


def plain_mask(*args, config: PreTrainedConfig, **kwargs) -> Tensor | None:
    """Mask of a plain forward met while the implementation is switched (packed steps bring a 4D mask of their own)."""
    name = _replaced.get(id(config), config._attn_implementation)
    make = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.get(name)
    return None if make is None else make(*args, config=config, **kwargs)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    specdec_step: Step | Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """query: [1, H, M, D]; key, value: [n, H_kv, S, D] as `SlotLayer.update` returned them.

    softcap: cap of the scores (Gemma 2); s_aux: [H] attention sinks (gpt-oss); sliding_window: see `Step.visible`.
    Returns [1, M, H, Dv]. `attention_mask` is ignored: the step knows it."""
    step = specdec_step
    if step is None:  # a plain forward of another thread, met while the implementation is switched
        return plain_implementation(module)(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, sliding_window=sliding_window,
            softcap=softcap, s_aux=s_aux, **kwargs,
        )  # fmt: skip
    if isinstance(step, Tensor):  # its number, while this is compiled: see specdec.compiled
        layer = module.layer_idx
        seen = torch.ops.specdec.attend(query, key, value, step, layer, scaling, sliding_window, softcap, s_aux)
        return seen, None
    if key.shape[2] != step.slots:
        raise NotImplementedError(
            "the model goes past its cache, as some do with gradient checkpointing in training mode: call its eval() "
            "or gradient_checkpointing_disable()"
        )
    if sliding_window is not None:
        step.windows.add(sliding_window)
    attend = _Attend(scaling, softcap, s_aux)
    out_M = []
    if step.grid_places:
        out_M.append(_grid(query, key, value, step, sliding_window, attend))
    for chunk, (first, end, place, start) in enumerate(step.chunks):
        seen = start + end - first
        mask = step.chunk_mask(chunk, sliding_window, query.dtype)
        k, v = key[place : place + 1, :, :seen], value[place : place + 1, :, :seen]
        out_M.append(attend.chunk(query[:, :, first:end], k, v, mask)[0].transpose(0, 1))
    if step.apart is not None and len(step.grid) < query.shape[2]:  # those that only fill up
        out_M.append(out_M[0].new_zeros(query.shape[2] - len(step.grid), *out_M[0].shape[1:]))
    return (out_M[0] if len(out_M) == 1 else torch.cat(out_M))[None], None


def _grid(query: Tensor, key: Tensor, value: Tensor, step: Step, window: int | None, attend: _Attend) -> Tensor:
    """[Md, H, Dv] attention of the tokens in the step's grid."""
    n, T, H, H_kv = step.grid_places, step.width, query.shape[1], key.shape[1]
    G = H // H_kv
    cells = step.to_grid(query[0].transpose(0, 1))  # [n * T, H, D]
    folded = cells.view(n, T, H_kv, G, -1).permute(0, 2, 1, 3, 4).reshape(n, H_kv, T * G, -1)
    mask = step.grid_mask(window, G, query.dtype)
    if step.apart is None:
        out = attend(folded, key[:n], value[:n], mask)
    else:
        rows = zip(folded.split(1), step.apart, mask.split(1), strict=True)
        out = torch.cat([attend(q, key[place : place + 1], value[place : place + 1], seen) for q, place, seen in rows])
    out = out.view(n, H_kv, T, G, -1).permute(0, 2, 1, 3, 4).reshape(n * T, H, -1)
    return step.from_grid(out)


class _Attend:
    """softmax(q k^T * scaling [capped] + mask [with sinks]) v, over query heads folded by KV group."""

    def __init__(self, scaling: float | None, softcap: float | None, sinks: Tensor | None):
        self.scaling, self.softcap, self.sinks = scaling, softcap, sinks

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """q: [n, H_kv, T * G, D], k, v: [n, H_kv, S, D], mask: [n, 1, T * G, S]. Returns [n, H_kv, T * G, Dv]."""
        if self.softcap is None and self.sinks is None:
            return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scaling)
        scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if self.scaling is None else self.scaling)
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        scores = scores + mask
        if self.sinks is not None:
            by_head = self.sinks.view(k.shape[1], -1)  # [H_kv, G], repeated for each of the T tokens
            column = by_head.repeat(1, q.shape[2] // by_head.shape[1])[None, :, :, None].expand(len(q), -1, -1, 1)
            scores = torch.cat([scores, column.to(scores.dtype)], dim=-1)
        accumulate = torch.promote_types(scores.dtype, torch.float32)
        weights = scores.softmax(-1, dtype=accumulate).to(q.dtype)
        return weights[..., : k.shape[2]] @ v  # a sink takes probability and gives nothing

    def chunk(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """q: [1, H, Tc, D], k, v: [1, H_kv, S, D], mask: [Tc, S] or None = causal. Returns [1, H, Tc, Dv]."""
        H, Tc, H_kv = q.shape[1], q.shape[2], k.shape[1]
        if self.softcap is None and self.sinks is None:
            return scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=self.scaling, is_causal=mask is None, enable_gqa=H_kv != H
            )
        G = H // H_kv
        if mask is None:
            mask = torch.full((Tc, Tc), -torch.inf, dtype=q.dtype, device=q.device).triu(1)
        folded = q.view(1, H_kv, G, Tc, -1).transpose(2, 3).reshape(1, H_kv, Tc * G, -1)
        out = self(folded, k, v, mask.repeat_interleave(G, dim=0)[None, None])
        return out.view(1, H_kv, Tc, G, -1).transpose(2, 3).reshape(1, H, Tc, -1)


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, plain_mask)
