"""The model card: README.md and curves.png beside a trained head, made of what its run measured and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from eval.report import markdown_table
from train.acceptance import ACCEPTANCE_FILE
from train.curves import Curves, Line, plot, read_curves, read_lines
from train.log import METRICS_FILE
from train.replay import Accuracy
from train.settings import FREE_ON_RESUME, SETTINGS_FILE

CURVES_FILE = "curves.png"
POINTS = 6  # rows of the table below the curves


@dataclass(frozen=True)
class Kind:
    """What `specdec train` makes under one name. drafter: what drafts with it on the command line, FOLDER being its
    folder."""

    title: str
    about: str
    drafter: str


KINDS = {
    "medusa": Kind(
        "Medusa heads",
        "Medusa heads (Cai et al., arXiv 2401.10774): residual blocks on the target's final state, a head for each "
        "token ahead.",
        "medusa:head=FOLDER",
    ),
    "mtp": Kind(
        "Multi-token-prediction head",
        "A multi-token-prediction head in the style of DeepSeek-V3 (arXiv 2412.19437): a decoder layer of the target's "
        "kind that reads the target's final state and the next token.",
        "mtp:head=FOLDER",
    ),
    "draft": Kind(
        "Draft model",
        "A small language model that started as layers of the target and was distilled from it.",
        "draft_model:model=FOLDER",
    ),
}


@dataclass(frozen=True)
class Trained:
    """What a card says of a run beyond the files that the run left.

    kind:        a key of KINDS.   target, fingerprint: the loaded target's description, and `heads.saved.fingerprint`.
    prompts, response_tokens: trained on.   peak_bytes: the most memory that the process held while training.
    training, engine: accuracy at the same places of the same held-out texts, by the training code and as replayed.
    """

    kind: str
    target: str
    fingerprint: str
    prompts: int
    response_tokens: int
    peak_bytes: int
    training: Accuracy
    engine: Accuracy

    def __post_init__(self) -> None:
        ours, theirs = self.training.reached, self.engine.reached
        if len(ours) != len(theirs) or ours[:1] != theirs[:1]:
            raise ValueError(
                f"the training code counted {ours} chains by depth and the engine {theirs}: measure both to the same "
                f"depth on the same texts"
            )


def write_card(folder: Path, out: Path, trained: Trained) -> None:
    """Write README.md and curves.png into `folder`, from what the run in `out` recorded: settings.yaml, metrics.jsonl
    and acceptance.jsonl. The same inputs give the same bytes.

    Raises ValueError, which names file, line and metric, where one is missing or no number; nothing is written then.
    """
    settings = yaml.safe_load((out / SETTINGS_FILE).read_text())
    curves = read_curves(out / METRICS_FILE)
    text = markdown(settings, curves, read_lines(out / ACCEPTANCE_FILE), trained)
    plot(curves).savefig(folder / CURVES_FILE, dpi=100, metadata={"Software": None})
    (folder / "README.md").write_text(text)


def markdown(settings: dict[str, Any], curves: Curves, acceptance: Sequence[Line], trained: Trained) -> str:
    """README.md as text. The draft length that it recommends is that of the first row of `acceptance`."""
    kind = KINDS[trained.kind]
    sections = [
        f"# {kind.title} for {settings['target']}",
        f"{kind.about} For speculative decoding: it drafts tokens, which the target verifies.",
        f"Target: {trained.target}; fingerprint of its weights: `{trained.fingerprint}`.",
        "## Use",
        _use(kind, settings["target"], acceptance[0]["draft_length"]),
        "## Recipe",
        _recipe(settings, trained),
        "## Training curves",
        _training(curves),
        "## Acceptance in the engine",
        _acceptance(acceptance),
        "## Training and serving agree",
        _agreement(trained),
        "## Cost",
        _cost(curves, trained),
        "## Limits",
        _limits(curves, acceptance),
        "## Licence",
        f"Derived from the target, {trained.target}: use it as that model's licence allows.",
    ]
    return "\n\n".join(sections) + "\n"


def _use(kind: Kind, target: str, draft_length: int) -> str:
    return f"""FOLDER is the folder that holds this file.

```
specdec generate --target {target} --drafter {kind.drafter},length={draft_length} --prompt "Why is the sky blue?"
specdec eval --target {target} --drafter {kind.drafter},length={draft_length} --out DIR
```

```python
import specdec
from specdec.models import load_target

target = load_target("{target}")
chat = [{{"role": "user", "content": "Why is the sky blue?"}}]
inputs = target.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
output, stats = specdec.generate(
    target.model,
    **inputs.to(target.model.device),
    drafter="{kind.drafter},length={draft_length}",
    tokenizer=target.tokenizer,
    max_new_tokens=128,
    return_stats=True,
)
print(target.tokenizer.decode(output[0]))
print(stats.summary())
```"""


def _recipe(settings: dict[str, Any], trained: Trained) -> str:
    shown = {name: value for name, value in settings.items() if name not in FREE_ON_RESUME}
    return (
        f"Trained on {trained.response_tokens:,} response tokens: the target's own answers, at temperature "
        f"{settings['temperature']:g}, to {trained.prompts:,} prompts. To train it again, save this to FILE and run "
        f"`specdec train {trained.kind} --config FILE --out DIR`:\n\n"
        f"```yaml\n{yaml.safe_dump(shown, sort_keys=False)}```"
    )


def _training(curves: Curves) -> str:
    last = len(curves.held_out) - 1
    places = np.linspace(0, last, min(POINTS, last + 1)).round().astype(int)
    cells = [
        [f"{point.tokens:,}", f"{point.loss:.3f}", *(f"{share:.1%}" for share in point.top1)]
        for point in (curves.held_out[place] for place in places)
    ]
    depths = [f"top-1, depth {depth}" for depth in range(1, len(curves.kept.top1) + 1)]
    return (
        f"![loss and accuracy against training tokens]({CURVES_FILE})\n\n"
        f"{markdown_table(['training tokens', 'held-out loss', *depths], cells)}\n\n"
        f"Top-1: how often a depth's arg-max is the text's token, whether or not earlier depths are right. The weights "
        f"are those of the evaluation with the lowest loss, {curves.kept.loss:.3f} after {curves.kept.tokens:,} tokens."
    )


ACCEPTANCE_COLUMNS: dict[str, Callable[[Line], str]] = {
    "drafter": lambda row: row["drafter"],
    "drafted per step": lambda row: str(row["draft_length"]),
    "temperature": lambda row: f"{row.number('temperature'):g}",
    "batch": lambda row: str(row["batch_size"]),
    "rule": lambda row: row["verifier"],
    "accepted length": lambda row: f"{row.number('mean_accepted_length'):.2f}",
    "acceptance": lambda row: f"{row.number('acceptance_rate'):.1%}",
    "acceptance by depth": lambda row: " / ".join(f"{share:.1%}" for share in row.numbers("conditional_acceptance")),
}


def _acceptance(rows: Sequence[Line]) -> str:
    cells = [[cell(row) for cell in ACCEPTANCE_COLUMNS.values()] for row in rows]
    return (
        f"{markdown_table(list(ACCEPTANCE_COLUMNS), cells)}\n\n"
        "Accepted length: accepted drafted tokens + 1 per decode step. Acceptance: accepted / drafted tokens. By "
        "depth: the share of steps that accepted a token there among those that did at all depths before; a path that "
        "ended at a leaf of a tree counts as rejected there."
    )


def _agreement(trained: Trained) -> str:
    def share(right: int, reached: int) -> str:
        return f"{right:,} of {reached:,}" + (f" ({right / reached:.1%})" if reached else "")

    cells = []
    for k, (ours, theirs) in enumerate(zip(trained.training.conditional, trained.engine.conditional, strict=True)):
        counts = [share(counted.right[k], counted.reached[k]) for counted in (trained.training, trained.engine)]
        difference = "none to compare" if ours is None or theirs is None else f"{100 * (theirs - ours):+.2f}"
        cells.append([str(k + 1), *counts, difference])
    return (
        "Arg-max chains at every place of the held-out texts, as the training code computes them and as the engine "
        "drafts them: right at this depth, of those that were right at all depths before.\n\n"
        f"{markdown_table(['depth', 'training', 'engine', 'difference in points'], cells)}"
    )


def _cost(curves: Curves, trained: Trained) -> str:
    tokens = curves.train[-1].tokens
    return (
        f"{len(curves.train):,} steps over {tokens:,} response tokens in {curves.seconds / 60:.1f} minutes, which is "
        f"{tokens / curves.seconds:,.0f} tokens/s; peak memory {trained.peak_bytes / 2**20:,.0f} MiB."
    )


def _limits(curves: Curves, acceptance: Sequence[Line]) -> str:
    def extreme(choose: Callable) -> str:
        row = choose(acceptance, key=lambda row: row.number("mean_accepted_length"))
        conditions = f"{row['drafter']}, temperature {row['temperature']:g}, batch {row['batch_size']}"
        return f"{row['mean_accepted_length']:.2f} ({conditions})"

    misses = ", ".join(f"{1 - share:.1%} at depth {k}" for k, share in enumerate(curves.kept.top1, start=1))
    last = curves.held_out[-1]
    half = min(curves.held_out, key=lambda point: abs(point.tokens - last.tokens / 2))
    trend = (
        "With one evaluation only, what more training would give cannot be told."
        if half is last
        else f"From {half.tokens:,} to {last.tokens:,} training tokens top-1 accuracy at depth 1 went from "
        f"{half.top1[0]:.1%} to {last.top1[0]:.1%}, the held-out loss from {half.loss:.3f} to {last.loss:.3f}."
    )
    return (
        f"Measured on {acceptance[0]['requests']} prompts held out of the training set, with at most "
        f"{acceptance[0]['max_new_tokens']} new tokens each: other kinds of prompts and longer texts were not. The "
        f"highest mean accepted length is {extreme(max)}, the lowest {extreme(min)}. The arg-max misses the text's "
        f"token in {misses}. {trend}"
    )
