"""p at every scored position equals, bit for bit, HF's own call on that position's prefix."""

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

from specdec.contracts import Draft
from specdec.processors import Prefixes, Processors

V = 40
EOS = torch.tensor([3, 5])
PROMPT = 6  # columns, left pads included


class BansLastToken(LogitsProcessor):
    """A user's own processor, which also counts the rows it saw."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[torch.arange(len(scores)), input_ids[:, -1]] = -torch.inf
        return scores


def only_even_after_even(row, ids):
    return [i for i in range(V) if i % 2 == int(ids[-1]) % 2 or i % 7 == row]


PROCESSORS = {
    "temperature": lambda: [hf.TemperatureLogitsWarper(0.7)],
    "top-k": lambda: [hf.TopKLogitsWarper(5)],
    "top-p": lambda: [hf.TopPLogitsWarper(0.8)],
    "top-h": lambda: [hf.TopHLogitsWarper(0.5)],
    "min-p": lambda: [hf.MinPLogitsWarper(0.2)],
    "typical": lambda: [hf.TypicalLogitsWarper(0.6)],
    "epsilon": lambda: [hf.EpsilonLogitsWarper(0.03)],
    "eta": lambda: [hf.EtaLogitsWarper(0.1)],
    "repetition": lambda: [hf.RepetitionPenaltyLogitsProcessor(1.5)],
    "repetition, pads ignored": lambda: [
        hf.RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=torch.tensor([2, 0, 1, 3]))
    ],
    "repetition, prompt ignored": lambda: [hf.RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=PROMPT)],
    "no-repeat n-gram": lambda: [hf.NoRepeatNGramLogitsProcessor(2)],
    "bad words": lambda: [hf.NoBadWordsLogitsProcessor([[4], [1, 2], [2, 1, 0]], EOS)],
    "sequence bias": lambda: [hf.SequenceBiasLogitsProcessor({(1, 2): 4.0, (0,): -3.0, (2, 1, 1): 5.0})],
    "min length": lambda: [hf.MinLengthLogitsProcessor(10, EOS)],
    "min new tokens": lambda: [hf.MinNewTokensLengthLogitsProcessor(PROMPT, 3, EOS)],
    "forced bos": lambda: [hf.ForcedBOSTokenLogitsProcessor(2)],
    "forced eos": lambda: [hf.ForcedEOSTokenLogitsProcessor(11, EOS)],
    "suppressed": lambda: [hf.SuppressTokensLogitsProcessor([0, 7])],
    "suppressed at begin": lambda: [hf.SuppressTokensAtBeginLogitsProcessor([0, 7], PROMPT + 1)],
    "decay": lambda: [hf.ExponentialDecayLengthPenalty((1, 1.3), EOS, PROMPT)],
    "invalid removed": lambda: [hf.SuppressTokensLogitsProcessor([1]), hf.InfNanRemoveLogitsProcessor()],
    "prefix constrained": lambda: [hf.PrefixConstrainedLogitsProcessor(only_even_after_even, 1)],
    "watermark": lambda: [hf.WatermarkLogitsProcessor(V, "cpu")],
    "user's own": lambda: [BansLastToken()],
    "order": lambda: [
        hf.TemperatureLogitsWarper(0.5),
        hf.RepetitionPenaltyLogitsProcessor(1.5),
        hf.TopPLogitsWarper(0.7),
        BansLastToken(),
        hf.MinNewTokensLengthLogitsProcessor(PROMPT, 4, EOS),
        hf.LogitNormalization(),
    ],
}
FOUR_ROWS = {"repetition, pads ignored", "prefix constrained"}  # hold data per row of the batch


def step(tree: bool):
    """Three rows (of a batch of four) after 0, 1 and 3 emitted tokens, with drafts of 3, 0 and 2 tokens."""
    g = torch.Generator().manual_seed(0)
    columns = [torch.randint(0, 3, (PROMPT + emitted,), generator=g).numpy() for emitted in (0, 1, 3)]
    tokens = torch.tensor([[1, 9, 2], [0, 0, 0], [2, 1, 0]])
    parents = torch.tensor([[-1, -1, 0], [-1, -1, -1], [-1, -1, -1]]) if tree else None
    draft = Draft(tokens, [3, 0, 2], parents=parents)
    prefixes = Prefixes(columns, [3, 0, 2], draft, None if parents is None else parents.numpy())
    return prefixes, torch.randn(8, V, generator=g) * 3


def expected_prefixes(prefixes: Prefixes, tree: bool) -> list[tuple[int, list[int]]]:
    """(index in the user's batch, ids) per scored position, written out by hand for `step`."""
    a, b, c = (ids.tolist() for ids in prefixes.columns)
    d = prefixes.draft.tokens.tolist()
    if tree:  # row 0: two children of the root, the third token hangs off the first
        paths = [a, [*a, d[0][0]], [*a, d[0][1]], [*a, d[0][0], d[0][2]], b, c, [*c, d[2][0]], [*c, d[2][1]]]
    else:
        paths = [a, a + d[0][:1], a + d[0][:2], a + d[0], b, c, c + d[2][:1], c + d[2][:2]]
    return list(zip([3, 3, 3, 3, 0, 2, 2, 2], paths, strict=True))


def plain(processors, request: int, ids: list[int], scores: torch.Tensor, four_rows: bool) -> torch.Tensor:
    """HF's call on one prefix, in a batch of four equal rows where the processor holds data for four."""
    rows = 4 if four_rows else 1
    out = LogitsProcessorList(processors)(torch.tensor([ids] * rows), scores.expand(rows, V).clone())
    return out[request if four_rows else 0]


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_equal_to_hf_on_each_prefix(name, tree):
    prefixes, logits = step(tree)
    before = logits.clone()
    try:
        processors = LogitsProcessorList(PROCESSORS[name]())
    except ValueError as error:
        assert name == "repetition, pads ignored"
        pytest.skip(f"this release of transformers has no such processor: {error}")
    got = Processors(processors, V).apply(logits, prefixes)
    assert torch.equal(logits, before), "the target's logits were changed in place"
    for r, (request, ids) in enumerate(expected_prefixes(prefixes, tree)):
        want = plain(PROCESSORS[name](), request, ids, logits[r : r + 1], name in FOUR_ROWS)
        assert torch.equal(got[r], want), f"position {r}"


@pytest.mark.parametrize("name", ["repetition", "no-repeat n-gram", "bad words", "user's own", "min new tokens"])
def test_broken_control_every_position_with_the_roots_prefix_is_caught(name):
    prefixes, logits = step(tree=False)
    roots = Prefixes([prefixes.columns[row] for row in prefixes.rows], [0] * 8, Draft.empty(8))
    right = Processors(LogitsProcessorList(PROCESSORS[name]()), V).apply(logits, prefixes)
    wrong = Processors(LogitsProcessorList(PROCESSORS[name]()), V).apply(logits, roots)
    assert not torch.equal(right, wrong)


def test_forced_bos_acts_on_a_prefix_of_one_token():
    prefixes = Prefixes([np.array([1])], [0], Draft(torch.tensor([[2]]), [1]))
    scores = torch.zeros(2, V)
    got = Processors(LogitsProcessorList([hf.ForcedBOSTokenLogitsProcessor(2)]), V).apply(scores, prefixes)
    assert got[0].argmax() == 2 and got[0].isneginf().sum() == V - 1
    assert torch.equal(got[1], scores[1])


def test_bf16_logits_are_processed_in_float32_as_hf_does():
    prefixes, logits = step(tree=False)
    got = Processors(LogitsProcessorList(PROCESSORS["temperature"]()), V).apply(logits.bfloat16(), prefixes)
    assert torch.equal(got, logits.bfloat16().float() / 0.7)


def test_warp_applies_the_prefix_free_processors_in_order():
    processors = Processors(LogitsProcessorList(PROCESSORS["order"]()), V)
    logits = torch.randn(2, V)
    want = hf.TopPLogitsWarper(0.7)(None, logits / 0.5).log_softmax(-1)
    assert torch.equal(processors.warp(logits), want)


def test_without_processors_logits_are_not_copied():
    processors = Processors(LogitsProcessorList(), V)
    logits = torch.randn(2, V).bfloat16()
    assert processors.is_identity
    assert processors.warp(logits) is logits


def test_stateful_processors_are_refused_by_name():
    guidance = hf.UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, model=None)
    with pytest.raises(NotImplementedError, match="UnbatchedClassifierFreeGuidanceLogitsProcessor.*guidance_scale"):
        Processors(LogitsProcessorList([guidance]), V)
