"""The tests of emitted tokens: right about simulated rules, silent about correct ones."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from eval.fidelity.distribution import Statistic, all_tests, corrected, function_test, joint_test, transform_test
from eval.fidelity.samples import samples
from eval.fidelity.settings import ALPHA, LEVEL, POWER

V = 500


def laws(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Generator]:
    """n random target and draft distributions [n, V] that overlap as a fair draft model's do."""
    rng = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, V, generator=rng, dtype=torch.float64)
    return logits.softmax(-1), (logits + torch.randn(n, V, generator=rng, dtype=torch.float64)).softmax(-1), rng


def draw(weights: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    return torch.multinomial(weights, 1, generator=rng)[:, 0]


def emitted(kind: str, p: torch.Tensor, q: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """[n] tokens of one step of token rejection with a draft of one, correct or with a bug."""
    rows = torch.arange(len(p))
    draft = q.argmax(-1) if kind == "greedy draft" else draw(q, rng)
    accept = torch.rand(len(p), generator=rng, dtype=torch.float64) * q[rows, draft] < p[rows, draft]
    rest = p if kind == "resample from p" else (p - q).clamp(min=0)
    return torch.where(accept, draft, draw(rest, rng))


def run(kind: str, n: int, seed: int = 0) -> dict[str, Statistic]:
    p, q, rng = laws(n, seed)
    tokens = emitted(kind, p, q, rng).tolist()
    found = samples(p.log(), tokens, list(q.log().half()), np.random.default_rng(seed))
    return {test.name: test for test in corrected(all_tests([found]))}


@pytest.mark.parametrize("seed", range(5))
def test_a_correct_rule_raises_no_alarm(seed):
    found = run("correct", 1000, seed)
    assert found.keys() == {"log p", "q", "log q", "pit"}
    assert not any(test.failed for test in found.values())


@pytest.mark.parametrize("kind", ["greedy draft", "resample from p"])
def test_broken_rules_are_caught(kind):
    assert any(test.failed for test in run(kind, 2000).values())


@pytest.mark.slow
def test_p_values_of_a_correct_rule_are_uniform():
    """120 correct runs: no test is biased towards alarm or towards silence."""
    runs = [run("correct", 300, seed) for seed in range(120)]
    for name in runs[0]:
        assert stats.kstest([run[name].p_value for run in runs], "uniform").pvalue > 1e-3, name


def test_smallest_bias_is_found_with_the_stated_power():
    """Excesses of exactly that bias, of variance 1, fail at the level in a share POWER of the runs."""
    rng = np.random.default_rng(0)
    n = 400
    smallest = function_test("q", np.tile([0.0, 1.0, 0.0], (n, 1))).smallest
    failed = [
        function_test("q", np.c_[rng.normal(smallest, 1, n), np.ones(n), np.zeros(n)]).p_value < LEVEL
        for _ in range(600)
    ]
    assert np.mean(failed) == pytest.approx(POWER, abs=0.04)


def test_one_rare_token_is_no_alarm():
    """1,000 positions where the draft has p = 0.001: the normal law would call two hits in one run 1 in 2,000 ..."""
    p, hits = 1e-4, 2
    rows = np.tile([-p, p * (1 - p), p * (1 - p) * (1 - 2 * p)], (1000, 1))
    rows[:hits, 0] += 1
    test = function_test("q", rows)
    exact = stats.binom.sf(hits - 1, 1000, p)
    assert 2 * stats.norm.sf(test.value) < 1e-8 < ALPHA < exact  # ... a billion times too rare
    assert test.p_value > ALPHA


def test_rare_tokens_among_even_ones_are_no_alarm():
    """log p where 20 positions are open and at 40 nearly all mass lies on one token: type III with that skewness ends
    at z = 1.2, which one correct run in eight exceeds."""
    rng = np.random.default_rng(0)
    rare = np.r_[np.full(20, 0.4), np.full(40, 1e-3)]  # p of the less probable of two tokens
    f = np.log([rare, 1 - rare])
    centred = f - (rare * f[0] + (1 - rare) * f[1])
    variance, third = (rare * centred[0] ** k + (1 - rare) * centred[1] ** k for k in (2, 3))
    end = -2 * variance.sum() ** 1.5 / third.sum()
    found = [
        function_test("log p", np.c_[np.where(rng.random(60) < rare, *centred), variance, third]) for _ in range(500)
    ]
    assert np.mean([test.value > end for test in found]) > 0.05
    assert np.mean([test.p_value < ALPHA for test in found]) < 0.01


def test_a_function_without_variance_has_no_test():
    assert function_test("q", np.zeros((10, 3))) is None


def test_holm_by_hand():
    given = [Statistic(name, 1, 0.0, p, 0.0) for name, p in (("a", 0.01), ("b", 0.04), ("c", 0.03))]
    assert [test.p_holm for test in corrected(given)] == pytest.approx([0.03, 0.06, 0.06])


def test_transform_test_and_its_bound():
    n = 1000
    even = transform_test((np.arange(n) + 0.5) / n)
    assert even.p_value == pytest.approx(1.0) and even.value == pytest.approx(0.5 / n)
    assert even.bound == pytest.approx(0.5 / n + math.sqrt(math.log(2 / 0.05) / (2 * n)))
    assert transform_test(np.random.default_rng(0).beta(1, 1.3, n)).p_value < 1e-6


def test_joint_test_is_chi_square_where_no_cell_is_rare():
    cells, law = np.array([30, 50, 20]), np.array([0.25, 0.5, 0.25])
    found = joint_test(cells, law, tokens=200)
    expected = stats.chisquare(cells, 100 * law)
    assert (found.value, found.p_value) == pytest.approx((expected.statistic, expected.pvalue))
    assert found.bound > 0.05  # total variation of the counts alone


def test_joint_test_pools_rare_cells_and_never_forgives_an_impossible_one():
    law = np.array([0.5, 0.48, 0.01, 0.01])
    assert joint_test(np.array([50, 48, 1, 1]), law, 100).value == pytest.approx(0)
    lone = np.append(np.full(10, 0.1 * (1 - 5e-6)), 5e-6)  # 0.02 expected of 4,000: one draw is no alarm
    pooled = joint_test(np.append(np.full(9, 400), [399, 1]), lone, 4000)
    assert pooled.value < 0.01 and pooled.p_value > 0.99
    impossible = joint_test(np.array([50, 49, 1]), np.array([0.5, 0.5, 0.0]), 100)
    assert impossible.p_value == 0


def test_joint_bound_holds():
    """The true law is further from the stated one than the bound in at most 5% of the runs."""
    rng, law, true = np.random.default_rng(0), np.full(8, 1 / 8), np.array([0.2, *[0.8 / 7] * 7])
    distance = np.abs(true - law).sum() / 2
    assert all(joint_test(rng.multinomial(500, true), law, 500).bound > distance for _ in range(100))
