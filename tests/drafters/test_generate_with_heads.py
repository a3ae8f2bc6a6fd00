"""Drafters with heads in the whole engine: the output stays the target's, for every family, chain or tree."""

import pytest
import torch

import specdec
from drafters.medusa import MedusaDrafter
from drafters.mtp import MTPDrafter
from drafters.trees import Tree
from specdec import loop
from specdec.cache import SlotCache
from tests.heads.test_medusa import random_heads
from tests.heads.test_mtp import random_head
from tests.specdec import test_sampling as sampling
from tests.tiny_models import FAMILIES, tiny

VOCAB = 11  # so small that drafts of untrained heads are often right
TREE = Tree(((0,), (1,), (2,), (0, 0), (1, 0), (0, 1), (2, 0), (0, 0, 0), (1, 0, 0)))
IDS = torch.tensor([1, 2, 4, 5, 7, 8, 9])
REDUCED = {"draft_vocab_size": len(IDS), "draft_ids": IDS}
LENGTH = 9
DRAFTERS = {
    "medusa": lambda model: MedusaDrafter(random_heads(model, vocab_size=VOCAB)),
    "medusa_tree": lambda model: MedusaDrafter(random_heads(model, vocab_size=VOCAB), TREE),
    "mtp": lambda model: MTPDrafter(random_head(model, vocab_size=VOCAB, **REDUCED)),
    "mtp_stages": lambda model: MTPDrafter(random_head(model, vocab_size=VOCAB, layers=3)),
    "mtp_tree": lambda model: MTPDrafter(random_head(model, vocab_size=VOCAB), top_k=3),
}


def prompts(rows=4, width=12):
    """Left-padded prompts of 12, 9, 6 and 3 tokens."""
    ids = torch.randint(1, VOCAB, (rows, width), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : 3 * row] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def generate(model, drafter, **kwargs):
    settings = {**prompts(), "do_sample": False, "max_new_tokens": 16, "draft_length": LENGTH} | kwargs
    return specdec.generate(model, drafter=drafter, return_stats=True, **settings)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"bloom"}))  # whose position biases the engine refuses
def test_greedy_equals_plain_decoding(family, monkeypatch):
    monkeypatch.setattr(loop, "CHUNK", 7)  # prompts enter over several steps, beside rows that decode
    model = tiny(family, vocab=VOCAB)
    expected, _ = generate(model, None)
    for name in DRAFTERS if family in ("llama", "gpt2", "falcon") else ("medusa_tree", "mtp", "mtp_tree"):
        out, stats = generate(model, DRAFTERS[name](model))
        assert torch.equal(out, expected), name
        assert stats.mean_accepted_length > 1 or "tree" not in name


@pytest.mark.parametrize("name", ["medusa_tree", "mtp_tree"])
def test_a_tree_path_that_is_not_moved_is_caught(name, monkeypatch):
    """Broken control: the accepted nodes' keys and values stay where the tree had them."""
    model = tiny("llama", vocab=VOCAB)
    expected, _ = generate(model, None)
    monkeypatch.setattr(SlotCache, "keep_path", lambda *args: None)
    out, _ = generate(model, DRAFTERS[name](model))
    assert not torch.equal(out, expected)


@pytest.mark.parametrize("name", DRAFTERS)
def test_coupled_sampling_equals_itself_without_a_draft(name):
    """Chains propose with the noise that the target chooses with; trees and Medusa are judged by it all the same."""
    model = tiny("qwen3", vocab=VOCAB)
    settings = {"do_sample": True, "verifier": "coupled", "seed": 3, "top_k": 0}
    plain, _ = generate(model, None, **settings)
    out, stats = generate(model, DRAFTERS[name](model), **settings)
    assert torch.equal(out, plain) and stats.mean_accepted_length > 1


@pytest.mark.parametrize(("name", "verifier"), [
    ("medusa", "rejection"),
    ("medusa_tree", "tree_rejection"),
    ("mtp", "block"),
    ("mtp", "tree_rejection"),
    ("mtp_stages", "rejection"),
    ("mtp_tree", "traversal"),
])  # fmt: skip
def test_a_request_samples_the_same_alone_and_in_a_batch(name, verifier):
    model = tiny("llama", vocab=VOCAB)
    settings = {"do_sample": True, "verifier": verifier, "seed": 3, "top_k": 0}
    together, stats = generate(model, DRAFTERS[name](model), request_ids=[5, 6, 7, 8], **settings)
    assert stats.verifier == verifier and stats.mean_accepted_length > 1
    for row in (0, 3):
        one = {key: value[row : row + 1] for key, value in prompts().items()}
        alone, _ = generate(model, DRAFTERS[name](model), **one, request_ids=[5 + row], **settings)
        assert torch.equal(alone[0], together[row])


class Lying(sampling.Lying):
    """Broken control: drafts arg-maxes but claims that they were drawn from the softmax."""

    needs_hidden = "post_norm"


def sampled_drafters(model):
    size = sampling.VOCAB
    ids = torch.tensor([0, 2, 3])
    return {
        "medusa_tree": MedusaDrafter(random_heads(model, vocab_size=size), Tree(((0,), (1,), (0, 0), (1, 0), (1, 1)))),
        "mtp": MTPDrafter(random_head(model, vocab_size=size)),
        "mtp_reduced": MTPDrafter(random_head(model, vocab_size=size, draft_vocab_size=3, draft_ids=ids)),
        "mtp_stages": MTPDrafter(random_head(model, vocab_size=size, layers=2)),
        "mtp_tree": MTPDrafter(random_head(model, vocab_size=size), top_k=2),
        "lying": Lying(MTPDrafter(random_head(model, vocab_size=size))),
    }


def law_p_value(name, verifier, draft_length):
    model = tiny("qwen3", seed=1, vocab=sampling.VOCAB)
    out = specdec.generate(
        model, sampling.PROMPT, do_sample=True, max_new_tokens=sampling.LENGTH, seed=5, verifier=verifier,
        num_return_sequences=sampling.SAMPLES, drafter=sampled_drafters(model)[name], draft_length=draft_length,
        **sampling.WARPERS,
    )  # fmt: skip
    samples = [tuple(row) for row in out[:, sampling.PROMPT.shape[1] :].tolist()]
    return sampling.p_value(samples, sampling.exact_law(model))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "verifier", "draft_length"), [
    ("medusa_tree", "tree_rejection", 5),
    ("medusa_tree", "traversal", 5),
    ("mtp", "rejection", 2),
    ("mtp", "block", 3),
    ("mtp", "traversal", 3),
    ("mtp", "coupled", 3),
    ("mtp_reduced", "block", 3),
    ("mtp_stages", "block", 3),
    ("mtp_tree", "tree_rejection", 5),
    ("mtp_tree", "traversal", 5),
])  # fmt: skip
def test_joint_law_of_four_tokens(name, verifier, draft_length):
    assert law_p_value(name, verifier, draft_length) > 1e-3


@pytest.mark.slow
def test_joint_law_catches_a_draft_that_lies_about_q():
    assert law_p_value("lying", "rejection", 2) < 1e-9
