"""p once more, by plain teacher forcing and Hugging Face's own processors: nothing of the engine takes part.

Were p the verifier's, a wrong processor or a corrupted cache would go into both sides of a test and stay hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from specdec.contracts import Draft
from specdec.step import Segment
from specdec.target import Target

CHUNK = 512  # prompt tokens per forward of `at_width`


def hf_processors(model: PreTrainedModel, input_ids: Tensor, **generate_arguments: Any) -> LogitsProcessorList:
    """The processors that `model.generate` makes for this call, which it hands to a custom decoding function."""
    found = []

    def stop_here(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        found.append(logits_processor)
        return input_ids

    model.generate(input_ids, custom_generate=stop_here, **generate_arguments)
    return found[0]


@torch.no_grad()
def teacher_forced(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """[T, V] logits before each of the T `tokens` that follow `prompt`: one forward of the model, without a cache."""
    input_ids = torch.tensor([[*prompt, *tokens[:-1]]], device=model.device)
    return model(input_ids=input_ids, use_cache=False, logits_to_keep=len(tokens)).logits[0]


@torch.no_grad()
def at_width(target: Target, prompt: Sequence[int], tokens: Sequence[int], width: int) -> Tensor:
    """The same logits from forwards of `width` tokens over the engine's cache, as verification runs them: what the
    width of the forward alone does to them."""
    cache = target.new_cache()
    cache.admit([0])
    text = torch.tensor([*prompt, *tokens])
    logits = []

    def run(first: int, end: int, drafted: int, scored: bool) -> None:
        """The text from `first` to `end`, its last `drafted` tokens as if drafted."""
        draft = Draft.empty(0, target.device)
        if scored:
            draft = Draft(text[end - drafted : end][None].to(target.device), [drafted])
        step = target.pack([Segment(0, text[first : end - drafted].numpy(), first, scored)], draft, cache)
        scores, _ = target.forward(step, cache)
        cache.lengths[0] = end
        if scored:
            logits.append(scores)

    for first in range(0, len(prompt), CHUNK):
        end = min(first + CHUNK, len(prompt))
        run(first, end, 0, scored=end == len(prompt))
    for first in range(len(prompt), len(text) - 1, width):
        end = min(first + width, len(text) - 1)
        run(first, end, end - first - 1, scored=True)
    return torch.cat(logits)


def processed(
    processors: LogitsProcessorList, columns: Sequence[int], tokens: Sequence[int], logits_TV: Tensor
) -> Tensor:
    """[T, V] float32 scores whose softmax is p before each token, processors called as `generate` calls them.

    columns: the prompt as it stood in its batch, left pads included, which a processor sees."""
    ids = torch.tensor([[*columns, *tokens]], device=logits_TV.device)
    rows = [processors(ids[:, : len(columns) + t], logits_TV[t : t + 1].float()) for t in range(len(tokens))]
    return torch.cat(rows)
