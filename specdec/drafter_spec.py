"""Drafters named on the command line: `ngram`, `ngram:max_n=3,length=8`, `my_module:MyDrafter:key=value`."""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from typing import Any

from specdec.contracts import Drafter
from specdec.models import LoadedModel
from specdec.registry import DRAFTERS, imported, known, parameters


@dataclass(frozen=True)
class DrafterSpec:
    """A parsed drafter name.

    text:    as given, and how reports name it.
    source:  a name of `registry.DRAFTERS`, or `module:Name`.
    options: keyword arguments for it, as text.
    length:  its own draft length, or None for the run's.
    """

    text: str
    source: str
    options: dict[str, str]
    length: int | None

    @staticmethod
    def parse(text: str) -> DrafterSpec:
        """Read `name[:key=value,...]` where name is a known drafter, else `module:Name[:key=value,...]`.

        Raises ValueError for a name that is neither known nor of that form (listing the known ones) and for malformed
        settings."""
        source, _, settings = text.partition(":")
        if source not in DRAFTERS:
            name, _, settings = settings.partition(":")
            if not name:
                known(DRAFTERS, source, "drafter")  # raises, listing the known ones
            source = f"{source}:{name}"
        options = dict(_setting(text, item) for item in settings.split(",")) if settings else {}
        length = options.pop("length", None)
        if length is not None and not length.isdecimal():
            raise ValueError(f"drafter {text!r} has length={length}: give 0 (plain decoding) or a positive number")
        return DrafterSpec(text, source, options, None if length is None else int(length))


def build_drafter(spec: DrafterSpec, target: LoadedModel) -> Drafter:
    """Make the drafter that `spec` names; a parameter called `target`, if it has one, gets the target.

    Settings are read as Python literals (4, 0.5, True) or else taken as text; always as text where the parameter is
    annotated `str` or `str | None`.
    Raises ValueError for settings that it does not take and ImportError where its module cannot be found."""
    factory = _factory(spec.source)
    if not callable(factory):
        raise ValueError(
            f"drafter {spec.text!r} is a {type(factory).__name__}: name a class, or a function that makes one"
        )
    taken = parameters(factory)
    keywords = {name: _value(text, taken.get(name)) for name, text in spec.options.items()}
    if "target" in taken:
        keywords["target"] = target
    try:
        inspect.Signature(taken.values()).bind(**keywords)
    except TypeError as error:
        takes = ", ".join(("length", *(name for name in taken if name != "target")))
        raise ValueError(f"drafter {spec.text!r}: {error}; its settings are {takes}") from None
    return factory(**keywords)


def _factory(source: str) -> Any:
    if ":" not in source:
        return known(DRAFTERS, source, "drafter")
    module = source.partition(":")[0]
    try:
        return imported(source)
    except ModuleNotFoundError as error:
        if error.name != module:  # the user's module is there, something that it imports is not
            raise
        raise ImportError(
            f"there is no module {module!r} for drafter {source!r} in the working directory or the environment; "
            f"known drafters are {', '.join(sorted(DRAFTERS))}"
        ) from None


def _setting(text: str, item: str) -> tuple[str, str]:
    key, equals, value = item.partition("=")
    if not key.isidentifier() or not equals or not value:
        raise ValueError(f"drafter {text!r}: {item!r} is not of the form key=value")
    return key, value


def _value(text: str, parameter: inspect.Parameter | None) -> Any:
    """A setting for `parameter`, which is None where the factory has none of that name."""
    annotation = None if parameter is None else parameter.annotation
    if annotation in (str, str | None, "str", "str | None"):
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
