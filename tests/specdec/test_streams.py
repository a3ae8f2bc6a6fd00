"""The generator against Random123's published vectors; transforms at their ends; streams that never meet."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from specdec import streams
from specdec.streams import WORD, Purpose, gumbel, philox, uniforms, words

# kat_vectors of Random123, philox4x32 with 10 rounds: counter, key, output.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((WORD,) * 4, (WORD,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("array", [torch.tensor, np.array], ids=["torch", "numpy"])
@pytest.mark.parametrize(("counter", "key", "want"), KNOWN)
def test_known_answers(array, counter, key, want):
    assert tuple(int(w[0]) for w in philox(key, tuple(array([c]) for c in counter))) == want


def test_broken_control_nine_rounds_miss_the_known_answers(monkeypatch):
    monkeypatch.setattr(streams, "ROUNDS", 9)
    for counter, key, want in KNOWN:
        assert tuple(int(w[0]) for w in philox(key, tuple(torch.tensor([c]) for c in counter))) != want


def test_words_are_keyed_by_request_time_purpose_and_index():
    """The layout of the counter, spelt out: (request, time, purpose << 24 | depth, index // 4)."""
    got = words(2**40 + 7, torch.tensor([5]), torch.tensor([9]), Purpose.COUPLED, 0, 6)[0].tolist()
    use = 3 << 24
    fours = [philox((7, 2**8), tuple(torch.tensor([c]) for c in (5, 9, use, i))) for i in (0, 1)]
    assert got == [int(w[0]) for four in fours for w in four][:6]
    later = words(2**40 + 7, torch.tensor([5]), torch.tensor([9]), Purpose.COUPLED, 4, 2)[0].tolist()
    assert later == got[4:]


def test_uniforms_are_the_streams_words_scaled():
    u = uniforms(7, np.array([5]), np.array([9]), Purpose.ACCEPT, 2, 3)[0]
    w = [philox((7, 0), tuple(torch.tensor([c]) for c in (5, 9, (1 << 24) + 2, i))) for i in (0, 1)]
    w = [int(x[0]) for four in w for x in four]
    want = [((w[2 * j] >> 5) * 2**26 + (w[2 * j + 1] >> 6)) / 2**53 for j in range(3)]
    assert u.tolist() == want


def test_a_row_has_the_same_numbers_alone_and_in_any_batch():
    requests, steps = np.array([4, 9, 2]), np.array([0, 3, 8])
    together = uniforms(1, requests, steps, Purpose.ACCEPT, 0, 5)
    for row in range(3):
        alone = uniforms(1, requests[row : row + 1], steps[row : row + 1], Purpose.ACCEPT, 0, 5)
        assert np.array_equal(together[row], alone[0])


def test_no_two_uses_share_a_number():
    """Seeds, requests, steps, purposes, depths and indices, small and crossing a word: all distinct."""
    seen = [
        uniforms(seed, np.array([request]), np.array([step]), purpose, depth, 4)[0]
        for seed in (0, 1, 2**32)
        for request in (0, 1)
        for step in (0, 1)
        for purpose in Purpose
        for depth in (0, 1)
    ]
    numbers = np.concatenate(seen)
    assert len(np.unique(numbers)) == len(numbers) == 3 * 2 * 2 * 4 * 2 * 4


def test_uniforms_follow_the_uniform_law_and_stay_below_one():
    u = uniforms(3, np.arange(5000), np.zeros(5000, dtype=np.int64), Purpose.ACCEPT, 0, 4).ravel()
    assert stats.kstest(u, "uniform").pvalue > 1e-3
    assert streams._unit(np.array([WORD]), np.array([WORD]))[0] == 1 - 2**-53
    assert streams._unit(np.array([0]), np.array([0]))[0] == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gumbel_is_finite_at_the_ends_and_exact_between(dtype):
    ends = gumbel(torch.tensor([0, 1, WORD - 1, WORD]), dtype)
    assert ends.isfinite().all()
    assert ends[0].item() == pytest.approx(33 * math.log(2), rel=1e-6)  # v = 2**-33: -log(-log(1 - v)) = -log v
    middle = gumbel(torch.tensor([2**31]), dtype)
    assert middle.item() == pytest.approx(-math.log(math.log(2)), rel=1e-6)


def test_gumbel_keeps_32_bits_where_noise_is_large():
    """The largest values decide an arg-max: neighbouring words there give different noise even in float32."""
    large = gumbel(torch.arange(64))
    assert len(large.unique()) == 64


def test_gumbel_noise_follows_its_law():
    noise = gumbel(words(11, torch.arange(200), torch.zeros(200, dtype=torch.long), Purpose.COUPLED, 0, 100))
    assert stats.kstest(noise.flatten().numpy(), "gumbel_r").pvalue > 1e-3
