"""What the commands share: their options, how they are read, and errors in one sentence."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any

import typer

from specdec.registry import COMMANDS, OWN_PACKAGES, known

DRAFTERS = (
    "ngram, ngram:max_n=3,length=8 (length is the draft length), medusa, medusa:head=DIR, medusa:nodes=12,length=12 (a "
    "tree), mtp, mtp:head=DIR, draft_model:model=PATH, draft_model:layers=6, or your own as module:Class"
)
DTYPES = "float32, bfloat16, float16, float64, or auto: bfloat16 where it is native, else float32."

Target = Annotated[
    str, typer.Option(help="Hub id, local folder, .gguf file, or 'demo' for the small model that `make demo` installs.")
]
Drafter = Annotated[str, typer.Option(help=DRAFTERS)]
Drafters = Annotated[list[str], typer.Option("--drafter", help=f"{DRAFTERS}; may be given several times")]
DType = Annotated[str, typer.Option(help=DTYPES)]
Device = Annotated[str, typer.Option(help="Where the target runs, such as cpu or cuda:0; auto takes what is there.")]
PromptsFile = Annotated[str | None, typer.Option(help="JSONL file, as for eval; else the built-in prompts.")]
Limit = Annotated[int | None, typer.Option(min=1, help="N prompts, in turn from each category.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out broken rows of the prompts.")]
Raw = Annotated[bool, typer.Option("--raw", help="Do not apply the model's chat template.")]
BatchSizes = Annotated[str, typer.Option(help="Comma-separated.")]
Contexts = Annotated[str, typer.Option(help="Cached tokens per row, comma-separated.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Tokens to generate per prompt, at most.")]
DraftLength = Annotated[int, typer.Option(help="Drafted tokens per step; 0 is plain decoding.")]
Verifier = Annotated[str, typer.Option(help="Verification rule; auto: the lossless one that fits the draft.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy decoding; above 0 samples.")]
TopK = Annotated[
    int | None,
    typer.Option(
        help="Keep the k most probable tokens. Off unless given: HF's default 50 holds in model.generate only."
    ),
]
TopP = Annotated[float | None, typer.Option(help="Keep the most probable tokens up to this mass. Off unless given.")]
Seed = Annotated[int, typer.Option(help="Same seed, same samples.")]
Invariant = Annotated[
    bool,
    typer.Option(
        "--invariant",
        help="Give every token the same logits, bit for bit, whatever is computed beside it; with greedy decoding or "
        "--verifier coupled drafting then changes no token, also in bfloat16.",
    ),
]
Compile = Annotated[
    bool,
    typer.Option("--compile", help="Compiled forwards: faster steps, after a minute or more of compiling each model."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the killed run that --out holds.")]
ToWandb = Annotated[bool, typer.Option("--wandb", help="Log the tables and plots to Weights & Biases too.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")]


def hand_on(command: str, options: dict[str, Any], **read: Any) -> None:
    """Call what `command` stands for in `registry.COMMANDS` with a command's options, those in `read` replaced."""
    known(COMMANDS, command, "command")(**options | read)


def several(option: str, text: str, kind: Callable[[str], Any]) -> tuple[Any, ...]:
    """A comma-separated option's values. Raises ValueError that names the option."""
    try:
        return tuple(kind(part.strip()) for part in text.split(","))
    except ValueError:
        wanted = {int: "whole numbers", float: "numbers", length_or_auto: "whole numbers or auto"}[kind]
        raise ValueError(f"{option} is {text!r}: give {wanted} separated by commas, such as 1,4,8") from None


def length_or_auto(text: str) -> int | None:
    """A draft length; None, which is learned while decoding, for auto."""
    return None if text == "auto" else int(text)


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


def _raised_by_us(error: Exception) -> bool:
    frame = error.__traceback__
    while frame.tb_next:
        frame = frame.tb_next
    return frame.tb_frame.f_globals.get("__name__", "").partition(".")[0] in ("specdec", *OWN_PACKAGES)
