"""The drop-in on a grid of `generate`'s arguments: the same sequences, scores, caches and streams, or a refusal."""

import logging

import pytest

from specdec import loop
from specdec.stopping import Stops
from tests.specdec.argument_grid import COMBINATIONS, FAMILIES, OLD, combinations
from tests.specdec.conformance import MARKERS, README, Findings, refused_alone, refused_levels, table
from tests.specdec.covering import pairs, pairwise

FAST = 8  # combinations per family in the fast test; the families take different ones


@pytest.fixture(scope="module")
def alone() -> Findings:
    """Every level on its own."""
    logging.disable(logging.WARNING)  # what `generate` has to say about odd arguments
    yield refused_alone()
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def grid(alone) -> list[dict[str, str]]:
    return combinations(refused_levels(alone))


def test_every_argument_on_its_own(alone):
    assert not alone.failures, "\n".join(alone.failures)
    assert alone.counts["equal"] > 35


@pytest.mark.skipif(OLD, reason="older releases refuse less or word it differently")
def test_the_readme_tells_what_is_refused(alone):
    shown = README.read_text().partition(MARKERS[0])[2].partition(MARKERS[1])[0]
    assert shown.strip() == table(alone), "run python -m tests.specdec.conformance --write"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_part_of_the_grid(family, grid):
    place = FAMILIES.index(family)
    part = grid[-COMBINATIONS:][place * 29 :: 7 * 29 // FAST][:FAST]
    findings = Findings()
    for combination in part:
        for drafter in ("ngram", "guesses"):
            findings.run(family, combination, drafter)
    assert not findings.failures, "\n".join(findings.failures)
    assert findings.counts["equal"] > FAST and findings.counts["accepted"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_grid(family, grid):
    assert len(grid) >= 300
    findings = Findings()
    for number, combination in enumerate(grid):
        findings.run(family, combination, ("ngram", "guesses")[(number + FAMILIES.index(family)) % 2])
    assert not findings.failures, "\n".join(findings.failures)
    assert findings.counts["equal"] > 0.9 * len(grid) and findings.counts["generate breaks"] < 10
    assert 0.2 < findings.counts["accepted"] / findings.counts["drafted"] < 0.95


def test_the_grid_meets_every_pair(grid):
    levels = {"a": ("0", "1", "2"), "b": ("0", "1"), "c": ("0", "1")}
    found = pairwise(levels, lambda combination: combination.get("a") != "2" or combination.get("c") != "1")
    met = set().union(*map(pairs, found))
    assert len(met) == 3 * 2 + 2 * 2 + 3 * 2 - 1 and len(found) <= 8
    assert len({tuple(sorted(combination.items())) for combination in grid}) == len(grid) >= 300


def one_late(self, request, tokens):
    cut, done = CUT(self, request, tokens)
    return (tokens[: len(cut) + 1] if done and len(cut) < request.room else cut), done


def off_by_one(self, segments, draft, cache):
    step = PACK(self, segments, draft, cache)
    step.position_ids.add_(step.position_ids > 12)
    return step


CUT, PACK = Stops.cut, loop.Target.pack
BROKEN = {
    "stop cut one token late": (Stops, "cut", one_late),
    "positions off by one": (loop.Target, "pack", off_by_one),
}


@pytest.mark.parametrize("bug", BROKEN)
def test_the_grid_catches_a_broken_engine(bug, grid, monkeypatch, controls):
    monkeypatch.setattr(*BROKEN[bug])
    findings = Findings()
    for combination in grid[-24:]:
        findings.run("llama", combination, "guesses")
    assert len(findings.failures) >= 3
    controls(bug, f"by {len(findings.failures)} of 24 combinations of generate's arguments")
