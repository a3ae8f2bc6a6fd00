"""What a call to `generate` is refused for, in one sentence, before anything is computed."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, PreTrainedModel

from specdec.compat import CACHE_KWARGS
from specdec.contracts import Verifier
from specdec.registry import parameters
from specdec.requests import Request
from specdec.target import Target

# Of the model's own keyword arguments.
HONOURED = {
    "attention_mask", "position_ids", "inputs_embeds", "use_cache", "logits_to_keep", "output_attentions",
    "output_hidden_states", *CACHE_KWARGS,
}  # fmt: skip


def check_draft_length(draft_length: int) -> None:
    """ValueError for anything but a whole number of at least 0."""
    whole_number(draft_length, "draft_length", "give 0 (plain decoding) or more drafted tokens per step", least=0)


def whole_number(value: Any, name: str, advice: str, least: int | None = None) -> int:
    """`value`, of any integer type but bool, as an int. ValueError for anything else and for one below `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or (least is not None and number < least):
        raise ValueError(f"{name} is {value!r}: {advice}")
    return number


def refuse_arguments(kwargs: Mapping[str, Any], caller: str, instead: dict[str, str]) -> None:
    """NotImplementedError for the first argument of `instead` that was given, with the advice that is there."""
    for name, advice in instead.items():
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"{name} is not supported by {caller}: {advice}")


def fitting_verifier(verifier: type | Verifier, sampling: bool) -> Verifier:
    """The rule for a call: an object as it is, a class of the table made. ValueError where it does not fit."""
    if isinstance(verifier, type):
        verifier = verifier(sampling) if "sampling" in parameters(verifier) else verifier()
    if (verifier.draws == "argmax") == sampling:
        raise ValueError(
            f"verifier {verifier.name!r} does not fit do_sample={sampling}: greedy rules go without sampling, all "
            f"others with it; verifier='auto' chooses"
        )
    return verifier


def check_prompt(input_ids: Tensor | None, mask: Tensor | None) -> None:
    """ValueError for a prompt batch that nothing can be generated from."""
    if input_ids is None:
        raise ValueError("input_ids is missing: give the prompts as a [batch, columns] tensor of token ids")
    if not isinstance(input_ids, Tensor) or input_ids.dtype not in (torch.int64, torch.int32):
        given = input_ids.dtype if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise ValueError(f"input_ids is of {given}: give an int64 tensor of token ids, [batch, columns]")
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise ValueError(
            f"input_ids has shape {tuple(input_ids.shape)}: give at least one row and one token, [batch, columns]"
        )
    if mask is not None and mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)} but input_ids {tuple(input_ids.shape)}: make them equal"
        )


def check_cache(cache: Any) -> None:
    """ValueError for what is no cache of transformers."""
    if not isinstance(cache, Cache | None):
        raise ValueError(f"the cache passed in is a {type(cache).__name__}: give a transformers.DynamicCache")


def check_token_ids(target: Target, requests: Sequence[Request]) -> None:
    """ValueError where a prompt holds an id that the model has no embedding for; what stands in padding is not run."""
    V = target.model.get_input_embeddings().weight.shape[0]
    for request in requests:
        tokens = request.tokens
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < V:
            outside = tokens[(tokens < 0) | (tokens >= V)][0]
            raise ValueError(
                f"row {request.index} of the prompts holds token id {outside}, but the model has ids 0 to {V - 1}: "
                f"use the model's own tokenizer"
            )


def check_positions(target: Target, requests: Sequence[Request]) -> None:
    """ValueError where a request cannot fit the model's positions, NotImplementedError where it would move them."""
    limit, switch = target.max_positions, target.positions_change_at
    for request in requests:
        length = request.slots + request.shift
        total = length + request.limit
        if limit is not None and (length > limit or (target.positions_are_a_table and total - 1 > limit)):
            raise ValueError(
                f"row {request.index} has a prompt of {length} tokens and may emit {request.limit}, but the model has "
                f"{limit} positions: shorten the prompt or lower max_new_tokens"
            )
        if switch is not None and total > switch:
            raise NotImplementedError(
                f"row {request.index} may grow to {total} tokens, but past {switch} this model's rotary embeddings "
                f"change with the longest row of a batch: keep prompt + max_new_tokens within {switch}"
            )


def check_per_request(config: GenerationConfig) -> None:
    """ValueError where lengths are asked for that include the prompt, which every request has its own;
    NotImplementedError for several answers to a prompt, whose requests would not be the prompts given."""
    if (config.num_return_sequences or 1) > 1:
        raise NotImplementedError(
            f"num_return_sequences is {config.num_return_sequences}, which is not supported by specdec.stream_batch: "
            f"give the prompt as many times"
        )
    for name, off in (("encoder_repetition_penalty", 1.0), ("encoder_no_repeat_ngram_size", 0)):
        if getattr(config, name) not in (None, off):
            raise NotImplementedError(f"{name} is not supported by specdec.stream_batch: call specdec.generate for it")
    for name in ("output_scores", "output_logits", "output_hidden_states", "output_attentions"):
        if getattr(config, name) and config.return_dict_in_generate:
            raise NotImplementedError(f"{name} is not supported by specdec.stream_batch: call specdec.generate for it")
    if config.max_new_tokens is None:
        raise ValueError("max_new_tokens was not given: say how many tokens each request may emit")
    if config.min_length and config.min_new_tokens is None:
        raise ValueError(f"min_length is {config.min_length}, which counts the prompt too: give min_new_tokens instead")


def refuse_cache(implementation: str | None) -> None:
    """NotImplementedError for a kind of cache with which another result, or another loop, would be asked for."""
    if implementation in ("quantized", "paged"):
        raise NotImplementedError(
            f"cache_implementation={implementation!r} is not supported by specdec: leave it out, or give one that "
            f"holds keys and values as they are ('dynamic', 'static')"
        )


def refuse_unsupported(config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """NotImplementedError that names the first argument which asks for what is not speculated."""
    refuse_cache(config.cache_implementation)
    constrained = getattr(config, "constraints", None) or getattr(config, "force_words_ids", None)
    asked = {
        "force_words_ids (constrained beam search)": constrained,
        "num_beam_groups (group beam search)": (getattr(config, "num_beam_groups", None) or 1) > 1,
        "num_beams (beam search)": (config.num_beams or 1) > 1,
        "penalty_alpha (contrastive search)": config.penalty_alpha,
        "dola_layers (decoding by the contrast of layers)": getattr(config, "dola_layers", None) is not None,
        "prompt_lookup_num_tokens": config.prompt_lookup_num_tokens is not None,
        "assistant_early_exit (the target's first layers as the assistant)": config.assistant_early_exit is not None,
        "use_mtp (the target's own multi-token prediction)": getattr(config, "use_mtp", None),
        **{name: value is not None for name, value in model_kwargs.items() if name not in HONOURED},
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise NotImplementedError(
                f"{name} is not supported by specdec: leave it out, or call model.generate without specdec"
            )


def refuse_foreign_inputs(model: PreTrainedModel) -> None:
    """NotImplementedError where something else than the model makes the inputs of its forwards, or chooses weights by
    their rows."""
    if getattr(model.prepare_inputs_for_generation, "__self__", model) is not model:
        raise NotImplementedError(
            f"the inputs of this {type(model).__name__} are made by another object (as PEFT's prompt and prefix tuning "
            f"do, with virtual tokens), which specdec would go past: call model.generate without specdec"
        )
    if hasattr(model, "peft_config"):
        hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
        if any({"adapter_names", "alora_offsets"} & set(getattr(hook, "keywords", ())) for hook in hooks):
            raise NotImplementedError(
                f"PEFT gives the rows of this {type(model).__name__} adapters of their own (adapter_names, or aLoRA's "
                f"offsets), and a packed forward has no rows: call model.generate without specdec"
            )
