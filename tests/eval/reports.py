"""A summary with everything that a report can show, for the tests of its pages."""

from dataclasses import asdict, replace

from eval.divergence import Divergence
from eval.memory import Memory
from eval.summary import categories, plain_across_batch_sizes, table
from tests.eval.samples import failure, record

ENVIRONMENT = {
    "command": "specdec eval --target demo --drafter ngram:max_n=4,length=5 --drafter draft_model:layers=6 "
    "--batch-sizes 1,4,8 --temperature 0,0.8 --repeats 3 --out results/2026-11-29",
    "target": "SmolLM2-135M-Instruct from a package (SmolLM2-135M-Instruct.Q4_1.gguf, 4-bit), float32 on cpu",
    "dtype": "float32",
    "weights": "0123456789abcdef",
    "cpu": "A processor of some make 9654 96-Core",
    "torch": "2.13.0",
}
METHODS = ("hf", "hf + draft_model:layers=6", "plain", "ngram:max_n=4,length=5", "draft_model:layers=6 (coupled)")
FIDELITY = {
    "verdict": "differs: precision only, in 3 of 16 requests (batch size 1, width of the forward 2)",
    "run": "draft_model-layers-20-bfloat16-0.8",
    "causes": {"state": 0, "rule": 0, "batch": 1, "precision": 2, "unexplained": 0},
}
NONE = dict.fromkeys(FIDELITY["causes"], 0)


def results() -> list:
    """Records of every method at three batch sizes and two temperatures, two categories, and one failed row."""
    found = []
    for temperature in (0.0, 0.8):
        for size, seconds in ((1, 4.0), (4, 5.0), (8, 7.0)):
            for place, method in enumerate(METHODS):
                for name, category in (("a", "question-answering"), ("b", "code-editing"), ("c", "code-editing")):
                    kind = "hf" if method.startswith("hf") else method
                    made = record(kind, id=name, category=category, batch_size=size, temperature=temperature, rows=1)
                    took = seconds / (1 + place / 5) + ord(name) % 3
                    found.append(replace(made, method=method, batch="abc".index(name), batch_seconds=took))
    return [
        *found,
        failure("my_module:MyDrafter:key=value", error="ValueError: " + "a long sentence that explains " * 6),
    ]


def summary() -> dict:
    records = [result for result in results() if not hasattr(result, "traceback")]
    margins = {"margin": 3e-5, "gap": 0.0123}
    found = [Divergence("float32", 0.0, METHODS[3], 8, f"question-answering-{n}", n, n, 7, **margins) for n in range(9)]
    memory = Memory("plain", 8, 2048, 3 << 28, 1 << 28, 5 << 19, 1 << 19)
    return {
        "rows": table(results()),
        "complete": True,
        "compile_seconds": 0.0,
        "categories": categories(records),
        "plain_across_batch_sizes": plain_across_batch_sizes(records),
        "divergences": [one.as_row() for one in found],
        "memory": [asdict(memory) | {"share": memory.share}],
        "environment": ENVIRONMENT,
        "fidelity": [FIDELITY, FIDELITY | {"run": "ngram", "verdict": "lossless within 0.1", "causes": NONE}],
    }


def traces() -> list[dict]:
    """A trace of forty steps with every kind of token, some of them long."""

    def drafted(place: int) -> list[dict]:
        texts = (" the", "\n\n", " internationalisation", " a")
        return [
            {
                "token": n,
                "text": text,
                "p": 0.5,
                "q": 0.25,
                "accept_prob": 1.0,
                "parent": n - 1,
                "accepted": n < place % 4,
            }
            for n, text in enumerate(texts)
        ]

    steps = [
        {"drafted": drafted(n) if n % 5 else [], "next": {"token": 1, "text": " next", "p": 0.125}, "emitted": 9}
        for n in range(40)
    ]
    trace = {"id": "writing-0", "method": METHODS[3], "verifier": "rejection", "temperature": 0.8, "dtype": "float32"}
    return [trace | {"steps": steps, "error": None}, trace | {"steps": steps[:2], "error": "RuntimeError: boom"}]
