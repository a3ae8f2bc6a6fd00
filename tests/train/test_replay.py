"""The engine's drafts on known texts: counts worked out by hand, by enumeration, and from the training forward."""

import pytest
import torch

from drafters.draft_model import DraftModelDrafter, first_layers
from drafters.medusa import MedusaDrafter
from drafters.mtp import MTPDrafter
from heads.medusa import MedusaConfig, MedusaHeads
from heads.mtp import MTPConfig, MTPHead
from specdec import loop
from specdec.contracts import BaseDrafter, Draft
from tests.tiny_models import tiny
from train.batches import Example
from train.replay import Accuracy, replayed_accuracy

DEPTHS = 3
SMALL_VOCAB = 3  # so that untrained heads are right often enough to reach the last depth


class Oracle(BaseDrafter):
    """Drafts the texts' own next tokens, except at the planted (text's first token, position) pairs."""

    name = "oracle"

    def __init__(self, texts, wrong=frozenset(), late=0, shortest=DEPTHS):
        self.texts = {text.tokens[0]: text.tokens for text in texts}
        self.wrong, self.late, self.shortest = wrong, late, shortest

    def propose(self, rows, budget, draws):
        tokens = torch.zeros(len(budget), max(budget), dtype=torch.long)
        for b, (text, limit) in enumerate(zip(rows.tokens, budget, strict=True)):
            known = self.texts[int(text[0])]
            assert text.tolist() == known[: len(text)]
            for depth in range(limit):
                position = len(text) + depth
                source = max(0, position - self.late)
                tokens[b, depth] = known[source] + ((known[0], position) in self.wrong)
        return Draft(tokens, [min(limit, self.shortest) for limit in budget])


def texts_of(*shapes, vocab=90, seed=0):
    """Random texts, one per (length, response_start), each known by its first token."""
    random = torch.Generator().manual_seed(seed)
    return [
        Example(f"t{n}", [n + 1, *torch.randint(0, vocab, (length - 1,), generator=random).tolist()], start)
        for n, (length, start) in enumerate(shapes)
    ]


def counted(texts, is_right, depths=DEPTHS):
    """The definition: for every chain t and depth k, as long as the chain is right and its tokens are in the text.

    is_right(text, t, k): whether the prediction of depth k of the chain at slot t is the text's token t + 1 + k."""
    reached, right = [0] * depths, [0] * depths
    for text in texts:
        for t in range(max(0, text.response_start - 2), len(text.tokens)):
            for k in range(1, depths + 1):
                if t + 1 + k >= len(text.tokens):
                    break
                reached[k - 1] += 1
                if not is_right(text, t, k):
                    break
                right[k - 1] += 1
    return Accuracy(tuple(reached), tuple(right))


def test_accuracy_shares_and_sum():
    first, second = Accuracy((4, 2), (3, 1)), Accuracy((1, 0), (0, 0))
    assert first.conditional == [0.75, 0.5] and first.joint == [0.75, 0.375]
    assert second.conditional == [0.0, None] and second.joint == [0.0, None]
    assert first + second == Accuracy((5, 2), (3, 1))
    assert Accuracy.none(2) + first == first


@pytest.mark.parametrize(
    ("reached", "right"),
    [((4, 2), (3,)), ((4,), (5,)), ((4, 4), (3, 1)), ((4, 2), (3, -1))],
    ids=["other depths", "more right than reached", "more reached than were right", "negative"],
)
def test_counts_that_cannot_be_are_refused(reached, right):
    with pytest.raises(ValueError, match="not counts of one set of chains"):
        Accuracy(reached, right)


def test_accuracies_of_other_depths_do_not_add():
    with pytest.raises(ValueError, match="accuracies of 2 and 1 depths"):
        Accuracy((4, 2), (3, 1)) + Accuracy((4,), (3,))


def test_planted_error_counted_by_hand():
    # 7 tokens, the response from 3 on, so chains start at t = 1. Position 5 is drafted wrongly at any depth:
    # t = 1: 3 right, 4 right, 5 wrong.   t = 2: 4 right, 5 wrong.   t = 3: 5 wrong.   t = 4: 6 right, then the end.
    [text] = texts_of((7, 3))
    found = replayed_accuracy(tiny("llama"), Oracle([text], {(1, 5)}), [text], DEPTHS, 1)
    assert found == Accuracy((4, 2, 1), (3, 1, 0))


def test_response_off_by_one_is_caught():
    [text] = texts_of((7, 3))
    for start in (2, 4):
        moved = Example(text.id, text.tokens, start)
        assert replayed_accuracy(tiny("llama"), Oracle([text], {(1, 5)}), [moved], DEPTHS, 1).reached[0] != 4


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("chunk", [3, 512])
def test_ragged_batches_and_prompt_chunks(monkeypatch, batch_size, chunk):
    monkeypatch.setattr(loop, "CHUNK", chunk)
    texts = texts_of((20, 9), (7, 1), (12, 2), (9, 8), (30, 4), (5, 5), (6, 5))
    wrong = {(first, position) for first in range(1, 8) for position in range(2 * first, 30, 2 + first)}
    expected = counted(texts, lambda text, t, k: (text.tokens[0], t + 1 + k) not in wrong)
    assert expected.right[-1] > 0 and expected.right[0] < expected.reached[0]
    assert replayed_accuracy(tiny("llama"), Oracle(texts, wrong), texts, DEPTHS, batch_size) == expected
    late = replayed_accuracy(tiny("llama"), Oracle(texts, wrong, late=1), texts, DEPTHS, batch_size)
    assert late.reached[0] == expected.reached[0] and late.right[0] < expected.right[0] / 2


def test_end_tokens_do_not_end_a_text():
    texts, model = texts_of((12, 4)), tiny("llama")
    model.generation_config.eos_token_id = texts[0].tokens[6]
    # Response tokens 4 to 11 are drafted at depth 1, 5 to 11 at depth 2, 6 to 11 at depth 3.
    assert replayed_accuracy(model, Oracle(texts), texts, DEPTHS, 1) == Accuracy((8, 7, 6), (8, 7, 6))


def test_texts_without_a_response_count_nothing():
    texts = texts_of((5, 5), (1, 1))
    assert replayed_accuracy(tiny("llama"), Oracle(texts), texts, DEPTHS, 2) == Accuracy.none(DEPTHS)


class Forks(Oracle):
    def propose(self, rows, budget, draws):
        draft = super().propose(rows, budget, draws)
        return Draft(draft.tokens, draft.lengths, parents=torch.full_like(draft.tokens, -1))


@pytest.mark.parametrize(
    ("drafter", "depths", "batch_size", "message"),
    [
        (lambda texts: Forks(texts), 3, 1, "drafts trees"),
        (lambda texts: Oracle(texts, shortest=2), 3, 1, "drafted 2 tokens where 3 were asked for"),
        (lambda texts: Oracle(texts), 0, 1, "depths is 0"),
        (lambda texts: Oracle(texts), 3, 0, "batch_size is 0"),
    ],
)
def test_refusals(drafter, depths, batch_size, message):
    texts = texts_of((9, 3))
    with pytest.raises(ValueError, match=message):
        replayed_accuracy(tiny("llama"), drafter(texts), texts, depths, batch_size)


def test_no_texts_are_refused():
    with pytest.raises(ValueError, match="number of texts is 0"):
        replayed_accuracy(tiny("llama"), Oracle([]), [], DEPTHS, 1)


# What training computes, against what the engine drafts.


def random_texts():
    texts = texts_of((24, 7), (20, 1), (22, 9), (26, 2), (12, 11), (28, 12), vocab=SMALL_VOCAB)
    return [Example(text.id, [n % SMALL_VOCAB, *text.tokens[1:]], text.response_start) for n, text in enumerate(texts)]


def shaken(module, seed):
    """`module` with all its weights moved, so that no part of it is without effect."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return module


def states_of(model, text):
    """tokens [1, T] of a text and the target's post-norm states [1, T, D]."""
    tokens = torch.tensor([text.tokens])
    return tokens, model.get_decoder()(tokens).last_hidden_state


# Each builds a head on a model: the head, its drafter, and per depth the training forward's predictions [T] for a text.


def mtp(layers):
    def build(model):
        config = MTPConfig(layers=layers, hidden_size=32, vocab_size=SMALL_VOCAB)
        head = shaken(MTPHead(config, model), seed=layers).requires_grad_(False)

        def predictions(text):
            states = head(*states_of(model, text), DEPTHS)
            return [head.project(state)[0].argmax(-1) for state in states]

        return head, MTPDrafter, predictions

    return build


def medusa(model):
    config = MedusaConfig(heads=DEPTHS, layers=1, hidden_size=32, vocab_size=SMALL_VOCAB)
    heads = shaken(MedusaHeads(config, model), seed=3).requires_grad_(False)
    return heads, MedusaDrafter, lambda text: list(heads(states_of(model, text)[1])[:, 0].argmax(-1))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("build", [mtp(1), mtp(DEPTHS), medusa], ids=["mtp recursive", "mtp stages", "medusa"])
def test_drafts_are_what_training_predicts(family, build):
    """Depth k of the training forward, entry t, stands for token t + 1 + k."""
    model, texts = tiny(family, vocab=SMALL_VOCAB).requires_grad_(False), random_texts()
    head, drafter, predictions = build(model)
    predicted = {text.id: [depth.tolist() for depth in predictions(text)] for text in texts}
    expected = counted(texts, lambda text, t, k: predicted[text.id][k - 1][t] == text.tokens[t + 1 + k])
    assert expected.right[-1] > 0, "these texts do not test the last depth"
    assert replayed_accuracy(model, drafter(head), texts, DEPTHS, 4) == expected
    # The control: the same drafter, given every state of the target one token late.
    assert replayed_accuracy(model, delayed(drafter)(head), texts, DEPTHS, 4) != expected


def delayed(base):
    class Delayed(base):
        def admit(self, ids):
            super().admit(ids)
            self.kept = {}

        def observe(self, rows, verdict, hidden):
            late = []
            for row, states in zip(rows.ids, hidden, strict=True):
                states = torch.cat([self.kept.get(row, torch.zeros_like(states[:1])), states])
                self.kept[row] = states[-1:]
                late.append(states[:-1])
            super().observe(rows, verdict, late)

    return Delayed


def test_draft_model_drafts_are_its_own_forward():
    model, texts = tiny("llama", vocab=SMALL_VOCAB), random_texts()
    small = first_layers(model, 1)
    with torch.no_grad():
        predicted = {text.id: small(torch.tensor([text.tokens])).logits[0].argmax(-1).tolist() for text in texts}
    expected = counted(texts, lambda text, t, k: predicted[text.id][t + k] == text.tokens[t + 1 + k])
    assert expected.right[-1] > 0
    assert replayed_accuracy(model, DraftModelDrafter(small), texts, DEPTHS, 4) == expected
    # The control: another drafter on the same texts.
    assert replayed_accuracy(model, DraftModelDrafter(model), texts, DEPTHS, 4) != expected
