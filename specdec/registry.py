"""The one table of names: what `drafter="ngram"` or `specdec eval` stands for, resolved only when asked.

The core never imports a concrete drafter, verifier or command; it loads them from here by name. Anything else is
given as an object, or on the command line as `module:Name`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

DRAFTERS = {
    "ngram": "drafters.ngram:NGramDrafter",
    "draft_model": "drafters.draft_model:build",
    "medusa": "drafters.medusa:build",
    "mtp": "drafters.mtp:build",
}
DRAFT_MODEL = "drafters.draft_model:DraftModelDrafter"  # what `assistant_model` stands for
VERIFIERS = {
    "auto": "verifiers.auto:AutoVerifier",
    "greedy": "verifiers.greedy:GreedyVerifier",
    "rejection": "verifiers.rejection:RejectionVerifier",
    "block": "verifiers.block:BlockVerifier",
    "coupled": "verifiers.coupled:CoupledVerifier",
    "tree_rejection": "verifiers.tree_rejection:TreeRejectionVerifier",
    "traversal": "verifiers.traversal:TraversalVerifier",
    "typical": "verifiers.typical:TypicalVerifier",
}
COMMANDS = {
    "eval": "eval.command:run",
    "export": "heads.export:export",
    "train medusa": "train.medusa:main",
    "train mtp": "train.mtp:main",
    "train draft": "train.draft:main",
    "bench budget": "eval.bench_budget:run",
    "bench forward": "eval.bench_forward:run",
    "bench schedule": "eval.bench_schedule:run",
    "bench step": "eval.bench_step:run",
    "bench train": "train.bench:run",
    "bench verify": "eval.bench_verify:run",
    "report": "eval.rebuild:run",
    "plan measure": "eval.plan.command:measure",
    "plan predict": "eval.plan.command:predict",
    "plan check": "eval.plan.command:check",
    "plan split": "eval.plan.command:split_phases",
    "fidelity": "eval.fidelity.command:run",
}
OWN_PACKAGES = ("drafters", "verifiers", "heads", "train", "eval")


def known(table: dict[str, str], name: str, kind: str) -> Any:
    """The object that `name` stands for in `table`.

    Raises ValueError that lists the known names for a name that is not in it."""
    if name not in table:
        raise ValueError(
            f"unknown {kind} {name!r}: known are {', '.join(sorted(table))}; a {kind} of your own is given as an "
            f"object, or on the command line as module:Name"
        )
    return imported(table[name])


def imported(path: str) -> Any:
    """The attribute that `module:Name` names, a user's (from the working directory too) or ours.

    Raises ImportError, in one sentence, where one of our package names is shadowed by another module, and ValueError
    where the path is malformed or the module has no such attribute."""
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ValueError(f"{path!r} is not of the form module:Name, for example my_drafter:MyDrafter")
    package = module_name.partition(".")[0]
    if package in OWN_PACKAGES:
        _check_not_shadowed(package)
    elif "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    module = importlib.import_module(module_name)
    if not hasattr(module, attribute):
        raise ValueError(f"module {module_name!r} ({module.__file__}) has no attribute {attribute!r}")
    return getattr(module, attribute)


@functools.cache  # once it is imported it is ours for good; what is raised is not remembered
def _check_not_shadowed(package: str) -> None:
    ours = Path(__file__).resolve().parent.parent / package
    spec = importlib.util.find_spec(package)  # looks, and does not run what it finds
    found = Path(spec.origin or next(iter(spec.submodule_search_locations))).resolve()
    if ours not in (found, *found.parents):
        raise ImportError(
            f"specdec needs its own package {package!r} but Python found {found} first: run from another folder, or "
            f"rename that file or package"
        )


@functools.cache  # looking it up takes as long as a small model's layer
def parameters(function: Callable) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function, or of a class's constructor."""
    return inspect.signature(function).parameters
