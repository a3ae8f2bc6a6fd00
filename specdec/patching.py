"""`specdec.patch(model)`: every `model.generate` of a script decodes speculatively, and the script stays as it is."""

from __future__ import annotations

import functools
import inspect
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from transformers import GenerationMixin, PreTrainedModel

from specdec.contracts import Drafter
from specdec.drafter_spec import DrafterSpec
from specdec.generation import decided_by
from specdec.speculation import speculate
from specdec.spellings import what_drafts
from specdec.stats import Stats
from specdec.target import refuse_unsupported

logger = logging.getLogger("specdec")


class patch:
    """Make `model.generate` speculative, from now on or within a `with` block.

    model:       a Hugging Face model, or a PEFT model, whose `generate` ends in its base model's.
    arguments:   those of `specdec.speculate`. A call's own streamer, tokenizer and assistant_model go before them.
    stats:       the `specdec.Stats` of the last call that speculated, None before the first.

    A call that cannot be speculated (beam search, say) goes to the `generate` that was there, after one line in the
    log per reason; so does one with a `custom_generate` of its own, without a line. Threads may share a patched model;
    those that would share a drafter object wait for each other. A copy of a patched model is not patched.

    Raises NotImplementedError for a model that can never be speculated with, ValueError for one that is patched already
    and for arguments that `speculate` refuses.

    Example: with specdec.patch(model, drafter="ngram"): print(pipeline("text-generation", model)(texts))
    """

    def __init__(self, model: PreTrainedModel, **arguments: Any):
        self.model = model = getattr(model, "get_base_model", lambda: model)()  # PEFT's name for what it wraps
        if not isinstance(model, GenerationMixin):
            raise ValueError(f"model is a {type(model).__name__}: give a Hugging Face model that has generate")
        if isinstance(model.generate, patch):
            raise ValueError(f"this {type(model).__name__} is patched already: undo that patch first")
        refuse_unsupported(model)
        self._arguments = arguments
        first = speculate(**arguments)
        self._draft_length = first.draft_length
        self._idle = [first.drafter_for(model)]  # now, so that a drafter that cannot be had is told at once
        by_name = isinstance(first.drafter, DrafterSpec | None)
        self._one_at_a_time = None if by_name else threading.RLock()
        self._own = vars(model).get("generate")  # of the instance alone, where something else has wrapped it before
        self._plain = model.generate
        self._names = list(inspect.signature(self._plain).parameters)
        self._told: set[str] = set()
        self._undone = False
        self.stats: Stats | None = None
        functools.update_wrapper(self, self._plain)  # the signature, for scripts that look at it
        vars(model)["generate"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What `model.generate` is now."""
        call = dict(zip(self._names, args, strict=False)) | kwargs
        if self._undone or call.get("custom_generate") is not None:
            return self._plain(*args, **kwargs)
        with self._drafter() as drafter:
            decode = None
            try:
                decode, prepared = self._prepared(call, drafter)
                output = self._plain(**prepared)
            except (NotImplementedError, ValueError) as error:
                if decode is not None and decode.stats is not None:  # not refused: it failed on the way
                    raise
                self._tell(error)
            else:
                self.stats = decode.stats
                return output
        return self._plain(*args, **kwargs)

    def undo(self) -> None:
        """Put back what was there. Twice does no harm; what others have put over the patch stays, and goes past it."""
        self._undone = True
        if vars(self.model).get("generate") is self:
            del vars(self.model)["generate"]
            if self._own is not None:
                vars(self.model)["generate"] = self._own

    def __enter__(self) -> patch:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def __reduce__(self) -> tuple:
        return getattr, (self.model, "generate")  # of a copy of the model, which has none yet but its class's

    def _prepared(self, call: dict[str, Any], drafter: Drafter | None) -> tuple[speculate, dict[str, Any]]:
        """What decodes a call, and the arguments of the `generate` that was there with which it does."""
        own = {name: call.pop(name, None) for name in ("streamer", "tokenizer", "synced_gpus")}
        arguments = self._arguments | {name: value for name, value in own.items() if value is not None}
        said, length = what_drafts("ngram", arguments.get("draft_length"), arguments.get("tokenizer"), call)
        if said == "ngram":  # unchanged: the call does not say what drafts
            said, length = drafter, self._draft_length
        decode = speculate(**arguments | {"drafter": said, "draft_length": length})
        ids = call.pop("input_ids", None) if call.get("inputs") is None else None
        prompt = call.pop("inputs", None) if ids is None else ids
        return decode, decided_by(decode, self.model, prompt, call)

    @contextmanager
    def _drafter(self) -> Iterator[Drafter | None]:
        """The drafter, or another like it where other threads have it; an object is waited for."""
        with self._one_at_a_time or nullcontext():
            try:
                drafter = self._idle.pop()
            except IndexError:
                drafter = speculate(**self._arguments).drafter_for(self.model)
            try:
                yield drafter
            finally:
                self._idle.append(drafter)

    def _tell(self, error: Exception) -> None:
        """Log why a call is not speculated, once where only numbers differ."""
        reason = re.sub(r"\d+", "N", str(error))
        if reason not in self._told:
            self._told.add(reason)
            logger.warning("this call and others like it go to generate without specdec: %s", error)
