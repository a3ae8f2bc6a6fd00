"""Traced steps hold the p and q that a forward without a cache gives, and do not change what is generated."""

import pytest
import torch

from drafters.draft_model import DraftModelDrafter
from eval.grid import Speculation
from eval.html import chips
from eval.settings import Settings
from eval.trace import trace
from specdec.models import LoadedModel
from tests.eval.samples import prompts_of
from tests.tiny_models import tiny
from tests.toy_tokenizer import VOCAB, toy_tokenizer

TEMPERATURE = 0.8


def settings(**changes) -> Settings:
    fixed = {"target": "t", "drafters": ("d",), "prompts": None, "batch_sizes": (1,), "max_new_tokens": 12}
    return Settings(**fixed | {"temperatures": (0.0, TEMPERATURE)} | changes)


@pytest.fixture
def loaded():
    return LoadedModel(tiny("llama", vocab=VOCAB), toy_tokenizer(), "tiny")


def probabilities(model, tokens, temperature=1.0):
    with torch.no_grad():
        return (model(torch.tensor([tokens])).logits[0, -1].float() / temperature).softmax(-1)


def test_p_and_q_of_a_sampled_chain(loaded):
    draft_model = tiny("llama", seed=1, vocab=VOCAB)
    drafted = [Speculation("d", "draft_model", DraftModelDrafter(draft_model), 3)]
    [prompt] = prompts_of(5)
    [found] = trace(TEMPERATURE, loaded, drafted, [prompt], settings())
    text, some_rejected, some_accepted = list(prompt.tokens), False, False
    assert found["error"] is None and found["verifier"] == "block"
    for step in found["steps"]:
        prefix = list(text)
        for place, token in enumerate(step["drafted"]):
            p, q = (probabilities(model, prefix, TEMPERATURE)[token["token"]] for model in (loaded.model, draft_model))
            assert token["p"] == pytest.approx(p.item(), abs=1e-5) and token["q"] == pytest.approx(q.item(), abs=1e-5)
            assert token["parent"] == place - 1
            prefix.append(token["token"])
        taken = [token["token"] for token in step["drafted"] if token["accepted"]]
        some_rejected |= len(taken) < len(step["drafted"])
        some_accepted |= bool(taken)
        text += taken
        p = probabilities(loaded.model, text, TEMPERATURE)[step["next"]["token"]]
        assert step["next"]["p"] == pytest.approx(p.item(), abs=1e-5)
        text.append(step["next"]["token"])
    assert some_rejected and some_accepted
    assert sum(step["emitted"] for step in found["steps"]) == 12


@pytest.mark.parametrize("temperature", [0.0, TEMPERATURE])
def test_a_traced_request_is_the_grids_request(loaded, temperature):
    from eval.grid import methods_at

    drafted = [Speculation("d", "draft_model", DraftModelDrafter(tiny("llama", seed=1, vocab=VOCAB)), 3)]
    prompts = prompts_of(5, 9)
    traced = trace(temperature, loaded, drafted, prompts, settings())
    method = methods_at(temperature, loaded, drafted, settings(), {})[-1]
    for prompt, found in zip(prompts, traced, strict=True):
        emitted = []
        for step in found["steps"]:
            path = [token["token"] for token in step["drafted"] if token["accepted"]]
            emitted += [*path, step["next"]["token"]][: step["emitted"]]
        assert [emitted] == method.generate([prompt], 12).tokens


@pytest.mark.parametrize(("draft_ids", "rows"), [(None, ["hf + d"]), ([3, 5, 8], [])])
def test_a_draft_model_with_a_vocabulary_of_its_own_has_no_row_of_hfs(loaded, draft_ids, rows):
    """HF subtracts the assistant's distribution from the target's, which have different widths then."""
    from eval.grid import methods_at

    draft = tiny("llama", seed=1, vocab=VOCAB)
    draft.config.draft_ids = draft_ids
    methods = methods_at(0.0, loaded, [Speculation("d", "draft_model", DraftModelDrafter(draft), 3)], settings(), {})
    assert [method.name for method in methods if method.name.startswith("hf + ")] == rows


def test_what_raises_ends_its_own_trace(loaded):
    class Raises(DraftModelDrafter):
        def propose(self, rows, budget, draws):
            raise RuntimeError("boom")

    drafted = [Speculation(name, "x", kind(tiny("llama", vocab=VOCAB)), 3) for name, kind in
               [("bad", Raises), ("good", DraftModelDrafter)]]  # fmt: skip
    bad, good = trace(0.0, loaded, drafted, prompts_of(5), settings())
    assert bad["error"] == "RuntimeError: boom" and len(bad["steps"]) == 1  # the prompt's own step drafts nothing
    assert good["error"] is None


def token(text, accepted, parent, p=0.5, q=0.25):
    return {"token": 1, "text": text, "p": p, "q": q, "accept_prob": 0.75, "parent": parent, "accepted": accepted}


def kinds(drafted, emitted):
    step = {"drafted": drafted, "next": {"token": 2, "text": "n", "p": 0.1}, "emitted": emitted}
    return [chip.kind for chip in chips(step)]


def test_what_became_of_each_token():
    chain = [token("a", True, -1), token("b", False, 0), token("c", False, 1)]
    assert kinds(chain, 2) == ["accepted", "rejected", "unreached", "replaced"]
    assert kinds(chain[:1], 2) == ["accepted", "added"]
    assert kinds([], 1) == ["added"]
    assert kinds(chain, 1) == ["accepted", "rejected", "unreached", "cut"]  # `a` was a stop
    tree = [token("a", False, -1), token("b", True, -1), token("c", False, 0), token("d", True, 1)]
    assert kinds(tree, 3) == ["rejected", "accepted", "unreached", "accepted", "added"]


def test_a_chip_says_p_and_q():
    [chip, _] = chips({"drafted": [token("a\n", True, -1)], "next": token("n", True, 0), "emitted": 2})
    assert chip.text == "a\u21b5" and chip.tip == "accepted: p 0.5, q 0.25, accepted with probability 0.750"
