"""The six rungs: what each of them runs, and what is known of its tokens."""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from eval.fidelity.ladder import BATCHED, PLAIN, RUNGS, WIDTH
from eval.fidelity.observe import observe
from eval.fidelity.results import Result
from eval.folder import Folder
from specdec import compiled
from specdec.target import Target
from tests.eval.fidelity.ladders import SAMPLED, climbed, ladder_of
from tests.shapes import depend_on_shapes
from tests.tiny_models import tiny


def by_rung(results: list[Result]) -> dict[int, dict[int, list[int]]]:
    return {rung.number: {r.number: r.tokens for r in results if r.rung == rung.number} for rung in RUNGS}


def test_rungs_run_what_they_say():
    ladder = ladder_of(samples=1)
    results = climbed(ladder)
    assert not any(result.error for result in results)
    rows = {rung.number: {r.rows for r in results if r.rung == rung.number} for rung in RUNGS}
    assert rows == {0: {1}, 1: {1}, 2: {1, 2}, 3: {1}, 4: {1}, 5: {1, 2}}
    tokens = by_rung(results)
    assert all(tokens[rung] == tokens[0] for rung in range(1, 6))  # float64: nothing differs
    for result in results:
        if RUNGS[result.rung].speculative:
            assert len(result.steps) < len(result.tokens) == sum(result.steps) and sum(result.drafted) > 0
        elif RUNGS[result.rung] is not WIDTH:
            assert result.steps == [1] * 16
        assert max(map(abs, result.shifts)) < 1e-5 and result.outside == []
        assert result.samples == {} and result.lossless


def test_in_invariant_mode_every_rung_has_the_same_scores(monkeypatch):
    depend_on_shapes(monkeypatch)
    for invariant in (True, False):
        ladder = replace(ladder_of(tiny("llama", dtype=torch.bfloat16)), invariant=invariant)
        scores = [{r.number: r.scores for r in climbed(ladder) if r.rung == rung} for rung in range(1, 6)]
        assert all(rung == scores[0] for rung in scores) == invariant


def test_compiled_every_rung_runs_graphs(monkeypatch):
    """No packed forward is eager: one graph is the reference's, of rung 0, the other the model's, of all others."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    ladder = ladder_of(tiny("llama", dtype=torch.float32))
    expected = by_rung(climbed(ladder))
    before = counters["stats"]["unique_graphs"]
    monkeypatch.setattr(Target, "_run", None)  # an eager forward
    results = climbed(replace(ladder, compile=True))
    assert not any(result.error for result in results) and by_rung(results) == expected
    assert counters["stats"]["unique_graphs"] == before + 2


def test_the_reference_has_the_same_weights_in_higher_precision():
    ladder = ladder_of(tiny("llama", dtype=torch.bfloat16))
    assert ladder.reference.dtype == torch.float64 and ladder.model.dtype == torch.bfloat16
    assert ladder.reference_is_wider and not ladder_of().reference_is_wider
    assert torch.equal(ladder.reference.lm_head.weight, ladder.model.lm_head.weight.double())


def test_sampling_is_tested_and_replayed_with_a_seed_for_each_sample():
    ladder = ladder_of(sampling=SAMPLED, samples=2)
    results = climbed(ladder)
    assert [job.key for job in ladder.jobs() if job.rung is BATCHED] == [(5, 0, 0), (5, 0, 1), (5, 1, 0), (5, 1, 1)]
    last = [r for r in results if r.rung == BATCHED.number]
    assert {(r.sample, r.seed) for r in last} == {(0, 0), (1, 1)}
    assert len({tuple(r.tokens) for r in last}) == 6
    for result in last:
        assert all(len(entries) == len(result.tokens) for entries in result.samples.values())
        assert result.replays and max(violation for *_, violation in result.replays) < 1e-5
    assert any(entry is not None for result in last for entry in result.samples["q"])
    one_by_one = by_rung(results)[4]
    assert one_by_one == {r.number: r.tokens for r in last if r.sample == 0}  # a request's draws are its own


def test_any_int_is_a_seed():
    [first, *_] = climbed(ladder_of(sampling=SAMPLED, seed=-1), BATCHED.number)
    assert first.error is None and first.seed == -1 and len(first.samples["pit"]) == 16


def test_what_a_drafter_raises_is_recorded_with_its_traceback():
    class Failing(type(ladder_of().drafter)):
        def propose(self, rows, budget, draws):
            if 2 in rows.tokens[0]:
                raise RuntimeError("no more drafts")
            return super().propose(rows, budget, draws)

    ladder = ladder_of(drafter=Failing(min_n=1), batch_size=1)
    jobs = [job for job in ladder.jobs() if job.rung is BATCHED]
    failed = observe(ladder, jobs[0], [])
    assert "RuntimeError: no more drafts" in failed[0].error and failed[0].tokens == []
    assert failed[0].job == jobs[0].key


def test_the_place_of_a_token_among_the_steps():
    result = Result(5, 0, 0, 1, 0, "a", 0, 3, tokens=[1, 2, 3, 4], steps=[1, 2, 1])
    assert [result.step_of(place) for place in range(4)] == [(0, 0), (1, 0), (1, 1), (2, 0)]
    with pytest.raises(IndexError):
        result.step_of(4)


def test_results_come_back_from_their_folder_as_they_were(tmp_path):
    ladder, folder = ladder_of(sampling=SAMPLED), Folder(tmp_path / "out", result=lambda fields: Result(**fields))
    assert folder.start({"seed": 1}) == []
    jobs = [job for job in ladder.jobs() if job.rung in (PLAIN, BATCHED)][-3:]
    done = [observe(ladder, job, []) for job in jobs]
    for results in done:
        folder.append(results)
    assert folder.start({"seed": 1}) == sum(done, [])
    folder.append(next(results for results in done if len(results) == 2)[:1])  # known already
    folder.append([replace(done[0][0], rung=4, rows=2)])  # half a job, as a kill leaves it
    assert folder.start({"seed": 1}) == sum(done, [])
