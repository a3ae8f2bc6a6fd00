"""`specdec plan`: what speculation will be worth elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specdec.cli_options import (
    AsJson,
    BatchSizes,
    Contexts,
    Device,
    Drafter,
    Drafters,
    DraftLength,
    DType,
    PromptsFile,
    Raw,
    Target,
    hand_on,
    one_sentence_errors,
    several,
)

Rows = Annotated[int, typer.Option(help="N prompts, in turn from each category; the largest batch of the loop.")]
Steps = Annotated[int, typer.Option(help="Decode steps of each run of the loop.")]
Repeats = Annotated[int, typer.Option(help="How often each forward of the grid is measured.")]

plan = typer.Typer(no_args_is_help=True)


@plan.callback()
def _plans() -> None:
    """Predict what speculation is worth on other models, devices and batch sizes."""


@plan.command("measure")
@one_sentence_errors
def measure(
    out: Annotated[Path, typer.Option(help="Folder for costs.json.")],
    target: Target = "demo",
    drafters: Drafters = ("ngram",),
    draft_length: DraftLength = 8,
    batch_sizes: BatchSizes = "1,2,4,8",
    contexts: Contexts = "64,512",
    prompts: PromptsFile = None,
    raw: Raw = False,
    limit: Rows = 8,
    steps: Steps = 16,
    repeats: Repeats = 15,
    dtype: DType = "auto",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure the packed forward over a grid, the device, the loop and the drafters."""
    hand_on(
        "plan measure",
        locals(),
        batch_sizes=several("--batch-sizes", batch_sizes, int),
        contexts=several("--contexts", contexts, int),
    )


@plan.command("predict")
@one_sentence_errors
def predict(
    out: Annotated[Path, typer.Option(help="Folder for prediction.json and prediction.png.")],
    costs: Annotated[Path | None, typer.Option(help="costs.json of the device, from `plan measure`.")] = None,
    bandwidth: Annotated[float | None, typer.Option(help="Of a device without costs, in GB/s.")] = None,
    compute: Annotated[float | None, typer.Option(help="Of a device without costs, in TFLOP/s.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Folder, config.json or Hub id to plan for; else the model of --costs.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Of the weights of --model and --draft-model; else as --costs measured, or bfloat16."),
    ] = None,
    acceptance: Annotated[
        str | None,
        typer.Option(
            help="By depth, given that it is reached: 0.8,0.7,0.6; an eval folder, of chains; else as in --costs."
        ),
    ] = None,
    drafter: Annotated[str | None, typer.Option(help="Which one of --costs and of the eval folder.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Which rows of the eval folder.")] = None,
    draft_ratio: Annotated[
        float | None, typer.Option(help="A drafted token's time over the target's; else as --costs measured.")
    ] = None,
    draft_model: Annotated[str | None, typer.Option(help="Configuration of the drafter, as for --model.")] = None,
    batch_sizes: BatchSizes = "1,2,4,8,16,32,64,128,256,512",
    contexts: Contexts = "512,4096,32768",
    as_json: AsJson = False,
) -> None:
    """Predict the speed-up, the best draft length and the batch from which on speculation stops paying."""
    hand_on(
        "plan predict",
        locals(),
        bandwidth=None if bandwidth is None else 1e9 * bandwidth,
        compute=None if compute is None else 1e12 * compute,
        batch_sizes=several("--batch-sizes", batch_sizes, int),
        contexts=several("--contexts", contexts, int),
    )


@plan.command("check")
@one_sentence_errors
def check(
    out: Annotated[Path, typer.Option(help="Folder for costs.json, check.json and check.png.")],
    target: Target = "demo",
    drafter: Drafter = "ngram",
    batch_sizes: Annotated[str, typer.Option(help="Comma-separated; each divides --limit.")] = "1,4,8",
    draft_lengths: Annotated[str, typer.Option(help="Comma-separated.")] = "2,5",
    prompts: PromptsFile = None,
    raw: Raw = False,
    limit: Rows = 8,
    steps: Steps = 16,
    repeats: Repeats = 15,
    dtype: DType = "auto",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Predict the loop's speed-up, measure it, and exit with status 1 where they are too far apart."""
    hand_on(
        "plan check",
        locals(),
        batch_sizes=several("--batch-sizes", batch_sizes, int),
        draft_lengths=several("--draft-lengths", draft_lengths, int),
    )


@plan.command("split")
@one_sentence_errors
def split(
    out: Annotated[Path, typer.Option(help="Folder for split.json and split.png.")],
    prefill_rate: Annotated[float, typer.Option(help="Requests/s that one device prefills.")],
    decode_rate: Annotated[float, typer.Option(help="Requests/s that one device decodes without speculation.")],
    devices: Annotated[int, typer.Option(help="In all; every number from 2 up to it is planned.")] = 8,
    decode_speedup: Annotated[float, typer.Option(help="What speculation makes of decode, as predicted.")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Divide devices between prefill and decode, without and with speculation."""
    hand_on("plan split", locals())
