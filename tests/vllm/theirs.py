"""Second half of `make test-vllm`, run where vLLM is installed and specdec is not: vLLM on the exported heads."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams

SMALL_MARGIN = 1e-4  # of logits; at a smaller one, either token is greedy decoding's
ACCEPTANCE_POINTS = 1.0


def main(folder: Path) -> int:
    """Print how vLLM compares to folder/ours.json; 0 if it gives the same tokens and acceptance."""
    ours = json.loads((folder / "ours.json").read_text())
    llm = LLM(
        model=str(folder / "target"),
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        disable_log_stats=False,  # it counts drafted and accepted tokens
        speculative_config={
            "method": "medusa",
            "model": str(folder / "heads"),
            "num_speculative_tokens": ours["heads"],
        },
    )
    prompts = [{"prompt_token_ids": row["prompt"]} for row in ours["rows"]]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=ours["max_new_tokens"]))
    pairs = zip(ours["rows"], outputs, strict=True)
    unlike = [first_difference(row, list(output.outputs[0].token_ids)) for row, output in pairs]
    counted = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    accepted, drafted = (counted[f"vllm:spec_decode_num_{kind}_tokens"] for kind in ("accepted", "draft"))
    points = 100 * abs(accepted / drafted - ours["acceptance"])
    wrong = {n: place for n, place in enumerate(unlike) if place is not None}
    print(f"{len(prompts) - len(wrong)} of {len(prompts)} prompts give our tokens; others, from token: {wrong}")
    print(f"accepted: {accepted / drafted:.2%} of {drafted} here, {ours['acceptance']:.2%} in specdec")
    return int(bool(wrong) or points > ACCEPTANCE_POINTS)


def first_difference(row: dict, theirs: list[int]) -> int | None:
    """Where vLLM's tokens first differ from ours, None where they do not before the first small margin."""
    for place, (mine, margin) in enumerate(zip(row["tokens"], row["margins"], strict=True)):
        if margin < SMALL_MARGIN:
            return None
        if place >= len(theirs) or theirs[place] != mine:
            return place
    return None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
