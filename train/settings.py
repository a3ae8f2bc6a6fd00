"""What a training run is asked to do: one frozen dataclass, given as flags or as a YAML file of the same names."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeVar

import yaml
from transformers import HfArgumentParser
from transformers.hf_argparser import HfArg

from specdec.disk import make_folder
from train.losses import LossName

SETTINGS_FILE = "settings.yaml"
FREE_ON_RESUME = ("out", "resume")  # a folder may have been moved; all else decides what the run computes or records


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """What every recipe has in common; a recipe derives its own settings from this class.

    A *step* is one update of the weights, from `accumulation` batches on each process.
    """

    target: str = HfArg(help="the model to train for: hub id, local folder, or 'demo'")
    prompts: str = HfArg(help="prompts to train on: JSONL file, or folder or name of a dataset (with --column)")
    out: str = HfArg(help="folder for checkpoints, metrics and the trained weights")

    column: str | None = HfArg(default=None, help="the dataset's column that holds the prompts")
    raw: bool = HfArg(default=False, help="do not apply the target's chat template")
    limit: int | None = HfArg(default=None, help="use at most this many prompts")
    max_prompt_tokens: int = HfArg(default=512, help="leave out prompts longer than this")
    held_out: float = HfArg(default=0.05, help="share of the prompts kept out of training, to evaluate on; 0 for none")

    responses: str | None = HfArg(default=None, help="folder of the target's responses (default: OUT/responses)")
    response_batch_size: int = HfArg(default=16, help="prompts that the target answers together")
    temperature: float = HfArg(default=0.7, help="temperature of the responses; 0 is greedy decoding")
    max_new_tokens: int = HfArg(default=256, help="longest response")

    dtype: str = HfArg(default="auto", help="floating-point type of the frozen target; what is trained is float32")
    device: Literal["auto", "cpu"] = HfArg(default="auto", help="auto: the accelerator where there is one")
    mixed_precision: Literal["no", "bf16"] = HfArg(default="no", help="bf16: compute the trained part in bfloat16")
    states: Literal["fly", "disk"] = HfArg(
        default="fly", help="the target's states: computed for every batch, or once and cached to disk"
    )

    loss: LossName = HfArg(default="kl", help="what is minimised at each token; see train/losses.py")
    depth_decay: float = HfArg(default=0.8, help="weight of each further depth's loss, relative to the one before")
    epochs: int = HfArg(default=1, help="times that the training set is gone through")
    batch_size: int = HfArg(default=8, help="examples per batch and process")
    accumulation: int = HfArg(default=1, help="batches per process and step")
    learning_rate: float = HfArg(default=1e-3, help="highest learning rate of AdamW")
    warmup: float = HfArg(default=0.05, help="share of the steps with a rising learning rate; then it falls (cosine)")
    weight_decay: float = HfArg(default=0.0, help="AdamW's weight decay, on every trained parameter")
    clip: float = HfArg(default=1.0, help="longest gradient (L2 norm); longer ones are scaled down")
    seed: int = HfArg(default=0, help="seed of the order of the data, of the responses and of new weights")

    save_every: int = HfArg(default=200, help="steps between checkpoints")
    eval_every: int = HfArg(default=200, help="steps between evaluations on the held-out prompts")
    wandb: bool = HfArg(default=False, help="log to Weights & Biases too; WANDB_MODE=offline works")
    resume: bool = HfArg(default=False, help="go on with the run in OUT from its last checkpoint")

    def __post_init__(self) -> None:
        whole = ("max_prompt_tokens", "response_batch_size", "max_new_tokens", "epochs", "batch_size", "accumulation")
        for name in (*whole, "save_every", "eval_every"):
            self._check(name, getattr(self, name) >= 1, "at least 1")
        self._check("limit", self.limit is None or self.limit >= 1, "at least 1, or nothing for all")
        self._check("held_out", 0 <= self.held_out < 1, "at least 0 and below 1")
        self._check("temperature", 0 <= self.temperature < math.inf, "0 for greedy decoding or a positive number")
        self._check("depth_decay", 0 < self.depth_decay <= 1, "above 0 and up to 1")
        self._check("learning_rate", self.learning_rate > 0, "a positive number")
        self._check("warmup", 0 <= self.warmup < 1, "at least 0 and below 1")
        self._check("weight_decay", self.weight_decay >= 0, "at least 0")
        self._check("seed", 0 <= self.seed < 2**32, "0 to 4294967295")
        self._check("clip", 0 < self.clip < math.inf, "a positive number")

    def _check(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:  # true for NaN, which no comparison holds for
            raise ValueError(f"{name} is {getattr(self, name)}: give {wanted}")


Settings = TypeVar("Settings", bound=TrainSettings)


def parse(cls: type[Settings], argv: Sequence[str], prog: str) -> Settings:
    """Settings from a command line, and from the YAML file of `--config` where that is given; flags win.

    Raises ValueError, in one sentence, for an unknown name (with close ones), an unreadable file and values out of
    range. A malformed value ends the process with argparse's message, as --help does with the list of flags.
    """
    known = [field.name for field in dataclasses.fields(cls)]
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--config", metavar="FILE", help="YAML file of the same names; flags win over it")
    given = [token[2:].partition("=")[0].replace("-", "_") for token in argv if token.startswith("--")]
    _refuse_unknown(given, [*known, "config", "help"], "the command line")
    config, flags = early.parse_known_args(argv)
    if config.config is not None:
        flags = _flags(config.config, known) + flags
    parser = HfArgumentParser(cls, prog=prog, allow_abbrev=False, parents=[early])
    return parser.parse_args_into_dataclasses(flags, look_for_args_file=False)[0]


def _flags(file: str, known: Sequence[str]) -> list[str]:
    """What a YAML file says, as flags, so that argparse reads both alike.

    The base loader leaves every scalar a string: `no` is not false, and 1e-3 goes through the same conversion as on
    the command line. What is null there keeps its default."""
    try:
        values = yaml.load(Path(file).read_text(), Loader=yaml.BaseLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {file} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ValueError(f"--config {file} does not hold lines of the form `name: value`")
    _refuse_unknown(values, known, file)
    flags: list[str] = []
    for name, value in values.items():
        if isinstance(value, list):
            flags += [f"--{name}", *value]
        elif value not in ("", "null"):
            flags.append(f"--{name}={value}")
    return flags


def _refuse_unknown(given: Iterable[str], known: Sequence[str], where: str) -> None:
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known) or known
            raise ValueError(f"{where} names {name!r}, which is no setting: did you mean {', '.join(close)}?")


def claim(settings: TrainSettings) -> None:
    """Write the settings to OUT/settings.yaml. To be called by every process, before anything else is written to OUT.

    Raises ValueError, in one sentence, where OUT holds a run of other settings, a run that `resume` does not ask to go
    on with, or none although it does.
    """
    folder = Path(settings.out)
    recorded = folder / SETTINGS_FILE
    if settings.resume and not recorded.exists():
        raise ValueError(f"--resume was given but {folder} holds no run: leave it out, or give that run's --out")
    if recorded.exists():
        _check_same(settings, recorded)
        if not settings.resume and any(folder.glob("checkpoints/step-*")):
            raise ValueError(
                f"{folder} holds a run of these settings: add --resume to go on with it, or give another --out"
            )
        return
    make_folder(folder)
    made = folder / f".{SETTINGS_FILE}-{os.getpid()}"  # several processes may write, each the same
    made.write_text(yaml.safe_dump(asdict(settings), sort_keys=False))
    os.replace(made, recorded)


def _check_same(settings: TrainSettings, recorded: Path) -> None:
    try:
        before = yaml.safe_load(recorded.read_bytes())
    except yaml.YAMLError:
        before = None
    if not isinstance(before, dict):
        raise ValueError(f"{recorded} is damaged: give another --out, or remove that folder")
    now = asdict(settings)
    for name in [*now, *(before.keys() - now.keys())]:
        if name not in FREE_ON_RESUME and before.get(name) != now.get(name):
            raise ValueError(
                f"{recorded.parent} holds a run with {name}={before.get(name)!r}, not {now.get(name)!r}: ask for the "
                f"same again, or give another --out"
            )
