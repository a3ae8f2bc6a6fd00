"""Acceptance by depth: counted, given, and read from an evaluation's folder."""

import json
import random

import pytest

from eval.plan.acceptance import Acceptance, of_folder
from tests.eval.plan.shapes import summary_row


def test_by_hand():
    found = Acceptance.of_steps([(2, 2), (2, 0), (0, 0)])
    assert found.accepted == pytest.approx((1 / 3, 1)) and found.drafted == pytest.approx((2 / 3, 2 / 3))
    assert [found.length(n) for n in range(3)] == pytest.approx([1, 4 / 3, 5 / 3])
    assert [found.mean_drafted(n) for n in range(3)] == pytest.approx([0, 2 / 3, 4 / 3])
    assert found.drafted_shares(2) == pytest.approx([1 / 3, 0, 2 / 3])
    assert found.drafted_shares(1) == pytest.approx([1 / 3, 2 / 3]) and found.drafted_shares(0) == [1]


def test_depths_that_no_step_reached_cost_and_give_nothing():
    found = Acceptance.of_steps([(4, 1), (4, 0)])
    assert found.accepted == (0.5, 0, 0, 0) and found.mean_drafted(4) == 4 and found.length(4) == 1.5


def drafter_steps(limit: int) -> list[tuple[int, int]]:
    """A drafter that often finds nothing, and whose later tokens are worse; the same steps whatever the limit."""
    rng, steps = random.Random(0), []
    for _ in range(4000):
        found = rng.choice([0, 2, 6])
        accepted = next((depth for depth in range(6) if rng.random() > 0.9 - 0.1 * depth), 6)
        drafted = min(found, limit)
        steps.append((drafted, min(accepted, drafted)))
    return steps


@pytest.mark.parametrize("limit", [1, 2, 4, 6])
def test_a_short_drafts_length_follows_from_the_long_ones(limit):
    long, short = Acceptance.of_steps(drafter_steps(6)), drafter_steps(limit)
    assert long.length(limit) == pytest.approx(1 + sum(a for _, a in short) / len(short))
    assert long.mean_drafted(limit) == pytest.approx(sum(d for d, _ in short) / len(short))


def test_acceptance_given_drafted_alone_is_caught():
    """Broken control: leaving out the steps that draft nothing promises longer drafts than there are."""
    steps = drafter_steps(6)
    flattering = Acceptance.of_steps([step for step in steps if step[0]])
    assert flattering.length(6) > 1.1 * (1 + sum(a for _, a in steps) / len(steps))


def write_summary(folder, *rows: dict) -> None:
    plain = {"method": "plain", "drafter": None, "temperature": 0.0, "error": None}
    (folder / "summary.json").write_text(json.dumps({"rows": [plain, *rows]}))


def test_read_from_a_folder(tmp_path):
    write_summary(tmp_path, summary_row("ngram", 0.0))
    found, counted = of_folder(tmp_path, None, None), Acceptance.of_steps([(2, 2), (2, 0), (0, 0)])
    assert found == of_folder(tmp_path, "ngram", 0.0)
    assert found.accepted == pytest.approx(counted.accepted) and found.drafted == pytest.approx(counted.drafted)


@pytest.mark.parametrize("limit", [1, 3, 6])
def test_a_folder_says_what_its_steps_do(tmp_path, limit):
    write_summary(tmp_path, summary_row("ngram", 0.0, drafter_steps(limit)))
    found, counted = of_folder(tmp_path, None, None), Acceptance.of_steps(drafter_steps(limit))
    assert found.accepted == pytest.approx(counted.accepted) and found.drafted == pytest.approx(counted.drafted)


@pytest.mark.parametrize(
    ("steps", "accepted", "drafted"),
    [
        ([(4, 1), (4, 0)], (1 / 2, 0), (1, 1)),
        ([(0, 0), (0, 0), (4, 1), (4, 0)], (1 / 4, 0), (1 / 2, 1 / 2)),
        ([(4, 0), (4, 0)], (0,), (1,)),
    ],
)
def test_depths_that_no_step_reached_do_not_change_the_number_of_steps(tmp_path, steps, accepted, drafted):
    """A summary leaves them out, though they count among the drafted tokens."""
    write_summary(tmp_path, summary_row("ngram", 0.0, steps))
    found = of_folder(tmp_path, None, None)
    assert found.accepted == pytest.approx(accepted) and found.drafted == pytest.approx(drafted)
    assert found.length(4) == pytest.approx(1 + sum(a for _, a in steps) / len(steps))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"rows": 5}', '{"rows": [{}]}', "\x89"])
def test_a_damaged_summary_is_one_line(tmp_path, text):
    (tmp_path / "summary.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match="not the summary of an evaluation") as error:
        of_folder(tmp_path, None, None)
    assert "\n" not in str(error.value)


def test_noise_free_acceptance_is_preferred(tmp_path):
    """Of two steps that drafted one token the first was accepted, by luck: its probabilities were 0.9 and 0.3."""
    write_summary(tmp_path, summary_row("m", 0.8, [(1, 1), (1, 0)], accept_prob=[[0.9], [0.3]]))
    assert of_folder(tmp_path, None, None).accepted == pytest.approx((0.6,))


def test_a_row_that_is_not_clear_is_asked_for(tmp_path):
    failed = {"method": "broken", "drafter": "broken", "temperature": 0.0, "error": "it broke"}
    rows = [summary_row(method, temperature) for method in ("ngram", "other") for temperature in (0.0, 0.8)]
    write_summary(tmp_path, failed, *rows)
    assert of_folder(tmp_path, "other", 0.8).depth == 2
    for asked, said in {
        (None, None): "method ngram, other, none was named",
        ("broken", None): "method ngram, other, not 'broken'",
        ("other", None): "temperature 0.0, 0.8, none was named",
        ("other", 0.5): "temperature 0.0, 0.8, not 0.5",
    }.items():
        with pytest.raises(ValueError, match=said):
            of_folder(tmp_path, *asked)
    with pytest.raises(FileNotFoundError, match="no summary.json"):
        of_folder(tmp_path / "nothing", None, None)
    write_summary(tmp_path, summary_row("idle", 0.0, [(0, 0)]))
    with pytest.raises(ValueError, match="no step drafted"):
        of_folder(tmp_path, None, None)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Acceptance.given([]), "at least one"),
        (lambda: Acceptance.given([0.5, 1.5]), "an acceptance is 1.5"),
        (lambda: Acceptance((0.5,), (1.0, 1.0)), "as many of both"),
        (lambda: Acceptance((0.5,), (float("nan"),)), "between 0 and 1"),
        (lambda: Acceptance((0.5, 0.5), (0.5, 0.6)), "they never rise"),
        (lambda: Acceptance.of_steps([(0, 0)]), "no step drafted"),
    ],
)
def test_impossible_values_are_named(make, said):
    with pytest.raises(ValueError, match=said):
        make()
