"""The self-check catches what it injects, and nothing where nothing is injected."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import eval.fidelity.selfcheck as selfcheck
from eval.fidelity.bugs import MODEL_BUGS, Bug, keyed_by_position, less_or_equal, none
from eval.fidelity.toy import TREE, P, TableDrafter, toy_ladder, toy_model
from eval.folder import Folder
from eval.methods import EncodedPrompt
from tests.eval.fidelity.ladders import ladder_of
from tests.tiny_models import tiny
from verifiers.block import BlockVerifier
from verifiers.tree_rejection import TreeRejectionVerifier


def base_ladder(seed: int = 0):
    """24 prompts, decoded together: a batch costs little more than a row."""
    prompts = [
        EncodedPrompt(n, f"p{n}", "", [1 + (n + place * (2 + n % 5)) % 90 for place in range(8)]) for n in range(24)
    ]
    model = tiny("llama", dtype=torch.float32)
    return selfcheck.sampled(ladder_of(model, seed=seed, prompts=prompts, max_new_tokens=60, batch_size=24))


def test_the_toy_models_law_is_the_table():
    logits = toy_model()(input_ids=torch.tensor([[0, 1, 2]]), use_cache=False).logits[0]
    torch.testing.assert_close(logits.softmax(-1), P, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bug", [bug for bug in MODEL_BUGS if bug.caught_by != "test"], ids=lambda bug: bug.name)
def test_bugs_that_single_tokens_show_are_caught_at_once(bug):
    base = base_ladder()
    check = selfcheck.on_model(bug, base, selfcheck.plain_envelope(base))
    assert check.right and check.caught_by == bug.caught_by and check.tokens <= selfcheck.TOKENS


@pytest.mark.slow
@pytest.mark.parametrize("bug", [bug for bug in MODEL_BUGS if bug.caught_by == "test"], ids=lambda bug: bug.name)
def test_bugs_of_the_rule_are_caught_by_a_distribution_test(bug):
    base = base_ladder()
    check = selfcheck.on_model(bug, base, selfcheck.plain_envelope(base))
    assert check.right and check.caught_by == "test" and check.smallest is not None


def test_a_planted_zero_tells_less_from_less_or_equal():
    assert selfcheck.planted("none").right
    with less_or_equal(None):
        assert selfcheck.planted("u q <= p").caught_by == "replay"


@pytest.mark.slow
def test_joint_laws_on_the_toy():
    chain, tree = toy_ladder(TableDrafter(), BlockVerifier, 0), toy_ladder(TableDrafter(TREE), TreeRejectionVerifier, 0)
    assert selfcheck.on_toy("none", chain).right and selfcheck.on_toy("none", tree).right
    with keyed_by_position(chain) as broken:
        assert selfcheck.on_toy("keyed by position", broken).right
    unmodified = toy_ladder(TableDrafter(TREE, says="unmodified"), TreeRejectionVerifier, 0)
    assert selfcheck.on_toy("unmodified q", unmodified).right


@pytest.mark.slow
def test_no_false_alarm_on_20_correct_runs():
    """At the level of 0.001 per run, 20 runs are silent with probability 0.98."""
    for seed in range(20):
        base = base_ladder(1000 * seed)
        check = selfcheck.on_model(Bug("none", "", none), base, selfcheck.plain_envelope(base))
        assert check.right, (seed, check)
        assert check.tokens >= selfcheck.TOKENS


def test_the_table_and_the_exit_status(tmp_path, monkeypatch, capsys):
    checks = [
        selfcheck.Check("none", "model", "", "", 4000, []),
        selfcheck.Check("resample from p", "model", "test", "p = 1e-9", 700, ["replay"], 0.1),
    ]
    monkeypatch.setattr(selfcheck, "all_checks", lambda ladder: iter(checks))
    folder = Folder(tmp_path)
    assert selfcheck.self_check(None, folder, as_json=False) == 0
    shown = capsys.readouterr().out
    assert "resample from p" in shown and "700" in shown and "WRONG" not in shown
    checks.append(selfcheck.Check("none", "toy", "test", "p = 1e-9", 10, []))  # a false alarm
    assert selfcheck.self_check(None, folder, as_json=False) == 1 and "WRONG" in capsys.readouterr().out
    checks[-1] = selfcheck.Check("stale slot", "model", "", "", 10, [])  # a bug that went unnoticed
    assert selfcheck.self_check(None, folder, as_json=True) == 1


def test_the_drafter_is_the_target_but_for_its_middle_layers():
    def of_layers(count: int):
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 11}
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=count, **sizes))

    model = of_layers(5)
    kept, layers = (
        [layer.self_attn.q_proj.weight for layer in one.model.layers]
        for one in (selfcheck.without_middle(model), model)
    )
    assert len(kept) == 4 and all(a is b for a, b in zip(kept, [*layers[:2], *layers[3:]], strict=True))
    assert len(selfcheck.without_middle(of_layers(30)).model.layers) == 27
    with pytest.raises(ValueError, match="give a target of two or more"):
        selfcheck.without_middle(of_layers(1))
