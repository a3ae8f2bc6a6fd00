"""What one fidelity run is defined by."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from specdec.call_checks import check_draft_length, fitting_verifier
from specdec.invariant import check_fits
from specdec.registry import VERIFIERS, known

ALPHA = 1e-3  # chance that a correct method fails any one of a run's distribution tests
CONFIDENCE = 0.95  # of the upper bounds on distances
LEVEL = ALPHA / 9  # at which any one test fails for certain, by Holm: two rungs' four tests and the joint law
NOT_LOSSLESS = "NOT lossless"  # how the verdict begins on what is wrong
POWER = 0.9  # chance with which the smallest detectable bias would have been detected


@dataclass(frozen=True)
class Settings:
    """All that the results depend on: a run continues only under equal settings.

    sampling: keyword arguments of `generate`: do_sample and, where it is true, the warpers.
    samples:  how many seeds the batched speculative rung is run with, from `seed` on; more give the tests more tokens.
    """

    target: str
    drafter: str
    prompts: str | None
    batch_size: int
    max_new_tokens: int
    sampling: dict[str, Any]
    draft_length: int = 5
    verifier: str = "auto"
    seed: int = 0
    samples: int = 1
    dtype: str = "auto"
    device: str = "auto"
    limit: int | None = None
    raw: bool = False
    skip_bad: bool = False
    invariant: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_new_tokens", "samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.samples > 1 and not self.sampling["do_sample"]:
            raise ValueError(f"samples is {self.samples} but greedy decoding has no seed: give a temperature above 0")
        fitting_verifier(known(VERIFIERS, self.verifier, "verifier"), self.sampling["do_sample"])
        check_draft_length(self.draft_length)
        if self.invariant:
            check_fits(self.draft_length)

    def config(self, prompts_digest: str) -> dict[str, Any]:
        """As JSON holds it, with a digest of the prompts' text so that an edited file counts as another run."""
        return asdict(self) | {"prompts_digest": prompts_digest}
