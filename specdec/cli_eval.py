"""`specdec eval`, `fidelity` and `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specdec.cli_options import (
    DTYPES,
    AsJson,
    BatchSizes,
    Compile,
    Device,
    Drafter,
    Drafters,
    DraftLength,
    DType,
    Invariant,
    Limit,
    MaxNewTokens,
    PromptsFile,
    Raw,
    Resume,
    Seed,
    SkipBad,
    Target,
    Temperature,
    TopK,
    TopP,
    ToWandb,
    Verifier,
    hand_on,
    length_or_auto,
    one_sentence_errors,
    several,
)


@one_sentence_errors
def evaluate(
    out: Annotated[Path, typer.Option(help="Folder for results.jsonl, summary.json, report.md and report.html.")],
    target: Target = "demo",
    drafters: Drafters = ("ngram",),
    prompts: Annotated[
        str | None,
        typer.Option(
            help="JSONL file with turns, prompt or messages per row (such as Spec-Bench's question.jsonl), or with "
            "--column a data set, NAME or NAME:CONFIG; else the built-in prompts."
        ),
    ] = None,
    column: Annotated[
        str | None, typer.Option(help="Column of the data set with a text, a list of turns or a chat per row.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Split of the data set, where it has several.")] = None,
    batch_sizes: BatchSizes = "1,4,8",
    max_new_tokens: MaxNewTokens = 128,
    draft_lengths: Annotated[
        str,
        typer.Option(
            "--draft-length",
            help="Most drafted tokens per step; 0 is plain decoding; auto: learned, but where another rule than "
            "coupled samples. Several, comma-separated.",
        ),
    ] = "5",
    verifiers: Annotated[
        str,
        typer.Option(
            "--verifier",
            help="Verification rules, comma-separated, each run at the temperatures that it fits; auto: the lossless "
            "one that fits the draft.",
        ),
    ] = "auto",
    temperatures: Annotated[
        str,
        typer.Option("--temperature", help="0 is greedy decoding; above 0 samples. Several, comma-separated."),
    ] = "0",
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = 0,
    raw: Raw = False,
    dtypes: Annotated[str, typer.Option("--dtype", help=f"{DTYPES} Several, comma-separated.")] = "auto",
    device: Device = "auto",
    limit: Limit = None,
    repeats: Annotated[int, typer.Option(min=1, help="How often each batch is timed with each method.")] = 1,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="End no request before it has all its tokens.")
    ] = False,
    vllm: Annotated[
        str | None,
        typer.Option(help="Python of an environment with vLLM (such as .venv-vllm/bin/python), to compare it too."),
    ] = None,
    invariant: Invariant = False,
    compile: Compile = False,
    skip_bad: SkipBad = False,
    memory: Annotated[
        int | None, typer.Option(min=1, help="Also measure tensor bytes with this many tokens of context.")
    ] = None,
    traces: Annotated[int, typer.Option("--trace", min=0, help="Show every step of the first N prompts.")] = 0,
    to_wandb: ToWandb = False,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Measure acceptance, speed and equality of the output against plain decoding and against HF generate."""
    hand_on(
        "eval",
        locals(),
        drafters=tuple(drafters),
        batch_sizes=several("--batch-sizes", batch_sizes, int),
        draft_lengths=several("--draft-length", draft_lengths, length_or_auto),
        temperatures=several("--temperature", temperatures, float),
        verifiers=several("--verifier", verifiers, str),
        dtypes=several("--dtype", dtypes, str),
    )


@one_sentence_errors
def fidelity(
    out: Annotated[Path, typer.Option(help="Folder for results.jsonl, fidelity.json and fidelity.md.")],
    target: Target = "demo",
    drafter: Drafter = "ngram",
    prompts: PromptsFile = None,
    batch_size: Annotated[int, typer.Option(help="Of the batched rungs.")] = 8,
    max_new_tokens: MaxNewTokens = 64,
    draft_length: DraftLength = 5,
    verifier: Verifier = "auto",
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = 0,
    samples: Annotated[int, typer.Option(help="Seeds of the last rung: more tokens for the distribution tests.")] = 1,
    raw: Raw = False,
    dtype: DType = "auto",
    device: Device = "auto",
    limit: Limit = None,
    invariant: Invariant = False,
    compile: Compile = False,
    skip_bad: SkipBad = False,
    resume: Resume = False,
    self_checked: Annotated[
        bool,
        typer.Option(
            "--self-check",
            help="Inject known bugs instead, drafting with the target but for its middle layers, and catch each.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Is the output still the target model's, and where it is not, why? Exit status 1 where it is not."""
    hand_on("fidelity", locals())


@one_sentence_errors
def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders that specdec eval wrote.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the comparison of several runs.")] = None,
    to_wandb: ToWandb = False,
    as_json: AsJson = False,
) -> None:
    """Make a run's reports again, also of a killed one, or show several runs side by side."""
    hand_on("report", locals())


def add_to(app: typer.Typer) -> None:
    """Make the three commands `app`'s."""
    app.command("eval")(evaluate)
    app.command()(fidelity)
    app.command()(report)
