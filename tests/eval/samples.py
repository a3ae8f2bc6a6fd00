"""Records, prompts and commands that the evaluation's tests share."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from eval.methods import EncodedPrompt
from eval.runner import Failure, Record
from specdec.cli import app

PHASES = {"draft": 1.0, "forward": 6.0, "verify": 2.0, "loop": 1.0, "prefill": 5.0}
BASE = Record(
    id="a",
    conversation="a",
    category="maths",
    method="plain",
    drafter=None,
    verifier="greedy",
    lossless=True,
    temperature=0.0,
    dtype="float32",
    draft_length=0,
    batch_size=2,
    batch=0,
    repeat=0,
    prompt_tokens=3,
    tokens=[1, 2, 3, 4],
    drafted=[0, 0, 0],
    accepted=[0, 0, 0],
    accept_prob=[[], [], []],
    rows=2,
    batch_seconds=4.0,
    batch_prefill_seconds=1.0,
    batch_prefill_tokens=2,
    batch_phases=PHASES,
    batch_audit_seconds=None,
    batch_forwards=4,
    batch_decode_forwards=3,
    batch_packed_tokens=12,
    batch_syncs=4,
)


def record(method: str, **changes) -> Record:
    """BASE under `method`, with what HF or a drafter would leave in it, and then `changes`; a chat of its own."""
    changes = {"conversation": changes.get("id", BASE.id)} | changes
    if method == "hf":
        hf = dict.fromkeys(
            (
                "verifier",
                "drafted",
                "accepted",
                "accept_prob",
                "draft_length",
                "batch_phases",
                "batch_decode_forwards",
                "batch_packed_tokens",
                "batch_syncs",
            )
        )
        return replace(BASE, method="hf", **hf | changes)
    if method != "plain":
        drafted = {"drafted": [2, 2], "accepted": [1, 0], "accept_prob": [[0.75, 0.5], [0.25]], "draft_length": 2}
        drafted["batch_audit_seconds"] = 0.01
        changes = {"drafter": method} | drafted | changes
    return replace(BASE, method=method, **changes)


def prompts_of(*lengths: int) -> list[EncodedPrompt]:
    """One prompt per length, ids p0, p1, ..."""
    return [
        EncodedPrompt(number, f"p{number}", "maths", [1 + (7 * number + place) % 90 for place in range(length)])
        for number, length in enumerate(lengths)
    ]


def failure(method: str, **changes) -> Failure:
    """A job of BASE's row that raised."""
    fields = {
        "method": method,
        "drafter": method,
        "temperature": 0.0,
        "dtype": "float32",
        "batch_size": 2,
        "batch": 0,
        "repeat": 0,
        "error": "RuntimeError: boom",
        "traceback": "Traceback (most recent call last):\n  line\nRuntimeError: boom\n",
    }
    return Failure(**fields | changes)


def command(name: str, folder: Path, texts: Sequence[str], *fixed: str) -> Callable[..., Result]:
    """What runs `specdec name` with further options on prompts of these texts, p0 and so on, in `folder`/out."""
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": f"p{n}", "prompt": text}) + "\n" for n, text in enumerate(texts)))
    always = [name, "--prompts", str(path), "--raw", "--out", str(folder / "out"), *fixed]
    return lambda *options: CliRunner().invoke(app, [*always, *options])
