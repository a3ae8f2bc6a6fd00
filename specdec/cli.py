"""The `specdec` command: argument parsing, streaming text and one-sentence errors. The work is done elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import specdec
from specdec.call_checks import check_draft_length, fitting_verifier
from specdec.drafter_spec import DrafterSpec, build_drafter
from specdec.models import load_target
from specdec.prompts import Prompt, encode
from specdec.registry import COMMANDS, OWN_PACKAGES, VERIFIERS, known
from specdec.streaming import TokenPrinter

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Speculative decoding: try it, then measure it.")
bench = typer.Typer(no_args_is_help=True)
train = typer.Typer(no_args_is_help=True)
app.add_typer(bench, name="bench")
app.add_typer(train, name="train")

Target = Annotated[
    str, typer.Option(help="Hub id, local folder, .gguf file, or 'demo' for the small model that `make demo` installs.")
]
DTypeOption = Annotated[
    str, typer.Option(help="float32, bfloat16, float16, float64, or auto: bfloat16 where it is native, else float32.")
]
Device = Annotated[str, typer.Option(help="Where the target runs, such as cpu or cuda:0; auto takes what is there.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Tokens to generate per prompt, at most.")]
DraftLength = Annotated[int, typer.Option(help="Drafted tokens per step; 0 is plain decoding.")]
VerifierName = Annotated[str, typer.Option(help="Verification rule; auto: the lossless one that fits the draft.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy decoding; above 0 samples.")]
TopK = Annotated[
    int | None,
    typer.Option(
        help="Keep the k most probable tokens. Off unless given: HF's default 50 holds in model.generate only."
    ),
]
TopP = Annotated[float | None, typer.Option(help="Keep the most probable tokens up to this mass. Off unless given.")]
Raw = Annotated[bool, typer.Option("--raw", help="Do not apply the model's chat template.")]
DRAFTER_HELP = (
    "ngram, ngram:max_n=3,length=8 (length is the draft length), medusa, medusa:head=DIR, medusa:nodes=12,length=12 (a "
    "tree), mtp, mtp:head=DIR, draft_model:model=PATH, draft_model:layers=6, or your own as module:Class"
)


def one_sentence_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Print what our own code refuses as one sentence on stderr and exit with status 2.

    Only errors raised by this project's code are the user's to mend; any other keeps its traceback."""

    @functools.wraps(command)
    def wrapped(**options: Any) -> None:
        try:
            command(**options)
        except (ValueError, NotImplementedError, ImportError, OSError, FloatingPointError) as error:
            if not _raised_by_us(error):
                raise
            typer.echo(f"specdec: {error}", err=True)
            raise typer.Exit(2) from None

    return wrapped


def sampling_arguments(temperature: float, top_k: int | None, top_p: float | None) -> dict[str, Any]:
    """Keyword arguments of `generate` for the command line's sampling options: warpers are off unless asked for.

    Raises ValueError for values out of range and for a warper without sampling."""
    if temperature != 0 and not 1e-6 <= temperature <= 1e6:  # beyond, logits overflow or masked ones become NaN
        raise ValueError(f"--temperature is {temperature}: give 0 for greedy decoding, or 1e-6 to 1e6 to sample")
    if temperature == 0:
        if top_k is not None or top_p is not None:
            raise ValueError("--top-k and --top-p shape sampling and need a --temperature above 0")
        return {"do_sample": False}
    if top_k is not None and top_k < 0:
        raise ValueError(f"--top-k is {top_k}: give a positive number, or 0 for off")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"--top-p is {top_p}: give a number above 0 and up to 1")
    return {
        "do_sample": True,
        "temperature": temperature,
        "top_k": top_k or 0,
        "top_p": 1.0 if top_p is None else top_p,
    }


@app.command()
@one_sentence_errors
def generate(
    prompt: Annotated[str, typer.Option(help="What the model answers, or with --raw goes on from.")],
    target: Target = "demo",
    drafter: Annotated[str, typer.Option(help=DRAFTER_HELP)] = "ngram",
    max_new_tokens: MaxNewTokens = 128,
    draft_length: Annotated[
        int | None,
        typer.Option(help="Drafted tokens per step, at most; 0 is plain decoding. As many as pay unless given."),
    ] = None,
    verifier: VerifierName = "auto",
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same sample.")] = None,
    raw: Raw = False,
    dtype: DTypeOption = "auto",
    device: Device = "auto",
    color: Annotated[bool, typer.Option("--color", help="Drafted and accepted tokens in green.")] = False,
) -> None:
    """Stream one answer as its tokens are accepted, then a line of statistics."""
    if not prompt.strip():
        raise ValueError("--prompt is empty: give it some text")
    sampling = sampling_arguments(temperature, top_k, top_p)
    fitting_verifier(known(VERIFIERS, verifier, "verifier"), sampling["do_sample"])
    if draft_length is not None:
        check_draft_length(draft_length)
    spec = DrafterSpec.parse(drafter)
    loaded = load_target(target, dtype, device)
    chosen = build_drafter(spec, loaded)
    typer.echo(f"target: {loaded.description}", err=True)
    question = Prompt("prompt", "", ({"role": "user", "content": prompt},))
    input_ids = torch.tensor(encode([question], loaded.tokenizer, raw), device=loaded.model.device)
    printer = TokenPrinter(loaded.tokenizer, color)
    _, stats = specdec.generate(
        loaded.model,
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        drafter=chosen,
        draft_length=draft_length if spec.length is None else spec.length,
        verifier=verifier,
        seed=seed,
        return_stats=True,
        on_commit=printer.on_commit,
        max_new_tokens=max_new_tokens,
        **sampling,
    )
    printer.end()
    typer.echo(stats.summary())


@app.command("eval")
@one_sentence_errors
def evaluate(
    out: Annotated[Path, typer.Option(help="Folder for results.jsonl, summary.json and report.md.")],
    target: Target = "demo",
    drafter: Annotated[list[str], typer.Option(help=f"{DRAFTER_HELP}; may be given several times")] = ("ngram",),
    prompts: Annotated[
        str | None, typer.Option(help="JSONL file with turns, prompt or messages per row; else the built-in prompts.")
    ] = None,
    batch_sizes: Annotated[str, typer.Option(help="Comma-separated.")] = "1,4,8",
    max_new_tokens: MaxNewTokens = 128,
    draft_length: DraftLength = 5,
    verifier: VerifierName = "auto",
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Annotated[int, typer.Option(help="Same seed, same samples.")] = 0,
    raw: Raw = False,
    dtype: DTypeOption = "auto",
    device: Device = "auto",
    limit: Annotated[int | None, typer.Option(min=1, help="N prompts, in turn from each category.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="How often each batch is timed with each method.")] = 1,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out broken lines of the prompts file.")] = False,
    memory: Annotated[
        int | None, typer.Option(min=1, help="Also measure tensor bytes with this many tokens of context.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the killed run that --out holds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table's rows as JSON, and nothing else.")] = False,
) -> None:
    """Measure acceptance, speed and equality of the output against plain decoding and against HF generate."""
    known(COMMANDS, "eval", "command")(
        target=target,
        drafters=tuple(drafter),
        prompts=prompts,
        batch_sizes=_numbers(batch_sizes),
        max_new_tokens=max_new_tokens,
        sampling=sampling_arguments(temperature, top_k, top_p),
        draft_length=draft_length,
        verifier=verifier,
        seed=seed,
        raw=raw,
        dtype=dtype,
        device=device,
        limit=limit,
        repeats=repeats,
        skip_bad=skip_bad,
        out=out,
        memory=memory,
        resume=resume,
        as_json=as_json,
    )


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


@app.command()
@one_sentence_errors
def export(
    folder: Annotated[Path, typer.Argument(help="Folder of a trained head, such as OUT/head.")],
    form: Annotated[str, typer.Option("--format", help="vllm-medusa, fasterdecoding or native-mtp.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    target: Target = "demo",
    dtype: DTypeOption = "auto",
) -> None:
    """Write a head in another project's format, and compare what is read back with the head itself."""
    known(COMMANDS, "export", "command")(folder, form, out, load_target(target, dtype, "cpu").model, target)
    typer.echo(f"{out}: {folder} as {form}, read back and equal")


@bench.callback()
def _parts() -> None:
    """Time parts on their own."""


@bench.command("step")
@one_sentence_errors
def bench_step(
    target: Target = "demo",
    batch_size: Annotated[int, typer.Option(help="Rows.")] = 8,
    draft_length: DraftLength = 5,
    context: Annotated[int, typer.Option(help="Cached tokens per row.")] = 256,
    repeats: Annotated[int, typer.Option(help="Rounds; every part is timed once in each.")] = 9,
    dtype: DTypeOption = "auto",
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
) -> None:
    """Time the parts of a step beside the target's forward: verification rules and logits processors."""
    check_draft_length(draft_length)
    known(COMMANDS, "bench step", "command")(
        target=target,
        dtype=dtype,
        device=device,
        batch_size=batch_size,
        draft_length=draft_length,
        context=context,
        repeats=repeats,
        as_json=as_json,
    )


@bench.command("train")
@one_sentence_errors
def bench_train(
    kind: Annotated[str, typer.Argument(help="medusa or mtp.")],
    target: Target = "demo",
    batch_size: Annotated[int, typer.Option(min=1, help="Examples.")] = 8,
    draft_vocab_size: Annotated[int, typer.Option(min=1, help="Ids that the head can propose.")] = 8192,
    repeats: Annotated[int, typer.Option(min=2, help="Rounds; both are timed once in each.")] = 7,
    dtype: DTypeOption = "auto",
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
) -> None:
    """Time a training step beside the bare forward and backward of the same modules."""
    known(COMMANDS, "bench train", "command")(
        kind=kind,
        target=target,
        dtype=dtype,
        device=device,
        batch_size=batch_size,
        draft_vocab_size=draft_vocab_size,
        repeats=repeats,
        as_json=as_json,
    )


@bench.command("verify")
@one_sentence_errors
def bench_verify(
    small: Annotated[bool, typer.Option("--small", help="8 rows, vocabulary 32,768.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
) -> None:
    """Time verification kernels against the bytes they must read; the torch rules where there is no GPU."""
    known(COMMANDS, "bench verify", "command")(small=small, as_json=as_json)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--batch-sizes is {text!r}: give whole numbers separated by commas, such as 1,4,8") from None


def _raised_by_us(error: Exception) -> bool:
    frame = error.__traceback__
    while frame.tb_next:
        frame = frame.tb_next
    return frame.tb_frame.f_globals.get("__name__", "").partition(".")[0] in ("specdec", *OWN_PACKAGES)


def main() -> None:
    """The console script."""
    app()
