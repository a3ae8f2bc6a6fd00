"""The methods of one dtype and temperature: Hugging Face's, plain decoding, each drafter at each length and rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import specdec
from drafters.draft_model import DraftModelDrafter
from eval.hf import assisted, hf_method, prompt_lookup
from eval.methods import Method, Request, engine_method
from eval.runs import CONTROL, COUPLED_CONTROL, DEFAULT_MODE
from eval.settings import Settings
from eval.vllm.rows import Engine, vllm_method
from specdec.contracts import Drafter
from specdec.drafter_spec import DrafterSpec, build_drafter
from specdec.invariant import check_fits, refuse_mixing
from specdec.models import LoadedModel
from specdec.speculation import DRAFT_LENGTH, LONGEST


@dataclass(frozen=True)
class Speculation:
    """A drafter as one column of the grid: `text` is its name with its draft length where several were asked for.

    length: None = learned while decoding."""

    text: str
    source: str
    drafter: Drafter
    length: int | None

    @property
    def longest(self) -> int:
        """Most drafted tokens per step."""
        return LONGEST if self.length is None else self.length

    @property
    def fixed(self) -> int:
        """The length for an engine that does not learn it."""
        return DRAFT_LENGTH if self.length is None else self.length


def speculations(loaded: LoadedModel, settings: Settings) -> list[Speculation]:
    """Every drafter at every draft length. Raises ValueError for one that lacks part of the contract, and for two that
    come out under one name, and, where the invariant mode is asked for, for what it cannot run."""
    if settings.invariant:
        refuse_mixing(loaded.model)
    found = []
    for text in settings.drafters:
        spec = DrafterSpec.parse(text)
        drafter = build_drafter(spec, loaded)
        if not isinstance(drafter, Drafter):
            raise ValueError(
                f"drafter {text!r} made a {type(drafter).__name__} that lacks some of what specdec.Drafter asks for: "
                f"derive it from specdec.BaseDrafter"
            )
        if spec.length is not None or len(settings.draft_lengths) == 1:
            length = settings.draft_lengths[0] if spec.length is None else spec.length
            found.append(Speculation(text, spec.source, drafter, length))
            continue
        joint = "," if spec.options else ":"
        for length in settings.draft_lengths:
            shown = "auto" if length is None else length
            found.append(Speculation(f"{text}{joint}length={shown}", spec.source, drafter, length))
    if settings.invariant:
        for one in found:
            check_fits(one.length)
    names = [one.text for one in found]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ValueError(
            f"drafter {repeated.pop()!r} is given by name and by --draft-length too: leave one of the two out"
        )
    return found


def methods_at(
    temperature: float,
    loaded: LoadedModel,
    drafted: Sequence[Speculation],
    settings: Settings,
    engines: Mapping[str, Engine],
) -> list[Method]:
    """What is run in turns at one temperature, Hugging Face's methods first, then vLLM's `engines`.

    Plain decoding draws as the first rule that fits does. Where that is not the coupled rule but another one is, plain
    decoding runs in the coupled way too, as what the coupled outputs must equal. In invariant mode it runs in the
    default one too, which shows what the mode costs and changes."""
    model, verifiers = loaded.model, settings.verifiers_at(temperature)
    request = Request.of(model, settings.sampling(temperature), settings.seed)

    def ours(
        name: str, drafter: Drafter | None, length: int | None, verifier: str, invariant: bool = settings.invariant
    ) -> Method:
        engine = partial(specdec.generate, invariant=invariant, compile=settings.compile)
        return engine_method(name, model, request, drafter, length, verifier, engine)

    methods = [hf_method(model, request), *_hf_drafted(loaded, request, drafted)]
    methods += [vllm_method(name, engine, request) for name, engine in engines.items()]
    methods.append(ours(CONTROL, None, 0, verifiers[0]))
    if "coupled" in verifiers[1:]:
        methods.append(ours(COUPLED_CONTROL, None, 0, "coupled"))
    if settings.invariant:
        methods.append(ours(DEFAULT_MODE, None, 0, verifiers[0], invariant=False))
    for speculation in drafted:
        for verifier in verifiers:
            name = speculation.text if len(settings.verifiers) == 1 else f"{speculation.text} ({verifier})"
            methods.append(ours(name, speculation.drafter, speculation.length, verifier))
    return methods


def first_ngram(drafted: Sequence[Speculation]) -> Speculation | None:
    """The n-gram drafter beside which other engines' own n-grams are run."""
    return next((one for one in drafted if one.source == "ngram" and one.fixed), None)


def _hf_drafted(loaded: LoadedModel, request: Request, drafted: Sequence[Speculation]) -> list[Method]:
    """HF's counterparts of our drafters: prompt lookup for the first n-gram one, an assistant for each draft model but
    for those with a reduced vocabulary, which HF cannot verify."""
    found = []
    if (ngram := first_ngram(drafted)) is not None:
        found.append(prompt_lookup(loaded.model, request, ngram.fixed))
    for speculation in drafted:
        drafter = speculation.drafter
        if isinstance(drafter, DraftModelDrafter) and drafter.ids is None and speculation.fixed:
            assistant = drafter.model.model
            found.append(assisted(speculation.text, loaded.model, request, assistant, speculation.fixed))
    return found
