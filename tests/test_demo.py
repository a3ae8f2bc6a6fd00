"""The demo model in float32: speculative and plain output equal Hugging Face `generate` token for token."""

import pytest
import torch

import specdec
from drafters.draft_model import DraftModelDrafter, first_layers
from specdec.prompts import encode, load_prompts

PROMPTS, TOKENS = 8, 32
TIE = 1e-4  # float32 logits closer than this may be ordered either way by another batch shape


def batches(tokenizer, size):
    prompts = load_prompts(limit=PROMPTS)
    texts = encode(prompts, tokenizer, raw=False)
    for start in range(0, PROMPTS, size):
        batch = tokenizer.pad({"input_ids": texts[start : start + size]}, padding_side="left", return_tensors="pt")
        yield batch["input_ids"], batch["attention_mask"]


@torch.no_grad()
def undecided(model, prompt, ours, theirs) -> bool:
    """Whether the first differing token of two outputs is one that the model itself is undecided about."""
    place = next(i for i, (a, b) in enumerate(zip(ours.tolist(), theirs.tolist(), strict=True)) if a != b)
    logits = model(torch.cat([prompt, theirs[:place]])[None], use_cache=False).logits[0, -1]
    return (logits.max() - logits[torch.stack([ours[place], theirs[place]])].min()).item() < TIE


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 4, 8])
def test_greedy_output_is_that_of_generate(demo, size):
    model, tokenizer = demo.model, demo.tokenizer
    drafters = {"none": None, "ngram": "ngram", "draft_model": DraftModelDrafter(first_layers(model, 4))}
    for ids, mask in batches(tokenizer, size):
        settings = {"attention_mask": mask, "do_sample": False, "max_new_tokens": TOKENS}
        theirs = model.generate(ids, **settings)[:, ids.shape[1] :]
        for name, drafter in drafters.items():
            ours = specdec.generate(model, ids, drafter=drafter, draft_length=5, **settings)[:, ids.shape[1] :]
            for row in range(len(ids)):
                width = min(ours.shape[1], theirs.shape[1])
                if torch.equal(ours[row, :width], theirs[row, :width]):
                    continue
                prompt = ids[row][mask[row].bool()]
                assert undecided(model, prompt, ours[row, :width], theirs[row, :width]), f"row {row}, drafter {name}"


@pytest.mark.slow
def test_a_token_off_by_one_is_not_taken_for_a_tie(demo):
    """Broken control of the test above."""
    ids, mask = next(batches(demo.tokenizer, 1))
    settings = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 8}
    theirs = demo.model.generate(ids, **settings)[0, ids.shape[1] :]
    wrong = theirs.clone()
    wrong[4] += 1
    assert not undecided(demo.model, ids[0], wrong, theirs)


@pytest.mark.slow
def test_coupled_sampling_emits_the_same_tokens_whatever_drafts(demo):
    """At temperature 0.8: n-gram, draft model and no drafter give the sequence of plain sampling with that seed."""
    model = demo.model
    for ids, mask in batches(demo.tokenizer, 4):
        settings = {"attention_mask": mask, "do_sample": True, "temperature": 0.8, "top_k": 0, "max_new_tokens": 32}
        outs = [
            specdec.generate(model, ids, drafter=drafter, draft_length=5, verifier="coupled", seed=3, **settings)
            for drafter in (None, "ngram", DraftModelDrafter(first_layers(model, 4)))
        ]
        assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
