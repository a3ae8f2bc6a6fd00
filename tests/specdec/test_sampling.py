"""Sampled output of the whole engine follows the target's law: chi-square over joint tokens on a narrow vocabulary."""

import pytest
import torch
from scipy.stats import chi2
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

import specdec
from drafters.draft_model import DraftModelDrafter
from specdec.contracts import BaseDrafter, Draft
from tests.tiny_models import tiny

VOCAB, LENGTH, SAMPLES = 5, 4, 3000
PROMPT = torch.tensor([[1, 2, 3, 1, 2]])
WARPERS = {"temperature": 0.8, "top_k": 4, "repetition_penalty": 1.3}
PROCESSORS = LogitsProcessorList(
    [RepetitionPenaltyLogitsProcessor(1.3), TemperatureLogitsWarper(0.8), TopKLogitsWarper(4)]
)


@torch.no_grad()
def exact_law(model) -> dict[tuple[int, ...], float]:
    """Probability of every output of LENGTH tokens, by HF's own processors on plain forwards."""
    law = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for tokens, mass in law.items():
            ids = torch.cat([PROMPT, torch.tensor([tokens], dtype=torch.long)], dim=1)
            p = PROCESSORS(ids, model(ids, use_cache=False).logits[:, -1].float()).softmax(-1)[0]
            longer |= {(*tokens, token): mass * p[token].item() for token in range(VOCAB)}
        law = longer
    return law


def p_value(samples: list[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """Of Pearson's chi-square."""
    return p_of([cells(samples, law)])


def cells(samples: list[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> list[tuple[int, float]]:
    """(observed, expected) counts, of outcomes pooled, least probable first, so that 5 are expected at least."""
    counts = dict.fromkeys(law, 0)
    for sample in samples:
        counts[sample] += 1
    found, observed, expected = [], 0, 0.0
    for outcome in sorted(law, key=law.get):
        observed, expected = observed + counts[outcome], expected + law[outcome] * len(samples)
        if observed and not expected:
            return [(observed, 0.0)]  # an impossible outcome
        if expected >= 5:
            found.append((observed, expected))
            observed, expected = 0, 0.0
    found[-1] = (found[-1][0] + observed, found[-1][1] + expected)
    return found


def p_of(experiments: list[list[tuple[int, float]]]) -> float:
    """Of the sum of several experiments' chi-squares."""
    if any(expected == 0 for each in experiments for _, expected in each):
        return 0.0
    statistic = sum((o - e) ** 2 / e for each in experiments for o, e in each)
    return float(chi2.sf(statistic, sum(len(each) - 1 for each in experiments)))


def draw(model, drafter, seed) -> list[tuple[int, ...]]:
    out = specdec.generate(
        model, PROMPT, do_sample=True, max_new_tokens=LENGTH, num_return_sequences=SAMPLES, drafter=drafter,
        draft_length=2, seed=seed, **WARPERS,
    )  # fmt: skip
    return [tuple(row) for row in out[:, PROMPT.shape[1] :].tolist()]


class Lying(BaseDrafter):
    """Broken control: drafts arg-maxes but claims that they were drawn from the softmax."""

    def __init__(self, drafter):
        self.drafter = drafter
        self.admit, self.release, self.observe = drafter.admit, drafter.release, drafter.observe

    def propose(self, rows, budget, draws):
        class ArgMax:
            def sample(self, logits, depth, index=None):
                tokens, q_logits, q_logz = draws.sample(logits, depth, index)
                return q_logits.argmax(-1), q_logits, q_logz

        return self.drafter.propose(rows, budget, ArgMax())


class Mixed(BaseDrafter):
    """Half of the rows one-hot, half with a q, in one batch."""

    def __init__(self, drafter):
        self.drafter = drafter
        self.admit, self.release, self.observe = drafter.admit, drafter.release, drafter.observe

    def propose(self, rows, budget, draws):
        draft = self.drafter.propose(rows, budget, draws)
        one_hot = torch.arange(len(budget)) % 2 == 0
        return Draft(draft.tokens, draft.lengths, q_logits=draft.q_logits, q_logz=draft.q_logz, one_hot=one_hot)


def drafters(name):
    small = DraftModelDrafter(tiny("llama", seed=0, vocab=VOCAB))
    return {"none": None, "ngram": "ngram", "draft_model": small, "mixed": Mixed(small), "lying": Lying(small)}[name]


@pytest.mark.parametrize("name", ["none", "ngram", "draft_model", "mixed"])
def test_joint_law_of_four_tokens(name):
    model = tiny("qwen3", seed=1, vocab=VOCAB)
    assert p_value(draw(model, drafters(name), seed=5), exact_law(model)) > 1e-3


def test_joint_law_catches_a_draft_that_lies_about_q():
    model = tiny("qwen3", seed=1, vocab=VOCAB)
    assert p_value(draw(model, drafters("lying"), seed=5), exact_law(model)) < 1e-9


def test_joint_law_catches_plain_sampling_without_its_processors():
    model = tiny("qwen3", seed=1, vocab=VOCAB)
    out = specdec.generate(model, PROMPT, do_sample=True, max_new_tokens=LENGTH, num_return_sequences=SAMPLES,
                           temperature=0.8, top_k=4, seed=5)  # fmt: skip
    assert p_value([tuple(row) for row in out[:, PROMPT.shape[1] :].tolist()], exact_law(model)) < 1e-9
