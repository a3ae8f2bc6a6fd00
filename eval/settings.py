"""What one evaluation is defined by: the grid and what holds for all of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from specdec.call_checks import check_draft_length, fitting_verifier
from specdec.cli_options import sampling_arguments
from specdec.models import resolve_dtype
from specdec.registry import VERIFIERS, known


@dataclass(frozen=True)
class Settings:
    """All that results depend on: a run continues only under equal settings.

    The grid: dtypes x temperatures x batch_sizes x (drafters x draft_lengths x verifiers).

    prompts:      JSONL file, the name of a data set where `column` is given, or None for the built-in ones.
    column:       of the data set, with a text, a list of texts (turns) or a chat per row; split: of the data set.
    temperatures: 0 is greedy decoding; top_k and top_p hold at those above.
    draft_lengths: of drafters whose own name gives none; 0 is plain decoding, None is learned while decoding.
    verifiers:    each runs at the temperatures that it fits.
    repeats:      how often each batch is timed with each method.
    ignore_eos:   every request emits max_new_tokens.
    invariant:    our methods run in specdec's invariant mode.
    compile:      our methods run compiled forwards.
    vllm:         Python of an environment with vLLM, which then is compared too.
    """

    target: str
    drafters: tuple[str, ...]
    prompts: str | None
    batch_sizes: tuple[int, ...]
    max_new_tokens: int
    temperatures: tuple[float, ...] = (0.0,)
    top_k: int | None = None
    top_p: float | None = None
    draft_lengths: tuple[int | None, ...] = (5,)
    verifiers: tuple[str, ...] = ("auto",)
    seed: int = 0
    dtypes: tuple[str, ...] = ("auto",)
    device: str = "auto"
    limit: int | None = None
    column: str | None = None
    split: str | None = None
    raw: bool = False
    skip_bad: bool = False
    repeats: int = 1
    ignore_eos: bool = False
    vllm: str | None = None
    invariant: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        lists = {
            "batch size": self.batch_sizes,
            "drafter": self.drafters,
            "temperature": self.temperatures,
            "draft length": self.draft_lengths,
            "verifier": self.verifiers,
            "dtype": self.dtypes,
        }
        for kind, given in lists.items():
            _check_list(kind, given)
        if min(self.batch_sizes) < 1:
            raise ValueError(f"batch sizes are {list(self.batch_sizes)}: give one or more positive numbers")
        for dtype in self.dtypes:
            resolve_dtype(dtype, torch.device("cpu"))  # refuses unknown ones; on the run's device only `auto` differs
        if "auto" in self.dtypes and len(self.dtypes) > 1:
            raise ValueError(
                f"dtypes are {list(self.dtypes)}: auto stands for one of the others, name that one or give auto alone"
            )
        for length in self.draft_lengths:
            if length is not None:
                check_draft_length(length)
        if self.vllm is not None and not os.access(self.vllm, os.X_OK):
            raise ValueError(f"vllm is {self.vllm!r}: give the Python of an environment that has vLLM")
        if self.repeats < 1 or self.max_new_tokens < 1:
            raise ValueError(
                f"repeats is {self.repeats} and max_new_tokens {self.max_new_tokens}: both must be at least 1"
            )
        if self.split is not None and self.column is None:
            raise ValueError(
                f"split {self.split!r} is given without a column: --split belongs to a data set's --column"
            )
        self._check_verifiers()

    def sampling(self, temperature: float) -> dict[str, Any]:
        """Keyword arguments of `generate` at one of the temperatures."""
        warped = temperature > 0 or max(self.temperatures) == 0  # where nothing samples, warpers are refused as useless
        return sampling_arguments(temperature, *((self.top_k, self.top_p) if warped else (None, None)))

    def verifiers_at(self, temperature: float) -> list[str]:
        """Those that fit, in the order given."""
        return [name for name in self.verifiers if _misfit(name, temperature > 0) is None]

    def config(self, prompts_digest: str) -> dict[str, Any]:
        """As JSON holds it, with a digest of the prompts' text so that an edited file counts as another run."""
        config = asdict(self) | {"prompts_digest": prompts_digest}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in config.items()}

    def _check_verifiers(self) -> None:
        """ValueError for a verifier that fits no temperature and for a temperature that no verifier fits."""
        for temperature in self.temperatures:
            self.sampling(temperature)
        misfits = {(name, t): _misfit(name, t > 0) for name in self.verifiers for t in self.temperatures}
        alone = [[misfits[name, t] for t in self.temperatures] for name in self.verifiers]
        alone += [[misfits[name, t] for name in self.verifiers] for t in self.temperatures]
        for found in alone:
            if all(found):
                raise ValueError(found[0])


def _misfit(verifier: str, sampling: bool) -> str | None:
    """Why a verifier cannot run with or without sampling, None where it can. ValueError for an unknown name."""
    rule = known(VERIFIERS, verifier, "verifier")
    try:
        fitting_verifier(rule, sampling)
    except ValueError as error:
        return str(error)
    return None


def _check_list(kind: str, given: Sequence[Any]) -> None:
    if not given:
        raise ValueError(f"no {kind} is given: name one or more")
    if repeated := {item for item in given if given.count(item) > 1}:
        raise ValueError(f"{kind} {repeated.pop()!r} is given more than once: name each once")
