"""The drop-in: `specdec.generate(model, ...)` takes what `model.generate(...)` takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from specdec.call_checks import check_cache, check_prompt, refuse_arguments, refuse_cache
from specdec.compat import cached_tokens, handed_over, mark_callers
from specdec.contracts import Drafter, Verifier
from specdec.loop import OnCommit
from specdec.speculation import speculate
from specdec.spellings import what_drafts
from specdec.stopping import with_stop_strings

INSTEAD = {
    "custom_generate": "say what drafts with drafter=",
    "adapter_names": "call model.generate for rows with adapters of their own",  # PEFT's, which an error would leave on
}


def generate(
    model: PreTrainedModel,
    input_ids: Tensor | None = None,
    *,
    drafter: str | Drafter | None = "ngram",
    verifier: str | Verifier = "auto",
    draft_length: int | None = None,
    seed: int | None = None,
    request_ids: Sequence[int] | None = None,
    streamer: BaseStreamer | None = None,
    stop_strings: str | list[str] | None = None,
    tokenizer: Any = None,
    on_commit: OnCommit | None = None,
    max_batch: int | None = None,
    synced_gpus: bool | None = None,
    invariant: bool = False,
    compile: bool | Literal["auto"] = False,
    return_stats: bool = False,
    **kwargs: Any,
) -> Any:
    """`model.generate(input_ids, **kwargs)`, decoded speculatively; the same output type.

    input_ids:    [B, columns] int64, left-padded, with `attention_mask` of the same shape where there is padding.
    drafter:      a name as on the command line ("ngram", "mtp", "ngram:max_n=3"), an object with the `Drafter` methods,
                  or None for plain decoding.
    verifier:     "auto" (the lossless rule that fits the draft, see verifiers/auto.py), a name, or an object.
    draft_length: drafted tokens per row and step, at most; 0 is plain decoding. None: as many as pay, from 0 to
                  LONGEST, by what steps turn out to cost and to accept (see specdec.budget), which the next call with
                  the same model and drafter (the same name, or object) begins with; but DRAFT_LENGTH where
                  the sample depends on the length (sampling with another rule than "coupled"), so that a seed gives
                  the same sample whatever the clock does, and in tensor-parallel processes. A name's own length= goes
                  before it.
    seed:         of the sampling streams; None draws one from torch's generator, so `set_seed` works.
    request_ids:  B ints in [0, 2**32) that name the rows' random streams; default: the row's index.
    streamer:     gets tokens as they are accepted (batch of 1).
    tokenizer:    the target's, for stop_strings and for a draft model given by name.
    on_commit:    called as on_commit(row, tokens, n_drafted) after every step of every row.
    max_batch:    most rows at work at a time, None = all; a row that ends makes place for the next one at once.
    invariant:    give every token the same logits, bit for bit, whatever is computed beside it (specdec.invariant):
                  greedy search, and sampling with verifier="coupled", then emit exactly what plain decoding does, in
                  bfloat16 too, at any batch size and draft length up to LONGEST_DRAFT. It costs the padding; compiled
                  where the graph is batch invariant (specdec.compiled), nothing.
    compile:      run the target, and a draft model, through `torch.compile` (see specdec.compiled): faster steps, after
                  a minute or more in the first call on a model; "auto" does so on CUDA only.
    return_stats: also return the call's `Stats`: (output, stats).
    Raises ValueError or NotImplementedError, in one sentence, for what it cannot do.

    Example: specdec.generate(model, **tokenizer("Hello", return_tensors="pt"), drafter="ngram", max_new_tokens=32)
    """
    refuse_arguments(kwargs, "specdec.generate", INSTEAD)
    if input_ids is None:
        input_ids = kwargs.pop("inputs", None)  # as `generate` calls them
    drafter, draft_length = what_drafts(drafter, draft_length, tokenizer, kwargs)
    decode = speculate(
        drafter=drafter, verifier=verifier, draft_length=draft_length, seed=seed, request_ids=request_ids,
        streamer=streamer, tokenizer=tokenizer, on_commit=on_commit, max_batch=max_batch,
        synced_gpus=synced_gpus, invariant=invariant, compile=compile,
    )  # fmt: skip
    kwargs["stop_strings"] = stop_strings
    output = model.generate(**decided_by(decode, model, input_ids, kwargs))
    return (output, decode.stats) if return_stats else output


def decided_by(
    decode: speculate, model: PreTrainedModel, input_ids: Tensor | None, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Arguments with which `model.generate` does what `kwargs` say and decodes by `decode`, whose tokenizer is the one
    for stop strings. Raises for what can be refused before `generate` prepares the call."""
    refuse_cache(kwargs.get("cache_implementation"))
    check_cache(handed_over(kwargs))
    mark_callers(kwargs)
    if cached_tokens(handed_over(kwargs)) == 0 and kwargs.get("inputs_embeds") is None:
        check_prompt(input_ids, kwargs.get("attention_mask"))
    if kwargs.pop("token_healing", None):
        input_ids = model.heal_tokens(input_ids, decode.tokenizer)
    return with_stop_strings(model, decode.tokenizer, kwargs) | {"inputs": input_ids, "custom_generate": decode}
