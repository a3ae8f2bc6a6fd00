"""`specdec bench`: parts timed on their own."""

from __future__ import annotations

from typing import Annotated

import typer

from specdec.call_checks import check_draft_length
from specdec.cli_options import AsJson, Device, DraftLength, DType, Target, hand_on, one_sentence_errors

bench = typer.Typer(no_args_is_help=True)


@bench.callback()
def _parts() -> None:
    """Time parts on their own."""


@bench.command("step")
@one_sentence_errors
def step(
    target: Target = "demo",
    batch_size: Annotated[int, typer.Option(help="Rows.")] = 8,
    draft_length: DraftLength = 5,
    context: Annotated[int, typer.Option(help="Cached tokens per row.")] = 256,
    repeats: Annotated[int, typer.Option(help="Rounds; every part is timed once in each.")] = 9,
    dtype: DType = "auto",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Time the parts of a step beside the target's forward: verification rules and logits processors."""
    check_draft_length(draft_length)
    hand_on("bench step", locals())


@bench.command("train")
@one_sentence_errors
def train(
    kind: Annotated[str, typer.Argument(help="medusa or mtp.")],
    target: Target = "demo",
    batch_size: Annotated[int, typer.Option(min=1, help="Examples.")] = 8,
    draft_vocab_size: Annotated[int, typer.Option(min=1, help="Ids that the head can propose.")] = 8192,
    repeats: Annotated[int, typer.Option(min=2, help="Rounds; both are timed once in each.")] = 7,
    dtype: DType = "auto",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Time a training step beside the bare forward and backward of the same modules."""
    hand_on("bench train", locals())


@bench.command("verify")
@one_sentence_errors
def verify(
    small: Annotated[bool, typer.Option("--small", help="8 rows, vocabulary 32,768.")] = False,
    as_json: AsJson = False,
) -> None:
    """Time verification kernels against the bytes they must read; the torch rules where there is no GPU."""
    hand_on("bench verify", locals())
