"""Batches against ones made by hand; every example once per epoch; the loss mask as a person sees it."""

import numpy as np
import pytest
import torch

import train.batches
from tests.toy_tokenizer import toy_tokenizer
from train.batches import Batches, Example, padded, show_example


def examples_of(lengths):
    """Example n holds the token n, all but the first of them as response."""
    return [Example(f"e{n}", [n] * length, 1) for n, length in enumerate(lengths)]


def random_lengths(count, seed=0):
    return np.random.default_rng(seed).integers(10, 200, count).tolist()


def test_loss_mask_starts_at_the_first_response_token():
    assert Example("a", [10, 11, 12, 13, 14], 3).loss_mask == [False, False, False, True, True]
    assert Example("a", [10, 11], 2).loss_mask == [False, False]


@pytest.mark.parametrize("start", [0, 3, -1])
def test_a_response_that_starts_outside_the_text_is_refused(start):
    with pytest.raises(ValueError, match=f"example 'a' has 2 tokens and response_start {start}"):
        Example("a", [1, 2], start)


def test_padding_by_hand():
    examples = [Example("a", [5, 6, 7], 1), Example("b", [8, 9], 1), Example("c", [1, 2, 3, 4], 3)]
    batch = padded(examples, [1, 2])
    assert batch.tokens.dtype == torch.int64 and batch.loss_mask.dtype == torch.bool
    assert batch.tokens.tolist() == [[8, 9, 0, 0], [1, 2, 3, 4]]
    assert batch.loss_mask.int().tolist() == [[0, 1, 0, 0], [0, 0, 0, 1]]
    assert list(batch.rows) == [1, 2] and batch.hidden is None


def assert_same(one, other):
    assert torch.equal(one.tokens, other.tokens) and torch.equal(one.loss_mask, other.loss_mask)
    assert one.rows == other.rows


def test_any_step_can_be_asked_for_without_the_ones_before():
    examples = examples_of(random_lengths(53))
    through = Batches(examples, 4, seed=3)
    in_order = [through.batch_at(step) for step in range(4 * through.per_epoch)]
    for step in (30, 2, 55, 31, 0):
        assert_same(Batches(examples, 4, seed=3).batch_at(step), in_order[step])
        assert_same(through.batch_at(step), in_order[step])


def test_seed_and_epoch_change_the_order():
    examples = examples_of(random_lengths(64))
    batches = Batches(examples, 4, seed=0)
    epochs = [[batches.batch_at(step).rows for step in range(first, first + 16)] for first in (0, 16)]
    other = Batches(examples, 4, seed=1)
    assert epochs[0] != epochs[1] and epochs[0] != [other.batch_at(step).rows for step in range(16)]


@pytest.mark.parametrize(
    ("count", "batch_size", "world", "per_epoch"),
    [
        (1, 4, 1, 1),
        (7, 3, 1, 3),
        (64, 8, 1, 8),
        (64, 8, 2, 4),
        (61, 8, 3, 3),
        (200, 2, 4, 25),
        (5, 8, 4, 1),
        (3, 1, 2, 1),
    ],
)
def test_ranks_cover_every_example_once_per_epoch(count, batch_size, world, per_epoch):
    examples = examples_of(random_lengths(count))
    ranks = [Batches(examples, batch_size, 0, rank, world) for rank in range(world)]
    for epoch in range(2):
        seen = []
        for step in range(epoch * per_epoch, (epoch + 1) * per_epoch):
            for rank in ranks:
                assert rank.per_epoch == per_epoch
                rows = rank.batch_at(step).rows
                assert 1 <= len(rows) <= max(batch_size, 2)
                seen += rows
        assert sorted(seen) == list(range(count))


def padding_share(batches):
    padded_to = [batches.batch_at(step).tokens.numel() for step in range(batches.per_epoch)]
    return 1 - sum(batches.lengths) / sum(padded_to)


def test_similar_lengths_share_a_batch_but_lengths_are_mixed_over_the_epoch(monkeypatch):
    batches = Batches(examples_of(random_lengths(1024)), 8, seed=0)
    assert padding_share(batches) < 0.06
    longest = [batches.batch_at(step).tokens.shape[1] for step in range(batches.per_epoch)]
    assert abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 0.3  # sorted, it would be 1
    monkeypatch.setattr(train.batches, "WINDOW", 1)
    assert padding_share(Batches(batches.examples, 8, seed=0)) > 0.3  # without sorting


def test_a_set_with_nothing_to_train_on_is_refused():
    masked = [Example("a", [1, 2], 2), Example("b", [1], 1)]
    with pytest.raises(ValueError, match="none of the 2 examples has a response token"):
        Batches(masked, 2, 0)
    assert Batches([*masked, Example("c", [1, 2], 1)], 3, 0).batch_at(0).loss_mask.sum() == 1


def test_impossible_batches_are_refused():
    with pytest.raises(ValueError, match="2 examples cannot be shared by 3 processes"):
        Batches(examples_of([5, 6]), 1, 0, 0, 3)
    with pytest.raises(ValueError, match="batch_size is 0"):
        Batches(examples_of([5]), 0, 0)


def test_the_shown_example_marks_what_is_trained_on():
    tokenizer = toy_tokenizer()
    prompt, response = tokenizer("user: hi\n")["input_ids"], tokenizer("yes")["input_ids"]
    tokens = [*prompt, *response, tokenizer.eos_token_id]
    shown = show_example(Example("p0", tokens, len(prompt)), tokenizer)
    assert shown == "example 'p0':\n[not trained on, 9 tokens] user: hi\n\n[trained on, 4 tokens] yes<end>"
    late = show_example(Example("p0", tokens, len(prompt) + 1), tokenizer)  # a mask that is off by one shows
    assert "[trained on, 3 tokens] es<end>" in late
