"""What a reader of report.md must see."""

from dataclasses import asdict

from eval.divergence import Divergence
from eval.memory import Memory
from eval.report import COLUMNS, markdown
from eval.summary import rows
from tests.eval.samples import record

MEMORY = asdict(Memory("ngram", 8, 2048, 3 << 20, 1 << 20, 5 << 19, 1 << 19)) | {"share": 0.125}
ENVIRONMENT = {"command": "specdec eval --out x", "torch": "2.13"}


def report(divergences=(), complete=True, **changes) -> str:
    records = [record(method, id=name) for method in ("hf", "plain") for name in "ab"]
    records += [record("ngram", id=name, batch_seconds=2.0, **changes) for name in "ab"]
    table = rows(records, ["hf", "plain", "ngram"], 0.0, "float32", ("hf", "ngram"))
    across = [{"batch_size": 8, "reference_batch_size": 1, "requests": 60, "different": 7}]
    summary = {
        "rows": table,
        "environment": ENVIRONMENT,
        "complete": complete,
        "plain_across_batch_sizes": across,
        "divergences": [asdict(divergence) | {"tie": divergence.tie} for divergence in divergences],
        "memory": [MEMORY],
    }
    return markdown(summary)


def test_table_explains_itself():
    text = report()
    assert text.startswith("# Evaluation")
    assert "| ngram | 2 | 1.50 | 25.0% | 4.0 | 2.00x [2.00, 2.00] | 2.00x [2.00, 2.00] | 100.0% | 0 of 2 |" in text
    assert "| hf | 2 | - | - | 2.0 | 1.00x [1.00, 1.00] |" in text
    assert all(f"**{name}**" in text for name in COLUMNS if name != "batch")
    assert "`specdec eval --out x`" in text and "- torch: 2.13" in text
    assert "- ngram, batch 2: draft 10.0%, forward 60.0%, verify 20.0%, loop 10.0%" in text
    assert "None." in text and "Interrupted" not in text


def test_lossy_rule_is_on_the_first_line():
    first = report(lossless=False, verifier="typical").splitlines()[0]
    assert "LOSSY" in first and "ngram (verifier typical)" in first


def test_divergences_are_listed_and_ties_counted():
    found = [
        Divergence("ngram", 2, "a", 17, 5, 6, margin=3e-5, gap=3e-5),
        Divergence("hf", 2, "b", 3, 5, None, margin=0.25, gap=None),
        Divergence("hf", 2, "a", 4, 7, 8, margin=3e-5, gap=0.5),
    ]
    text = report(found)
    assert "3 in all" in text and "1 of the 2 measured" in text
    assert "| ngram | 2 | a | 17 | 5 | 6 | 3e-05 | 3e-05 |" in text
    assert "| hf | 2 | b | 3 | 5 | None | 0.25 | - |" in text


def test_what_the_batch_size_alone_changes():
    assert "plain decoding at batch 8 differs from plain decoding at batch 1 in 7 of 60 requests" in report()


def test_memory_is_in_words():
    line = "ngram, batch 8, 2048 tokens of context: weights 3.0 MiB, cache 1.0 MiB, everything else at a decode step's "
    assert line + "peak 0.5 MiB (12.5% of weights + cache), at a prefill step's peak 2.5 MiB" in report()
    assert Memory("x", 8, 2048, 3, 1, 0, 1).share == 0.25


def test_interrupted_run_says_so():
    assert "Interrupted" in report(complete=False)
