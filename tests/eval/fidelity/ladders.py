"""Ladders of tiny models, and their results."""

import torch
from transformers import PreTrainedModel

from drafters.ngram import NGramDrafter
from eval.fidelity.ladder import Ladder
from eval.fidelity.observe import observe
from eval.fidelity.results import Result
from eval.methods import EncodedPrompt
from specdec.call_checks import fitting_verifier
from specdec.registry import VERIFIERS, known
from tests.tiny_models import tiny

GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 1.0}


def ladder_of(model: PreTrainedModel | None = None, verifier="auto", sampling=GREEDY, **changes) -> Ladder:
    """Three repetitive prompts of different lengths, drafted by n-grams; float64 unless a model is given."""

    def make():
        return fitting_verifier(known(VERIFIERS, verifier, "verifier"), sampling["do_sample"])

    prompts = [
        EncodedPrompt(number, f"p{number}", "", [1 + (place % (3 + number)) for place in range(6 + 2 * number)])
        for number in range(3)
    ]
    given = {
        "model": tiny("llama", dtype=torch.float64) if model is None else model,
        "prompts": prompts,
        "drafter": NGramDrafter(min_n=1),
        "verifier": make,
        "draft_length": 4,
        "batch_size": 2,
        "max_new_tokens": 16,
        "sampling": sampling,
        "stops": frozenset(),
        "pad": 0,
    }  # fmt: skip
    return Ladder(**given | changes)


def climbed(ladder: Ladder, *numbers: int) -> list[Result]:
    """The rungs of these numbers, or all."""
    results: list[Result] = []
    for job in ladder.jobs():
        if not numbers or job.rung.number in numbers:
            results += observe(ladder, job, results)
    return results


def rounding_model(dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """A tiny model with many near ties, whose last states depend on how many are scored at once, as large models' do.

    The dependence is a few units in the last place: in float64 it decides nothing."""
    model = tiny("llama", dtype=dtype)
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        rows = model.lm_head.weight
        rows[48:96] = rows[:48] * (1 + 0.004 * torch.randn(48, 32, generator=rng)).to(dtype)
    model.lm_head.register_forward_pre_hook(_rounded_by_width)
    return model


def _rounded_by_width(module: torch.nn.Module, states: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    [state] = states
    width = state.shape[-2]
    noise = torch.randn(state.shape[-1], generator=torch.Generator().manual_seed(width), dtype=torch.float64)
    return (state * (1 + 4 * torch.finfo(state.dtype).eps * noise).to(state.dtype),)
