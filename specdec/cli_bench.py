"""`specdec bench`: parts timed on their own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specdec.call_checks import check_draft_length
from specdec.cli_options import (
    AsJson,
    BatchSizes,
    Compile,
    Contexts,
    Device,
    Drafter,
    DraftLength,
    DType,
    MaxNewTokens,
    PromptsFile,
    Raw,
    Resume,
    Target,
    hand_on,
    one_sentence_errors,
    several,
)

Context = Annotated[int, typer.Option(help="Cached tokens per row.")]
Repeats = Annotated[int, typer.Option(help="Rounds; every part is timed once in each.")]

bench = typer.Typer(no_args_is_help=True)


@bench.callback()
def _parts() -> None:
    """Time parts on their own."""


@bench.command("budget")
@one_sentence_errors
def budget(
    out: Annotated[Path, typer.Option(help="Folder for results.jsonl, a line per round, and budget.json.")],
    target: Target = "demo",
    drafter: Drafter = "ngram",
    batch_sizes: BatchSizes = "1,2,4,8,16",
    max_new_tokens: MaxNewTokens = 64,
    repeats: Annotated[int, typer.Option(help="Rounds for each category and batch size.")] = 5,
    raw: Raw = False,
    dtype: DType = "auto",
    device: Device = "auto",
    compile: Compile = False,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Compare learned draft lengths with plain decoding and with every fixed length, by category and batch size."""
    hand_on("bench budget", locals(), batch_sizes=several("--batch-sizes", batch_sizes, int))


@bench.command("forward")
@one_sentence_errors
def forward(
    target: Target = "demo",
    batch_sizes: BatchSizes = "1,2,4,8",
    widths: Annotated[str, typer.Option(help="Tokens per row, comma-separated: 1 is plain decoding.")] = "1,2,4,6,8",
    context: Context = 256,
    repeats: Repeats = 9,
    bandwidth: Annotated[
        float | None, typer.Option(help="In GB/s, of the floor; else that of a copy, measured first.")
    ] = None,
    dtype: DType = "auto",
    device: Device = "auto",
    compile: Compile = False,
    as_json: AsJson = False,
) -> None:
    """Time the packed forward by rows and width, against the bytes it must read and HF's own forward."""
    hand_on(
        "bench forward",
        locals(),
        batch_sizes=several("--batch-sizes", batch_sizes, int),
        widths=several("--widths", widths, int),
        bandwidth=None if bandwidth is None else 1e9 * bandwidth,
    )


@bench.command("step")
@one_sentence_errors
def step(
    target: Target = "demo",
    drafter: Drafter = "ngram",
    batch_sizes: BatchSizes = "1,8",
    draft_length: DraftLength = 5,
    contexts: Contexts = "256,4096",
    steps: Annotated[int, typer.Option(help="Decode steps of each run of the loop.")] = 32,
    repeats: Repeats = 9,
    raw: Raw = False,
    dtype: DType = "auto",
    device: Device = "auto",
    compile: Compile = False,
    as_json: AsJson = False,
) -> None:
    """Time the parts of a step beside the target's forward, where a real step's time goes, and what context adds."""
    check_draft_length(draft_length)
    hand_on(
        "bench step",
        locals(),
        batch_sizes=several("--batch-sizes", batch_sizes, int),
        contexts=several("--contexts", contexts, int),
    )


@bench.command("schedule")
@one_sentence_errors
def schedule(
    target: Target = "demo",
    drafter: Drafter = "ngram",
    prompts: PromptsFile = None,
    limit: Annotated[int, typer.Option(help="N requests; prompts start over where there are fewer.")] = 64,
    raw: Raw = False,
    max_batch: Annotated[int, typer.Option(help="Rows at work at a time.")] = 8,
    max_new_tokens: MaxNewTokens = 128,
    chunk: Annotated[int, typer.Option(help="Prompt tokens per step, at most.")] = 16,
    repeats: Repeats = 3,
    dtype: DType = "auto",
    device: Device = "auto",
    compile: Compile = False,
    as_json: AsJson = False,
) -> None:
    """Run many requests through a few rows, against Hugging Face's generate in static batches."""
    hand_on("bench schedule", locals())


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
