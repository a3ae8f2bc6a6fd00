"""Compiled forwards: one `torch.compile` per model, for steps of every shape.

All of a packed forward but attention is one graph, in which only M, the packed tokens, and R, the scored nodes, vary.
Attention is in it as an opaque operator, which runs the eager function on the step in flight. So rows, widths, trees,
windows, prompt chunks and the size of the cache never meet the compiler: no step compiles anything again, and nothing
in attention is padded.

On a CPU the weights are frozen into the graph, laid out anew for the CPU's matrix products, which is most of the gain.
They take their memory once more, and changed weights need another graph. Where those products are specdec's own, and
attention too, every sum over a token runs in an order that nothing else in the step decides: the graph is batch
invariant.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from specdec import cpu_attention, cpu_linear
from specdec.attention import configs_of, packed_attention, switched
from specdec.cache import SlotCache
from specdec.capture import HiddenContract, captured, final_norm, has_final_norm
from specdec.contracts import Draft
from specdec.step import Segment, Step, pack

if TYPE_CHECKING:
    from specdec.target import Target

logger = logging.getLogger("specdec")

BACKEND = "inductor"
SIZES = (2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # M and R on a GPU, then multiples of the last
INPUTS = ("input_ids", "position_ids", "keep", "number", "post", "pre")  # of `_traced`
COLD = 2  # uses of a size on a GPU: one to warm up, one to record
SAMPLES = 8  # values per weight that show a change which torch does not count: one written through `.data`

_in_flight: dict[int, SlotCache] = {}  # with its step, by the number that a graph hands on to its attention
_numbers = itertools.count()
_graphs: weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple, Graph | None]] = weakref.WeakKeyDictionary()
_compiling = threading.Lock()  # freezing is a setting of the whole process


def wanted(compile: bool | Literal["auto"], device: torch.device) -> bool:
    """Whether to compile for `device`; "auto" does so on CUDA only."""
    return device.type == "cuda" if compile == "auto" else compile


def graph_for(target: Target) -> Graph | None:
    """The graph of the target's model, compiled unless an earlier call did so.

    None, logged once, where the model or the machine does not allow one. A graph lives as long as its model does and
    serves all calls with as many threads and the same autocast, for which torch would make another one."""
    device = target.device.type
    kind = torch.get_num_threads(), torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    graphs = _graphs.setdefault(target.model, {})

    def is_current() -> bool:
        return kind in graphs and (graphs[kind] is None or not graphs[kind].is_stale(target.model))

    if not is_current():
        with _compiling:
            if not is_current():  # another thread may have been faster
                if kind in graphs:
                    reason = "has changed since it was compiled (weights, hooks, settings): compiling it again"
                    logger.warning("%s %s", type(target.model).__name__, reason)
                graphs[kind] = _made(target)
    return graphs[kind]


def _made(target: Target) -> Graph | None:
    try:
        return Graph(target)
    except (NotImplementedError, torch._dynamo.exc.TorchDynamoException) as error:
        reason = str(error).strip().partition("\n")[0]
        logger.warning("%s runs eagerly, as it cannot be compiled here: %s", type(target.model).__name__, reason)
        return None


class Graph:
    """A model's compiled forward, which gives the final states too, whoever asks: a graph without them might round
    differently. It refers to the model's weights, but not to the model.

    batch_invariant: whether a token's logits are the same bits whatever else is in its step.
    settled: whether the latest forward took as long as later ones of its size will: a CUDA graph is slow at first.
    """

    def __init__(self, target: Target):
        if target.padded:
            raise NotImplementedError("only packed forwards are compiled")
        if any(weight.device.type == "meta" for weight in target.model.parameters()):
            raise NotImplementedError("some of its weights are offloaded")
        self.frozen = target.device.type == "cpu"
        self._pre_norm: HiddenContract | None = "pre_norm" if has_final_norm(target.model) else None
        self._state = self._state_of(target.model)
        self.settled, self._uses = True, Counter[tuple[int, ...]]()
        # torch keeps what it compiled by code object: with one of its own, a graph is not taken for a recompilation
        # of another model's, and its memory is freed with it.
        traced = FunctionType(_traced.__code__.replace(), _traced.__globals__)
        # On a CPU, products with one input (q, k, v; gate and up) become one, and the graph's calls are made from C++.
        on_cpu, on_gpu = {"cpp.enable_concat_linear": True, "cpp_wrapper": True}, {"triton.cudagraphs": True}
        products = cpu_linear.OwnProducts()
        if self.frozen and cpu_linear.available():
            on_cpu |= {"cpp.weight_prepack": False, "post_grad_custom_pre_pass": products}
        options = {"guard_filter_fn": _on_inputs, **(on_cpu if self.frozen else on_gpu)}
        self._run = torch.compile(traced, backend=BACKEND, fullgraph=True, options=options)
        attended = self._trace(target)
        self.batch_invariant = self.frozen and products.are_all and attended and self._same_in_company(target)

    def __call__(
        self, target: Target, step: Step, cache: SlotCache, hidden: HiddenContract | None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [R, V] of a step of `target`, and the states [M, D] that `hidden` asks for."""
        if hidden == "pre_norm" and self._pre_norm is None:
            final_norm(target.model.get_decoder())  # raises
        # A tensor made in inference mode would be another kind of input than those that were compiled for.
        with torch.inference_mode(False), torch.no_grad():
            inputs = self._inputs(step)
            logits, post, pre = self._forward(target, cache, inputs)
        if not self.frozen:
            size = tuple(tensor.shape[-1] for tensor in inputs)
            self._uses[size] += 1
            self.settled = self._uses[size] > COLD
        logits = logits[: len(step.keep)]
        if hidden is None:
            return logits, None
        states = post if hidden == "post_norm" else pre
        return logits, states[0][0, : step.input_ids.shape[1]]

    def is_stale(self, model: PreTrainedModel) -> bool:
        """Whether the model is no longer the one in the graph."""
        return self._state != self._state_of(model)

    def _state_of(self, model: PreTrainedModel) -> tuple:
        """What differs once a hook has come or gone, a setting been changed, or a weight in the graph been replaced or
        written to."""
        modules = list(model.modules())
        hooks = [_foreign(module._forward_pre_hooks) + _foreign(module._forward_hooks) for module in modules]
        settings = [(type(each), _plain(vars(each))) for each in (*modules, *configs_of(model))]
        if not self.frozen:
            return hooks, settings
        tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
        counted = [(tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in tensors]
        samples = [tensor.flatten()[:: max(1, tensor.numel() // SAMPLES)].double() for tensor in tensors]
        return hooks, settings, counted, torch.cat(samples).numpy().tobytes()

    def _forward(
        self, target: Target, cache: SlotCache, inputs: list[Tensor]
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        number = next(_numbers)
        _in_flight[number] = cache
        try:
            with (
                switched(target.model, target.configs),
                # always there, for torch may trace again: under autocast, say
                captured(target.model, "post_norm", torch.compiler.is_compiling) as post,
                captured(target.model, self._pre_norm, torch.compiler.is_compiling) as pre,
            ):
                return self._run(target, *inputs, torch.tensor(number), post, pre)
        finally:
            del _in_flight[number]

    def _inputs(self, step: Step) -> list[Tensor]:
        """Token ids and positions [1, M'] and nodes to score [R'], filled up with zeros to what the graph takes."""

        def filled(values: Tensor) -> Tensor:
            count = values.shape[-1]
            size = max(count, 2) if self.frozen else _size(count)  # a graph for 1 would be another one
            out = values.new_zeros(*values.shape[:-1], size)
            out[..., :count] = values
            return out

        return [filled(step.input_ids), filled(step.position_ids), filled(step.keep)]

    def _trace(self, target: Target) -> bool:
        """Compile, in a first forward: of 8 tokens and 4 scored nodes, so that these count as two sizes. Returns
        whether attention was specdec's own."""
        with torch._inductor.config.patch(freezing=self.frozen):
            step, _ = self._prompts(target, [8], scored=4, dynamic=True)
        return not step.attended_by_torch

    def _same_in_company(self, target: Target) -> bool:
        """Whether some tokens get the same logits beside others as alone: the compiler might vectorise over tokens."""
        (_, alone), (_, beside) = (self._prompts(target, lengths, sum(lengths)) for lengths in ([9], [9, 28]))
        return torch.equal(alone, beside[:9])

    @torch.inference_mode(False)
    @torch.no_grad()
    def _prompts(self, target: Target, lengths: list[int], scored: int, dynamic: bool = False) -> tuple[Step, Tensor]:
        """A step of prompts of these lengths, and the logits [scored, V] of its first tokens."""
        cache = target.new_cache()
        cache.admit(range(len(lengths)))
        ids = [np.arange(length) % target.vocab_size for length in lengths]
        prompts = [Segment(row, tokens, 0, scored=False) for row, tokens in enumerate(ids)]
        cache.step = step = pack(prompts, Draft.empty(0, target.device), cache, target.device, one_grid=False)
        step.keep = torch.arange(scored, device=target.device)
        inputs = self._inputs(step)
        inputs[1] %= target.max_positions or len(ids[-1])
        for tensor in inputs if dynamic else ():
            torch._dynamo.mark_dynamic(tensor, tensor.dim() - 1)
        return step, self._forward(target, cache, inputs)[0][:scored]


def _traced(
    target: Target,
    input_ids: Tensor,
    position_ids: Tensor,
    keep: Tensor,
    number: Tensor,
    post: list[Tensor],
    pre: list[Tensor],
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """What is compiled. `post` and `pre`, the states after and before the last norm, are empty: the hooks that are
    there while this is traced fill them, then and always."""
    post.clear()
    pre.clear()
    return target.packed_logits({"input_ids": input_ids}, position_ids, keep, number, _NoCache()), post, pre


class _NoCache(Cache):
    """Hands keys and values through to attention, which stores them."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    number: Tensor,
    layer: int,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[1, M', H, Dv] `packed_attention` of query [1, H, M', D], key and value [1, H_kv, M', D], over the step in flight
    under `number`; zeros past its M tokens. Called by `packed_attention` itself where that is compiled."""
    if not query.dtype == key.dtype == value.dtype:  # what autocast would see to, which does not reach in here
        same = query.to(value.dtype), key.to(value.dtype), value
        return attend(*same, number, layer, scaling, window, softcap, sinks).to(query.dtype)
    cache = _in_flight[number.item()]
    step, layer = cache.step, cache.layers[layer]
    M = step.input_ids.shape[1]
    out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
    if query.shape[2] > M:
        out[:, M:] = 0
        query, key, value = query[:, :, :M], key[:, :, :M], value[:, :, :M]
    if cpu_attention.fits(step, layer, query, key, value, softcap, sinks):
        cpu_attention.attend(step, layer, query, key, value, out, scaling, window)
    else:
        step.attended_by_torch = True
        keys, values = layer.update(key, value)
        out[:, :M] = packed_attention(
            None, query, keys, values, None, scaling, specdec_step=step, sliding_window=window, softcap=softcap,
            s_aux=sinks,
        )[0]  # fmt: skip
    return out


# Not `custom_op`, whose checks in every call take as long as the attention of a short row.
_library = torch.library.Library("specdec", "DEF")
_library.define(
    "attend(Tensor query, Tensor key, Tensor value, Tensor number, int layer, float? scaling, int? window, "
    "float? softcap, Tensor? sinks) -> Tensor",
    tags=(torch.Tag.cudagraph_unsafe,),
)
# The name is looked up in every call, for those who time it.
_library.impl("attend", lambda *inputs: attend(*inputs), "CompositeExplicitAutograd")


@torch.library.register_fake("specdec::attend", lib=_library)
def _(query, key, value, number, layer, scaling, window, softcap, sinks):
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


def _foreign(hooks: dict[int, Callable]) -> list[int]:
    """The ids of a module's hooks but for our own, which come and go with the steps of any thread."""
    return [id_ for id_, hook in hooks.items() if getattr(hook, "__module__", None) != captured.__module__]


def _plain(values: dict[str, object]) -> dict[str, object]:
    """The plain values of a module or a configuration, but for the one that is switched while a forward runs."""
    switch = "_attn_implementation_internal"
    return {
        name: value for name, value in values.items() if isinstance(value, (bool, int, float, str)) and name != switch
    }


def _on_inputs(guards: list) -> list[bool]:
    """Which guards to keep: not those on the model, hundreds in every step, since `Graph.is_stale` looks at it once a
    call."""
    return [guard.name in ("", *INPUTS) for guard in guards]


def _size(count: int) -> int:
    return next((size for size in SIZES if size >= count), -(-count // SIZES[-1]) * SIZES[-1])
