"""A folder is never mixed up with another run, and a killed run loses at most the batch it was in."""

import json

import pytest

from eval.folder import Folder
from eval.settings import Settings
from tests.eval.samples import failure, record

CONFIG = {"max_new_tokens": 8, "batch_sizes": [1, 2]}
JOB = [record("plain", id="a"), record("plain", id="b")]
NEXT = [record("ngram", id="a"), record("ngram", id="b")]


@pytest.fixture
def folder(tmp_path):
    folder = Folder(tmp_path / "new" / "out")
    assert folder.start(CONFIG) == []
    return folder


def test_holds_what_was_appended(folder):
    folder.append(JOB)
    folder.append(NEXT)
    folder.check(CONFIG, resume=True)
    assert folder.start(CONFIG) == JOB + NEXT


def test_refuses_a_folder_with_results(folder):
    folder.check(CONFIG, resume=False)  # nothing in it yet
    folder.append(JOB)
    with pytest.raises(FileExistsError, match="--resume"):
        folder.check(CONFIG, resume=False)


@pytest.mark.parametrize("other", [{**CONFIG, "max_new_tokens": 9}, {"batch_sizes": [1, 2]}, {**CONFIG, "seed": 1}])
def test_refuses_to_continue_another_run(folder, other):
    folder.append(JOB)
    before = folder.results.read_text()
    with pytest.raises(ValueError, match="max_new_tokens=8" if "seed" not in other else "seed=None, not 1"):
        folder.check(other, resume=True)
    assert folder.results.read_text() == before


@pytest.mark.parametrize("tail", ["", "half a line"])
def test_drops_an_unfinished_job(folder, tail):
    folder.append(JOB)
    folder.append(NEXT[:1])  # one of two rows
    with folder.results.open("a") as file:
        file.write(tail)
    assert folder.start(CONFIG) == JOB
    assert [json.loads(line)["method"] for line in folder.results.read_text().splitlines()] == ["plain", "plain"]
    folder.append(NEXT)
    assert folder.start(CONFIG) == JOB + NEXT


def settings(**changes) -> Settings:
    plain = {"target": "t", "drafters": ("ngram",), "prompts": None, "batch_sizes": (1,), "max_new_tokens": 4}
    return Settings(**plain | changes)


def test_configuration_survives_json_and_tells_runs_apart():
    config = settings().config("digest")
    assert json.loads(json.dumps(config)) == config
    for changes in ({"seed": 1}, {"drafters": ("ngram", "x")}, {"temperatures": (0.0, 0.8)}, {"repeats": 2}):
        assert settings(**changes).config("digest") != config
    assert settings().config("other prompts") != config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_sizes": (1, 0)}, r"\[1, 0\]"),
        ({"batch_sizes": ()}, "no batch size is given"),
        ({"batch_sizes": (2, 2)}, "batch size 2 is given more than once"),
        ({"drafters": ("ngram", "ngram")}, "drafter 'ngram' is given more than once"),
        ({"draft_lengths": (5, -1)}, "-1"),
        ({"temperatures": (0.5, -0.5)}, "--temperature is -0.5"),
        ({"dtypes": ("float32", "float32")}, "dtype 'float32' is given more than once"),
        ({"verifiers": ("block",)}, "'block' does not fit do_sample=False"),
        ({"verifiers": ("block", "greedy"), "temperatures": (0.5,)}, "'greedy' does not fit do_sample=True"),
        ({"verifiers": ("nope",)}, "unknown verifier 'nope'"),
        ({"dtypes": ("float32", "flaot16")}, "unknown dtype 'flaot16'"),
        ({"dtypes": ("auto", "float32")}, "auto stands for one of the others"),
        ({"top_k": 5}, "need a --temperature above 0"),
        ({"split": "test"}, "belongs to a data set's --column"),
        ({"repeats": 0}, "repeats is 0"),
    ],
)
def test_settings_are_validated(changes, message):
    with pytest.raises(ValueError, match=message):
        settings(**changes)


def test_an_out_that_cannot_be_a_folder_is_refused_before_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is not a folder"):
        Folder(tmp_path / "file").check(CONFIG, False)
    with pytest.raises(ValueError, match="file is not a folder"):
        Folder(tmp_path / "file" / "below").check(CONFIG, False)


def test_a_damaged_folder_is_named(tmp_path):
    folder = Folder(tmp_path / "run")
    folder.start(CONFIG)
    folder.append([record("plain")])
    (tmp_path / "run" / "results.jsonl").write_text("{broken}\n" + (tmp_path / "run" / "results.jsonl").read_text())
    folder.check(CONFIG, True)
    with pytest.raises(ValueError, match="line 1, is not a result"):
        folder.start(CONFIG)
    (tmp_path / "run" / "results.jsonl").write_text("{broken}\n")
    (tmp_path / "run" / "config.json").write_text("")
    with pytest.raises(ValueError, match="config.json is missing or damaged"):
        folder.check(CONFIG, True)


def test_verifiers_run_at_the_temperatures_that_they_fit():
    chosen = settings(verifiers=("auto", "block", "greedy"), temperatures=(0.0, 0.8), top_k=7)
    assert chosen.verifiers_at(0.0) == ["auto", "greedy"] and chosen.verifiers_at(0.8) == ["auto", "block"]
    assert chosen.sampling(0.0) == {"do_sample": False}
    assert chosen.sampling(0.8) == {"do_sample": True, "temperature": 0.8, "top_k": 7, "top_p": 1.0}


def test_failures_are_kept_and_unfinished_jobs_are_not(folder):
    folder.append(JOB)
    folder.append([failure("ngram")])
    folder.append([record("plain", id="a", batch=1)])
    assert folder.start(CONFIG) == [*JOB, failure("ngram")]


def test_several_processes_write_files_of_their_own_that_merge(tmp_path):
    first, second = Folder(tmp_path / "run", 0), Folder(tmp_path / "run", 1)
    assert first.start(CONFIG) == []
    other = [record("plain", id=name, batch=1) for name in "cd"]
    first.append(JOB)
    second.append(other)
    with pytest.raises(FileExistsError):
        Folder(tmp_path / "run").check(CONFIG, resume=False)
    assert second.read() == [*JOB, *other] and len(list(first.path.glob("results-*.jsonl"))) == 2
    assert first.merge() == [*JOB, *other]
    assert not list(first.path.glob("results-*.jsonl")) and Folder(tmp_path / "run").start(CONFIG) == [*JOB, *other]


def test_a_kill_between_merging_and_cleaning_up_doubles_nothing(folder):
    folder.append(JOB)
    (folder.path / "results-0.jsonl").write_text(folder.results.read_text())
    assert folder.read() == JOB


@pytest.mark.parametrize("file", ["results.jsonl", "report.md"])
def test_a_full_disk_is_named(folder, file):
    folder.write_text("report.md", "before")
    for name in ("results.jsonl", "report.md.part"):
        (folder.path / name).symlink_to("/dev/full")
    with pytest.raises(ValueError, match=rf"{file} cannot be written \(No space left on device\).*--resume"):
        folder.append(JOB) if file == "results.jsonl" else folder.write_text(file, "x" * 100_000)
    assert (folder.path / "report.md").read_text() == "before"


@pytest.mark.parametrize("content", [b"[]", b"\xff\xfe"])
def test_damaged_files_of_other_kinds_are_named(folder, content):
    folder.append(JOB)
    with folder.results.open("ab") as file:
        file.write(content + b"\n")
    with pytest.raises(ValueError, match="line 3, is not a result"):
        folder.start(CONFIG)
    (folder.path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match="config.json is missing or damaged"):
        folder.check(CONFIG, True)
