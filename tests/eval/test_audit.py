"""Wrong drafts are named with prompt and step, whatever the engine makes of them; right ones pass."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import eval.audit
import specdec
from eval.audit import AuditedDrafter, audited
from eval.methods import Request, engine_method
from specdec.contracts import BaseDrafter, Draft, Rows
from tests.eval.samples import prompts_of
from tests.tiny_models import tiny

SAMPLING = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
V = 97


class Uniform(BaseDrafter):
    """Draws from a uniform q; from draft number `from_draft` of row `row` on, something is wrong with it."""

    name = "uniform"

    def __init__(self, wrong: str = "", row: int = 1, from_draft: int = 3):
        self.wrong, self.row, self.from_draft, self.drafts = wrong, row, from_draft, {}

    def propose(self, rows, budget, draws):
        N = max(budget)
        drawn = [draws.sample(torch.zeros(len(budget), V), depth) for depth in range(N)]
        tokens, q_logits, q_logz = (torch.stack(part, 1) for part in zip(*drawn, strict=True))
        for b, row in enumerate(rows.ids):
            self.drafts[row] = self.drafts.get(row, 0) + (budget[b] > 0)
            if row == self.row and self.drafts[row] >= self.from_draft:
                if self.wrong == "mass":
                    q_logz[b] -= 0.01
                if self.wrong == "nan":
                    q_logz[b] = torch.nan
                if self.wrong == "token":
                    tokens[b, 0] = V + 5
        return Draft(tokens, list(budget), q_logits=q_logits, q_logz=q_logz)


def run(drafter, sampling=SAMPLING, max_new_tokens=30):
    model = tiny("llama")
    method = engine_method("x", model, Request.of(model, sampling, 0), drafter, 2, "auto", specdec.generate)
    return method.generate(prompts_of(3, 6, 4), max_new_tokens)


def test_a_right_draft_changes_nothing():
    model = tiny("llama")
    prompts = prompts_of(3, 6, 4)
    from eval.methods import left_padded

    input_ids, mask = left_padded([prompt.tokens for prompt in prompts], 0, model.device)
    expected = specdec.generate(
        model, input_ids, attention_mask=mask, drafter=Uniform(), draft_length=2, seed=0, max_new_tokens=30, **SAMPLING
    )
    assert run(Uniform()).tokens == expected[:, input_ids.shape[1] :].tolist()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [("mass", "a q that does not sum to 1"), ("nan", "a q that does not sum to 1"), ("token", "outside the target's")],
)
def test_prompt_and_step_are_named(wrong, message):
    with pytest.raises(ValueError, match=rf"{message}.* row 1 \(prompt 'p1'\) in the row's drafting step 3"):
        run(Uniform(wrong))


def test_a_wrong_q_that_never_came_is_not_reported():
    """The control of the test above: the same drafter, its mistake after the last draft."""
    run(Uniform("mass", from_draft=1000))


def test_what_another_error_hid_is_named():
    class Raises(Uniform):
        def observe(self, rows, verdict, hidden):
            if self.drafts.get(1, 0) >= 3:
                raise RuntimeError("later")

    with pytest.raises(ValueError, match="does not sum to 1"):
        run(Raises("mass"))
    with pytest.raises(RuntimeError, match="later"):
        run(Raises())


def test_one_hot_rows_and_padding_are_not_held_to_their_q():
    rows = Rows([0, 1], [np.array([1]), np.array([2])], torch.device("cpu"), V)

    class Mixed(BaseDrafter):
        name = "mixed"

        def propose(self, rows, budget, draws):
            q_logits, q_logz = torch.zeros(2, 2, V), torch.zeros(2, 2)
            q_logz[1, 0] = torch.tensor(float(V)).log()
            tokens = torch.tensor([[3, 4], [5, V + 9]])  # the last one is padding
            return Draft(tokens, [2, 1], q_logits=q_logits, q_logz=q_logz, one_hot=torch.tensor([True, False]))

    watched = AuditedDrafter(Mixed(), "ab")
    watched.propose(rows, [2, 2], None)
    watched.check()
    assert not watched.trees


def test_trees_are_noticed_and_a_malformed_draft_is_refused():
    rows = Rows([0], [np.array([1])], torch.device("cpu"), V)

    class Tree(BaseDrafter):
        name = "tree"

        def propose(self, rows, budget, draws):
            return Draft(torch.tensor([[3, 4]]), [2], parents=torch.tensor([[-1, -1]]))

    watched = AuditedDrafter(Tree(), "a")
    watched.propose(rows, [2], None)
    assert watched.trees
    with pytest.raises(ValueError, match="'tree' drafted 2 tokens in row 0, where the budget is 1"):
        watched.propose(rows, [1], None)


def test_what_looking_took_is_told_from_what_drafting_took(monkeypatch):
    """By a clock that drafting puts forward by 100 and looking at a draft by 1."""
    now, drafts = [0.0], []
    monkeypatch.setattr(eval.audit, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def tick(seconds, function):
        def ticking(*arguments):
            now[0] += seconds
            return function(*arguments)

        return ticking

    drafter = Uniform()
    drafter.propose = tick(100, lambda *arguments: drafts.append(1) or Uniform.propose(drafter, *arguments))
    monkeypatch.setattr(eval.audit, "check_draft", tick(1, eval.audit.check_draft))
    assert run(drafter).audit_seconds == len(drafts) > 0
    assert run(None).audit_seconds is None


def test_no_drafter_is_none():
    with audited(None, []) as watched:
        assert watched is None
