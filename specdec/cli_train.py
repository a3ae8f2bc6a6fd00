"""`specdec train` and `export`: heads made, and written for others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specdec.cli_options import DType, Target, one_sentence_errors
from specdec.models import load_target
from specdec.registry import COMMANDS, known

train = typer.Typer(no_args_is_help=True)


@train.callback()
def _recipes() -> None:
    """Train heads, or a draft model, on the target's own answers. `specdec train RECIPE --help` lists the settings."""


def _add_recipe(name: str, described: str) -> None:
    """`specdec train NAME`: its arguments go on to the recipe, which is also a module for `accelerate launch`."""
    passed_on = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

    @train.command(name, context_settings=passed_on, help=described)
    @one_sentence_errors
    def recipe(context: typer.Context) -> None:
        known(COMMANDS, f"train {name}", "command")(context.args)


_add_recipe("medusa", "Medusa heads: one more output head per token ahead.")
_add_recipe("mtp", "A multi-token-prediction head: one more decoder layer, applied again for each token ahead.")
_add_recipe("draft", "A small draft model, distilled from some of the target's layers.")


@one_sentence_errors
def export(
    folder: Annotated[Path, typer.Argument(help="Folder of a trained head, such as OUT/head.")],
    form: Annotated[str, typer.Option("--format", help="vllm-medusa, fasterdecoding or native-mtp.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    target: Target = "demo",
    dtype: DType = "auto",
) -> None:
    """Write a head in another project's format, and compare what is read back with the head itself."""
    known(COMMANDS, "export", "command")(folder, form, out, load_target(target, dtype, "cpu").model, target)
    typer.echo(f"{out}: {folder} as {form}, read back and equal")
