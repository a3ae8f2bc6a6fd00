"""The one file that knows which transformers release is installed (5.16 up to, not including, 6).

Between 5.16 and 5.24 the cache argument and output of every model were renamed from `past_key_values` to `cache`.
"""

from __future__ import annotations

import inspect

from transformers import PreTrainedModel


def cache_argument(model: PreTrainedModel) -> str:
    """Name of the keyword under which `model.forward` takes a cache."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


CACHE_KWARGS = ("cache", "past_key_values")  # under either name `generate` hands a cache to a decoding function
