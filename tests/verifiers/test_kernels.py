"""Fused verification against the torch references: on a GPU where there is one, else in Triton's interpreter."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from transformers.generation import logits_process as hf

import verifiers.kernels.block
import verifiers.kernels.inputs
import verifiers.kernels.nodes
import verifiers.kernels.pick
from specdec.contracts import Scores
from specdec.draws import inverse_cdf, make_draws
from specdec.registry import VERIFIERS, known
from specdec.streams import Purpose, uniforms
from tests.verifiers.kernel_cases import DEVICE, Step, differing_rows, near_ties, random_step
from verifiers.kernels.block import block, block_reference
from verifiers.kernels.inputs import Warp, draft_arguments, target_arguments
from verifiers.kernels.nodes import score_nodes
from verifiers.kernels.rejection import rejection, rejection_reference

RULES = {"rejection": (rejection, rejection_reference), "block": (block, block_reference)}
ALMOST_ONE = 1 - 2**-53
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the NaNs that the interpreter meets
interpreted = pytest.mark.skipif(
    DEVICE == "cuda", reason="patches a device function, which only the interpreter allows"
)


@pytest.fixture(params=RULES)
def rule(request):
    return RULES[request.param]


@pytest.fixture
def chunk(monkeypatch):
    """Sets the vocabulary entries per program: small for many chunks, large because the interpreter is slow."""
    return lambda entries: monkeypatch.setattr(verifiers.kernels.inputs, "BLOCK", entries)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("q", torch.float32), ("q", torch.bfloat16), ("one-hot", torch.float32), ("mixed", torch.bfloat16)],
)
@pytest.mark.parametrize(("V", "entries"), [(17, 32), (1000, 512)])
def test_small_vocabularies(rule, chunk, kind, dtype, V, entries):
    chunk(entries)
    step = random_step([3, 0, 2, 3], V, kind, dtype, seed=V)
    assert near_ties(*rule, step) == 0


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("kind", ["q", "mixed"])
def test_the_engines_own_verdict(name, chunk, kind):
    """Not only the reference beside the kernel: the verifier itself, its draws made as the loop makes them."""
    chunk(64)
    step = random_step([3, 0, 2], 100, kind, seed=19)
    requests, steps = [4, 2**32 - 1, 0], [0, 7, 2**31]
    draws = make_draws("fresh", 5, requests, steps, [0] * 3, lambda logits: logits, DEVICE)
    pick_u = uniforms(5, np.array(requests), np.array(steps), Purpose.PICK, 0, 1)[:, 0]
    want = known(VERIFIERS, name, "verifier")().verify(step.draft, step.p, draws)
    got = RULES[name][0](step.draft, step.p, draws.uniform(3), torch.from_numpy(pick_u).to(DEVICE))
    assert differing_rows(got, want) == []


@pytest.mark.parametrize("V", [49_152, 128_256, 262_144])
def test_large_vocabularies(rule, chunk, V):
    chunk(32_768)
    assert near_ties(*rule, random_step([2, 1], V, "q", torch.bfloat16, seed=V)) <= 1


def test_the_shipped_chunk(rule):
    assert near_ties(*rule, random_step([1, 1], 20_000, "mixed")) == 0


def test_near_ties_are_counted_and_larger_differences_are_not_ties(rule):
    """A uniform at the very threshold is a tie, one a percent away is not: the comparison itself is tested."""
    kernel, reference = rule
    step = random_step([1], 17, "one-hot", seed=2)
    h = reference(*step.arguments).accept_prob.double()
    assert 0.05 < h.item() < 0.95
    accepting = lambda draft, p, u, pick_u, warp=None: kernel(draft, p, u * 0, pick_u, warp)  # noqa: E731
    assert near_ties(accepting, reference, replace(step, u=h + 1e-6)) == 1
    with pytest.raises(AssertionError, match="no near-tie"):
        near_ties(accepting, reference, replace(step, u=h * 1.01))


def test_processed_on_load_equals_hf_processors(rule, chunk):
    """Temperature 1/2 and top-k in two rows' places, min-p in the others'; the reference gets HF's own output."""
    chunk(128)
    step = random_step([2, 1], 200, "q", seed=5)
    logits = step.p.logits.clone()
    warp = Warp(scale=torch.ones(len(logits), device=DEVICE), floor=torch.empty(len(logits), device=DEVICE))
    processed = logits.clone()
    for row in range(len(logits)):
        if row % 2:
            warp.scale[row] = 2
            warp.floor[row] = 2 * logits[row].topk(20).values[-1]
            warped = hf.TemperatureLogitsWarper(0.5)(None, logits[row : row + 1])
            processed[row] = hf.TopKLogitsWarper(20)(None, warped)[0]
        else:
            warp.floor[row] = logits[row].max() + torch.log(torch.tensor(0.0123))
            processed[row] = hf.MinPLogitsWarper(0.0123)(None, logits[row : row + 1])[0]
    assert torch.equal(warp.apply(logits), processed)
    kernel, reference = rule
    want = replace(step, p=Scores(processed, step.p.index))
    got = kernel(*step.arguments, warp)
    assert differing_rows(got, reference(*want.arguments)) == []
    assert differing_rows(kernel(*step.arguments), reference(*want.arguments)) != []  # the warp matters in this step


@pytest.mark.parametrize("pick_u", [0.0, ALMOST_ONE])
def test_excluded_tokens_are_never_emitted_nor_accepted(rule, chunk, pick_u):
    """Also at u = 0, where only a strict comparison rejects a drafted token of probability 0."""
    chunk(64)
    step = random_step([2, 0], 70, "q", seed=7)
    logits = step.p.logits.clone()
    logits[:, :40] = logits[:, 66:] = -torch.inf
    tokens = torch.zeros_like(step.draft.tokens)
    u, pick_u = torch.zeros_like(step.u), torch.full_like(step.pick_u, pick_u)
    step = Step(replace(step.draft, tokens=tokens), Scores(logits, step.p.index), u, pick_u)
    assert near_ties(*rule, step) == 0
    got = rule[0](*step.arguments)
    assert got.n_accepted.tolist() == [0, 0]
    assert ((got.next_token >= 40) & (got.next_token < 66)).all()


def test_residual_without_mass_falls_back_to_p(rule):
    """q is 0.1 % above p everywhere, through its normaliser, and the drafted token is rejected."""
    step = random_step([1, 1], 50, "q", seed=9)
    q_logits = step.p.logits[step.p.index[:, :1]]
    draft = replace(step.draft, q_logits=q_logits, q_logz=q_logits.logsumexp(-1) - 1e-3)
    step = Step(draft, step.p, torch.full_like(step.u, 0.9995), step.pick_u)
    assert near_ties(*rule, step) == 0
    got = rule[0](*step.arguments)
    want = inverse_cdf(step.p.probs(torch.zeros(2, dtype=torch.long, device=DEVICE)), step.pick_u)
    assert got.n_accepted.tolist() == [0, 0] and torch.equal(got.next_token, want)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_undefined_rows_emit_minus_one_and_leave_others_alone(rule, chunk, bad):
    chunk(32)
    step = random_step([1, 1], 40, "q", seed=11)
    step = replace(step, u=torch.zeros_like(step.u))
    logits = step.p.logits.clone()
    root = step.p.index[1, 0]
    logits[root, :] = logits[root, :] if bad > -torch.inf else bad  # -inf must be everywhere to leave no token
    logits[root, 33] = bad
    broken = replace(step, p=Scores(logits, step.p.index))
    assert near_ties(*rule, broken) == 0
    got, whole = rule[0](*broken.arguments), rule[0](*step.arguments)
    assert got.next_token[1] == -1
    assert got.next_token[0] == whole.next_token[0] and (whole.next_token >= 0).all()


def test_nan_in_q_of_the_rejected_place_is_undefined(rule, chunk):
    chunk(32)
    step = random_step([1, 1], 40, "q", seed=13)
    q_logits = step.draft.q_logits.clone()
    q_logits[0, 0, 39] = torch.nan
    draft = replace(step.draft, q_logits=q_logits, q_logz=q_logits.logsumexp(-1))
    got = rule[0](draft, step.p, step.u, step.pick_u)
    assert (got.next_token >= 0).tolist() == [False, True]


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_empty_batches_and_drafts(rule, lengths):
    step = random_step(lengths, 17, "one-hot")
    assert near_ties(*rule, step) == 0
    got = rule[0](*step.arguments)
    assert got.path.shape == got.accept_prob.shape == (len(lengths), 0)
    assert got.n_accepted.tolist() == [0] * len(lengths) and (got.next_token >= 0).all()


def test_strided_inputs_are_read_as_they_are(rule):
    step = random_step([2, 1], 33, "q", seed=15)
    wide = torch.full((len(step.p.logits), 50), 9.0, device=DEVICE)
    wide[:, :33] = step.p.logits
    draft = replace(
        step.draft,
        tokens=step.draft.tokens.T.contiguous().T,
        q_logits=step.draft.q_logits.transpose(0, 1).contiguous().transpose(0, 1),
        q_logz=step.draft.q_logz.T.contiguous().T,
    )
    strided = Step(draft, Scores(wide[:, :33], step.p.index), step.u.T.contiguous().T, step.pick_u)
    assert differing_rows(rule[0](*strided.arguments), rule[1](*step.arguments)) == []


def test_what_kernels_do_not_take_is_named(rule):
    step = random_step([1], 17, "q")
    with pytest.raises(ValueError, match="q_ids"):
        rule[0](replace(step.draft, q_ids=torch.arange(17)), step.p, step.u, step.pick_u)
    with pytest.raises(ValueError, match="tree"):
        rule[0](replace(step.draft, parents=torch.zeros(1, 1)), step.p, step.u, step.pick_u)
    transposed = Scores(step.p.logits.T.contiguous().T, step.p.index)
    with pytest.raises(ValueError, match="stride"):
        rule[0](step.draft, transposed, step.u, step.pick_u)


@interpreted
def test_places_after_a_rejection_are_not_read():
    """In the interpreter programs run in order, so every later place is skipped; block needs them all."""
    step = random_step([3, 3], 17, "q", seed=1)
    u = torch.tensor([[0.0, ALMOST_ONE, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    far = replace(step.draft, tokens=step.p.logits.argmin(-1)[step.p.index[:, :3]])
    target, q = target_arguments(far, step.p), draft_arguments(far)
    assert score_nodes(target, q, u).logz.isnan().tolist() == [[False, False, True, True], [False] * 4]
    assert not score_nodes(target, q, None).logz.isnan().any()


# Broken controls: device functions replaced; the comparison with the reference must catch each.


@triton.jit
def accepts_equality(p, q, u):
    return u * q.to(tl.float64) <= p.to(tl.float64)


@triton.jit
def not_subtracted(p, q):
    return p


@triton.jit
def one_place_late(stopped, b, length, N):
    mark = tl.load(stopped + b)
    return tl.minimum(tl.where(mark > 0, N + 2 - mark, length), length)


@triton.jit
def without_order(counter, expected):
    """The first program to finish decides, before the others have stored their share."""
    return tl.atomic_add(counter, 1) == 0


BROKEN = {
    "<= instead of <": ([(verifiers.kernels.nodes, "accepts", accepts_equality)], "rejection"),
    "residual not subtracted": ([(verifiers.kernels.pick, "residual", not_subtracted)], "rejection"),
    "residual not subtracted (prefix mass)": ([(verifiers.kernels.block, "residual_of", not_subtracted)], "block"),
    "off-by-one in the accepted prefix": ([(verifiers.kernels.pick, "accepted_count", one_place_late)], "rejection"),
    "combined before all chunks are there": (
        [(m, "arrives_last", without_order) for m in (verifiers.kernels.nodes, verifiers.kernels.pick)],
        "rejection",
    ),
}


@interpreted
@pytest.mark.parametrize("name", BROKEN)
def test_broken_controls_are_caught(name, chunk, monkeypatch, controls):
    chunk(32)
    patches, rule = BROKEN[name]
    step = random_step([2, 1, 2, 2], 40, "q", seed=20)
    logits = step.p.logits.clone()
    logits[0, step.draft.tokens[0, 0]] = -torch.inf  # a drafted token with p = 0, met by u = 0
    u = step.u.clone()
    u[0, 0], u[2, 0] = 0, ALMOST_ONE
    root, rejected = logits[step.p.index[2, 0]].softmax(-1), step.draft.tokens[2, 0]
    pick_u = step.pick_u.clone()
    pick_u[2] = root[:rejected].sum() + root[rejected] / 2  # where p itself would give the rejected token again
    step = Step(step.draft, Scores(logits, step.p.index), u, pick_u)
    assert near_ties(*RULES[rule], step) == 0
    for module, attribute, broken in patches:
        monkeypatch.setattr(module, attribute, broken)
    with pytest.raises(AssertionError):
        near_ties(*RULES[rule], step)
    controls(f"kernel {rule}: {name}", "other tokens than the torch reference, and no near-tie in float64")
