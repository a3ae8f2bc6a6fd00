"""What a call costs beyond Hugging Face's: `generate` with max_new_tokens=1, ours and theirs in turn.

    python -m tests.specdec.call_overhead [--target demo] [--rows 1] [--calls 400]

Prints the median and quartiles of both in milliseconds, and of the ratio of each pair of calls; and how many Python
functions a call of either runs, which no other load on the machine moves.
"""

import argparse
import cProfile
import json
import pstats
import time
from collections.abc import Callable

import numpy as np
import torch

import specdec
from specdec.models import load_target
from tests.tiny_models import tiny

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--target", default="tiny", help="tiny (2 layers in memory), or what specdec's --target takes")
    options.add_argument("--rows", type=int, default=1)
    options.add_argument("--prompt", type=int, default=16, help="tokens per row")
    options.add_argument("--calls", type=int, default=400)
    options.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: of this process, on a busy machine")
    asked = options.parse_args()
    is_tiny = asked.target == "tiny"
    model = tiny("llama", dtype=torch.float32) if is_tiny else load_target(asked.target, "float32").model
    ids = torch.randint(1, 90, (asked.rows, asked.prompt), generator=torch.Generator().manual_seed(0))
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 1, "pad_token_id": 0}
    calls = {
        "specdec": lambda: specdec.generate(model, ids, **settings),
        "transformers": lambda: model.generate(ids, **settings),
    }
    assert torch.equal(*(call() for call in calls.values()))
    seconds = in_turn(calls, asked.calls, CLOCKS[asked.clock])
    result = {name: quartiles(1000 * values) for name, values in seconds.items()}
    result["ratio"] = quartiles(seconds["specdec"] / seconds["transformers"])
    result["functions"] = {name: functions(call) for name, call in calls.items()}
    print(json.dumps(vars(asked) | result, indent=1))


def in_turn(calls: dict[str, Callable], count: int, clock: Callable[[], float]) -> dict[str, np.ndarray]:
    """Seconds [count] of each call, one after another, so that a slow spell hits all alike; the first tenth is not
    counted."""
    seconds = {name: [] for name in calls}
    for _ in range(count + count // 10):
        for name, call in calls.items():
            started = clock()
            call()
            seconds[name].append(clock() - started)
    return {name: np.array(values[-count:]) for name, values in seconds.items()}


def quartiles(values: np.ndarray) -> dict[str, float]:
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    return {"median": round(middle, 3), "quartiles": [round(low, 3), round(high, 3)]}


def functions(call: Callable) -> int:
    """Python and built-in functions that one call runs."""
    with cProfile.Profile() as profile:
        call()
    return pstats.Stats(profile).total_calls


if __name__ == "__main__":
    main()
