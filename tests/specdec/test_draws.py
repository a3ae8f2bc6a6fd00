"""Samplers draw from their weights, never outside them, and address their numbers as promised."""

import pytest
import torch
from scipy import stats

from specdec.draws import defined_argmax, inverse_cdf, make_draws, raise_if_undefined
from specdec.streams import Purpose, gumbel, words

ALMOST_ONE = 1 - 2**-53


def identity(logits):
    return logits


def draws(kind="fresh", seed=0, requests=(0, 1), steps=(0, 0), positions=(5, 5), warp=identity):
    return make_draws(kind, seed, list(requests), list(steps), list(positions), warp, "cpu")


def p_value(tokens, weights):
    """Chi-square of tokens against the law proportional to `weights`."""
    law = weights.double() / weights.double().sum()
    return stats.chisquare(torch.bincount(tokens, minlength=len(law)), len(tokens) * law).pvalue


def test_inverse_cdf_takes_the_token_whose_interval_holds_u():
    weights = torch.tensor([[1.0, 0.0, 2.0, 1.0, 0.0]]).repeat(6, 1)  # intervals [0, 1/4), -, [1/4, 3/4), [3/4, 1)
    u = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, ALMOST_ONE], dtype=torch.float64)
    assert inverse_cdf(weights, u).tolist() == [0, 0, 2, 2, 3, 3]


@pytest.mark.parametrize("u", [0.0, ALMOST_ONE])
@pytest.mark.parametrize("V", [1, 17, 50_257])
def test_inverse_cdf_never_takes_a_token_without_weight_nor_one_out_of_range(V, u):
    weights = torch.zeros(2, V)
    weights[0, V // 2] = 1e-30
    weights[1, V // 3] = 3e30
    got = inverse_cdf(weights, torch.full((2,), u, dtype=torch.float64))
    assert got.tolist() == [V // 2, V // 3]


def test_inverse_cdf_marks_rows_without_a_distribution():
    weights = torch.tensor([[0.0, 0.0], [torch.nan, 1.0], [torch.inf, 1.0], [0.0, 1.0]])
    assert inverse_cdf(weights, torch.full((4,), 0.5, dtype=torch.float64)).tolist() == [-1, -1, -1, 1]


def test_the_error_names_row_request_and_step():
    raise_if_undefined(0, 1, 9, 2)
    with pytest.raises(ValueError, match=r"row 1 \(request 9\).*step 2"):
        raise_if_undefined(-1, 1, 9, 2)


def test_samples_follow_the_warped_logits_and_report_them_as_q():
    probs = torch.tensor([0.5, 0.25, 0.15, 0.1])
    n = 20_000
    sampler = draws(requests=range(n), steps=[0] * n, positions=[0] * n, warp=lambda logits: logits / 2)
    tokens, q_logits, q_logz = sampler.sample(2 * probs.log().expand(n, 4), depth=0)
    assert torch.allclose((q_logits - q_logz[:, None]).exp(), probs.expand(n, 4))
    assert p_value(tokens, probs) > 1e-3
    assert p_value(tokens, probs**2) < 1e-9  # broken control: the law of the raw logits is told apart


def test_rows_keep_their_own_numbers_in_any_batch_and_subset():
    logits = torch.randn(3, 1000)
    whole = draws(requests=[7, 8, 9], steps=[0, 4, 2], positions=[1, 1, 1])
    together = whole.sample(logits, depth=1)[0]
    assert whole.sample(logits[[2, 0]], depth=1, rows=[2, 0])[0].tolist() == together[[2, 0]].tolist()
    alone = draws(requests=[8], steps=[4], positions=[1])
    assert alone.sample(logits[1:2], depth=1)[0].item() == together[1].item()
    assert torch.equal(alone.uniform(5)[0], whole.uniform(5)[1])


def test_numbers_are_fresh_at_every_step_and_depth():
    flat = torch.zeros(1, 100_000)
    tokens = [draws(requests=[0], steps=[step]).sample(flat, depth)[0].item() for step in (0, 1) for depth in (0, 1)]
    assert len(set(tokens)) == 4


def test_siblings_have_their_own_numbers_and_without_replacement_q_leaves_the_earlier_out():
    logits = torch.zeros(1, 100_000)
    first, second = (draws().sample(logits, 0, rows=[0], index=i)[0].item() for i in (0, 1))
    assert first != second
    left = logits.index_fill(1, torch.tensor([first]), -torch.inf)
    _, q_logits, q_logz = draws().sample(left, 0, rows=[0], index=1)
    q = (q_logits - q_logz[:, None]).exp()[0]
    assert q[first] == 0 and q[second].item() == pytest.approx(1 / 99_999)


def test_where_the_warpers_leave_the_draft_no_token_its_own_q_is_drawn_from():
    """Rows: all that has mass is banned; some of it is; nothing had mass (siblings that ran out)."""
    banned = torch.tensor([0, 2])
    logits = torch.tensor([[0.25, 0, 0.75, 0], [0.5, 0.25, 0.25, 0], [0.0, 0, 0, 0]]).log()
    rows = draws(requests=range(3), steps=[0] * 3, warp=lambda x: x.index_fill(1, banned, -torch.inf))
    tokens, q_logits, q_logz = rows.sample(logits, 0)
    q = (q_logits - q_logz[:, None]).exp()
    assert torch.allclose(q[:2], torch.tensor([[0.25, 0, 0.75, 0], [0.0, 1, 0, 0]]))
    assert tokens[0] in banned and tokens[1] == 1
    assert q_logz[2] == -torch.inf and q[2].isnan().all()


def test_a_nan_draft_row_yields_an_index_in_range_and_a_nan_q():
    logits = torch.tensor([[0.0, torch.nan], [0.0, 1.0]])
    tokens, q_logits, q_logz = draws().sample(logits, 0)
    assert ((tokens >= 0) & (tokens < 2)).all()
    assert (q_logits - q_logz[:, None]).isnan().any(1).tolist() == [True, False]


def test_coupled_choices_depend_on_absolute_position_only():
    """Step row 0 at position 5, depth 2 is the same place as position 7, depth 0, whatever the steps were."""
    logits = torch.randn(1, 500)
    early = draws("coupled", requests=[3], steps=[0], positions=[5]).sample(logits, depth=2)[0]
    late = draws("coupled", requests=[3], steps=[9], positions=[7]).sample(logits, depth=0)[0]
    other = draws("coupled", requests=[3], steps=[9], positions=[8]).sample(torch.zeros(1, 500), depth=0)[0]
    assert early == late
    assert other != draws("coupled", requests=[3], steps=[9], positions=[7]).sample(torch.zeros(1, 500), depth=0)[0]


def test_coupled_noise_is_made_in_pieces_of_the_same_stream(monkeypatch):
    V = 3 * 64 + 10
    logits = torch.randn(6, V, generator=torch.Generator().manual_seed(0))
    sampler = draws("coupled", requests=range(6), steps=[0] * 6, positions=range(6))
    noise = gumbel(words(0, torch.arange(6), torch.arange(6), Purpose.COUPLED, 0, V))
    want = (logits + noise).argmax(-1)
    monkeypatch.setattr("specdec.draws.COUPLED_STEP", 64)
    assert torch.equal(sampler.sample(logits, 0)[0], want)
    assert len((want // 64).unique()) > 2  # several pieces won
    undefined = logits.index_put((torch.tensor([0, 1, 1]), torch.tensor([70, 5, 200])), torch.tensor(torch.nan))
    rows = torch.arange(6)
    assert (sampler.choose(undefined, rows, torch.zeros_like(rows)) == -1).tolist() == [True] * 2 + [False] * 4


def test_coupled_choices_follow_the_softmax():
    probs = torch.tensor([0.5, 0.25, 0.15, 0.1])
    n = 20_000
    tokens, q_logits, _ = draws("coupled", requests=range(n), steps=[0] * n, positions=[0] * n).sample(
        probs.log().expand(n, 4), depth=0
    )
    assert q_logits is None
    assert p_value(tokens, probs) > 1e-3


def test_argmax_draws_take_the_warped_maximum():
    ban_first = lambda logits: logits.index_fill(1, torch.tensor([0]), -torch.inf)  # noqa: E731
    tokens, q_logits, q_logz = draws("argmax", warp=ban_first).sample(torch.tensor([[3.0, 1.0, 2.0]]), 0)
    assert (tokens.tolist(), q_logits, q_logz) == ([2], None, None)


@pytest.mark.parametrize("V", [1, 3, 512, 513, 1025, 50_257])
def test_defined_argmax_is_the_first_maximum(V):
    logits = torch.randint(0, 4, (20, V)).float()  # many ties
    first = [row.index(max(row)) for row in logits.tolist()]
    assert defined_argmax(logits).tolist() == first


@pytest.mark.parametrize("V", [600, 1024])
@pytest.mark.parametrize("at", [0, 599])
def test_defined_argmax_marks_undefined_rows(V, at):
    logits = torch.zeros(4, V)
    logits[0, at] = torch.nan
    logits[1, at] = torch.inf
    logits[2] = -torch.inf
    logits[3, at] = 1
    assert defined_argmax(logits).tolist() == [-1, -1, -1, at]


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="'greedy'"):
        draws("greedy")
    with pytest.raises(ValueError, match="4294967296"):
        draws(requests=[0, 2**32])
    with pytest.raises(ValueError, match="fresh"):
        draws("argmax").uniform(3)
