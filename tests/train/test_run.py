"""A whole run on a tiny target: prompts in, a head that drafts out, with its card."""

import json
import shutil

import pytest
import torch
from typer.testing import CliRunner

import specdec
import train.draft
import train.medusa
import train.mtp
from drafters.draft_model import DraftModelDrafter
from specdec.cli import app
from specdec.drafter_spec import DrafterSpec, build_drafter
from specdec.models import load_target
from tests.tiny_models import tiny
from tests.toy_tokenizer import VOCAB, toy_tokenizer

RECIPES = {
    "medusa": (train.medusa.main, ["--heads", "2"], "medusa:head={}"),
    "mtp": (train.mtp.main, ["--depths", "2"], "mtp:head={}"),
    "draft": (train.draft.main, ["--layers", "0"], "draft_model:model={}"),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    tiny("llama", dtype=torch.float32, vocab=VOCAB).save_pretrained(folder / "model")
    toy_tokenizer().save_pretrained(folder / "model")
    rows = [{"id": f"p{n}", "prompt": f"say {n}"} for n in range(16)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def arguments(target, out, *more):
    given = {
        "target": target / "model", "prompts": target / "prompts.jsonl", "out": out, "responses": target / "responses",
        "held_out": 0.3, "temperature": 0, "max_new_tokens": 10, "epochs": 2, "batch_size": 4, "learning_rate": 1e-2,
        "acceptance_prompts": 3, "acceptance_tokens": 8, "eval_every": 3, "save_every": 3, "device": "cpu",
    }  # fmt: skip
    return [*(f"--{name}={value}" for name, value in given.items()), *more]


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("reduced", [False, True], ids=["all", "reduced"])
def test_what_was_trained_drafts(kind, reduced, target, tmp_path, capsys):
    main, own, name = RECIPES[kind]
    out = tmp_path / "out"
    main(arguments(target, out, *own, *(["--draft_vocab_size", "40"] if reduced else [])))
    assert "[trained on, " in capsys.readouterr().err  # the first example is shown with its mask
    card = (out / "head" / "README.md").read_text()
    assert "## Acceptance in the engine" in card and str(out) not in card
    rows = [json.loads(line) for line in (out / "acceptance.jsonl").read_text().splitlines()]
    assert {row["batch_size"] for row in rows} == {1, 8} and {row["verifier"] for row in rows} == {"greedy"}
    loaded = load_target(str(target / "model"), "float32", "cpu")
    drafter = build_drafter(DrafterSpec.parse(name.format(out / "head")), loaded)
    ids = torch.tensor([[5, 6, 7, 8]])
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 20, "do_sample": False}
    found, stats = specdec.generate(loaded.model, ids, drafter=drafter, draft_length=2, return_stats=True, **settings)
    assert torch.equal(found, loaded.model.generate(ids, **settings))
    assert sum(stats.rows[0].drafted) > 0
    if reduced and not isinstance(drafter, DraftModelDrafter):
        head = drafter.heads if kind == "medusa" else drafter.head
        assert len(head.draft_ids) == 40 and VOCAB - 1 in head.draft_ids  # the end token is always there


def test_the_command_passes_its_arguments_on(target, tmp_path):
    result = CliRunner().invoke(app, ["train", "medusa", *arguments(target, tmp_path, "--headz", "3")])
    assert result.exit_code == 2 and "'headz', which is no setting: did you mean heads" in result.output


def test_a_run_without_held_out_prompts_is_refused(target, tmp_path):
    with pytest.raises(ValueError, match="held_out is 0.0: give more than 0"):
        train.medusa.main(arguments(target, tmp_path, "--held_out=0"))


def test_too_few_tokens_to_draft_for_are_refused_before_the_run(target, tmp_path):
    with pytest.raises(ValueError, match="acceptance_tokens is 2: give at least 3"):
        train.medusa.main(arguments(target, tmp_path, "--acceptance_tokens=2"))


def test_a_head_of_one_token_has_no_tree(target, tmp_path):
    train.mtp.main(arguments(target, tmp_path, "--depths=2", "--draft_vocab_size=1"))
    rows = [json.loads(line) for line in (tmp_path / "acceptance.jsonl").read_text().splitlines()]
    assert {row["drafter"] for row in rows} == {"mtp"}


def test_a_run_is_not_resumed_with_other_weights_of_the_target(target, tmp_path):
    """Its responses, which hold the fingerprint too, are those of the new weights here."""
    copy = tmp_path / "target"
    shutil.copytree(target, copy)
    own = [f"--target={copy / 'model'}", "--heads=2"]
    train.medusa.main(arguments(target, tmp_path / "out", *own, f"--responses={copy / 'responses'}"))
    shutil.rmtree(copy / "responses")
    tiny("llama", seed=1, dtype=torch.float32, vocab=VOCAB).save_pretrained(copy / "model")
    with pytest.raises(ValueError, match="checkpoints holds what was made with target="):
        train.medusa.main(arguments(target, tmp_path / "out", *own, f"--responses={copy / 'responses'}", "--resume"))
