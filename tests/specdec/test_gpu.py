"""The engine on a GPU: the tokens are those of the same engine on the CPU, whatever drafts."""

import pytest
import torch

import specdec
from drafters.draft_model import DraftModelDrafter, first_layers
from drafters.ngram import NGramDrafter
from eval.launches import launches
from eval.plan.steady import warm
from tests.drafters.test_generate_with_heads import DRAFTERS, VOCAB, prompts
from tests.tiny_models import tiny

pytestmark = pytest.mark.gpu
WAYS = {
    "plain": lambda model: None,
    "ngram": lambda model: "ngram",
    "draft model": lambda model: DraftModelDrafter(first_layers(model, 1)),
    **DRAFTERS,
}


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "top_k": 0, "verifier": "coupled"}])
@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_the_cpu(way, sampling):
    found = {}
    for device in ("cpu", "cuda"):
        model = tiny("llama", vocab=VOCAB).to(device)
        inputs = {name: tensor.to(device) for name, tensor in prompts().items()}
        drafter = WAYS[way](model)
        found[device] = specdec.generate(
            model, **inputs, drafter=drafter, draft_length=5, seed=3, max_new_tokens=16, **sampling
        ).cpu()
    assert torch.equal(found["cpu"], found["cuda"])


@pytest.mark.parametrize(("drafter", "draft_length"), [(None, 0), (NGramDrafter(), 4)])
def test_a_step_waits_for_the_device_once(drafter, draft_length):
    model = tiny("llama", dtype=torch.float32, vocab=VOCAB).cuda()
    with warm(model, drafter, draft_length, [[1, 2, 3, 4] * 3] * 4, steps=2) as batch:
        found = launches(batch.step, model.device)
    assert found["syncs"] == 1 and found["launches"] > 100
