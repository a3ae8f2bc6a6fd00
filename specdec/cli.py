"""The `specdec` command: `generate`, and the commands of the other cli_*.py files. The work is done elsewhere."""

from __future__ import annotations

from typing import Annotated

import torch
import typer

import specdec
from specdec import cli_bench, cli_eval, cli_plan, cli_train
from specdec.call_checks import check_draft_length, fitting_verifier
from specdec.cli_options import (
    Compile,
    Device,
    Drafter,
    DType,
    Invariant,
    MaxNewTokens,
    Raw,
    Target,
    Temperature,
    TopK,
    TopP,
    Verifier,
    one_sentence_errors,
    sampling_arguments,
)
from specdec.drafter_spec import DrafterSpec, build_drafter
from specdec.models import load_target
from specdec.prompts import Prompt, encode
from specdec.registry import VERIFIERS, known
from specdec.streaming import TokenPrinter

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Speculative decoding: try it, then measure it.")


@app.command()
@one_sentence_errors
def generate(
    prompt: Annotated[str, typer.Option(help="What the model answers, or with --raw goes on from.")],
    target: Target = "demo",
    drafter: Drafter = "ngram",
    max_new_tokens: MaxNewTokens = 128,
    draft_length: Annotated[
        int | None,
        typer.Option(help="Drafted tokens per step, at most; 0 is plain decoding. As many as pay unless given."),
    ] = None,
    verifier: Verifier = "auto",
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same sample.")] = None,
    raw: Raw = False,
    dtype: DType = "auto",
    device: Device = "auto",
    invariant: Invariant = False,
    compile: Compile = False,
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
        invariant=invariant,
        compile=compile,
        return_stats=True,
        on_commit=printer.on_commit,
        max_new_tokens=max_new_tokens,
        **sampling,
    )
    printer.end()
    typer.echo(stats.summary())


cli_eval.add_to(app)
app.add_typer(cli_plan.plan, name="plan")
app.add_typer(cli_bench.bench, name="bench")
app.add_typer(cli_train.train, name="train")
app.command()(cli_train.export)


def main() -> None:
    """The console script."""
    app()
