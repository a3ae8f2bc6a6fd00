"""The streams in Triton against Random123's published vectors and against `specdec.streams`, word for word."""

import pytest
import torch
import triton
import triton.language as tl

from specdec import streams
from specdec.kernels import philox
from specdec.streams import WORD, Purpose
from tests.specdec.test_streams import KNOWN

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the NaNs that the interpreter meets
SEEDS = [0, 1, 2**40 + 7, 2**64 - 1, -3]


@triton.jit
def four_words(out, seed, request, time, use, index):
    at = tl.arange(0, 1)
    use = tl.load(use).to(tl.uint32)
    words = philox.in_order(*philox.stream_words(seed, tl.load(request), tl.load(time), use, tl.load(index + at)))
    tl.store(out + tl.arange(0, 4), words.to(tl.int64))


def addresses():
    """Streams and times at and across the ends of a word."""
    ids = [5, 2**31, WORD]
    pairs = torch.cartesian_prod(torch.tensor(ids), torch.tensor(ids)).to(DEVICE)
    return pairs[:, 0].contiguous(), pairs[:, 1].contiguous()


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN)
def test_known_answers(counter, key, want):
    out = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    seed = philox.signed(key[0] + (key[1] << 32))
    four_words[(1,)](out, seed, *(torch.tensor([c], device=DEVICE) for c in counter))
    assert tuple(out.tolist()) == want


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("first", "count"), [(0, 6), (4, 4200)])
def test_words_are_those_of_the_torch_streams(seed, first, count):
    requests, times = addresses()
    got = philox.words(seed, requests, times, Purpose.COUPLED, first, count)
    assert torch.equal(got, streams.words(seed, requests, times, Purpose.COUPLED, first, count))


def test_broken_control_another_order_of_the_words(monkeypatch):
    requests, times = addresses()
    want = streams.words(3, requests, times, Purpose.COUPLED, 0, 8)
    assert torch.equal(philox.words(3, requests, times, Purpose.COUPLED, 0, 8), want)
    monkeypatch.setattr(philox, "in_order", _not_interleaved)
    assert not torch.equal(philox.words(3, requests, times, Purpose.COUPLED, 0, 8), want)


@triton.jit
def _not_interleaved(w0, w1, w2, w3):
    return tl.interleave(tl.interleave(w0, w1), tl.interleave(w2, w3))


@pytest.mark.parametrize("seed", SEEDS)
def test_uniforms_are_those_of_the_torch_streams(seed):
    requests, times = addresses()
    got = philox.uniforms(seed, requests, times, Purpose.ACCEPT, 3, 7)
    want = streams.uniforms(seed, requests.cpu().numpy(), times.cpu().numpy(), Purpose.ACCEPT, 3, 7)
    assert got.dtype == torch.float64 and got.cpu().numpy().tolist() == want.tolist()


def test_gumbel_noise_is_within_rounding_of_the_definition():
    """The ends and small words are included: the largest noise decides an arg-max, and float32's log1p is delicate."""
    words = noise_words()
    got = philox.gumbel_noise(words)
    assert (got - streams.gumbel(words)).abs().max() < 4e-6  # the same rounded v in both
    large = words < 2**31
    assert (got - streams.gumbel(words, torch.float64))[large].abs().max() < 4e-6


def test_broken_control_a_plain_logarithm_loses_the_large_noise(monkeypatch):
    monkeypatch.setattr(philox, "gumbel", _plain_gumbel)
    assert (philox.gumbel_noise(noise_words()) - streams.gumbel(noise_words())).abs().max() > 0.1


@triton.jit
def _plain_gumbel(words):
    v = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    return -tl.log(-tl.log(1.0 - v))


def noise_words():
    """Both ends, a range of small words, and random ones."""
    random = torch.randint(0, 2**32, (20_000,), generator=torch.Generator().manual_seed(0))
    special = torch.tensor([2**20, 2**24 + 1, 2**31, WORD - 2**9, WORD - 1, WORD])
    return torch.cat([torch.arange(2000), special, random]).to(DEVICE)


def test_no_stream_and_no_word_launch_nothing():
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert philox.words(0, none, none, Purpose.PICK, 0, 3).shape == (0, 3)
    assert philox.gumbel_noise(none).shape == (0,)
