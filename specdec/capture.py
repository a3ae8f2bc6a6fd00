"""The target's final hidden states, caught by a hook during one forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from torch import Tensor, nn
from transformers import PreTrainedModel

HiddenContract = Literal["post_norm", "pre_norm"]


@contextmanager
def captured(model: PreTrainedModel, hidden: HiddenContract | None, mine: Callable[[], bool]) -> Iterator[list[Tensor]]:
    """A list that gets the decoder's final state, before or after its last norm, from each forward in which `mine()`;
    nothing if `hidden` is None."""
    states: list[Tensor] = []
    if hidden is None:
        yield states
        return
    decoder = model.get_decoder()

    def after(module: nn.Module, args: tuple, out: object) -> None:
        if mine():
            states.append(out[0])

    def before(module: nn.Module, args: tuple) -> None:
        if mine():
            states.append(args[0])

    if hidden == "post_norm":
        handle = decoder.register_forward_hook(after)
    else:
        handle = final_norm(decoder).register_forward_pre_hook(before)
    try:
        yield states
    finally:
        handle.remove()


def has_final_norm(model: PreTrainedModel) -> bool:
    """Whether "pre_norm" states can be had."""
    return _final_norm(model.get_decoder()) is not None


def final_norm(decoder: nn.Module) -> nn.Module:
    """The decoder's last norm. Raises NotImplementedError where it has none under a known name."""
    if (norm := _final_norm(decoder)) is None:
        raise NotImplementedError(
            f"{type(decoder).__name__} has no final norm under a known name: use needs_hidden='post_norm'"
        )
    return norm


def _final_norm(decoder: nn.Module) -> nn.Module | None:
    named = (getattr(decoder, name, None) for name in ("norm", "final_layernorm", "final_layer_norm", "ln_f"))
    return next((module for module in named if isinstance(module, nn.Module)), None)
