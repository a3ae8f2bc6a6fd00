"""Hidden states and attentions in `generate`'s layout: per emitted token a tuple, by layer.

The packed forward holds neither, so the emitted tokens go through the model's own forward once more, in one piece where
the cache allows: what `generate` would have found, up to the rounding of a wider forward. Attentions need eager
attention, as everywhere in transformers.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from transformers.cache_utils import StaticLayer
from transformers.utils import ModelOutput

from specdec.prompt_reader import PromptReader

Layers = tuple[Tensor, ...]


def layer_outputs(reader: PromptReader, emitted: Tensor, cached: bool) -> dict[str, tuple[Layers, ...] | None]:
    """`hidden_states` and `attentions`, None for what was not asked for.

    reader:  it has read the prompts; its cache gets the columns of `emitted` [B, L], all but the last.
    cached:  False for the layout of a call with use_cache=False, in which every entry holds the whole text.
    """
    steps = list(_cached_steps(reader, emitted[:, :-1]) if cached else _whole_texts(reader, emitted[:, :-1]))
    found = {name: tuple(step[name] for step in steps) for name in ("hidden_states", "attentions")}
    return {name: value if name in reader.asked else None for name, value in found.items()}


def _cached_steps(reader: PromptReader, ids: Tensor) -> Iterator[dict[str, Layers]]:
    """The prompt's outputs, then those of each of `ids` [B, T] alone."""
    yield _of(reader.first)
    whole = "attentions" not in reader.asked or not any(isinstance(layer, StaticLayer) for layer in reader.cache.layers)
    for part in ids.split(ids.shape[1] if whole else 1, dim=1) if ids.shape[1] else ():
        seen = [min(int(layer.get_seq_length()), _most(layer)) for layer in reader.cache.layers]
        out = _of(reader.read(part))
        for t in range(part.shape[1]):
            attentions = (
                _row(weights, t, part.shape[1], min(before + t, _most(layer)) if whole else None)
                for weights, before, layer in zip(out["attentions"], seen, reader.cache.layers, strict=False)
            )
            yield {
                "hidden_states": tuple(states[:, t : t + 1] for states in out["hidden_states"]),
                "attentions": tuple(attentions),
            }


def _most(layer) -> int | float:
    """Earlier columns that a token sees at most."""
    return layer.sliding_window - 1 if layer.is_sliding and hasattr(layer, "sliding_window") else float("inf")


def _row(weights: Tensor, t: int, T: int, earlier: int | None) -> Tensor:
    """[B, H, 1, earlier + 1] of token t of T, of whose weights [B, H, T, S] the last column is token T - 1's own. All S
    where `earlier` is None."""
    if earlier is None:
        return weights[:, :, t : t + 1]
    end = weights.shape[3] - T + t + 1
    return weights[:, :, t : t + 1, end - earlier - 1 : end]


def _whole_texts(reader: PromptReader, ids: Tensor) -> Iterator[dict[str, Layers]]:
    """The outputs of the prompt, and of the prompt with the first 1, 2, .. of `ids`, each in a forward of its own."""
    yield _of(reader.first)
    for end in range(1, ids.shape[1] + 1):
        yield _of(reader.read_again(ids[:, :end]))


def _of(out: ModelOutput) -> dict[str, Layers]:
    return {name: out.get(name) or () for name in ("hidden_states", "attentions")}
