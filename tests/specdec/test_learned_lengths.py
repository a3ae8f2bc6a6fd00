"""What the decode loop asks and tells a budget of draft lengths, by one that does not learn; and which calls have one.

What is expected follows from three numbers of each row: how many tokens it has to draft, how many of them are wanted,
and how many are right.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

import specdec
from specdec import loop
from specdec.budget import Budget, Drafted
from specdec.contracts import BaseDrafter, Draft
from specdec.invariant import LONGEST_DRAFT
from specdec.speculation import DRAFT_LENGTH, LONGEST, speculate
from tests.specdec.test_generation import VOCAB, prompts, real_outputs
from tests.tiny_models import tiny

NEW, RIGHT = 20, 2  # tokens that each row emits, and how many of the first tokens of a draft are right
HAS, CHOSEN = (5, 1, 3, 0), (3, 4, 1, 2)  # by row: tokens that it has to draft, and those that the budget wants
DRAFTING, OBSERVING, FORWARD = 7.0, 3.0, 5.0  # seconds
LENGTHS = prompts()["attention_mask"].sum(1).tolist()


@dataclass(frozen=True)
class Asked:
    """A call of `lengths`; and beside it how many requests have had a place, and the tokens of each row's text."""

    requests: list[int]
    limits: list[int]
    grades: list[int]
    rooms: list[int] | None
    entered: int
    texts: dict[int, int]


class Fixed:
    """A budget that wants CHOSEN of every row, and keeps what it is asked and told."""

    def __init__(self, drafter, chosen=CHOSEN):
        self.drafter, self.chosen = drafter, chosen
        self.asked, self.recorded, self.timed, self.forgotten = [], [], [], []
        self.acceptance = SimpleNamespace(record=self.recorded.append, forget=self.forgotten.append)

    def lengths(self, requests, limits, grades, rooms=None):
        texts = self.drafter.texts[-1] if self.drafter.texts else {}
        self.asked.append(Asked(*map(list, (requests, limits, grades)), rooms, len(self.drafter.admitted), texts))
        return [min(limit, self.chosen[row]) for row, limit in zip(requests, limits, strict=True)]

    def time(self, rows, drafted, step_seconds, draft_seconds):
        self.timed.append((rows, list(drafted), step_seconds, draft_seconds))


class Knowing(BaseDrafter):
    """Drafts the first RIGHT tokens right and the others wrong; with `trimmable` at most HAS, graded by row.

    trees_from: in which call it begins to hand over chains as trees."""

    def __init__(self, outputs, clock, trimmable, trees_from=None):
        self.outputs, self.clock, self.trimmable, self.trees_from = outputs, clock, trimmable, trees_from
        self.admitted, self.given, self.texts = [], [], []

    def propose(self, rows, budget, draws):
        self.clock.now += DRAFTING
        self.given.append(dict(zip(rows.ids, budget, strict=True)))
        self.texts.append(dict(zip(rows.ids, map(len, rows.tokens), strict=True)))
        has = HAS if self.trimmable else [LONGEST] * 4
        lengths = [min(limit, has[row]) for row, limit in zip(rows.ids, budget, strict=True)]
        tokens = torch.zeros(len(lengths), LONGEST, dtype=torch.long)
        for drafted, row, text, length in zip(tokens, rows.ids, rows.tokens, lengths, strict=True):
            drafted[:length] = self.outputs[row][len(text) : len(text) + length]
        tokens[:, RIGHT:] = (tokens[:, RIGHT:] + 1) % VOCAB
        parents = None
        if self.trees_from is not None and len(self.given) > self.trees_from:
            parents = torch.arange(-1, LONGEST - 1).expand(tokens.shape).contiguous()
        return Draft(tokens, lengths, parents, grades=[10 + row for row in rows.ids] if self.trimmable else None)

    def observe(self, rows, verdict, hidden):
        self.clock.now += OBSERVING

    def admit(self, ids):
        self.admitted += ids


@dataclass
class Run:
    budget: Fixed
    drafter: Knowing
    drafted: list[list[int]]  # by row and decode step
    steps: list[tuple[list[int], bool]]  # the rows that decode, and whether prompt tokens are with them


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("specdec.stats.time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


@pytest.fixture
def run(monkeypatch, clock):
    """Generate greedily with a budget that is no real one; four rows, with max_batch so many at a time."""
    model = tiny("llama")
    outputs = real_outputs(model, max_new_tokens=NEW)
    model.register_forward_hook(lambda *_: setattr(clock, "now", clock.now + FORWARD))

    def run(trimmable=True, trees_from=None, **settings):
        drafter, steps = Knowing(outputs, clock, trimmable, trees_from), []
        budget = Fixed(drafter)

        class Watched(loop.Batch):
            def schedule(self):
                segments = super().schedule()
                entering = [row for row in self.live if self.cache.lengths[row] < LENGTHS[row]]
                steps.append(([row for row in self.live if row not in entering], bool(entering)))
                return segments

        monkeypatch.setattr("specdec.speculation.budget_for", lambda *kind: budget)
        monkeypatch.setattr("specdec.speculation.Batch", Watched)
        settings |= {"drafter": drafter, "max_new_tokens": NEW, "do_sample": False}
        rows = [row[-length:] for row, length in zip(prompts()["input_ids"], LENGTHS, strict=True)]
        done = {found.index: found for found in specdec.stream_batch(model, rows, **settings)}
        for row, found in done.items():
            assert found.tokens.tolist() == outputs[row][LENGTHS[row] :].tolist()
        return Run(budget, drafter, [done[row].stats.drafted for row in range(4)], steps)

    return run


def decoded(row, has, chosen):
    """By decode step of a row that drafts `chosen` of the `has` tokens it has: (limit, drafted, accepted, room)."""
    room, steps = NEW - 1, []
    while room:
        limit = min(room - 1, LONGEST, has)
        drafted = min(limit, chosen)
        accepted = min(drafted, RIGHT)
        steps.append((limit, drafted, accepted, room))
        room -= accepted + 1
    return steps


def by_row(asked):
    """Row -> (limit, grade) wherever it had anything to draft."""
    found = defaultdict(list)
    for step in asked:
        for row, limit, grade in zip(step.requests, step.limits, step.grades, strict=True):
            if limit:
                found[row].append((limit, grade))
    return found


def check_trimmed(run, **settings):
    """Drafts are made to the full length, and cut to what the budget chose of them."""
    done = run(**settings)
    for row in range(4):
        steps = decoded(row, HAS[row], CHOSEN[row])
        assert done.drafted[row] == [drafted for _, drafted, _, _ in steps], "lengths"
        given = [step[row] for step in done.drafter.given if step.get(row)]
        assert given == [min(room - 1, LONGEST) for _, _, _, room in steps if room > 1]
        assert by_row(done.budget.asked)[row] == [(limit, 10 + row) for limit, *_ in steps if limit], "grades"
        recorded = [of for step in done.budget.recorded for of in step if of.request == row]
        expected = [Drafted(row, drafted, accepted, 10 + row) for limit, drafted, accepted, _ in steps if limit]
        assert recorded == expected, "records"


def check_rooms(run):
    """None while a request waits, then the tokens left of each."""
    asked = run(max_batch=2).budget.asked
    for step in asked:
        left = [NEW - (step.texts[row] - LENGTHS[row]) for row in step.requests]
        assert step.rooms == (None if step.entered < 4 else left), "rooms"
    assert {step.rooms is None for step in asked} == {True, False}


def check_times(run, trimmable=True):
    """Steps without prompt tokens, in two parts: of a drafter that costs as much whatever is chosen, 0 for drafting."""
    done = run(trimmable, max_batch=3, prefill_chunk_size=5)
    left = [iter(decoded(row, HAS[row] if trimmable else LONGEST, CHOSEN[row])) for row in range(4)]
    expected = []
    for rows, with_prompts in done.steps:
        drafted = [next(left[row])[1] for row in rows]
        if not with_prompts:
            drafting = (DRAFTING if any(drafted) else 0.0) + OBSERVING
            expected.append((len(rows), drafted, FORWARD, 0.0 if trimmable else drafting))
    assert any(rows and with_prompts for rows, with_prompts in done.steps)
    assert done.budget.timed == expected, "times"


def check_forgotten(run, **settings):
    assert sorted(run(**settings).budget.forgotten) == [0, 1, 2, 3], "forgotten"


def check_trees(run):
    """Once trees came, the budget is not asked any more, and all that a row may draft is drafted."""
    done, chains = run(trimmable=False, trees_from=2), 2
    assert len(done.budget.asked) == chains + 1, "asked"
    assert len(done.budget.recorded) == 1 + chains  # the first step only reads the prompts
    assert done.drafter.given[:chains] == [dict(enumerate(CHOSEN))] * chains
    for given, texts in zip(done.drafter.given[chains + 1 :], done.drafter.texts[chains + 1 :], strict=True):
        assert given == {row: min(LONGEST, NEW - (texts[row] - LENGTHS[row]) - 1) for row in given}
    assert max(done.drafter.given[chains + 1].values()) == LONGEST


def test_what_a_trimmable_drafter_has_is_what_the_budget_chooses_from(run):
    check_trimmed(run)
    check_trimmed(run, max_batch=2, prefill_chunk_size=5)


def test_another_drafter_is_told_what_the_budget_chose(run):
    done = run(trimmable=False)
    for row in range(4):
        steps = decoded(row, LONGEST, CHOSEN[row])
        chosen = [drafted for _, drafted, _, _ in steps]
        assert done.drafted[row] == chosen
        assert [step[row] for step in done.drafter.given if step.get(row)] == [n for n in chosen if n]
        assert by_row(done.budget.asked)[row] == [(limit, 0) for limit, *_ in steps if limit]
        recorded = [of for step in done.budget.recorded for of in step if of.request == row]
        assert recorded == [Drafted(row, drafted, accepted) for limit, drafted, accepted, _ in steps if limit]


def test_rooms_are_told_once_no_request_waits(run):
    check_rooms(run)


@pytest.mark.parametrize("trimmable", [True, False])
def test_steps_without_prompt_tokens_are_timed(trimmable, run):
    check_times(run, trimmable)


@pytest.mark.parametrize("settings", [{}, {"max_batch": 1}])
def test_every_request_is_forgotten_once(settings, run):
    check_forgotten(run, **settings)


def test_who_hands_over_trees_drafts_all_of_them_from_then_on(run):
    check_trees(run)


class Settling:
    """In place of a graph: the first `cold` of its forwards take longer than later ones will."""

    def __init__(self, cold):
        self.cold = cold

    def __call__(self, target, step, cache, hidden):
        self.cold -= 1
        self.settled = self.cold < 0
        return target._run(step, cache, hidden, None)


@pytest.mark.parametrize("cold", [0, 3])
def test_forwards_of_a_graph_that_is_not_settled_are_not_timed(cold, run, monkeypatch):
    monkeypatch.setattr("specdec.target.graph_for", lambda target: Settling(cold))
    done = run(compile=True)
    assert len(done.budget.recorded) == len(done.steps)
    assert len(done.budget.timed) == len(done.steps) - max(cold, 1)  # the first one reads the prompts


@pytest.mark.parametrize(
    ("draft", "kind"),
    [
        (lambda tokens: Draft(tokens, [1], torch.full_like(tokens, -1)), "a tree"),
        (
            lambda tokens: Draft(tokens, [1], q_logits=torch.zeros(1, 1, VOCAB), q_logz=torch.zeros(1, 1)),
            "a draft with",
        ),
    ],
)
def test_drafts_that_are_not_to_be_cut_once_known_are_refused(draft, kind):
    class Trimmable(BaseDrafter):
        trimmable = True

        def propose(self, rows, budget, draws):
            return draft(torch.zeros(1, 1, dtype=torch.long))

    with pytest.raises(ValueError, match=f"drafter 'custom' is trimmable but returned {kind}"):
        specdec.generate(tiny("llama"), torch.tensor([[1, 2]]), drafter=Trimmable(), max_new_tokens=4, do_sample=False)


def drops_grades(worthwhile, batch, scored):
    batch.grades = [0] * len(scored)
    return worthwhile(batch, scored)


def drafts_all(worthwhile, batch, scored):
    worthwhile(batch, scored)
    return batch.limits


def tells_no_rooms(worthwhile, batch, scored):
    others, batch.waiting = batch.waiting, [None]
    lengths = worthwhile(batch, scored)
    batch.waiting = others
    return lengths


def tells_all_rooms(worthwhile, batch, scored):
    others, batch.waiting = batch.waiting, []
    lengths = worthwhile(batch, scored)
    batch.waiting = others
    return lengths


def records_all(learn, batch, *step):
    batch.limits = [1] * len(batch.limits)
    learn(batch, *step)


def times_prompts(learn, batch, *step):
    batch._clock.prefill = False
    learn(batch, *step)


def times_drafting(learn, batch, *step):
    batch.trims = False
    learn(batch, *step)
    batch.trims = True


def forgets_nobody(learn, batch, scored, *step):
    learn(batch, [SimpleNamespace(row=request.row, done=False) for request in scored], *step)


def keeps_the_budget(learn, batch, scored, draft, read):
    learn(batch, scored, replace(draft, parents=None), read)


@pytest.mark.parametrize(
    ("name", "broken", "check", "caught"),
    [
        ("worthwhile", drops_grades, check_trimmed, "grades"),
        ("worthwhile", drafts_all, check_trimmed, "lengths"),
        ("worthwhile", tells_no_rooms, check_rooms, "rooms"),
        ("worthwhile", tells_all_rooms, check_rooms, "rooms"),
        ("learn", records_all, check_trimmed, "records"),
        ("learn", times_prompts, check_times, "times"),
        ("learn", times_drafting, check_times, "times"),
        ("learn", forgets_nobody, check_forgotten, "forgotten"),
        ("learn", keeps_the_budget, check_trees, "asked"),
    ],
)
def test_a_loop_that_tells_or_heeds_something_else_is_caught(name, broken, check, caught, run, monkeypatch, controls):
    right = getattr(loop.Batch, name)
    monkeypatch.setattr(loop.Batch, name, lambda batch, *step: broken(right, batch, *step))
    with pytest.raises(AssertionError, match=caught):
        check(run)
    controls(f"a loop that {broken.__name__.replace('_', ' ')}", f"{caught} by hand")


def prepared(model, do_sample, **settings):
    """The batch of a call that is not run."""
    decode = speculate(**settings)
    return model.generate(**prompts(), do_sample=do_sample, max_new_tokens=4, custom_generate=decode.prepare)


@pytest.mark.parametrize(
    ("do_sample", "settings", "length"),
    [
        (False, {}, LONGEST),
        (False, {"verifier": "greedy"}, LONGEST),
        (True, {"verifier": "coupled"}, LONGEST),
        (False, {"invariant": True}, min(LONGEST, LONGEST_DRAFT)),
    ],
)
def test_lengths_are_learned_where_a_sample_does_not_depend_on_them(do_sample, settings, length):
    batch = prepared(tiny("llama"), do_sample, **settings)
    assert isinstance(batch.budget, Budget)
    assert batch.draft_length == batch.budget.acceptance.longest == length


@pytest.mark.parametrize(
    ("do_sample", "settings", "length"),
    [
        (True, {}, DRAFT_LENGTH),
        (True, {"verifier": "rejection"}, DRAFT_LENGTH),
        (True, {"verifier": "block"}, DRAFT_LENGTH),
        (False, {"draft_length": 3}, 3),
        (False, {"drafter": "ngram:length=3"}, 3),
        (True, {"verifier": "coupled", "draft_length": LONGEST + 4}, LONGEST + 4),
    ],
)
def test_lengths_are_fixed_where_a_sample_depends_on_them_or_one_is_given(do_sample, settings, length):
    batch = prepared(tiny("llama"), do_sample, **settings)
    assert batch.budget is None and batch.draft_length == length


@pytest.mark.parametrize("settings", [{"drafter": None}, {"draft_length": 0}])
def test_plain_decoding_learns_no_lengths(settings):
    assert prepared(tiny("llama"), False, **settings).budget is None


def test_processes_that_share_a_model_draft_the_same():
    model = tiny("llama")
    model._tp_size = 2
    batch = prepared(model, False)
    assert batch.budget is None and batch.draft_length == DRAFT_LENGTH


def samples(monkeypatch, verifier, learns=False):
    """What one seed gives under budgets that want no drafts and three tokens of every row; whether they were asked.

    learns: makes the call learn its lengths, whatever its rule."""
    settings = {"drafter": "draft_model:layers=1", "do_sample": True, "seed": 1, "max_new_tokens": NEW}
    found, model, asked = [], tiny("llama"), []
    for wanted in (0, 3):
        fixed = Fixed(SimpleNamespace(texts=[], admitted=[]), [wanted] * 4)
        other = {"budget": fixed} if learns else {}
        monkeypatch.setattr("specdec.speculation.budget_for", lambda *_, fixed=fixed: fixed)
        monkeypatch.setattr("specdec.speculation.Batch", lambda other=other, **given: loop.Batch(**given | other))
        found.append(specdec.generate(model, **prompts(), **settings, verifier=verifier))
        asked.append(bool(fixed.asked))
    return *found, any(asked)


@pytest.mark.parametrize("verifier", ["rejection", "block", "coupled"])
def test_a_seed_gives_one_sample_whatever_steps_take(verifier, monkeypatch, controls):
    none, some, learned = samples(monkeypatch, verifier)
    assert torch.equal(none, some) and learned == (verifier == "coupled")
    if not learned:
        none, some, _ = samples(monkeypatch, verifier, learns=True)
        assert not torch.equal(none, some)
        controls(f"lengths learned for {verifier}", "two samples of one seed")
