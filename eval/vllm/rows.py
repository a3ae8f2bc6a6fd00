"""vLLM as rows of the same table: plain, and with its own n-gram drafting, each an engine in a process of its own.

vLLM brings its own torch, so it lives in an environment of its own (`make .venv-vllm/ready`), takes prompts and gives
tokens through a pipe. An engine that is not asked waits; it takes its turn as every other method does.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from eval.methods import EncodedPrompt, Method, Outcome, Request, through_stop

if TYPE_CHECKING:
    from eval.grid import Speculation

VLLM = "vllm"
WORKER = Path(__file__).with_name("worker.py")
CACHE_GIB = "2"  # for keys and values: vLLM takes most of the memory if it is not told


class Engine:
    """One vLLM engine. It starts at its first request and is ended by leaving the with block.

    python: of the environment that has vLLM.   log: file for what vLLM prints.   arguments: of `vllm.LLM`."""

    def __init__(self, python: str, log: Path, arguments: dict[str, Any]):
        self.python, self.log, self.arguments = python, log, arguments
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._process is not None:
            self._process.stdin.close()  # its loop over requests ends
            self._process.wait()

    def ask(self, prompts: Sequence[Sequence[int]], sampling: dict[str, Any]) -> dict[str, Any]:
        """What `eval.vllm.worker.answer` gives. Raises RuntimeError where vLLM ended instead."""
        if self._process is None:
            self._start()
            self._send(self.arguments)
        self._send({"prompts": prompts, "sampling": sampling})
        if answer := self._process.stdout.readline():
            return json.loads(answer)
        raise RuntimeError(f"vLLM ended with status {self._process.wait()}: {self.log} has what it printed")

    def _start(self) -> None:
        cores = sorted(os.sched_getaffinity(0))[: torch.get_num_threads()]
        bound = {
            "VLLM_CPU_KVCACHE_SPACE": CACHE_GIB,
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),  # as many threads as this process computes with
            "HF_HUB_OFFLINE": "1",
        }
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                [self.python, str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | bound,
            )

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the missing answer says so


@contextmanager
def engines(python: str, model: PreTrainedModel, ngram: Speculation | None, log: Path) -> Iterator[dict[str, Engine]]:
    """vLLM on a copy of `model`'s weights, by row of the table: plain, and beside an n-gram drafter with vLLM's
    n-grams of the same sizes and draft length."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model.save_pretrained(folder)
        arguments = {
            "model": folder,
            "dtype": str(model.dtype).removeprefix("torch."),
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,  # or a repeat, and a turn of a chat, would be given its prefill
            "disable_log_stats": False,  # they say when the first token came
        }
        found = {VLLM: arguments}
        if ngram is not None:
            speculation = {
                "method": "ngram",
                "num_speculative_tokens": ngram.fixed,
                "prompt_lookup_max": ngram.drafter.max_n,
                "prompt_lookup_min": ngram.drafter.min_n,
            }
            found[f"{VLLM} + ngram"] = arguments | {"speculative_config": speculation}
        yield {name: stack.enter_context(Engine(python, log, given)) for name, given in found.items()}


def vllm_method(name: str, engine: Engine, request: Request) -> Method:
    """The row of one engine."""
    sampling = {key: value for key, value in request.sampling.items() if key in ("top_k", "top_p")}
    sampling |= {
        "temperature": request.temperature,
        "seed": request.seed,
        "stop_token_ids": sorted(request.stops),
        "ignore_eos": not request.stops,
        "detokenize": False,
    }

    def generate(prompts: list[EncodedPrompt], max_new_tokens: int) -> Outcome:
        found = engine.ask([prompt.tokens for prompt in prompts], sampling | {"max_tokens": max_new_tokens})
        tokens = [through_stop(row, request.stops) for row in found["tokens"]]
        return Outcome(tokens, found["seconds"], found["prefill_seconds"], len(prompts), None, None)

    return Method(name, None, request.temperature, engine.arguments["dtype"], None, generate)
