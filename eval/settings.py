"""What one evaluation run is defined by."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from specdec.call_checks import check_draft_length, fitting_verifier
from specdec.drafter_spec import DrafterSpec
from specdec.registry import VERIFIERS, known


@dataclass(frozen=True)
class Settings:
    """All that results depend on: a run continues only under equal settings.

    sampling:    keyword arguments of `generate`: do_sample and, where it is true, the warpers.
    draft_length: of drafters whose own name gives none; 0 is plain decoding.
    repeats:     how often each batch is timed with each method.
    """

    target: str
    drafters: tuple[str, ...]
    prompts: str | None
    batch_sizes: tuple[int, ...]
    max_new_tokens: int
    sampling: dict[str, Any]
    draft_length: int = 5
    verifier: str = "auto"
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    limit: int | None = None
    raw: bool = False
    skip_bad: bool = False
    repeats: int = 1

    def __post_init__(self) -> None:
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ValueError(f"batch sizes are {list(self.batch_sizes)}: give one or more positive numbers")
        for kind, given in (("batch size", self.batch_sizes), ("drafter", self.drafters)):
            if repeated := {item for item in given if given.count(item) > 1}:
                raise ValueError(f"{kind} {repeated.pop()!r} is given more than once: name each once")
        fitting_verifier(known(VERIFIERS, self.verifier, "verifier"), self.sampling["do_sample"])
        check_draft_length(self.draft_length)
        if self.repeats < 1 or self.max_new_tokens < 1:
            raise ValueError(
                f"repeats is {self.repeats} and max_new_tokens {self.max_new_tokens}: both must be at least 1"
            )

    @property
    def temperature(self) -> float:
        """0 for greedy decoding."""
        return self.sampling.get("temperature", 1.0) if self.sampling["do_sample"] else 0.0

    def length_of(self, spec: DrafterSpec) -> int:
        """The draft length that holds for a drafter."""
        return self.draft_length if spec.length is None else spec.length

    def config(self, prompts_digest: str) -> dict[str, Any]:
        """As JSON holds it, with a digest of the prompts' text so that an edited file counts as another run."""
        config = asdict(self) | {"prompts_digest": prompts_digest}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in config.items()}
