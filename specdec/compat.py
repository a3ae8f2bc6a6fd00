"""The one file that knows which transformers release is installed (5.16 up to, not including, 6).

Between 5.16 and 5.24 the cache argument and output of every model were renamed from `past_key_values` to `cache`.
"""

from __future__ import annotations

from typing import Any

from transformers import Cache, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

from specdec.registry import parameters


def cache_argument(model: PreTrainedModel) -> str:
    """Name of the keyword under which `model.forward` takes a cache."""
    return "cache" if "cache" in parameters(type(model).forward) else "past_key_values"


CACHE_KWARGS = ("cache", "past_key_values")  # under either name `generate` hands a cache to a decoding function
# The field of `generate`'s output that holds it.
CACHE_FIELD = next(name for name in CACHE_KWARGS if name in GenerateDecoderOnlyOutput.__dataclass_fields__)


def handed_over(model_kwargs: dict[str, Any]) -> Cache | None:
    """The cache among what `generate` hands to a decoding function: the caller's, or the one it made."""
    return next((model_kwargs[name] for name in CACHE_KWARGS if model_kwargs.get(name) is not None), None)


def is_callers(cache: Cache | None) -> bool:
    """Whether the cache outlives the call. Before 5.20 `generate` did not mark an empty one as its caller's own, so
    that it is only known where `specdec.generate` was called."""
    return cache is not None and (getattr(cache, "_is_user_defined", False) or cached_tokens(cache) > 0)


def mark_callers(kwargs: dict[str, Any]) -> None:
    """Note on a cache among the keyword arguments of `generate` that it is its caller's, as later releases do."""
    cache = handed_over(kwargs)
    if isinstance(cache, Cache):
        cache._is_user_defined = True


def cached_tokens(cache: Cache | None) -> int:
    """Columns that a cache holds."""
    return 0 if cache is None else int(cache.get_seq_length())
