"""The Medusa drafter against each head's formula at the right place of the text."""

import pytest
import torch
from torch.nn.functional import silu

from drafters.medusa import MedusaDrafter, build
from drafters.trees import Tree
from specdec.contracts import Drafter
from specdec.drafter_spec import DrafterSpec, build_drafter
from specdec.models import LoadedModel
from tests.drafters.texts import paths, play
from tests.heads.test_medusa import random_heads
from tests.tiny_models import tiny

TREE = Tree(((0,), (1,), (0, 0), (0, 2), (1, 0), (0, 0, 1), (2,)))
IDS = torch.arange(3, 97, 4)


@pytest.fixture
def model():
    return tiny("llama")


def candidates(heads, model, state, head):
    """Tokens of one head on one state, most probable first."""
    for block in heads.blocks[head]:
        state = state + silu(block.weight @ state + block.bias)
    logits = model.lm_head(state)
    if heads.draft_ids is not None:
        kept = torch.zeros(97, dtype=torch.bool).index_fill_(0, heads.draft_ids, True)
        logits = logits.masked_fill(~kept, -torch.inf)
    return logits.argsort(descending=True).tolist()


def follows(heads, model, tree):
    """The check that every draft is the tree of the heads' candidates, given the state of the last token but one."""

    def check(draft, texts, budget):
        assert draft.lengths == [min(limit, len(tree.paths)) for limit in budget]
        assert draft.q_logits is None and (draft.parents is None) == tree.is_chain
        for b, text in enumerate(texts):
            top = [candidates(heads, model, text.states[-1], head) for head in range(heads.config.heads)]
            expected = [
                [top[depth][rank] for depth, rank in enumerate(path)] for path in tree.paths[: draft.lengths[b]]
            ]
            assert paths(draft, b) == expected

    return check


@pytest.mark.parametrize("ids", [None, IDS], ids=["all", "reduced"])
@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_drafts_equal_the_heads_formula(model, tree, ids):
    heads = random_heads(model, draft_ids=ids, draft_vocab_size=None if ids is None else len(ids))
    expected = Tree(((0,), (0, 0), (0, 0, 0))) if tree is None else tree  # the heads are 3
    play(MedusaDrafter(heads, tree), follows(heads, model, expected), longest=9)


class OneStateLate(MedusaDrafter):
    """Broken control: drafts from the state before the last."""

    def observe(self, rows, verdict, hidden):
        super().observe(rows, verdict, [states[:-1] if len(states) > 1 else states for states in hidden])


class SomeonesState(MedusaDrafter):
    """Broken control: rows get each other's states."""

    def observe(self, rows, verdict, hidden):
        super().observe(rows, verdict, hidden[::-1])


class HeadsOffByOne(MedusaDrafter):
    """Broken control: the second head drafts the first token."""

    def _candidates(self, states, N):
        return self.heads(states).roll(-1, 0)[:N].argmax(-1).T


@pytest.mark.parametrize("broken", [OneStateLate, SomeonesState, HeadsOffByOne])
def test_the_comparison_catches(model, broken):
    heads = random_heads(model)
    with pytest.raises(AssertionError):
        play(broken(heads), follows(heads, model, Tree.chain(3)), longest=3)


def test_nothing_is_kept_of_released_rows(model):
    drafter = MedusaDrafter(random_heads(model))
    play(drafter, lambda *_: None)
    assert isinstance(drafter, Drafter) and not drafter._states


def test_a_tree_beyond_the_heads_is_refused(model):
    with pytest.raises(ValueError, match="reaches depth 4 and rank 0, where there are 3 heads of 97 candidates"):
        MedusaDrafter(random_heads(model), Tree.chain(4))
    with pytest.raises(ValueError, match="rank 24, where there are 3 heads of 24"):
        MedusaDrafter(random_heads(model, draft_ids=IDS, draft_vocab_size=24), Tree(((24,),)))


def test_by_name(model, tmp_path):
    """From a folder, as `--drafter` asks for it; the tree comes from the accuracies saved with the heads."""
    target = LoadedModel(model, None, "tiny")
    heads, folder = random_heads(model), tmp_path / "heads"
    heads.save_pretrained(folder, about={"accuracies": [[0.5, 0.3], [0.4, 0.1], [0.2, 0.0]]})
    chain = build_drafter(DrafterSpec.parse(f"medusa:head={folder}"), target)
    play(chain, follows(heads, model, Tree.chain(3)))
    tree = build_drafter(DrafterSpec.parse(f"medusa:head={folder},nodes=4"), target)
    assert tree.tree == Tree(((0,), (1,), (0, 0), (1, 0)))  # worth .5, .3, .2 and .12; (0, 1) is worth .05
    heads.save_pretrained(folder, about={})
    with pytest.raises(ValueError, match="nodes=4 needs the heads' measured accuracies"):
        build(target, str(folder), nodes=4)
    for nodes in (0, "many"):
        with pytest.raises(ValueError, match=f"nodes={nodes} is not a number of tree nodes"):
            build(target, str(folder), nodes=nodes)
