"""`specdec plan ...` from its arguments to its files, on a tiny model; bad input gets one sentence."""

import json

import pytest
import torch
from typer.testing import CliRunner

import eval.plan.workload
from eval.plan.costs import Costs
from specdec.cli import app
from specdec.models import LoadedModel
from tests.eval.plan.shapes import summary_row
from tests.tiny_models import tiny
from tests.toy_tokenizer import VOCAB, toy_tokenizer

PNG = b"\x89PNG"


@pytest.fixture(autouse=True)
def target(monkeypatch):
    loaded = LoadedModel(tiny("llama", vocab=VOCAB, dtype=torch.float32), toy_tokenizer(), "tiny")
    monkeypatch.setattr(eval.plan.workload, "load_target", lambda *arguments: loaded)


@pytest.fixture
def plan(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("abcabcabc", "aaaa")))
    loop = ["--prompts", str(prompts), "--raw", "--limit", "2", "--steps", "4", "--repeats", "1"]

    def invoke(command: str, *options: str):
        fixed = loop if command in ("measure", "check") else []
        return CliRunner().invoke(app, ["plan", command, "--out", str(tmp_path / "out"), *fixed, *options])

    return invoke


@pytest.fixture
def costs(plan, tmp_path):
    options = ("--drafter", "ngram:min_n=1", "--draft-length", "3", "--batch-sizes", "1,2", "--contexts", "8,64")
    result = plan("measure", *options)
    assert result.exit_code == 0, result.output
    return tmp_path / "out" / "costs.json"


@pytest.fixture
def larger(tmp_path):
    """A configuration of another model."""
    tiny("qwen3").config.save_pretrained(tmp_path / "larger")
    return str(tmp_path / "larger")


def test_measured_costs_are_read_as_they_were_written(costs, tmp_path):
    found = Costs.read(costs)
    assert len(found.points) == 2 * 3 * 2 and {p.width for p in found.points} == {1, 2, 4}
    assert found.drafters.keys() == {"ngram:min_n=1"} and found.shape.name == "tiny"
    found.write(tmp_path / "again.json")
    assert Costs.read(tmp_path / "again.json") == found


def test_predict_from_costs_and_for_another_model(plan, costs, larger, tmp_path):
    sizes = ("--batch-sizes", "1,8,512", "--contexts", "16,128")
    result = plan("predict", "--costs", str(costs), *sizes)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("tokens of context speculation") == 2 and "speed-up" in result.stdout
    other = plan("predict", "--costs", str(costs), "--model", larger, "--json", *sizes)
    found = json.loads(other.stdout)
    assert found == json.loads((tmp_path / "out" / "prediction.json").read_text())
    assert [(row["context"], row["batch_size"]) for row in found["rows"]] == [
        (context, batch) for context in (16, 128) for batch in (1, 8, 512)
    ]
    assert found["stops_paying"].keys() == {"16", "128"} and "larger" in found["plan"]
    assert (tmp_path / "out" / "prediction.png").read_bytes().startswith(PNG)


def test_predict_for_a_given_device(plan, larger):
    """Without anything measured: 1 GB/s reads this tiny model's weights in 22 us, so a draft of a right token pays."""
    given = ("--bandwidth", "1", "--compute", "1", "--model", larger, "--acceptance", "1,1", "--draft-ratio", "0.5")
    result = plan("predict", *given, "--batch-sizes", "1", "--contexts", "1", "--json")
    assert result.exit_code == 0, result.output
    row = json.loads(result.stdout)["rows"][0]
    assert row["best_draft_length"] == 2 and 1 < row["speedups"][0] < 2 / 1.5 and row["speedups"][1] < 3 / 2
    drafted = plan("predict", *given[:-2], "--draft-model", larger, "--batch-sizes", "1", "--contexts", "1", "--json")
    assert json.loads(drafted.stdout)["rows"][0]["best_draft_length"] == 0  # a drafter as dear as its target


def test_acceptance_from_an_evaluations_folder(plan, larger, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text(json.dumps({"rows": [summary_row("ngram", 0.0)]}))
    result = plan(
        "predict", "--bandwidth", "1", "--compute", "1", "--model", larger, "--draft-ratio", "0",
        "--acceptance", str(tmp_path / "run"), "--json",
    )  # fmt: skip
    found = json.loads(result.stdout)["acceptance"]
    assert found["accepted"] == pytest.approx([1 / 3, 1]) and found["drafted"] == pytest.approx([2 / 3, 2 / 3])


def test_check_writes_both_numbers_and_says_whether_they_agree(plan, tmp_path):
    result = plan("check", "--drafter", "ngram:min_n=1", "--batch-sizes", "1,2", "--draft-lengths", "1,3")
    found = json.loads((tmp_path / "out" / "check.json").read_text())
    assert [(row["batch_size"], row["draft_length"]) for row in found["rows"]] == [(1, 1), (1, 3), (2, 1), (2, 3)]
    agree = all(abs(row["predicted_speedup"] / row["measured_speedup"] - 1) <= 0.15 for row in found["rows"])
    assert result.exit_code == (0 if agree else 1), result.output
    assert "largest error" in result.stdout and (tmp_path / "out" / "check.png").read_bytes().startswith(PNG)


def test_split_prints_the_seeds_numbers(plan, tmp_path):
    result = plan("split", "--prefill-rate", "5.6", "--decode-rate", "10", "--devices", "3", "--decode-speedup", "2")
    assert result.exit_code == 0, result.output
    assert "2.80" in result.stdout and "3.33" in result.stdout and "3.59" in result.stdout
    assert (tmp_path / "out" / "split.png").read_bytes().startswith(PNG)
    rows = json.loads((tmp_path / "out" / "split.json").read_text())["rows"]
    assert [row["plain_prefill"] for row in rows] == [1, 2]


GIVEN = ("--bandwidth", "1000", "--compute", "100")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("predict",), "give either --costs, or both"),
        (("predict", "--bandwidth", "1000"), "give either --costs, or both"),
        (("predict", "--costs", "nowhere.json"), "nowhere.json is not a file"),
        (("predict", "--bandwidth", "inf", "--compute", "1", "--model", "LARGER"), "bandwidth of inf"),
        (("predict", *GIVEN), "no model to plan for"),
        (("predict", *GIVEN, "--model", "LARGER"), "what drafting costs"),
        (("predict", *GIVEN, "--model", "LARGER", "--draft-ratio", "0.1"), "what is accepted"),
        (("predict", *GIVEN, "--model", "LARGER", "--draft-ratio", "0.1", "--acceptance", "x"), "--acceptance is 'x'"),
        (("predict", *GIVEN, "--model", "LARGER", "--draft-ratio", "0.1", "--acceptance", "2"), "an acceptance is 2.0"),
        (("predict", *GIVEN, "--model", "LARGER", "--draft-ratio", "0.1", "--acceptance", ""), "--acceptance is ''"),
        (
            ("predict", *GIVEN, "--model", "LARGER", "--draft-ratio", "0.1", "--temperature", "1"),
            "--temperature chooses",
        ),
        (("predict", *GIVEN, "--model", "LARGER", "--draft-ratio", "inf"), "draft ratio is inf"),
        (("predict", *GIVEN, "--model", "LARGER", "--draft-ratio", "1", "--draft-model", "x"), "both given"),
        (("predict", *GIVEN, "--model", "./nothing", "--draft-ratio", "1"), "no configuration"),
        (("predict", *GIVEN, "--model", "LARGER", "--dtype", "int3"), "unknown dtype"),
        (("predict", "--contexts", "a"), "--contexts is 'a'"),
        (("predict", "--batch-sizes", "0"), "batch sizes are [0]"),
        (("measure", "--draft-length", "0"), "draft lengths are"),
        (("measure", "--drafter", "nope"), "known are"),
        (("measure", "--steps", "0"), "limit, steps and repeats are [2, 0, 1]"),
        (("measure", "--contexts", "300"), "256 positions"),
        (("check", "--batch-sizes", "3"), "do not fill batches of 3"),
        (("check", "--draft-lengths", "0"), "draft lengths are [0]"),
        (("split", "--prefill-rate", "0", "--decode-rate", "1"), "prefills 0"),
        (("split", "--prefill-rate", "1", "--decode-rate", "inf"), "decodes inf"),
        (("split", "--prefill-rate", "1", "--decode-rate", "1", "--devices", "1"), "cannot be split"),
        (("split", "--prefill-rate", "1", "--decode-rate", "1", "--decode-speedup", "0"), "speed-up is 0"),
    ],
)
def test_bad_input_is_one_sentence(plan, larger, arguments, said):
    result = plan(*(larger if argument == "LARGER" else argument for argument in arguments))
    assert result.exit_code == 2 and said in result.stderr, result.output
    assert result.stderr.startswith("specdec: ") and result.stderr.count("\n") == 1


def test_damaged_costs_are_named(plan, costs):
    found = json.loads(costs.read_text())
    del found["points"][3]
    for text, said in {
        "{": "does not hold step costs",
        "[]": "does not hold step costs",
        "{}": "has no 'environment'",
        json.dumps(found): "must be a full grid",
        json.dumps(found | {"device": {"bandwidth": -1, "compute": 1}}): "bandwidth of -1",
        json.dumps(found | {"shape": {}}): "has no 'attention'",
        json.dumps(found | {"shape": found["shape"] | {"vocab": 0}}): "no model's shape",
        json.dumps(found | {"points": []}): "no measured forward",
        json.dumps(found | {"drafters": []}): "does not hold step costs",
        "\x89PNG": "does not hold step costs",
    }.items():
        costs.write_text(text, encoding="latin-1")
        result = plan("predict", "--costs", str(costs))
        assert result.exit_code == 2 and said in result.stderr, (text[:40], result.output)


def test_a_full_disk_is_one_sentence(plan, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "split.json").symlink_to("/dev/full")
    result = plan("split", "--prefill-rate", "1", "--decode-rate", "1")
    assert result.exit_code == 2 and "cannot be written to (No space left on device)" in result.stderr


def test_a_model_is_planned_in_the_dtype_of_the_costs(plan, costs, larger):
    """FLOP/s were measured in float32."""
    plans = {
        dtype: json.loads(
            plan("predict", "--costs", str(costs), "--model", larger, "--json", "--batch-sizes", "1", *dtype).stdout
        )["rows"]
        for dtype in [(), ("--dtype", "float32"), ("--dtype", "bfloat16")]
    }
    assert plans[()] == plans["--dtype", "float32"] != plans["--dtype", "bfloat16"]


def test_a_drafter_that_was_not_measured_is_named(plan, costs):
    result = plan("predict", "--costs", str(costs), "--drafter", "medusa")
    assert result.exit_code == 2 and "ngram:min_n=1" in result.stderr and "'medusa'" in result.stderr
