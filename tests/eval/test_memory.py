"""Bytes, against sizes that can be worked out."""

import numpy as np
import pytest
import torch

from drafters.ngram import NGramDrafter
from eval.memory import FullDrafts, PeakBytes, measure, weight_bytes
from specdec.contracts import Rows
from tests.tiny_models import tiny

CPU = torch.device("cpu")
MB = 1 << 20


def held(*sizes: int) -> None:
    """All of them at once."""
    _ = [torch.empty(size, dtype=torch.uint8) for size in sizes]


def test_peak_is_what_is_held_at_once():
    before = torch.empty(MB, dtype=torch.uint8)
    with PeakBytes() as used:
        held(3 * MB, 2 * MB)
        held(4 * MB)
    assert (used.peak, used.live) == (5 * MB, 0)
    with PeakBytes() as used:
        kept = torch.empty(MB, dtype=torch.uint8)
        _ = [kept.view(-1, 2), before[1:], before.add_(1)]  # views and what was there before
        held(MB)
    assert (used.peak, used.live) == (2 * MB, MB)


def test_tied_weights_count_once():
    model = tiny("llama", dtype=torch.float32)
    separate = weight_bytes(model)
    assert separate == 4 * sum(p.numel() for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    model.lm_head.weight = model.model.embed_tokens.weight
    assert separate - weight_bytes(model) == 4 * 97 * 32


def test_a_run_of_known_size():
    model = tiny("llama", dtype=torch.float32, vocab=9_000)
    drafter = NGramDrafter()
    plain, ngram = (
        measure("x", model, d, length, batch_size=3, context=200) for d, length in [(None, 0), (drafter, 5)]
    )
    for found in plain, ngram:
        per_token = 2 * 2 * 2 * 8 * 4  # keys and values, 2 layers, 2 heads of 8, 4 bytes
        assert found.cache / per_token in (3 * (192 + 1), 3 * (256 + 1))  # buckets of 64 that hold about 200 tokens
        assert found.weights == weight_bytes(model)
    logits = 3 * 9_000 * 4  # nearly all that a decode step holds, in every row once, and 6 times with a full draft
    assert logits < plain.decode < 1.5 * logits
    assert 6 * logits < ngram.decode < 1.5 * 6 * logits
    assert plain.share == plain.decode / (plain.weights + plain.cache)
    assert not drafter._rows


def test_full_drafts_keep_what_was_drafted():
    history = [np.array([5, 6, 7, 5, 6]), np.array([1, 2, 3])]
    rows = Rows([0, 1], history, CPU, vocab_size=10)
    draft = FullDrafts(NGramDrafter()).propose(rows, [2, 4], None)
    assert draft.lengths == [2, 4]
    assert draft.tokens.tolist() == [[7, 5, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("context", [10, 257])
def test_context_must_hold_the_measured_steps_and_fit_the_model(context):
    with pytest.raises(ValueError, match=f"is {context} tokens.*256 positions"):
        measure("x", tiny("llama"), None, 5, 1, context)
