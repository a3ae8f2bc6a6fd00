"""The speed regression check: what a step of a fixed workload asks of a device, counted, so that no clock is needed.

What follows from the algorithm is asserted as such: one forward over the last token and the drafted ones of every row,
without padding, one read and no other wait, no copy of the logits or of the cache, no more calls for eight rows than
for one, nor in the model than HF's own forward makes. The rest is held under a ceiling that is what it takes now and a
little more; who lowers it lowers the ceiling.
"""

import functools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper

from drafters.draft_model import DraftModelDrafter, first_layers
from drafters.medusa import MedusaDrafter
from drafters.mtp import MTPDrafter
from drafters.ngram import NGramDrafter
from drafters.trees import Tree
from eval.bench_forward import hf_forward
from eval.endless import endless
from eval.launches import launches
from eval.plan.measure import forward_calls
from eval.work import Counts, Work, count_step
from specdec.cache import SlotLayer
from specdec.contracts import BaseDrafter, Draft
from specdec.draft_checks import made_safe
from specdec.loop import Batch
from specdec.processors import Processors
from specdec.registry import VERIFIERS, known
from specdec.target import Target
from tests.heads.test_medusa import random_heads
from tests.heads.test_mtp import random_head
from tests.tiny_models import tiny

VOCAB = 1000  # so large that a copy of the logits is more than all else that the loop allocates
PROMPT, CHUNK, LENGTH, STEPS = 20, 64, 4, 4  # tokens and steps; everything stays within the cache's first bucket
RAGGED = [0, 1, 2, 3, 4, 0, 1, 2]
PERIOD = 5  # of the first prompt, which counts from 0 to 4 again and again
TREE = Tree(((0,), (1,), (0, 0), (1, 0)))


class RaggedDrafter(BaseDrafter):
    """As many tokens as RAGGED says, none of any use."""

    def propose(self, rows, budget, draws):
        lengths = [min(limit, RAGGED[row]) for row, limit in zip(rows.ids, budget, strict=True)]
        return Draft(torch.zeros(len(lengths), LENGTH, dtype=torch.long), lengths)


def counting(model):
    """`model`, which now goes on counting as the first prompt does, with as many kernels as before."""
    embedded = model.get_input_embeddings().weight[:PERIOD]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()[:PERIOD] = embedded.roll(1, 0)
    return model


DRAFTERS = {
    "plain": lambda model: None,
    "ragged": lambda model: RaggedDrafter(),
    "ngram": lambda model: NGramDrafter(),
    "draft model": lambda model: DraftModelDrafter(first_layers(model, 1)),
    "medusa": lambda model: MedusaDrafter(random_heads(model, vocab_size=VOCAB)),
    "tree": lambda model: MedusaDrafter(random_heads(model, vocab_size=VOCAB), TREE),
    "mtp": lambda model: MTPDrafter(random_head(model, vocab_size=VOCAB)),
}
# per row; there are three Medusa heads
DRAFTED = {"plain": 0, "ngram": LENGTH, "draft model": LENGTH, "medusa": 3, "tree": LENGTH, "mtp": LENGTH}


@dataclass(frozen=True)
class Most:
    """kernels, tensors: of a step outside the target's forward and the drafter: packing, greedy verification, the read.
    copies: the step's index lists; the draft's lengths, for the check of the draft and for the rule; a tree's places,
    for its mask and for its accepted path.   mask: kernels of a tree's mask, which the target's forward asks for."""

    kernels: int
    tensors: int
    copies: int
    mask: int = 0


OF_LOOP = {"nothing": Most(25, 27, 1), "chain": Most(60, 62, 3), "tree": Most(155, 142, 5, mask=18)}
# Kernels and copies of the drafter, what the loop does to check its draft included: four one-layer forwards of the
# draft model, each with a pack; as many of the MTP head, which packs and picks rows by index besides.
OF_DRAFTER = {
    "plain": (3, 0),
    "ragged": (7, 0),
    "ngram": (7, 1),
    "draft model": (400, LENGTH),
    "medusa": (50, 1),
    "tree": (60, 2),
    "mtp": (500, 14),
}


@dataclass
class Step:
    """forwards: packed tokens of each forward of the target.   scored: rows of logits of each.   drafted: tokens that
    the drafter handed over.   syncs: by the engine's own count."""

    work: Work
    forwards: list[int]
    scored: list[int]
    drafted: int
    syncs: int

    @property
    def loop(self) -> Counts:
        """What neither the target nor the drafter does."""
        return sum((self.work.by[phase] for phase in ("loop", "forward", "verify")), Counts())


def recorded(drafter, lengths):
    """`drafter`, which notes in `lengths` what it hands over."""
    if drafter is None:
        return None
    propose = drafter.propose

    def watched(*args):
        draft = propose(*args)
        lengths.extend(draft.lengths)
        return draft

    object.__setattr__(drafter, "propose", watched)
    return drafter


@functools.cache
def run(method, B, target=Target, kind=Batch, prompt=PROMPT, chunk=CHUNK):
    """The steps of the prefill, and STEPS steps of decoding after them."""
    model = tiny("llama", dtype=torch.float32, vocab=VOCAB)
    repeats = method == "ngram"
    if repeats:
        counting(model)
    drafted, forwards, scored = [], [], []

    def watch(module, args, kwargs, out):
        forwards.append(kwargs["input_ids"].numel())
        scored.append(out.logits[..., 0].numel())

    prompts = [np.arange(prompt) % (PERIOD + b * (not repeats)) for b in range(B)]
    room = (STEPS + 4) * (LENGTH + 1)  # the first rows take some steps beside the others' prefill
    batch = endless(target(model), recorded(DRAFTERS[method](model), drafted), LENGTH, prompts, room, kind)
    batch.chunk = chunk
    steps = {"prefill": [], "decode": []}
    with model.register_forward_hook(watch, with_kwargs=True):
        while len(steps["decode"]) < STEPS:
            for noted in (drafted, forwards, scored):
                noted.clear()
            syncs = batch.stats.syncs
            phase = "prefill" if any(request.steps == 0 for request in batch.requests) else "decode"
            work = count_step(batch)
            steps[phase].append(Step(work, [*forwards], [*scored], sum(drafted), batch.stats.syncs - syncs))
    return steps


@functools.cache
def hf_kernels():
    """Of HF's own forward over as many tokens per row."""
    model = tiny("llama", dtype=torch.float32, vocab=VOCAB)
    calls, cache = forward_calls(model, [2], [1 + LENGTH], [PROMPT], 1)
    with torch.no_grad():
        calls[2, 1 + LENGTH, PROMPT]()
        return launches(hf_forward(model, cache, 2, 1 + LENGTH, PROMPT), torch.device("cpu"))["launches"]


def check_decoding(method, B, steps):
    kernels, copies = OF_DRAFTER[method]
    for step in steps:
        most = OF_LOOP[("tree" if method == "tree" else "chain") if step.drafted else "nothing"]
        assert step.forwards == step.scored == [B + step.drafted], "one forward, no padding, every token scored"
        assert step.work.total.reads == step.syncs == 1 and step.work.total.waits == 0
        assert step.loop.bytes < step.scored[0] * VOCAB * 4, "as much as a copy of the logits"
        assert step.loop.kernels <= most.kernels and step.loop.tensors <= most.tensors
        assert step.work.by["model"].kernels <= hf_kernels() + most.mask
        assert step.work.by["draft"].kernels <= kernels
        assert step.work.total.copies <= most.copies + copies
    if method in DRAFTED:
        assert [step.drafted for step in steps] == [B * DRAFTED[method]] * STEPS


@pytest.mark.parametrize("B", [1, 8])
@pytest.mark.parametrize("method", sorted(set(DRAFTERS) - {"ragged"}))
def test_a_decode_step_does_no_more_than_it_must(method, B):
    check_decoding(method, B, run(method, B)["decode"])


def test_rows_draft_different_lengths_for_free():
    steps = run("ragged", 8)["decode"]
    check_decoding("ragged", 8, steps)
    assert [step.forwards for step in steps] == [[8 + 13]] * STEPS  # 0 + 1 + 2 + 3 + 4 + 0 + 1 + 2 drafted tokens


@pytest.mark.parametrize("method", ["plain", "draft model", "medusa", "mtp"])
def test_eight_rows_take_no_more_calls_than_one(method):
    few, many = (run(method, B)["decode"][-1] for B in (1, 8))
    assert many.loop.kernels == few.loop.kernels and many.work.total.copies == few.work.total.copies
    assert many.work.by["model"].kernels == few.work.by["model"].kernels


def check_context(measure):
    short, long = (measure("draft model", 8, prompt=prompt, chunk=8 * 180)["decode"][-1] for prompt in (PROMPT, 180))
    assert long.loop == short.loop and long.work.by["model"].kernels == short.work.by["model"].kernels
    seen = 8 * (180 - PROMPT) * 2 * 2 * 2 * 8 * 4  # bytes of cache that the longer rows have more, in two layers
    assert long.work.by["model"].bytes - short.work.by["model"].bytes < seen, "as much as a copy of the cache"


def test_a_longer_context_takes_no_more_calls_and_of_memory_only_masks():
    check_context(run)


def test_attention_over_a_copy_of_the_cache_is_caught(monkeypatch, controls):
    update = SlotLayer.update
    monkeypatch.setattr(SlotLayer, "update", lambda *args, **kwargs: [view.clone() for view in update(*args, **kwargs)])
    with pytest.raises(AssertionError, match="a copy of the cache"):
        check_context(run.__wrapped__)
    controls("counted work: attention over a copy of the cache", "as much as a copy of the cache")


# Kernels of the loop, and what it allocates in copies of the logits, with a temperature and the rules as they run
# without a GPU. Coupled noise is made of 32-bit words in 64-bit integers, a part of the vocabulary at a time.
SAMPLING = {"rejection": (85, 4.5), "block": (220, 10), "coupled": (215, 66)}


@functools.cache
def sampling(rule):
    class Sampling(Batch):
        def __post_init__(self):
            self.verifier = known(VERIFIERS, rule, "verifier")()
            self.processors = Processors(LogitsProcessorList([TemperatureLogitsWarper(0.7)]), VOCAB)
            super().__post_init__()

    return Sampling


@pytest.mark.parametrize("rule", SAMPLING)
def test_sampling_waits_no_more_and_takes_no_more_calls_for_more_rows(rule):
    few, many = (run("draft model", B, kind=sampling(rule))["decode"][-1] for B in (1, 8))
    kernels, copies = SAMPLING[rule]
    for step in few, many:
        assert step.work.total.reads == step.syncs == 1 and step.work.total.waits == 0
        assert step.loop.kernels <= kernels
        assert step.loop.bytes <= copies * step.scored[0] * VOCAB * 4
    assert many.work.total.copies == few.work.total.copies and many.loop.kernels <= few.loop.kernels + 2


@pytest.mark.parametrize(
    ("B", "prompt", "chunk", "packed", "scored"),
    [
        (1, 50, 32, [32, 18], [0, 1]),  # only the end of a prompt is scored
        (8, 20, 64, [64, 3 + 64, 6 + 32], [3, 6, 8]),  # rows that are through decode beside the others' chunks
    ],
)
def test_prefill_runs_every_prompt_token_once_and_scores_the_last(B, prompt, chunk, packed, scored):
    steps = run("plain", B, prompt=prompt, chunk=chunk)["prefill"]
    assert [step.forwards for step in steps] == [[M] for M in packed]
    assert [step.scored for step in steps] == [[R] for R in scored]
    for step in steps:
        assert step.work.total.reads == 1 and step.work.total.copies <= OF_LOOP["nothing"].copies
        assert step.loop.kernels <= OF_LOOP["nothing"].kernels
        assert step.loop.bytes < max(1, step.scored[0]) * VOCAB * 4


class CopiesLogits(Target):
    def forward(self, *args, **kwargs):
        logits, hidden = super().forward(*args, **kwargs)
        return logits.clone(), hidden


class ForwardTwice(Target):
    def forward(self, *args, **kwargs):
        super().forward(*args, **kwargs)
        return super().forward(*args, **kwargs)


class PadsDrafts(Batch):
    def propose(self, scored, draws):
        draft, _ = super().propose(scored, draws)
        return made_safe(replace(draft, lengths=[max(draft.lengths)] * len(draft.lengths)), VOCAB)


class ReadsTwice(Batch):
    def verify(self, scored, draft, scores, draws):
        verdict = super().verify(scored, draft, scores, draws)
        assert verdict.n_accepted.min().item() >= 0
        return verdict


class SelectsByMask(Batch):
    def verify(self, scored, draft, scores, draws):
        verdict = super().verify(scored, draft, scores, draws)
        verdict.next_token[verdict.n_accepted > LENGTH] = 0
        return verdict


class CopiesEveryRow(Batch):
    def verify(self, scored, draft, scores, draws):
        for request in scored:
            torch.tensor([request.row]).to(self.target.device, non_blocking=True)
        return super().verify(scored, draft, scores, draws)


class CopiesAndWaits(Batch):
    def verify(self, scored, draft, scores, draws):
        torch.tensor([request.row for request in scored], device=self.target.device)
        return super().verify(scored, draft, scores, draws)


class LoopsOverRows(Batch):
    def verify(self, scored, draft, scores, draws):
        for row in range(len(scored)):
            scores.logits[row, :4].sum() + 1
        return super().verify(scored, draft, scores, draws)


class ChecksNothing(Batch):
    def propose(self, scored, draws):
        return made_safe(super().propose(scored, draws)[0], VOCAB)


@pytest.mark.parametrize(
    ("control", "method", "engine"),
    [
        ("logits copied once", "ragged", {"target": CopiesLogits}),
        ("two forwards", "ragged", {"target": ForwardTwice}),
        ("drafts padded to the longest", "ragged", {"kind": PadsDrafts}),
        ("a second read", "ragged", {"kind": ReadsTwice}),
        ("indexing by a mask", "ragged", {"kind": SelectsByMask}),
        ("a copy to the device for every row", "ragged", {"kind": CopiesEveryRow}),
        ("a copy that waits for the device", "ragged", {"kind": CopiesAndWaits}),
        ("a kernel for every row", "ragged", {"kind": LoopsOverRows}),
        ("a kernel for every row where none drafts", "plain", {"kind": LoopsOverRows}),
        ("a check of what is no draft", "plain", {"kind": ChecksNothing}),
        ("a copy that waits in a step of trees", "tree", {"kind": CopiesAndWaits}),
    ],
)
def test_an_engine_that_does_more_is_caught(control, method, engine, controls):
    steps = run(method, 8, **engine)["decode"]
    with pytest.raises(AssertionError) as caught:
        check_decoding(method, 8, steps)
    controls(f"counted work: {control}", str(caught.value).partition("\n")[0])
