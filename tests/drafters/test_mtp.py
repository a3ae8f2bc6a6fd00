"""The MTP drafter against its head's definition, computed one chain at a time without any cache."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from drafters import mtp_stage
from drafters.mtp import MTPDrafter, build
from drafters.mtp_stage import CachedStage, forwards
from specdec.contracts import Drafter, Rows
from specdec.drafter_spec import DrafterSpec, build_drafter
from specdec.draws import make_draws
from specdec.models import LoadedModel
from tests.drafters.texts import Text, greedy, paths, play
from tests.heads.test_mtp import random_head
from tests.tiny_models import POSITIONS, tiny

FAMILIES = ["llama", "gpt2", "qwen3", "mistral", "gemma3", "deepseek_v3", "mixtral", "falcon"]
IDS = torch.arange(1, 97, 3)


@contextmanager
def final_states(stage, kind):
    """Collects what goes into or comes out of the block's final norm."""
    (norm,) = stage.final.values()
    found = []
    hook = norm.register_forward_hook(
        lambda module, args, out: found.append(args[0][0] if kind == "pre_norm" else out[0])
    )
    yield found
    hook.remove()


@torch.no_grad()
def run(head, stage, entries):
    """Logits [n, Vd] and recycled states [n, D] of a stage over entries (token, state, position), causally."""
    tokens, states, positions = zip(*entries, strict=True)
    positions = torch.tensor(positions)
    inputs = stage.inputs(head.embed(torch.tensor(tokens)), torch.stack(states), positions)
    with final_states(stage, head.config.recycled) as found:
        logits = stage.block(
            inputs_embeds=inputs[None],
            position_ids=positions[None],
            attention_mask=torch.ones(1, len(entries), dtype=torch.long),
            use_cache=False,
        ).logits[0]
    return logits, found[0]


def reference(head, text, path):
    """[len(path) + 1, Vd] logits for the token after the text and after each token of `path`, its continuation.

    The definition of heads.mtp: the chain of the last state goes on from the text's own entries (one stage), or from
    every stage's entries of all chains (a stage per depth)."""
    tokens, n = [*text.tokens, *path], len(text.states)
    logits = []
    if head.config.layers == 1:
        entries = [(tokens[t + 1], text.states[t], t) for t in range(n)]
        for depth in range(1, len(path) + 2):
            out, states = run(head, head.stage(1), entries)
            logits.append(out[-1])
            if depth <= len(path):
                entries.append((tokens[n + depth], states[-1], n - 1 + depth))
        return torch.stack(logits)
    states = text.states
    for depth in range(1, len(path) + 2):
        entries = [(tokens[t + depth], states[t], t + depth - 1) for t in range(n)]
        out, states = run(head, head.stage(depth), entries)
        logits.append(out[-1])
    return torch.stack(logits)


def ids_of(head):
    return torch.arange(head.config.vocab_size) if head.draft_ids is None else head.draft_ids


def chains(head, longest=99):
    """The check that every draft is the chain of the reference's arg-maxes."""
    longest = min(longest, head.config.layers if head.config.layers > 1 else 99)

    def check(draft, texts, budget):
        assert draft.lengths == [min(limit, longest) for limit in budget]
        assert draft.q_logits is None and draft.parents is None
        for b, text in enumerate(texts):
            drafted = draft.tokens[b, : draft.lengths[b]].tolist()
            if drafted:
                best = reference(head, text, drafted[:-1]).argmax(-1)
                assert drafted == ids_of(head)[best].tolist()

    return check


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_chains_equal_the_definition(family, layers):
    head = random_head(tiny(family), layers=layers)
    play(MTPDrafter(head), chains(head), steps=8)


@pytest.mark.parametrize(
    "settings",
    [
        {"layers": 3},
        {"recycled": "pre_norm"},
        {"recycled": "pre_norm", "layers": 2},
        {"concat": "hidden_first", "zero_first_embedding": True},
        {"draft_vocab_size": len(IDS), "draft_ids": IDS},
        {"draft_vocab_size": len(IDS), "draft_ids": IDS, "layers": 2},
    ],
    ids=str,
)
def test_settings_of_the_head(settings):
    head = random_head(tiny("llama"), **settings)
    play(MTPDrafter(head), chains(head))


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("together", [0, 2])
def test_prompts_enter_in_chunks(layers, together, monkeypatch):
    """Prompts of up to 40 tokens in chunks of 3, and rows that attend in one grid or alone."""
    monkeypatch.setattr(mtp_stage, "CHUNK", 3)
    monkeypatch.setattr(mtp_stage, "TOGETHER", together)
    head = random_head(tiny("gpt2"), layers=layers)
    play(MTPDrafter(head), chains(head), steps=6, prompt=40)


def test_forwards_by_hand(monkeypatch):
    monkeypatch.setattr(mtp_stage, "CHUNK", 4)
    assert list(forwards([3, 9, 4], 0)) == [
        ({1: (0, 4)}, False),
        ({1: (4, 8)}, False),
        ({0: (0, 3), 1: (8, 9), 2: (0, 4)}, True),
    ]
    assert list(forwards([5, 6], 1)) == [({1: (0, 4)}, False), ({0: (0, 5), 1: (4, 6)}, True)]


def test_drafts_equal_what_training_computes():
    """MTPHead.forward, all chains at once, predicts the very tokens that are drafted."""
    for layers in (1, 3):
        head = random_head(tiny("qwen3"), layers=layers)

        def check(draft, texts, budget, head=head):
            for b, text in enumerate(texts):
                drafted = draft.tokens[b, : draft.lengths[b]].tolist()
                if not drafted:
                    continue
                tokens = torch.tensor([[*text.tokens, *drafted]])
                hidden = torch.zeros(*tokens.shape, 32, dtype=torch.float64)
                hidden[0, : len(text.states)] = text.states
                states = head(tokens, hidden, len(drafted))
                assert drafted == [int(head.project(state[0, len(text.states) - 1]).argmax()) for state in states]

        play(MTPDrafter(head), check)


class OneStateLate(MTPDrafter):
    """Broken control: every token gets the state of the one before it."""

    def observe(self, rows, verdict, hidden):
        super().observe(rows, verdict, [states.roll(1, 0) for states in hidden])


@pytest.mark.parametrize("layers", [1, 2])
def test_the_comparison_catches_states_one_late(layers):
    head = random_head(tiny("llama"), layers=layers)
    with pytest.raises(AssertionError):
        play(OneStateLate(head), chains(head))


def test_the_comparison_catches_recursion_in_the_wrong_slot(monkeypatch):
    head, go_on = random_head(tiny("llama")), CachedStage.go_on
    monkeypatch.setattr(
        CachedStage, "go_on", lambda self, ids, slots, *args: go_on(self, ids, [s + 1 for s in slots], *args)
    )
    with pytest.raises(AssertionError):
        play(MTPDrafter(head), chains(head))


def test_the_comparison_catches_a_drafts_own_entry_that_stays(monkeypatch):
    """The first accepted token's entry is the one made while drafting, instead of one with the target's state."""
    settle, extend, kept = CachedStage.settle, CachedStage.extend, set()

    def one_too_few(self, row, length, has_run):
        settle(self, row, length, has_run)
        if has_run:
            kept.add(row)

    def without_the_first(self, row, states):
        if row in kept and len(states) > 1:
            self.cache.lengths[row] += 1
            states = states[1:]
        kept.discard(row)
        extend(self, row, states)

    monkeypatch.setattr(CachedStage, "settle", one_too_few)
    monkeypatch.setattr(CachedStage, "extend", without_the_first)
    head = random_head(tiny("llama"))
    with pytest.raises(AssertionError):
        play(MTPDrafter(head), chains(head))


def test_the_comparison_catches_a_second_stage_rolled_back_one_too_few(monkeypatch):
    """The entry that rests on the first drafted token stays, whatever the verdict."""
    settle = CachedStage.settle

    def one_too_few(self, row, length, has_run):
        settle(self, row, length, has_run)
        if self.depth == 2 and has_run:
            self.cache.lengths[row] += 1
            self.inputs[row] = self.inputs[row][1:]

    monkeypatch.setattr(CachedStage, "settle", one_too_few)
    head = random_head(tiny("llama"), layers=2)
    with pytest.raises(AssertionError):
        play(MTPDrafter(head), chains(head))


class AllOrNothing(MTPDrafter):
    """Drafts to the end or not at all: a budget below the depth would leave the later stages behind."""

    def propose(self, rows, budget, draws):
        return super().propose(rows, [5 if limit else 0 for limit in budget], draws)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_counted_work(layers):
    """Every committed token enters every stage once; the last entries of later stages, which rest on drafts, again."""
    drafter, fed = AllOrNothing(random_head(tiny("llama"), layers=layers)), []
    for stage in drafter.stages:

        def forward(step, *args, run=stage.model.forward):
            fed.append(step.input_ids.numel())
            return run(step, *args)

        stage.model.forward = forward

    def check(draft, texts, budget):
        expected = 0
        for text, length in zip(texts, draft.lengths, strict=True):
            if length:
                before, text.entered = getattr(text, "entered", 0), len(text.states)
                expected += sum(text.entered - before + min(number, before) for number in range(layers))
                expected += length - layers  # recursion
        assert sum(fed) == expected
        fed.clear()

    play(drafter, check)


@pytest.mark.parametrize("ids", [None, IDS], ids=["all", "reduced"])
@pytest.mark.parametrize("layers", [1, 2])
def test_sampled_chains_come_with_their_exact_q(layers, ids):
    """q is the softmax of the definition's logits after the warper, 0 outside the draft vocabulary."""
    settings = {} if ids is None else {"draft_vocab_size": len(ids), "draft_ids": ids}
    head = random_head(tiny("llama"), layers=layers, **settings)
    drawn = []

    def draws(count):
        steps = [len(drawn)] * count
        return make_draws("fresh", 7, range(count), steps, [1] * count, lambda logits: logits / 0.7, "cpu")

    def check(draft, texts, budget):
        for b, text in enumerate(texts):
            drafted = draft.tokens[b, : draft.lengths[b]]
            drawn.extend(drafted.tolist())
            if len(drafted):
                q = (draft.q_logits[b, : len(drafted)] - draft.q_logz[b, : len(drafted), None]).exp()
                expected = torch.zeros(len(drafted), 97, dtype=torch.float64)
                expected[:, ids_of(head)] = (reference(head, text, drafted[:-1].tolist()) / 0.7).softmax(-1)
                torch.testing.assert_close(q, expected.float(), rtol=1e-4, atol=1e-6)
                assert q.gather(1, drafted[:, None]).min() > 0 and set(drafted.tolist()) <= set(ids_of(head).tolist())

    play(MTPDrafter(head), check, draws=draws, steps=25)
    assert len(set(drawn)) > 15  # not arg-maxes


def trees(head, top_k):
    """The check that every draft is EAGLE-2's tree, from the reference's log-probabilities path by path."""

    def check(draft, texts, budget):
        assert draft.lengths == budget and draft.q_logits is None
        for b, text in enumerate(texts):
            if not budget[b]:
                continue
            made, frontier = [], [(0.0, [])]
            for _ in range(-(-budget[b] // top_k)):
                children = []
                for score, path in frontier:
                    log_p, columns = reference(head, text, path)[-1].log_softmax(-1).topk(top_k)
                    tokens = ids_of(head)[columns].tolist()
                    children += [(score + p, [*path, t]) for p, t in zip(log_p.tolist(), tokens, strict=True)]
                made += children
                frontier = sorted(children, key=lambda child: -child[0])[:top_k]
            best = sorted(made, key=lambda node: -node[0])[: budget[b]]
            assert paths(draft, b) == [path for _, path in best]

    return check


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "mistral", "falcon"])
@pytest.mark.parametrize(("top_k", "longest"), [(2, 5), (3, 8)])
def test_trees_equal_the_definition(family, top_k, longest):
    head = random_head(tiny(family))
    play(MTPDrafter(head, top_k), trees(head, top_k), steps=5, longest=longest)


def test_trees_over_a_reduced_vocabulary():
    head = random_head(tiny("llama"), draft_vocab_size=len(IDS), draft_ids=IDS, recycled="pre_norm")
    play(MTPDrafter(head, 3), trees(head, 3), steps=6, longest=9)


def test_the_comparison_catches_nodes_with_the_state_of_another():
    head = random_head(tiny("llama"))
    drafter = MTPDrafter(head, 3)
    run_tree = drafter.stages[0].run_tree

    def own_states(ids, texts, states, nodes, last):
        swapped = torch.cat([states[:, :1], states[:, 1:].flip(1)], dim=1)
        return run_tree(ids, texts, swapped, nodes, last)

    drafter.stages[0].run_tree = own_states
    with pytest.raises(AssertionError):
        play(drafter, trees(head, 3), longest=9)


def rows_of_length(length):
    text = Text([int(t) for t in torch.arange(length) % 97], torch.randn(length - 1, 32, dtype=torch.float64))
    return text, Rows([0], [np.array(text.tokens)], torch.device("cpu"), 97)


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize(
    ("family", "left", "levels"), [("gpt2", 1, 3), ("gpt2", 0, 2), ("gpt2", -1, 1), ("llama", 0, 4)]
)
@torch.no_grad()
def test_a_table_of_positions_ends_the_draft(family, left, levels, top_k):
    """Of a text of POSITIONS - left tokens, depth k is read k - 2 positions after the last one."""
    head = random_head(tiny(family))
    text, rows = rows_of_length(POSITIONS - left)
    drafter = MTPDrafter(head, top_k)
    drafter.admit([0])
    drafter.observe(rows, None, [text.states])
    draft = drafter.propose(rows, [4 * top_k], greedy(1))
    if top_k == 1:
        assert draft.lengths == [levels]
        chains(head, levels)(draft, [text], [4])
    else:
        assert max(map(len, paths(draft, 0))) <= levels
        assert draft.lengths == [min(8, top_k + (levels - 1) * top_k**2)]


@torch.no_grad()
def test_a_full_table_of_positions_drafts_nothing():
    head = random_head(tiny("gpt2"))
    text, rows = rows_of_length(POSITIONS + 2)
    for top_k in (1, 2):
        drafter = MTPDrafter(head, top_k)
        drafter.admit([0])
        drafter.observe(rows, None, [text.states])
        assert drafter.propose(rows, [4], greedy(1)).lengths == [0]


def test_nothing_is_kept_of_released_rows():
    drafter = MTPDrafter(random_head(tiny("llama"), layers=2))
    play(drafter, lambda *_: None)
    assert isinstance(drafter, Drafter)
    assert all(not stage.inputs and not stage.cache.lengths and stage.cache.nbytes == 0 for stage in drafter.stages)


def test_what_cannot_be_drafted_is_refused():
    head = random_head(tiny("llama"), draft_vocab_size=len(IDS), draft_ids=IDS)
    for top_k in (0, "3", len(IDS) + 1):
        with pytest.raises(ValueError, match=f"top_k is {top_k!r}"):
            MTPDrafter(head, top_k)
    with pytest.raises(ValueError, match="top_k is 2, but a head of 3 stages drafts chains only"):
        MTPDrafter(random_head(tiny("llama"), layers=3), 2)


def test_by_name(tmp_path):
    model = tiny("llama")
    head, target = random_head(model), LoadedModel(model, None, "tiny")
    head.save_pretrained(tmp_path / "head")
    play(build(target, str(tmp_path / "head")), chains(head), steps=4)
    tree = build_drafter(DrafterSpec.parse(f"mtp:head={tmp_path / 'head'},top_k=3"), target)
    play(tree, trees(head, 3), steps=4, longest=9)
