"""First half of `make test-vllm`: the demo model and its Medusa heads as vLLM reads them, and what our engine makes of
16 prompts with them, greedy and in float32."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import PreTrainedModel

import specdec
from drafters.medusa import build
from heads.export import export
from heads.saved import shipped
from specdec.models import load_target
from specdec.prompts import encode, load_prompts

PROMPTS = 16
MAX_NEW_TOKENS = 64


def main(folder: Path) -> None:
    """Write folder/target, folder/heads and folder/ours.json."""
    target = load_target("demo", dtype="float32", device="cpu")
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
    export(shipped("medusa", target.model), "vllm-medusa", folder / "heads", target.model, "demo")
    drafter = build(target)
    rows, drafted, accepted = [], 0, 0
    for prompt in encode(load_prompts(limit=PROMPTS), target.tokenizer, raw=False):
        tokens, stats = specdec.generate(
            target.model,
            torch.tensor([prompt]),
            drafter=drafter,
            draft_length=drafter.heads.config.heads,
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
            return_stats=True,
        )
        rows.append(
            {
                "prompt": prompt,
                "tokens": tokens[0, len(prompt) :].tolist(),
                "margins": margins(target.model, tokens, len(prompt)),
            }
        )
        drafted += sum(stats.rows[0].drafted)
        accepted += sum(stats.rows[0].accepted)
    result = {"heads": drafter.heads.config.heads, "acceptance": accepted / drafted, "max_new_tokens": MAX_NEW_TOKENS}
    (folder / "ours.json").write_text(json.dumps(result | {"rows": rows}))


@torch.no_grad()
def margins(model: PreTrainedModel, tokens: torch.Tensor, prompt_length: int) -> list[float]:
    """Per generated token, how far its logit lies above the next best: below 1e-4 the order of a sum can decide."""
    best = model(tokens).logits[0, prompt_length - 1 : -1].topk(2).values
    return (best[:, 0] - best[:, 1]).tolist()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
