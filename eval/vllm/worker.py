"""vLLM's half of `eval.vllm.rows`: run by the Python of vLLM's own environment, where specdec is not.

Reads the engine's arguments as a line of JSON, then a request a line, and answers each in a line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from vllm import LLM, SamplingParams


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what vLLM prints must not come between the answers
    llm = LLM(**json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        answers.write(json.dumps(answer(llm, **json.loads(line))) + "\n")


def answer(llm: LLM, prompts: list[list[int]], sampling: dict[str, Any]) -> dict[str, Any]:
    """tokens: per prompt.   seconds: of the call.   prefill_seconds: until the last request had its first token."""
    inputs, settings = [{"prompt_token_ids": prompt} for prompt in prompts], SamplingParams(**sampling)
    started = time.perf_counter()
    outputs = llm.generate(inputs, settings, use_tqdm=False)
    seconds = time.perf_counter() - started
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "seconds": seconds,
        "prefill_seconds": max(output.metrics.first_token_latency for output in outputs),
    }


if __name__ == "__main__":
    main()
