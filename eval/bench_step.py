"""`specdec bench step`: what a decode step costs: its parts alone, in the real loop, and by context."""

from __future__ import annotations

import json
from collections.abc import Sequence

from eval import bench_context, bench_decode, bench_parts
from eval.ahead import compile_ahead, with_seconds
from eval.environment import described
from eval.plan.show import as_table
from eval.report import plain_console
from specdec.drafter_spec import DrafterSpec, build_drafter
from specdec.models import load_target
from specdec.prompts import encode, load_prompts


def run(
    *,
    target: str,
    drafter: str,
    dtype: str,
    device: str,
    batch_sizes: Sequence[int],
    draft_length: int,
    contexts: Sequence[int],
    steps: int,
    repeats: int,
    raw: bool,
    compile: bool,
    as_json: bool,
) -> None:
    """Measure and print three tables, or with `as_json` one JSON object and nothing else.

    contexts: cached tokens per row; the parts are timed at the first, and all at the largest batch size.   steps: of
    each run of the loop on the built-in prompts.   raw: without the chat template.   compile: the target's forwards are
    compiled, and a draft model's.
    Raises ValueError for sizes that cannot be measured, and NotImplementedError for a target that cannot be compiled.
    """
    sizes = {"--batch-sizes": batch_sizes, "--contexts": contexts, "--steps and --repeats": (steps, repeats)}
    for name, values in sizes.items():
        if min(values) < 1:
            raise ValueError(f"{name} are {', '.join(map(str, values))}: give at least 1")
    spec = DrafterSpec.parse(drafter)
    length = draft_length if spec.length is None else spec.length
    loaded = load_target(target, dtype, device)
    drafts = build_drafter(spec, loaded)
    prompts = encode(load_prompts(None, max(batch_sizes)), loaded.tokenizer, raw)
    model, B = loaded.model, max(batch_sizes)
    bench_context.check(model, length, contexts, repeats)
    compile_seconds = compile_ahead(model, drafts, compile)
    found = {
        "contexts": bench_context.measure(model, B, length, contexts, repeats, compile),
        "parts": bench_parts.measure(model, B, length, contexts[0], repeats, compile),
        "decode": bench_decode.measure(model, drafts, length, prompts, batch_sizes, steps, repeats, compile),
    }
    if as_json:
        settings = {"draft_length": length, "steps": steps, "repeats": repeats, "compile": compile}
        settings["compile_seconds"] = compile_seconds
        print(json.dumps({"environment": described(loaded, {drafter: drafts}), **settings, **found}, indent=2))
        return
    console = plain_console()
    named = with_seconds(loaded.description, compile_seconds)
    print(f"{named}: {B} rows, {length} drafted tokens, {contexts[0]} tokens of context")
    console.print(as_table(found["parts"], bench_parts.COLUMNS, section="kind"))
    print(f"the decode loop with {drafter}, {length} drafted tokens, {repeats} runs of {steps} steps each")
    console.print(as_table(found["decode"], bench_decode.COLUMNS, section="rows"))
    print(bench_context.growth(found["contexts"]))
    if compile:
        print("attention is the graph's operator, which stores keys and values too; memory is without what graphs hold")
    console.print(as_table(found["contexts"], bench_context.COLUMNS, section="rows"))
