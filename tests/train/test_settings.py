"""Settings from flags and YAML, what is refused, and the claim on the run's folder."""

import dataclasses
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
import yaml
from transformers.hf_argparser import HfArg

from train.settings import TrainSettings, claim, parse

NEEDED = ["--target", "demo", "--prompts", "a.jsonl", "--out", "run"]


@dataclass(frozen=True, kw_only=True)
class ToySettings(TrainSettings):
    layers: list[int] = HfArg(default_factory=lambda: [0], help="which layers")


def settings(**changes: object) -> ToySettings:
    return ToySettings(target="demo", prompts="a.jsonl", out="run", **changes)


def test_flags_give_each_value_its_type() -> None:
    flags = ["--learning-rate", "2e-4", "--epochs=3", "--loss", "tv", "--wandb", "--layers", "0", "-1", "--limit", "9"]
    expected = settings(learning_rate=2e-4, epochs=3, loss="tv", wandb=True, layers=[0, -1], limit=9)
    assert parse(ToySettings, [*NEEDED, *flags], "train") == expected


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "target: demo\nprompts: a.jsonl\nout: run\nlearning_rate: 1e-3\nmixed_precision: no\nraw: true\nepochs: 2\n"
        "layers: [0, -1]\ncolumn: null\n"
    )
    found = parse(ToySettings, ["--config", str(file), "--epochs", "5"], "train")
    assert found == settings(learning_rate=1e-3, mixed_precision="no", raw=True, epochs=5, layers=[0, -1])


def test_the_written_settings_are_a_config_file_of_the_same_run(tmp_path: Path) -> None:
    given = replace(settings(learning_rate=1e-5, loss="lk_hybrid", wandb=True, temperature=0.0), out=str(tmp_path))
    claim(given)
    assert parse(ToySettings, ["--config", str(tmp_path / "settings.yaml")], "train") == given


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--learning-rat", "the command line names 'learning_rat', which is no setting: did you mean learning_rate"),
        ("--batchsize=4", "the command line names 'batchsize', which is no setting: did you mean batch_size"),
        ("--qqq", "the command line names 'qqq', which is no setting: did you mean target, prompts, out"),
    ],
)
def test_an_unknown_flag_is_refused_with_close_ones(flag: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(ToySettings, [*NEEDED, flag], "train")


def test_an_unknown_name_in_the_file_is_refused_with_close_ones(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("warm_up: 0.1\n")
    with pytest.raises(ValueError, match=r"a.yaml names 'warm_up', which is no setting: did you mean warmup"):
        parse(ToySettings, [*NEEDED, "--config", str(file)], "train")


@pytest.mark.parametrize(
    ("text", "message"),
    [("just words", "does not hold lines of the form"), ("a: [1", "cannot be read"), (None, "cannot be read")],
)
def test_a_file_that_is_no_configuration_is_refused(text: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        parse(ToySettings, [*NEEDED, "--config", str(file)], "train")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0),
        ("batch_size", 0),
        ("accumulation", -1),
        ("limit", 0),
        ("held_out", 1.0),
        ("temperature", -0.1),
        ("temperature", float("inf")),
        ("seed", -1),
        ("seed", 2**32),
        ("depth_decay", 0.0),
        ("learning_rate", float("nan")),
        ("warmup", 1.0),
        ("weight_decay", -1.0),
        ("clip", 0.0),
        ("save_every", 0),
    ],
)
def test_values_out_of_range_are_refused_where_the_settings_are_built(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{name} is {value}: give "):
        settings(**{name: value})


@pytest.mark.parametrize("flags", [["--loss", "cosine"], ["--epochs", "two"], ["--mixed-precision", "fp16"]])
def test_malformed_values_end_with_usage(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(ToySettings, [*NEEDED, *flags], "train")
    assert f"argument {flags[0].replace('-p', '_p')}" in capsys.readouterr().err


def test_help_explains_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(ToySettings, ["--help"], "train")
    text = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(ToySettings):
        assert f"--{field.name}" in text
        assert field.metadata["help"].partition(";")[0] in text
    assert "--config" in text


def test_settings_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings().epochs = 2


def test_claim_writes_the_resolved_settings(tmp_path: Path) -> None:
    given = replace(settings(), out=str(tmp_path / "new"))
    claim(given)
    assert yaml.safe_load((tmp_path / "new" / "settings.yaml").read_text()) == asdict(given)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["settings.yaml"]


def test_a_folder_of_other_settings_is_refused_even_to_resume(tmp_path: Path) -> None:
    given = replace(settings(), out=str(tmp_path))
    claim(given)
    for resume in (False, True):
        with pytest.raises(
            ValueError, match="holds a run with epochs=1, not 2: ask for the same again, or give another"
        ):
            claim(replace(given, epochs=2, resume=resume))
    claim(given)  # nothing was begun yet


def test_a_begun_run_is_gone_on_with_only_when_asked(tmp_path: Path) -> None:
    given = replace(settings(), out=str(tmp_path))
    claim(given)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-00000001.pt").touch()
    with pytest.raises(ValueError, match="holds a run of these settings: add --resume"):
        claim(given)
    claim(replace(given, resume=True))


def test_a_run_may_be_resumed_in_another_place(tmp_path: Path) -> None:
    claim(replace(settings(), out=str(tmp_path / "here")))
    (tmp_path / "here").rename(tmp_path / "there")
    claim(replace(settings(), out=str(tmp_path / "there"), resume=True))


def test_resuming_what_never_began_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--resume was given but .* holds no run"):
        claim(replace(settings(), out=str(tmp_path), resume=True))


def test_a_file_is_no_folder_to_train_into(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(ValueError, match="out cannot be made a folder .*: give another --out"):
        claim(replace(settings(), out=str(tmp_path / "out")))


@pytest.mark.parametrize("content", [b"target: [", b"target: \xff", b"- 1"])
def test_damaged_settings_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_bytes(content)
    with pytest.raises(ValueError, match="settings.yaml is damaged"):
        claim(replace(settings(), out=str(tmp_path)))
