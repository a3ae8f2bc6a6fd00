"""Prefill and decode on separate devices: the seed's numbers, and the best split by brute force."""

import random

import pytest

from eval.plan.split import Rates, Split, best_split, plan

SEED = Rates(prefill=5.6, decode=10)


def test_the_seeds_numbers():
    assert Split(1, 1, SEED).requests_per_device == pytest.approx(2.8)
    assert Split(2, 1, SEED).requests_per_device == pytest.approx(10 / 3)  # 3.3
    assert (Split(1, 1, SEED).waiting, Split(2, 1, SEED).waiting) == ("decode", "prefill")
    assert best_split(SEED, 3) == Split(2, 1, SEED)
    assert SEED.balanced == pytest.approx(5.6 * 10 / 15.6)  # 3.59


def test_no_split_idles_where_the_rates_divide():
    assert Split(2, 1, Rates(5, 10)).waiting == "neither"
    assert Split(2, 1, Rates(5, 10)).requests_per_device == pytest.approx(Rates(5, 10).balanced)
    assert Split(3, 1, Rates(5.6, 16.8)).waiting == "neither"  # though 3 x 5.6 is not 16.8 in binary
    assert Split(3, 1, Rates(5.6, 16.9)).waiting == "decode"


def random_cases():
    rng = random.Random(0)
    return [(Rates(10 ** rng.uniform(-2, 2), 10 ** rng.uniform(-2, 2)), rng.randint(2, 40)) for _ in range(500)]


def brute_force(rates: Rates, devices: int) -> float:
    return max(min(n * rates.prefill, (devices - n) * rates.decode) for n in range(1, devices))


def test_best_split_is_that_of_a_search():
    for rates, devices in random_cases():
        found = best_split(rates, devices)
        assert found.devices == devices and found.prefill >= 1 and found.decode >= 1
        assert found.requests == pytest.approx(brute_force(rates, devices), rel=1e-12)
        assert found.requests_per_device <= rates.balanced * (1 + 1e-12)


def test_rounding_the_balanced_share_is_caught():
    """Broken control of the search: the balanced number of prefill devices, rounded, is often not the best one."""

    def rounded(rates: Rates, devices: int) -> float:
        prefill = min(max(round(devices * rates.decode / (rates.prefill + rates.decode)), 1), devices - 1)
        return Split(prefill, devices - prefill, rates).requests

    worse = [rounded(*case) < brute_force(*case) * (1 - 1e-9) for case in random_cases()]
    assert sum(worse) > 10


def test_speculation_moves_devices_from_decode_to_prefill():
    """Twice the decode rate, 20: of 16 devices 12.5 instead of 10.3 should prefill, and the limit rises to 4.375."""
    faster = SEED.with_speculation(2)
    assert faster == Rates(5.6, 20)
    assert best_split(SEED, 16) == Split(10, 6, SEED)  # 56 of 60
    assert best_split(faster, 16) == Split(12, 4, faster)  # 67.2 of 80, against 61.6 with 11
    assert faster.balanced == pytest.approx(112 / 25.6)
    for devices in range(2, 30):
        assert best_split(faster, devices).prefill >= best_split(SEED, devices).prefill
        assert best_split(faster, devices).requests >= best_split(SEED, devices).requests


def test_plan_has_a_row_for_each_number_of_devices():
    rows = plan(SEED, 2, 4)
    assert [row["devices"] for row in rows] == [2, 3, 4]
    assert rows[1]["plain_prefill"] == 2 and rows[1]["plain_requests_per_device"] == pytest.approx(10 / 3)
    assert rows[2]["speculative_requests"] == pytest.approx(min(3 * 5.6, 20))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Rates(0, 10), "prefills 0 and decodes 10"),
        (lambda: Rates(float("inf"), 10), "prefills inf"),
        (lambda: SEED.with_speculation(-1), "speed-up is -1"),
        (lambda: SEED.with_speculation(float("inf")), "decodes inf"),
        (lambda: plan(SEED, 1, 1), "1 device"),
    ],
)
def test_impossible_values_are_named(make, said):
    with pytest.raises(ValueError, match=said):
        make()
