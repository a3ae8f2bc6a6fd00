"""Greedy and coupled kernels against their torch references, and every kernel through the compiler for a GPU."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import verifiers.kernels.choice
import verifiers.kernels.inputs
from specdec.contracts import Scores
from specdec.draws import make_draws
from specdec.registry import VERIFIERS, known
from specdec.streams import Purpose, gumbel, words
from tests.verifiers.kernel_cases import DEVICE, differing_rows, random_step
from verifiers.kernels.choice import coupled, coupled_reference, greedy, greedy_reference
from verifiers.kernels.inputs import Warp

SEED = 2**40 + 11
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the NaNs that the interpreter meets
interpreted = pytest.mark.skipif(
    DEVICE == "cuda", reason="patches a device function, which only the interpreter allows"
)


@pytest.fixture
def chunk(monkeypatch):
    """Sets the vocabulary entries per program: small for many chunks, large because the interpreter is slow."""
    return lambda entries: monkeypatch.setattr(verifiers.kernels.inputs, "BLOCK", entries)


def keys(B):
    """Request ids and positions of B rows, some near the end of a word."""
    return torch.arange(B, device=DEVICE) + 2**32 - 5, torch.arange(B, device=DEVICE) * 1000


def check(got, want):
    """Equal verdicts, `accept_prob` included."""
    assert differing_rows(got, want) == []
    assert torch.equal(got.accept_prob.nan_to_num(-1), want.accept_prob.nan_to_num(-1))


def coupled_near_ties(step, warp=None):
    """Rows of the coupled kernel that differ from the reference, each confirmed in float64: the tokens at its first
    differing place have perturbed logits within rounding of each other. Asserts that no other row differs."""
    requests, positions = keys(len(step.draft.lengths))
    got, want = (f(step.draft, step.p, SEED, requests, positions, warp) for f in (coupled, coupled_reference))
    differing = differing_rows(got, want)
    for b in differing:
        place = min(got.n_accepted[b].item(), want.n_accepted[b].item())
        logits = (warp or Warp()).apply(step.p.logits)[step.p.index[b, place]].double()
        at = (requests[b : b + 1], positions[b : b + 1] + place)
        perturbed = logits + gumbel(words(SEED, *at, Purpose.COUPLED, 0, len(logits)), torch.float64)[0]
        chosen = [(v.next_token if v.n_accepted[b] == place else step.draft.tokens[:, place])[b] for v in (got, want)]
        assert (perturbed.max() - perturbed[torch.stack(chosen)]).max() < 1e-5, f"row {b} differs and is no near-tie"
    return len(differing)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("V", "entries"), [(17, 32), (1000, 512)])
def test_greedy(chunk, dtype, V, entries):
    """Few distinct logits: many ties, of which the first counts, also between chunks."""
    chunk(entries)
    step = random_step([3, 0, 2, 3], V, "one-hot", dtype, seed=V)
    check(greedy(step.draft, step.p), greedy_reference(step.draft, step.p))
    tied = Scores(step.p.logits.round().clamp(max=2), step.p.index)
    tokens = tied.logits.argmax(-1)[tied.index][:, :3]
    tokens[3, 1] += 1
    draft = replace(step.draft, tokens=tokens)
    got = greedy(draft, tied)
    check(got, greedy_reference(draft, tied))
    assert got.n_accepted.tolist() == [3, 0, 2, 1]


@pytest.mark.parametrize("V", [49_152, 128_256, 262_144])
def test_large_vocabularies(chunk, V):
    chunk(65_536)
    step = random_step([1, 0], V, "one-hot", torch.bfloat16, seed=V)
    check(greedy(step.draft, step.p), greedy_reference(step.draft, step.p))
    assert coupled_near_ties(step) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("V", "entries"), [(17, 32), (1000, 512)])
def test_coupled(chunk, dtype, V, entries):
    """Drafts are the tokens that the coupled choice gives, but for one: rows are accepted up to it."""
    chunk(entries)
    step = random_step([3, 0, 2, 3], V, "one-hot", dtype, seed=V)
    scale = torch.rand(len(step.p.logits), generator=torch.Generator().manual_seed(1)).to(DEVICE) + 0.5
    warp = Warp(scale, (step.p.logits.float() * scale[:, None]).topk(10).values[:, -1])
    requests, positions = keys(4)
    tokens = step.draft.tokens.clone()
    for place in range(3):  # the reference's own choice after the tokens so far
        verdict = coupled_reference(replace(step.draft, tokens=tokens), step.p, SEED, requests, positions, warp)
        tokens[:, place] = torch.where(verdict.n_accepted == place, verdict.next_token, tokens[:, place])
    tokens[3, 1] = (tokens[3, 1] + 1) % V
    step = replace(step, draft=replace(step.draft, tokens=tokens))
    assert coupled_near_ties(step, warp) == 0
    assert coupled(step.draft, step.p, SEED, requests, positions, warp).n_accepted.tolist() == [3, 0, 2, 1]


@pytest.mark.parametrize("name", ["greedy", "coupled"])
def test_the_engines_own_verdict(name, chunk):
    """Not only the reference beside the kernel: the verifier itself, its draws made as the loop makes them."""
    chunk(64)
    step = random_step([3, 0, 2], 100, "one-hot", seed=21)
    requests, positions = [4, 2**32 - 1, 0], [12, 7, 2**31]
    verifier = known(VERIFIERS, name, "verifier")()
    draws = make_draws(verifier.draws, SEED, requests, [0] * 3, positions, lambda logits: logits, DEVICE)
    want = verifier.verify(step.draft, step.p, draws)
    keyed = (SEED, torch.tensor(requests, device=DEVICE), torch.tensor(positions, device=DEVICE))
    got = coupled(step.draft, step.p, *keyed) if name == "coupled" else greedy(step.draft, step.p)
    assert differing_rows(got, want) == []


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_undefined_places_emit_minus_one(chunk, bad):
    chunk(32)
    step = random_step([1, 1, 0], 40, "one-hot", seed=3)
    logits = step.p.logits.clone()
    logits[2, 33 if bad != -torch.inf else slice(None)] = bad
    p = Scores(logits, step.p.index)
    requests, positions = keys(3)
    for got in (greedy(step.draft, p), coupled(step.draft, p, SEED, requests, positions)):
        assert (got.next_token >= 0).tolist() == [True, False, True]
    check(greedy(step.draft, p), greedy_reference(step.draft, p))


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_empty_batches_and_drafts(lengths):
    step = random_step(lengths, 17, "one-hot")
    check(greedy(step.draft, step.p), greedy_reference(step.draft, step.p))
    assert coupled_near_ties(step) == 0


# Broken controls.


@triton.jit
def last_of_chunks(tops, ids, chunks, CHUNKS: tl.constexpr):
    c = tl.arange(0, CHUNKS)
    top = tl.load(tops + c, mask=c < chunks, other=-float("inf"))
    return tl.max(tl.where(top == tl.max(top, 0), tl.load(ids + c, mask=c < chunks, other=0), -1), 0).to(tl.int64)


@triton.jit
def same_noise_everywhere(seed, request, time, use, index):
    zero = index.to(tl.uint32) * 0
    return tl.philox(seed, zero + request.to(tl.uint32), zero, zero + use, index.to(tl.uint32))


@interpreted
@pytest.mark.parametrize(
    ("attribute", "broken"), [("first_of_chunks", last_of_chunks), ("stream_words", same_noise_everywhere)]
)
def test_broken_controls_are_caught(chunk, monkeypatch, controls, attribute, broken):
    chunk(16)
    step = random_step([1, 1], 40, "one-hot", seed=3)
    tied = replace(step, p=Scores(step.p.logits.round().clamp(max=1), step.p.index))

    def compare():
        check(greedy(tied.draft, tied.p), greedy_reference(tied.draft, tied.p))
        assert coupled_near_ties(step) == 0

    compare()
    monkeypatch.setattr(verifiers.kernels.choice, attribute, broken)
    with pytest.raises(AssertionError):
        compare()
    controls(f"kernel choice: {broken.__name__}", "other tokens than the torch reference, and no near-tie in float64")


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="the other tests compile the kernels where there is a GPU")
def test_every_kernel_compiles_for_a_gpu():
    """The interpreter accepts what the compiler does not; a child, because this process interprets."""
    root = Path(__file__).parent.parent.parent
    script = root / "tests" / "verifiers" / "compile_kernels.py"
    env = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(root)}
    ended = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == sorted(
        ["_gumbel_kernel", "_uniforms_kernel", "_words_kernel", "choice_kernel", "node_kernel", "pick_kernel"]
        + ["prefix_kernel"]
    )
