"""How users of `generate` say what drafts, in terms of `specdec.generate`.

Assisted generation's settings choose what is drafted, never what is emitted; those that have no counterpart here (the
schedule, the confidence threshold, the lookbehinds) are left to `generate`, which ignores them without an assistant.
"""

from __future__ import annotations

import copy
from typing import Any

from specdec.contracts import Drafter
from specdec.registry import DRAFT_MODEL, imported


def what_drafts(
    drafter: str | Drafter | None, draft_length: int | None, tokenizer: Any, kwargs: dict[str, Any]
) -> tuple[str | Drafter | None, int | None]:
    """drafter and draft_length by `assistant_model` or `prompt_lookup_num_tokens`, which leave `kwargs`, where one of
    them was given: as an argument or in the generation config.

    Raises ValueError where a drafter was given too, and for an assistant whose token ids mean something else."""
    assistant, theirs = kwargs.pop("assistant_model", None), kwargs.pop("assistant_tokenizer", None)
    lookup = _setting(kwargs, "prompt_lookup_num_tokens")
    if assistant is None and lookup is None:
        return drafter, draft_length
    if drafter != "ngram" or (assistant is not None and lookup is not None):
        raise ValueError("more than one of drafter, assistant_model and prompt_lookup_num_tokens was given: give one")
    if assistant is not None:
        length = _setting(kwargs, "num_assistant_tokens", keep=True)
        return imported(DRAFT_MODEL)(assistant, theirs, tokenizer), length if draft_length is None else draft_length
    longest = _setting(kwargs, "max_matching_ngram_size", keep=True) or 2
    return f"ngram:max_n={longest},min_n=1", lookup if draft_length is None else draft_length


def _setting(kwargs: dict[str, Any], name: str, keep: bool = False) -> Any:
    """A setting of generation, taken out of wherever it is unless `keep`; the caller's config stays as it is."""
    value, config = kwargs.get(name), kwargs.get("generation_config")
    if not keep:
        kwargs.pop(name, None)
        if config is not None and getattr(config, name) is not None:
            kwargs["generation_config"] = copy.copy(config)
            setattr(kwargs["generation_config"], name, None)
    return value if value is not None or config is None else getattr(config, name)
