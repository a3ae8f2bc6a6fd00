"""What goes wrong in `specdec eval`: refused before anything is written, or kept to the row that it belongs to."""

import errno
import json
import os
from pathlib import Path

import torch

import eval.command
import specdec
from tests.eval.outputs import results, summary
from tests.toy_tokenizer import VOCAB


def test_refuses_another_runs_folder_and_loses_nothing(tmp_path, evaluate):
    evaluate("--limit", "2")
    before = (tmp_path / "out" / "results.jsonl").read_text()
    for options, message in [([], "--resume"), (["--resume", "--seed", "1"], "seed=0, not 1")]:
        result = evaluate("--limit", "2", *options)
        assert result.exit_code == 2 and message in result.stderr and "Traceback" not in result.stderr
    assert (tmp_path / "out" / "results.jsonl").read_text() == before


def test_interrupted_run_is_usable_and_resumes_where_it_was(tmp_path, evaluate, monkeypatch):
    true_generate, calls = specdec.generate, []

    def interrupted(*arguments, **keywords):
        calls.append(keywords["request_ids"])
        if len(calls) == 9:
            raise KeyboardInterrupt
        return true_generate(*arguments, **keywords)

    monkeypatch.setattr(specdec, "generate", interrupted)
    result = evaluate()
    assert result.exit_code == eval.command.INTERRUPTED and "--resume" in result.stderr
    assert not summary(tmp_path)["complete"] and summary(tmp_path)["rows"][0]["method"] == "hf"
    before = (tmp_path / "out" / "results.jsonl").read_text()
    assert 0 < len(before.splitlines()) < 30
    monkeypatch.setattr(specdec, "generate", true_generate)
    assert evaluate("--resume").exit_code == 0
    assert (tmp_path / "out" / "results.jsonl").read_text().startswith(before)
    keys = [(r.id, r.method, r.batch_size) for r in results(tmp_path)]
    assert len(keys) == len(set(keys)) == (4 + 3) * 5
    assert summary(tmp_path)["complete"] and {row["tokens"] for row in summary(tmp_path)["rows"]} == {50}


def test_prompt_that_does_not_fit_is_refused_before_the_run(tmp_path, evaluate):
    result = evaluate("--max-new-tokens", "250")
    assert result.exit_code == 2 and "'p0' has 9 tokens" in result.stderr and "256 positions" in result.stderr
    assert not (tmp_path / "out").exists()


def test_unknown_drafter_is_refused_before_the_run(tmp_path, evaluate):
    result = evaluate("--drafter", "nope")
    assert result.exit_code == 2 and "known are" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_verifier_that_does_not_fit_is_refused_before_the_run(tmp_path, evaluate):
    result = evaluate("--verifier", "block")
    assert result.exit_code == 2 and "does not fit do_sample=False" in result.stderr
    assert not (tmp_path / "out").exists()


def test_memory_at_an_impossible_context_is_refused_before_the_run(tmp_path, evaluate):
    assert evaluate("--memory", "300").exit_code == 2
    assert not (tmp_path / "out").exists()


def test_broken_prompt_line_is_named_or_skipped(tmp_path, evaluate):
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write("{broken\n")
    result = evaluate()
    assert result.exit_code == 2 and "line 6" in result.stderr and not (tmp_path / "out").exists()
    assert evaluate("--skip-bad").exit_code == 0
    assert {row["requests"] for row in summary(tmp_path)["rows"]} == {5}


def test_interrupted_before_the_first_result(tmp_path, evaluate, monkeypatch):
    def interrupted(*arguments, **keywords):
        raise KeyboardInterrupt

    monkeypatch.setattr(eval.command, "execute", interrupted)
    assert evaluate().exit_code == eval.command.INTERRUPTED
    assert summary(tmp_path)["rows"] == []


class Failing(specdec.BaseDrafter):
    """Drafts nothing, and raises in the third draft of a batch of two."""

    name = "failing"
    drafts = 0

    def admit(self, ids):
        self.drafts = 0

    def propose(self, rows, budget, draws):
        self.drafts += 1
        if len(rows.ids) == 2 and self.drafts == 3:
            raise RuntimeError("boom")
        return specdec.Draft.empty(len(rows.ids))


def wrong_token() -> specdec.BaseDrafter:
    class WrongToken(specdec.BaseDrafter):
        name = "wrong"

        def propose(self, rows, budget, draws):
            return specdec.Draft(torch.full((len(budget), 1), VOCAB), [min(1, limit) for limit in budget])

    return WrongToken()


def test_a_drafter_that_raises_fails_its_row_alone(tmp_path, evaluate):
    result = evaluate("--drafter", f"{__name__}:Failing", "--drafter", "ngram", "--trace", "1")
    assert result.exit_code == eval.command.FAILED and "1 row(s) failed" in result.stderr
    rows = {(row["method"], row["batch_size"]): row for row in summary(tmp_path)["rows"]}
    failed = rows.pop((f"{__name__}:Failing", 2))
    assert failed["error"] == "RuntimeError: boom" and "in propose" in failed["traceback"]
    assert len(rows) == 8 and all(row["error"] is None and row["tokens"] == 50 for row in rows.values())
    assert summary(tmp_path)["complete"] and "(FAILED)" in result.stdout
    again = evaluate("--drafter", f"{__name__}:Failing", "--drafter", "ngram", "--trace", "1", "--resume")
    assert again.exit_code == eval.command.FAILED and len(summary(tmp_path)["rows"]) == 9


def test_a_token_outside_the_vocabulary_is_named_with_row_and_step(tmp_path, evaluate):
    evaluate("--drafter", f"{__name__}:wrong_token", "--limit", "2")
    failed = summary(tmp_path)["rows"][-1]
    assert "outside the target's vocabulary for row 0 (prompt 'p1') in the row's drafting step 1" in failed["error"]


def test_a_drafter_without_the_contract_is_refused_before_the_run(tmp_path, evaluate):
    result = evaluate("--drafter", "collections:Counter")
    assert result.exit_code == 2 and "made a Counter that lacks some of what" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_one_sentence_and_the_run_goes_on_later(tmp_path, evaluate, monkeypatch):
    """The disk takes two jobs and a part of the third."""
    true_open, appends = Path.open, []

    def full(path, mode="r", *arguments, **keywords):
        if path.name == "results.jsonl" and mode == "a":
            appends.append(path)
            if len(appends) == 3:
                with true_open(path, "a") as file:
                    file.write('{"id": "p0", "conv')
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return true_open(path, mode, *arguments, **keywords)

    monkeypatch.setattr(Path, "open", full)
    result = evaluate("--limit", "2")
    assert result.exit_code == 2 and "No space left on device" in result.stderr and "Traceback" not in result.stderr
    monkeypatch.setattr(Path, "open", true_open)
    assert len(results(tmp_path)) == 2
    assert evaluate("--limit", "2", "--resume").exit_code == 0 and summary(tmp_path)["complete"]
    assert len(results(tmp_path)) == 2 * (4 + 3)


def test_answers_to_earlier_turns_survive_a_full_disk(tmp_path, evaluate, monkeypatch):
    """The disk takes the first batch of answers; the next run, with room, has the report of one that had it at once."""
    chats = [{"id": name, "turns": [name * 3, "de"]} for name in "abc"]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    true_replace, writes = Path.replace, []

    def full(path, target):
        writes.append(path.name)
        if writes.count("answers.json.part") == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return true_replace(path, target)

    monkeypatch.setattr(Path, "replace", full)
    result = evaluate()
    assert result.exit_code == 2 and "answers.json cannot be written (No space left on device)" in result.stderr
    assert len(json.loads((tmp_path / "out" / "answers.json").read_text())) == 2
    monkeypatch.setattr(Path, "replace", true_replace)
    assert evaluate("--resume").exit_code == 0
    answers = (tmp_path / "out" / "answers.json").read_text()
    assert {record.id for record in results(tmp_path)} == {*"abc", *(f"{name}, turn 2" for name in "abc")}
    (tmp_path / "out" / "answers.json").write_text(answers[:20])
    result = evaluate("--resume")
    assert result.exit_code == 2 and "answers.json is missing or damaged" in result.stderr


def test_a_run_is_not_continued_with_other_weights(tmp_path, evaluate, model):
    evaluate("--limit", "2")
    before = (tmp_path / "out" / "environment.json").read_text()
    assert evaluate("--limit", "2", "--resume").exit_code == 0
    with torch.no_grad():
        next(model.parameters()).add_(1)
    result = evaluate("--limit", "2", "--resume")
    assert result.exit_code == 2 and "holds a run with other weights (" in result.stderr
    assert json.loads(before)["weights"] == json.loads((tmp_path / "out" / "environment.json").read_text())["weights"]


def test_one_name_for_two_drafters_is_refused_before_the_run(tmp_path, evaluate):
    result = evaluate("--drafter", "ngram", "--drafter", "ngram:length=3", "--draft-length", "3,5")
    assert result.exit_code == 2 and "'ngram:length=3' is given by name and by --draft-length too" in result.stderr
    assert not (tmp_path / "out").exists()


def test_interleaved_repeats_are_continued_after_a_kill(tmp_path, evaluate):
    """A kill leaves whole jobs and half a line; the resumed run has the table of one that was never killed."""
    evaluate("--limit", "3", "--repeats", "2", "--drafter", "ngram:min_n=1")
    whole = (tmp_path / "out" / "results.jsonl").read_text()
    lines = whole.splitlines(keepends=True)
    (tmp_path / "out" / "results.jsonl").write_text("".join(lines[:17]) + lines[17][:40])
    (tmp_path / "out" / "summary.json").unlink()
    assert evaluate("--limit", "3", "--repeats", "2", "--drafter", "ngram:min_n=1", "--resume").exit_code == 0
    kept = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    assert kept[:17] == whole.splitlines()[:17]

    def counted(text: list[str]) -> list[dict]:
        rows = [json.loads(line) for line in text]
        return sorted(
            ({k: row[k] for k in ("id", "method", "batch_size", "repeat", "tokens", "accepted")} for row in rows),
            key=str,
        )

    assert counted(kept) == counted(whole.splitlines())
