"""What the slot cache moves, where rows of one step end at different places."""

import torch

from specdec.cache import BUCKET, SlotCache


def test_an_accepted_path_moves_and_a_row_at_the_end_of_the_buffer_stays():
    """Row 0's root is its last slot but one, and the longest path of the step would end past the buffer there."""
    cache = SlotCache(1)
    cache.admit([0, 1])
    cache.reserve(BUCKET)
    layer = cache.layers[0]
    layer.lazy_initialization(torch.zeros(1, 2, 1, 3), torch.zeros(1, 2, 1, 3))
    layer.keys.copy_(torch.arange(layer.keys.numel()).view_as(layer.keys))
    layer.values.copy_(layer.keys + 0.5)
    before = layer.keys.clone()
    cache.keep_path([(0, BUCKET - 2), (1, 10)], torch.tensor([[-1, -1, -1, -1], [1, 3, -1, -1]]))
    expected = before.clone()
    expected[1, :, 11], expected[1, :, 12] = before[1, :, 12], before[1, :, 14]
    assert torch.equal(layer.keys[:, :, :BUCKET], expected[:, :, :BUCKET])
    assert torch.equal(layer.values[:, :, :BUCKET], expected[:, :, :BUCKET] + 0.5)
    # broken control: the path read one node further on
    cache.keep_path([(1, 10)], torch.tensor([[2, 3]]))
    assert not torch.equal(layer.keys[:, :, :BUCKET], expected[:, :, :BUCKET])


def test_rows_that_go_together_are_not_moved_before_they_go():
    def moved(release):
        cache = SlotCache(1)
        cache.admit(range(8))
        cache.reserve(BUCKET)
        layer = cache.layers[0]
        layer.lazy_initialization(torch.zeros(1, 2, 1, 3), torch.zeros(1, 2, 1, 3))
        layer.keys.copy_(torch.arange(8.0).view(8, 1, 1, 1).expand_as(layer.keys))
        cache.lengths.update(dict.fromkeys(range(8), 4))
        before = layer.keys._version
        release(cache)
        return layer.keys, layer.keys._version - before, [cache.place(row) for row in (3, 4)]

    keys, writes, places = moved(lambda cache: cache.release([0, 1, 2, 5, 6, 7]))
    assert writes == 2 and sorted(places) == [0, 1]
    assert [keys[place, 0, 0, 0] for place in places] == [3, 4]
    one_by_one = lambda cache: [cache.release([row]) for row in (0, 1, 2, 5, 6, 7)]  # noqa: E731
    assert moved(one_by_one)[1] > 2  # broken control
