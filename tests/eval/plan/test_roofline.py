"""The roofline model by hand, its monotonicity, and its fit to forwards of a known device."""

import itertools

import pytest

from eval.plan.curve import Curve
from eval.plan.roofline import Device, Point, Roofline, fit
from eval.plan.shape import AttentionLayers
from tests.eval.plan.shapes import dense

DEVICE = Device(bandwidth=1e12, compute=1e14)
ATTENTION = (AttentionLayers(count=10, kv_elements=1000, flops=4000, window=None),)
GRID = ((1, 2, 4, 8), (1, 3, 6), (100, 1000))


def test_by_hand():
    """Weights take 2 ms to read and 20 us per token to compute with: the worked example."""
    seconds = Roofline(dense(), DEVICE)
    assert seconds(1, 1, 0) == seconds(10, 10, 5000) == pytest.approx(2e-3)
    assert seconds(40, 5, 0) == pytest.approx(4e-3)


def test_attention_and_overhead_by_hand():
    """A row's 1,000 seen tokens are 1,000 x 10 x 1,000 x 2 bytes = 20 us, and 0.4 us of arithmetic per query; 10 layers
    of 7 us."""
    seconds = Roofline(dense(ATTENTION), Device(1e12, 1e14, layer_overhead=7e-6))
    assert seconds(1, 1, 999) == pytest.approx(2e-3 + 20e-6 + 70e-6)
    assert seconds(3, 1, 999) == pytest.approx(2e-3 + 60e-6 + 70e-6)
    assert seconds(1, 100, 900) == pytest.approx(2e-3 + 40e-6 + 70e-6)  # arithmetic: 100 queries


def test_without_overlap_both_times_add_up():
    assert Device(1e12, 1e14, overlap=0).seconds(2e9, 1e11) == pytest.approx(3e-3)
    assert Device(1e12, 1e14, overlap=0.5).seconds(2e9, 1e11) == pytest.approx(2.5e-3)


def test_more_work_never_takes_less_time():
    seconds = Roofline(dense(ATTENTION), Device(1e12, 1e14, 1e-6, 0.7))
    sizes = [1, 2, 7, 40, 300]
    for a, b in itertools.pairwise(sizes):
        for other in sizes:
            assert seconds(a, other, 500) <= seconds(b, other, 500)
            assert seconds(other, a, 500) <= seconds(other, b, 500)
            assert seconds(other, 2, 10 * a) <= seconds(other, 2, 10 * b)


def points_of(device: Device) -> list[Point]:
    seconds = Roofline(dense(ATTENTION), device)
    return [Point(*place, seconds(*place)) for place in itertools.product(*GRID)]


@pytest.mark.parametrize("overlap", [0.0, 0.6, 1.0])
def test_fit_finds_the_device_behind_the_forwards(overlap):
    """What the forwards tell is found even where copy and product said twice and half as much."""
    true = Device(1e11, 1e12, layer_overhead=2e-5, overlap=overlap)
    found = fit(points_of(true), dense(ATTENTION), measured=Device(2e11, 5e11))
    for point in points_of(true):
        assert Roofline(dense(ATTENTION), found)(point.rows, point.width, point.context) == pytest.approx(
            point.seconds, rel=0.05
        )
    assert found.compute == pytest.approx(true.compute, rel=0.2)


def test_fit_keeps_what_the_forwards_do_not_tell():
    """Broken control of the test above: all points are bound by reading, so compute stays what the product said."""
    points = [point for point in points_of(Device(1e9, 1e15, overlap=1.0)) if point.width == 1]
    assert fit(points, dense(ATTENTION), measured=Device(1e9, 3e14)).compute > 1e14


class TestCurve:
    model = staticmethod(lambda rows, width, context: 1e-3 * rows * width)

    def test_is_exact_where_it_was_measured(self):
        points = [Point(*place, 1e-3 + sum(place) * 1e-5) for place in itertools.product(*GRID)]
        curve = Curve(points, self.model)
        assert all(curve(p.rows, p.width, p.context) == pytest.approx(p.seconds) for p in points)

    def test_between_and_beyond(self):
        """Measured forwards take twice the model at one row and three times at four: in between a factor in between,
        beyond three times."""
        curve = Curve([Point(1, 1, 10, 2e-3), Point(4, 1, 10, 12e-3)], self.model)
        assert 2 * 2e-3 < curve(2, 1, 10) < 3 * 2e-3
        assert curve(100, 5, 99) == pytest.approx(3 * 0.5)
        assert curve.largest == (4, 1, 10)

    def test_one_point_is_enough(self):
        assert Curve([Point(2, 3, 10, 0.012)], self.model)(1, 1, 500) == pytest.approx(2e-3)

    def test_holes_and_repeats_are_named(self):
        full = [Point(*place, 1e-3) for place in itertools.product(*GRID)]
        with pytest.raises(ValueError, match="no point at rows 2, width 3, context 1000"):
            Curve([p for p in full if (p.rows, p.width, p.context) != (2, 3, 1000)], self.model)
        with pytest.raises(ValueError, match="more than once"):
            Curve([*full, full[0]], self.model)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Device(0, 1e12), "bandwidth of 0"),
        (lambda: Device(1e9, -1), "compute of -1"),
        (lambda: Device(float("inf"), 1e12), "bandwidth of inf"),
        (lambda: Device(1e9, 1e12, layer_overhead=float("nan")), "overhead per layer is nan"),
        (lambda: Device(1e9, 1e12, overlap=1.5), "overlap 1.5"),
        (lambda: Device(1e9, 1e12, layer_overhead=-1e-6), "overhead per layer is -1e-06"),
        (lambda: Point(0, 1, 1, 1e-3), "not a measured forward"),
        (lambda: Point(1, 1, 1, float("nan")), "not a measured forward"),
    ],
)
def test_impossible_values_are_named(make, said):
    with pytest.raises(ValueError, match=said):
        make()
