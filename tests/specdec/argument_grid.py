"""The grid of argument combinations that `generate` and the drop-in are compared on (see tests.specdec.conformance).

A combination gives a level to each factor of LEVELS. The grid holds every level alone, combinations in which every two
levels that work alone meet, and random ones up to COMBINATIONS.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    PreTrainedModel,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from specdec.compat import cache_argument
from tests.specdec.covering import Combination, filled, pairwise
from tests.tiny_models import tiny
from tests.toy_tokenizer import toy_tokenizer

FAMILIES = ("llama", "gpt2", "qwen3", "mistral", "gemma3", "mixtral", "deepseek_v3")
COMBINATIONS = 330
VOCAB = 24  # so few that texts repeat, for n-grams; all of them are characters of the toy tokenizer
WIDTH, NEW = 10, 7  # columns of the prompts, tokens to emit


@dataclass(frozen=True)
class Prompts:
    """A batch of one layout for one model, and what plain greedy search answers."""

    model: PreTrainedModel
    ids: Tensor  # [B, WIDTH]
    mask: Tensor
    greedy: Tensor  # [B, NEW]

    @property
    def end(self) -> int:
        """A token that ends the first row halfway."""
        return int(self.greedy[0, 3])

    @property
    def unused(self) -> int:
        """A token that greedy search does not emit."""
        return next(token for token in range(9, VOCAB) if token not in self.greedy)


@functools.cache
def model_of(family: str, eager: bool) -> PreTrainedModel:
    model = tiny(family, vocab=VOCAB)
    if eager:
        model.set_attn_implementation("eager")
    return model


@functools.cache
def prompts_of(family: str, rows: str, layout: str, eager: bool) -> Prompts:
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 9, (int(rows), WIDTH), generator=random)
    mask = torch.ones_like(ids)
    for row in range(len(ids)):
        hidden = {"none": (), "left": range(row + 1), "right": range(WIDTH - 1 - row, WIDTH), "hole": range(3, 5 + row)}
        mask[row, list(hidden[layout])] = 0
    model = model_of(family, eager)
    out = model.generate(ids * mask, attention_mask=mask, do_sample=False, max_new_tokens=NEW)
    return Prompts(model, ids * mask, mask, out[:, WIDTH:])


class Recorder(BaseStreamer):
    def __init__(self):
        self.values: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.values.append(value.tolist())

    def end(self) -> None:
        self.values.append("end")


class StopAt(StoppingCriteria):
    """Stops where the last two ids add up to a multiple of five."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, -2:].sum(1) % 5 == 0


def favour(input_ids: Tensor, scores: Tensor) -> Tensor:
    """A user's processor: likes the id after the last but one."""
    liked = (input_ids[:, -2:-1] + 1) % scores.shape[1]
    return scores.scatter_add(1, liked, torch.full_like(liked, 2, dtype=scores.dtype))


def stop_text(prompts: Prompts) -> str:
    """A text that plain greedy search emits, of one token that is a whole character."""
    texts = [toy_tokenizer().decode(token) for token in prompts.greedy[:, 2:].flatten()]
    return next((text for text in texts if text.isprintable() and "\ufffd" not in text), "e")


def continued(prompts: Prompts) -> dict[str, Any]:
    """The cache of all columns of the prompts but the last two."""
    model, cache = prompts.model, DynamicCache(config=prompts.model.config)
    mask = prompts.mask[:, :-2]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        model(prompts.ids[:, :-2], attention_mask=mask, position_ids=positions, **{cache_argument(model): cache})
    return {cache_argument(model): cache}


Setting = Callable[[Prompts], dict[str, Any]]


def _fixed(**kwargs: Any) -> Setting:
    return lambda prompts: kwargs


# Factor -> level -> the arguments that it adds; the first level is the default. "rows", "layout", "settings" and
# "drafts" are read where the call is made.
LEVELS: dict[str, dict[str, Setting]] = {
    "rows": dict.fromkeys("31", _fixed()),
    "layout": dict.fromkeys(("none", "left", "right", "hole"), _fixed()),
    "prompt": {
        "input_ids": lambda p: {"input_ids": p.ids},
        "inputs_embeds": lambda p: {"inputs_embeds": p.model.get_input_embeddings()(p.ids).detach()},
    },
    "settings": dict.fromkeys(("arguments", "generation_config"), _fixed()),
    "length": {
        "max_new_tokens": _fixed(max_new_tokens=NEW),
        "max_length": lambda p: {"max_length": WIDTH + NEW},
        "max_new_tokens=1": _fixed(max_new_tokens=1),
    },
    "least": {"": _fixed(), "min_new_tokens": _fixed(min_new_tokens=5), "min_length": _fixed(min_length=WIDTH + 5)},
    "eos_token_id": {
        "": _fixed(),
        "int": lambda p: {"eos_token_id": p.end},
        "list": lambda p: {"eos_token_id": [3, p.end, int(p.greedy[-1, 4])]},
        "tensor": lambda p: {"eos_token_id": torch.tensor([p.end, 3])},
    },
    "pad_token_id": {"": _fixed(), "3": _fixed(pad_token_id=3)},
    "repetition_penalty": {"": _fixed(), "1.3": _fixed(repetition_penalty=1.3)},
    "no_repeat_ngram_size": {"": _fixed(), "2": _fixed(no_repeat_ngram_size=2)},
    "bad_words_ids": {"": _fixed(), "given": lambda p: {"bad_words_ids": [[int(p.greedy[0, 1])], [5, 7]]}},
    "suppress_tokens": {"": _fixed(), "given": lambda p: {"suppress_tokens": [int(p.greedy[0, 2]), 5]}},
    "begin_suppress_tokens": {"": _fixed(), "given": lambda p: {"begin_suppress_tokens": [int(p.greedy[0, 0])]}},
    "forced_eos_token_id": {"": _fixed(), "given": lambda p: {"forced_eos_token_id": p.unused}},
    "sequence_bias": {
        "": _fixed(),
        "given": lambda p: {"sequence_bias": [[[8], 3.0], [[int(p.greedy[0, 0]), 9], 5.0]]},
    },
    "exponential_decay_length_penalty": {"": _fixed(), "given": _fixed(exponential_decay_length_penalty=(2, 1.5))},
    "renormalize_logits": {"": _fixed(), "True": _fixed(renormalize_logits=True)},
    "remove_invalid_values": {"": _fixed(), "True": _fixed(remove_invalid_values=True)},
    "logits_processor": {"": _fixed(), "own": lambda p: {"logits_processor": LogitsProcessorList([favour])}},
    "stopping_criteria": {"": _fixed(), "own": lambda p: {"stopping_criteria": StoppingCriteriaList([StopAt()])}},
    "stop_strings": {"": _fixed(), "given": lambda p: {"stop_strings": [stop_text(p)], "tokenizer": toy_tokenizer()}},
    "max_time": {"": _fixed(), "1000": _fixed(max_time=1000.0), "0": _fixed(max_time=0.0)},
    "return_dict_in_generate": {"": _fixed(), "True": _fixed(return_dict_in_generate=True)},
    "output_scores": {"": _fixed(), "True": _fixed(output_scores=True)},
    "output_logits": {"": _fixed(), "True": _fixed(output_logits=True)},
    "output_hidden_states": {
        "": _fixed(),
        "True": _fixed(output_hidden_states=True, return_dict_in_generate=True),
    },
    "output_attentions": {"": _fixed(), "True": _fixed(output_attentions=True, return_dict_in_generate=True)},
    "use_cache": {"": _fixed(), "True": _fixed(use_cache=True), "False": _fixed(use_cache=False)},
    "cache": {
        "": _fixed(),
        "empty DynamicCache": lambda p: {cache_argument(p.model): DynamicCache(config=p.model.config)},
        "empty StaticCache": lambda p: {
            cache_argument(p.model): StaticCache(config=p.model.config, max_cache_len=WIDTH + NEW)
        },
        "DynamicCache to go on from": continued,
    },
    "cache_implementation": {
        "": _fixed(),
        "dynamic": _fixed(cache_implementation="dynamic"),
        "static": _fixed(cache_implementation="static"),
        "quantized": _fixed(cache_implementation="quantized"),
        "paged": _fixed(cache_implementation="paged"),
    },
    "prefill_chunk_size": {"": _fixed(), "4": _fixed(prefill_chunk_size=4)},
    "streamer": {"": _fixed(), "given": lambda p: {"streamer": Recorder()}},
    "drafts": dict.fromkeys(("", "prompt_lookup_num_tokens", "assistant_model"), _fixed()),
    "num_return_sequences": {"": _fixed(), "2 without sampling": _fixed(num_return_sequences=2)},
    "num_beams": {"": _fixed(), "2": _fixed(num_beams=2)},
    "num_beam_groups": {"": _fixed(), "2": _fixed(num_beams=2, num_beam_groups=2)},
    "penalty_alpha": {"": _fixed(), "0.6": _fixed(penalty_alpha=0.6, top_k=4)},
    "dola_layers": {"": _fixed(), "low": _fixed(dola_layers="low")},
    "force_words_ids": {"": _fixed(), "given": _fixed(force_words_ids=[[5]], num_beams=2)},
    "guidance_scale": {"": _fixed(), "1.5": _fixed(guidance_scale=1.5)},
    "watermarking_config": {"": _fixed(), "given": _fixed(watermarking_config={"bias": 2.0})},
    "encoder_repetition_penalty": {"": _fixed(), "1.3": _fixed(encoder_repetition_penalty=1.3)},
    "encoder_no_repeat_ngram_size": {"": _fixed(), "2": _fixed(encoder_no_repeat_ngram_size=2)},
    "assistant_early_exit": {"": _fixed(), "1": _fixed(assistant_early_exit=1)},
}
DEFAULT = {factor: next(iter(levels)) for factor, levels in LEVELS.items()}
ONLY_ALONE = {("length", "max_new_tokens=1"), ("max_time", "0")}  # in a combination they would hide everything else
OLD = Version(transformers.__version__) < Version("5.24")  # in 5.16 chunks of a prompt begin at 0 beside a cache
# Levels that `generate` does not take together, or answers with NaN or with a part.
EXCLUDED = [
    {("output_attentions", "True"), ("prefill_chunk_size", "4")},
    {("output_attentions", "True"), ("cache_implementation", "static")},
    {("output_attentions", "True"), ("cache", "empty StaticCache")},
    {("output_attentions", "True"), ("cache", "DynamicCache to go on from")},
    {("output_attentions", "True"), ("use_cache", "False"), ("layout", "left")},
    {("exponential_decay_length_penalty", "given"), ("eos_token_id", "")},
    {("prompt", "inputs_embeds"), ("prefill_chunk_size", "4")},
    {("use_cache", "False"), ("prefill_chunk_size", "4")},
    *([{("cache", "DynamicCache to go on from"), ("prefill_chunk_size", "4")}] if OLD else []),
    *({("cache", cache), ("use_cache", "False")} for cache in list(LEVELS["cache"])[1:]),
    *(
        {("cache", cache), ("cache_implementation", name)}
        for cache in list(LEVELS["cache"])[1:]
        for name in list(LEVELS["cache_implementation"])[1:]
    ),
]


def possible(combination: Combination) -> bool:
    return not any(pair <= set(combination.items()) for pair in EXCLUDED)


def alone() -> list[Combination]:
    """Every level on its own, with an end token where there has to be one."""
    single = [DEFAULT | {factor: level} for factor, levels in LEVELS.items() for level in list(levels)[1:]]
    return [DEFAULT, *(each if possible(each) else each | {"eos_token_id": "int"} for each in single)]


def combinations(refused: set[tuple[str, str]]) -> list[Combination]:
    """The grid, of levels that are not `refused` alone: at least COMBINATIONS, the first of which are of `alone()`."""
    singles = [combination for combination in alone() if not refused & set(combination.items())]
    usable = {
        factor: [level for level in levels if (factor, level) not in refused | ONLY_ALONE]
        for factor, levels in LEVELS.items()
    }
    return filled(singles + pairwise(usable, possible), usable, possible, COMBINATIONS, default=0.6)
