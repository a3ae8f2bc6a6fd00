"""The card's numbers against the files that they come from; what is missing is an error and no empty cell."""

import json
import re
from dataclasses import replace

import pytest
import torch
import yaml

from heads.medusa import MedusaConfig, MedusaHeads
from tests.tiny_models import tiny
from tests.toy_tokenizer import VOCAB, toy_tokenizer
from train.card import KINDS, Trained, write_card
from train.replay import Accuracy

SETTINGS = {
    "target": "demo",
    "prompts": "p.jsonl",
    "out": "/somewhere",
    "resume": False,
    "temperature": 0.7,
    "epochs": 2,
}
TRAINED = Trained(
    kind="medusa",
    target="the demo model, float32 on cpu",
    fingerprint="0123456789abcdef",
    prompts=1200,
    response_tokens=45678,
    peak_bytes=3 * 2**20,
    training=Accuracy((1000, 400), (400, 100)),
    engine=Accuracy((1000, 402), (402, 102)),
)
STEPS = 10  # of 100 tokens at 50 tokens/s, an evaluation after each; the seventh has the lowest loss


def metrics():
    lines = []
    for step in range(1, STEPS + 1):
        train = {"loss": 5 - step / 10, "tokens": 100.0, "tokens_per_second": 50.0, "top1": [0.1, 0.05]}
        held_out = {"loss": 4 + abs(step - 7) / 10, "tokens": 30.0, "top1": [0.03 * step, 0.01 * step]}
        lines += [{"step": step, "split": "train", **train}, {"step": step, "split": "held_out", **held_out}]
    return lines


def acceptance():
    common = {
        "draft_length": 2,
        "max_new_tokens": 64,
        "requests": 16,
        "batch_size": 1,
        "conditional_acceptance": [0.5, 0.25],
    }
    greedy = {"temperature": 0.0, "verifier": "greedy", "mean_accepted_length": 1.625, "acceptance_rate": 0.3125}
    sampled = {"temperature": 0.7, "verifier": "rejection", "mean_accepted_length": 1.5, "acceptance_rate": 0.25}
    return [{"drafter": "medusa", **common, **numbers} for numbers in (greedy, sampled)]


def run_files():
    return {"metrics": metrics(), "acceptance": acceptance()}


def write_run(out, **changed):
    out.mkdir(exist_ok=True)
    (out / "settings.yaml").write_text(yaml.safe_dump(SETTINGS, sort_keys=False))
    for name, lines in (run_files() | changed).items():
        (out / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return out


def card(folder, out, trained=TRAINED):
    folder.mkdir(exist_ok=True)
    write_card(folder, out, trained)
    return (folder / "README.md").read_text()


def table(text, heading):
    """The cells of the first table under a heading, without its own header."""
    lines = text.partition(f"## {heading}\n")[2].partition("\n## ")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")][2:]


def test_numbers_are_those_of_the_files(tmp_path):
    text = card(tmp_path / "head", write_run(tmp_path / "run"))
    shown = (1, 3, 5, 6, 8, 10)  # six of the ten evaluations, evenly spread, the first and the last among them
    assert table(text, "Training curves") == [
        [f"{100 * step:,}", f"{4 + abs(step - 7) / 10:.3f}", f"{3 * step}.0%", f"{step}.0%"] for step in shown
    ]
    assert table(text, "Acceptance in the engine") == [
        ["medusa", "2", "0", "1", "greedy", "1.62", "31.2%", "50.0% / 25.0%"],
        ["medusa", "2", "0.7", "1", "rejection", "1.50", "25.0%", "50.0% / 25.0%"],
    ]
    assert table(text, "Training and serving agree") == [
        ["1", "400 of 1,000 (40.0%)", "402 of 1,000 (40.2%)", "+0.20"],
        ["2", "100 of 400 (25.0%)", "102 of 402 (25.4%)", "+0.37"],
    ]
    assert "4.000 after 700 tokens" in text
    assert "10 steps over 1,000 response tokens in 0.3 minutes, which is 50 tokens/s; peak memory 3 MiB" in text
    assert "45,678 response tokens: the target's own answers, at temperature 0.7, to 1,200 prompts" in text
    assert text.count("the demo model, float32 on cpu") == 2 and "`0123456789abcdef`" in text
    assert "From 500 to 1,000 training tokens top-1 accuracy at depth 1 went from 15.0% to 30.0%" in text
    assert "misses the text's token in 79.0% at depth 1, 93.0% at depth 2" in text
    assert "highest mean accepted length is 1.62 (medusa, temperature 0, batch 1), the lowest 1.50" in text


def test_recipe_is_a_configuration_of_the_run_without_its_folder(tmp_path):
    text = card(tmp_path / "head", write_run(tmp_path / "run"))
    [block] = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert yaml.safe_load(block) == {name: SETTINGS[name] for name in ("target", "prompts", "temperature", "epochs")}


def test_the_same_inputs_give_the_same_bytes(tmp_path):
    folder, out = tmp_path / "head", write_run(tmp_path / "run")
    first = card(folder, out), (folder / "curves.png").read_bytes()
    assert (card(folder, out), (folder / "curves.png").read_bytes()) == first
    assert first[1].startswith(b"\x89PNG") and len(first[1]) < 100_000
    other = metrics()
    other[-1]["top1"] = [0.9, 0.8]
    card(folder, write_run(out, metrics=other))
    assert (folder / "curves.png").read_bytes() != first[1], "the curves do not show the metrics"


@pytest.mark.parametrize("bad", [None, float("nan"), "absent"])
@pytest.mark.parametrize(
    ("file", "line", "metric"),
    [
        ("metrics", 1, "tokens_per_second"),
        ("metrics", 1, "loss"),
        ("metrics", 20, "top1"),
        ("acceptance", 2, "mean_accepted_length"),
        ("acceptance", 2, "acceptance_rate"),
        ("acceptance", 1, "conditional_acceptance"),
    ],
)
def test_a_missing_metric_is_named_and_nothing_is_written(tmp_path, file, line, metric, bad):
    lines = run_files()[file]
    if bad == "absent":
        del lines[line - 1][metric]
    else:
        lines[line - 1][metric] = [0.5, bad] if isinstance(lines[line - 1][metric], list) else bad
    out = write_run(tmp_path / "run", **{file: lines})
    with pytest.raises(ValueError, match=rf"{file}.jsonl, line {line} has .*{metric}"):
        card(tmp_path / "head", out)
    assert list((tmp_path / "head").iterdir()) == []


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"metrics": [line for line in metrics() if line["split"] == "train"]}, "no line of split 'held_out'"),
        ({"metrics": []}, "metrics.jsonl holds nothing"),
        ({"acceptance": []}, "acceptance.jsonl holds nothing"),
        ({"acceptance": [acceptance()[0] | {"conditional_acceptance": []}]}, "conditional_acceptance = \\[\\]"),
    ],
)
def test_an_incomplete_run_is_refused(tmp_path, files, message):
    with pytest.raises(ValueError, match=message):
        card(tmp_path / "head", write_run(tmp_path / "run", **files))


def test_accuracies_of_other_places_are_refused():
    for engine in (Accuracy((999, 402), (402, 102)), Accuracy((1000,), (402,))):
        with pytest.raises(ValueError, match="measure both to the same depth on the same texts"):
            replace(TRAINED, engine=engine)


def test_a_depth_that_no_chain_reached_says_so(tmp_path):
    never = Accuracy((1000, 0), (0, 0))
    text = card(tmp_path / "head", write_run(tmp_path / "run"), replace(TRAINED, training=never, engine=never))
    assert table(text, "Training and serving agree")[1] == ["2", "0 of 0", "0 of 0", "none to compare"]


def test_one_evaluation_tells_no_trend(tmp_path):
    text = card(tmp_path / "head", write_run(tmp_path / "run", metrics=metrics()[:2]))
    assert "With one evaluation only" in text and "went from" not in text
    assert len(table(text, "Training curves")) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_card(tmp_path, kind):
    text = card(tmp_path / "head", write_run(tmp_path / "run"), replace(TRAINED, kind=kind))
    assert text.startswith(f"# {KINDS[kind].title} for demo\n") and f"--drafter {KINDS[kind].drafter},length=2" in text


def test_the_python_example_runs(tmp_path, capsys, monkeypatch):
    model = tiny("llama", dtype=torch.float32, vocab=VOCAB)
    model.save_pretrained(tmp_path / "target")
    toy_tokenizer().save_pretrained(tmp_path / "target")
    config = MedusaConfig(heads=2, layers=1, hidden_size=32, vocab_size=VOCAB)
    folder = tmp_path / "head"
    MedusaHeads(config, model).save_pretrained(folder, {})
    text = card(folder, write_run(tmp_path / "run"))
    [example] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(example.replace('"demo"', '"target"').replace("FOLDER", "head"), {})
    assert "(drafter medusa, verifier greedy)" in capsys.readouterr().out
