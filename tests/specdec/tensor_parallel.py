"""One of several processes that hold a model together (tp_plan="auto"): `torchrun ... tensor_parallel.py FOLDER`.

FOLDER/FAMILY holds each model. Writes FOLDER/RANK.json: per family, what generate and the drop-in emitted here."""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import specdec
from drafters.draft_model import DraftModelDrafter
from tests.specdec.test_generation import prompts
from tests.tiny_models import tiny

GREEDY = {"do_sample": False, "max_new_tokens": 24}
SEED = 7
SAMPLED = {"do_sample": True, "top_k": 0, "max_new_tokens": 24}


def emitted(model, rank: int) -> dict[str, list]:
    """What every way of decoding emits. The processes' clocks differ, as they would on their own."""
    clock = time.perf_counter
    time.perf_counter = lambda: clock() * (1 + 3 * rank)
    torch.manual_seed(SEED)  # as `generate` needs it as well: every process draws for itself
    out = {"hf": model.generate(**prompts(), **GREEDY)}
    out["ngram"] = specdec.generate(model, **prompts(), **GREEDY)
    small = DraftModelDrafter(tiny("llama"))  # each process has all of it
    out["draft model"], stats = specdec.generate(model, **prompts(), **GREEDY, drafter=small, return_stats=True)
    out["sampled"] = specdec.generate(model, **prompts(), **SAMPLED, drafter=small)
    time.perf_counter = clock
    return {name: tokens.tolist() for name, tokens in out.items()} | {"accepted": [row.accepted for row in stats.rows]}


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    found = {}
    for path in sorted(path for path in folder.iterdir() if path.is_dir()):
        model = AutoModelForCausalLM.from_pretrained(
            path, tp_plan="auto", dtype=torch.float64, experts_implementation="eager"
        )
        found[path.name] = emitted(model, rank)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()  # gloo's threads let go of the last tensors while each waits for the other
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
