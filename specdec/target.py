"""The target model behind one call: a laid-out step in, logits of the scored nodes out.

Two forwards give the same result: *packed* ([1, M] tokens, attention plugged in through transformers' attention
interface) and *padded* ([n, T] tokens with an explicit 4D mask), for models that do not take part in that interface.
The model's own code computes everything but attention, and the model is left as it was found.
"""

from __future__ import annotations

import inspect
import logging
import threading
import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from specdec.attention import configs_of, switched
from specdec.cache import SlotCache
from specdec.capture import HiddenContract, captured
from specdec.compat import cache_argument
from specdec.compiled import Graph, graph_for
from specdec.contracts import Draft
from specdec.registry import parameters
from specdec.step import Segment, Step, additive, pack

logger = logging.getLogger("specdec")

_accepted: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()  # asking their configurations takes its time


class Target:
    """A Hugging Face causal LM that runs steps over a slot cache.

    model:  any decoder-only model whose state is a KV cache; others raise NotImplementedError that says why.
    padded: force (True) or forbid (False) the padded forward; None = packed where the model supports it.
    chunk:  prompts are to be cut at multiples of so many tokens.
    """

    chunk = 1

    def __init__(self, model: PreTrainedModel, padded: bool | None = None):
        if model not in _accepted:
            refuse_unsupported(model)
            _accepted.add(model)
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        supports_packed = bool(getattr(model, "_supports_attention_backend", False))
        if padded is False and not supports_packed:
            raise NotImplementedError(
                f"{type(model).__name__} does not take part in transformers' attention interface, so it has no packed "
                f"forward: leave `padded` unset"
            )
        self.padded = not supports_packed if padded is None else padded
        if self.padded and padded is None:
            logger.warning("%s has no attention interface: using the padded forward", type(model).__name__)
        if self.padded and model.config._attn_implementation not in ("sdpa", "eager"):
            raise NotImplementedError(
                f"the padded forward needs attention 'sdpa' or 'eager', not {model.config._attn_implementation!r}: "
                f"load {type(model).__name__} with attn_implementation='sdpa'"
            )
        self.configs = configs_of(model)
        self.cache_argument = cache_argument(model)
        self._keeps_logits = "logits_to_keep" in parameters(type(model).forward)
        layer_types = getattr(self.config, "layer_types", None) or []
        self._has_windows = "sliding_attention" in layer_types and self.config.sliding_window is not None
        self._takes_mask_dict = self.padded and "attention_mask, dict" in inspect.getsource(type(model.get_decoder()))
        self.graph: Graph | None = None

    def compile(self, on: bool = True) -> None:
        """Run all forwards through a compiled graph: compiled now, unless the model has one already. Where it cannot be
        compiled they stay eager, which is logged once. Unless `on`: eagerly."""
        self.graph = graph_for(self) if on else None

    @property
    def device(self) -> torch.device:
        """Where the model's inputs go."""
        return device_of(self.model)

    @property
    def vocab_size(self) -> int:
        """V, the width of the logits."""
        head = self.model.get_output_embeddings()
        if head is None:
            return self.config.vocab_size
        return getattr(head, "out_features", None) or head.weight.shape[0]  # a quantised weight has any shape, or none

    @property
    def max_positions(self) -> int | None:
        """Positions the model was built for, or None where the configuration does not say."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def positions_are_a_table(self) -> bool:
        """Whether a position past `max_positions` cannot be computed at all (learned embeddings)."""
        return getattr(self.config, "rope_parameters", None) is None

    @property
    def positions_change_at(self) -> int | None:
        """Length at which the model's rotary frequencies change for every position (dynamic and longrope scaling take
        them from the longest row), so that cached keys and a cache-free forward disagree; None = never."""
        scaling = getattr(self.config, "rope_parameters", None) or {}
        per_layer_type = [value for value in scaling.values() if isinstance(value, dict)]
        for rope in per_layer_type or [scaling]:
            if rope.get("rope_type") in ("dynamic", "longrope"):
                original = getattr(self.config, "original_max_position_embeddings", None)
                return rope.get("original_max_position_embeddings") or original or self.max_positions
        return None

    @property
    def last_logits_only(self) -> dict[str, int]:
        """What keeps a forward of the model's own from computing the logits of every token."""
        return {"logits_to_keep": 1} if self._keeps_logits else {}

    def run_model(self, **inputs: object) -> ModelOutput:
        """A plain forward of the model's own."""
        return self.model(**inputs)

    def new_cache(self) -> SlotCache:
        """An empty cache of this model's layers."""
        return SlotCache(self.config.num_hidden_layers)

    def pack(self, segments: list[Segment], draft: Draft, cache: SlotCache) -> Step:
        """Lay out `segments` for `forward`; `draft` has one row per scored segment."""
        return pack(segments, draft, cache, self.device, one_grid=self.padded)

    @torch.no_grad()
    def forward(
        self, step: Step, cache: SlotCache, hidden: HiddenContract | None = None, embeds: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Run a step; its keys and values go to the cache (whose `lengths` the caller moves). `embeds` [M, D] replace
        the step's token ids as the model's input.

        Returns logits [R, V] of the nodes `step.keep` and, if `hidden` asks for it, the final state [M, D] of every
        packed token before or after the last norm."""
        cache.step = step
        if self.graph is None or embeds is not None:
            logits, state = self._run(step, cache, hidden, embeds)
        else:
            logits, state = self.graph(self, step, cache, hidden)
        if self._has_windows and not self.padded and not step.windows:
            raise NotImplementedError(
                f"{type(self.model).__name__} has sliding-window layers but does not hand its window to attention: "
                f"use specdec.Target(model, padded=True)"
            )
        return logits, state

    def _run(
        self, step: Step, cache: SlotCache, hidden: HiddenContract | None, embeds: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        with self.capture(hidden) as states:
            if self.padded:
                logits = self._padded_logits(step, cache, embeds)
            else:
                tokens = {"input_ids": step.input_ids} if embeds is None else {"inputs_embeds": embeds[None]}
                with switched(self.model, self.configs):
                    logits = self.packed_logits(tokens, step.position_ids, step.keep, step, cache)
        if not states:
            return logits, None
        state = states[0].flatten(0, 1)
        return logits, step.from_grid(state) if self.padded else state

    def capture(self, hidden: HiddenContract | None) -> AbstractContextManager[list[Tensor]]:
        """Catches the final state of this thread's forwards, and of none that another compiles."""
        me = threading.get_ident()
        return captured(self.model, hidden, lambda: not torch.compiler.is_compiling() and threading.get_ident() == me)

    def packed_logits(
        self, tokens: dict[str, Tensor], position_ids: Tensor, keep: Tensor, step: Step | Tensor, cache: Cache
    ) -> Tensor:
        """[R, V] the model's own forward over packed `tokens`, with attention `switched`; `step` goes to attention."""
        out = self.model(
            **tokens,
            position_ids=position_ids,
            # transformers hands a 4D mask on as it is; ours is built in attention, per window
            attention_mask=torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=keep.device),
            use_cache=True,
            specdec_step=step,
            **{self.cache_argument: cache},
            **({"logits_to_keep": keep} if self._keeps_logits else {}),
        )
        return out.logits[0] if self._keeps_logits else out.logits[0].index_select(0, keep)

    def _padded_logits(self, step: Step, cache: SlotCache, embeds: Tensor | None) -> Tensor:
        shape = (step.grid_places, step.width)
        if embeds is None:
            tokens = {"input_ids": step.to_grid(step.input_ids[0]).view(shape)}
        else:
            tokens = {"inputs_embeds": step.to_grid(embeds).view(*shape, -1)}
        cache.step = _PaddedStep(
            places=step.grid_places,
            slots=step.slots,
            token_places=step.to_grid(step.token_places),
            token_slots=step.to_grid(step.token_slots, fill=cache.capacity),  # padding goes to the cache's last slot
        )
        out = self.model(
            **tokens,
            position_ids=step.to_grid(step.position_ids[0]).view(shape),
            attention_mask=self._padded_mask(step),
            use_cache=True,
            **{self.cache_argument: cache},
        )
        return step.from_grid(out.logits.flatten(0, 1)).index_select(0, step.keep)

    def _padded_mask(self, step: Step) -> Tensor | dict[str, Tensor]:
        """4D mask(s) in the form the model's own attention takes: bool for sdpa, additive for eager."""

        def mask(window: int | None) -> Tensor:
            seen = step.visible(window)[:, None]
            return additive(seen, self.model.dtype) if self.model.config._attn_implementation == "eager" else seen

        window = getattr(self.config, "sliding_window", None)
        if self._has_windows and self._takes_mask_dict:
            return {"full_attention": mask(None), "sliding_attention": mask(window)}
        return mask(window if getattr(self.config, "use_sliding_window", True) else None)


@dataclass(frozen=True)
class _PaddedStep:
    """What the cache needs to know of a padded forward, by cell of the grid."""

    places: int
    slots: int
    token_places: Tensor
    token_slots: Tensor
    only_chunks = False


def device_of(model: PreTrainedModel) -> torch.device:
    """Where a model's inputs go."""
    embeddings = model.get_input_embeddings()
    device = embeddings.weight.device
    if device.type == "meta":  # accelerate keeps the weights elsewhere, and brings them when they are needed
        return torch.device(embeddings._hf_hook.execution_device)
    return device


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise NotImplementedError, with the reason, for models whose state cannot be rolled back token by token."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise NotImplementedError(f"{name} is an encoder-decoder: speculation here is for decoder-only models")
    config = model.config.get_text_config(decoder=True)
    if getattr(model, "_is_stateful", False):
        raise NotImplementedError(
            f"{name} keeps a recurrent state, which a rejected draft cannot be rolled back from: use another model"
        )
    reason = None
    unknown = sorted(set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"})
    if unknown:
        reason = f"has layers of type {', '.join(unknown)}, which a slot cache cannot hold"
    elif getattr(config, "attention_chunk_size", None) is not None:
        reason = f"attends in chunks of {config.attention_chunk_size}, which is not supported"
    elif getattr(config, "num_kv_shared_layers", 0):
        reason = "shares keys and values between layers, which is not supported"
    elif getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        reason = "builds position biases (ALiBi) from a 2D mask, which is not supported"
    if reason is not None:
        raise NotImplementedError(f"{name} {reason}: use another model")
