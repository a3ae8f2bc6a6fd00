"""What a reader of report.md must see."""

from dataclasses import asdict

from eval.cells import MAIN
from eval.divergence import Divergence
from eval.memory import Memory
from eval.report import markdown, markdown_table, terminal_table
from eval.sections import by_cause
from eval.summary import categories, table
from tests.eval.samples import failure, record

MEMORY = asdict(Memory("ngram", 8, 2048, 3 << 20, 1 << 20, 5 << 19, 1 << 19)) | {"share": 0.125}
ENVIRONMENT = {"command": "specdec eval --out x", "torch": "2.13"}


def summary(divergences=(), complete=True, more=(), **changes) -> dict:
    records = [record(method, id=name) for method in ("hf", "plain") for name in "ab"]
    records += [record("ngram", id=name, batch_seconds=2.0, **changes) for name in "ab"]
    across = [{"batch_size": 8, "reference_batch_size": 1, "requests": 60, "different": 7}]
    across[0] |= {"dtype": "float32", "temperature": 0.0}
    return {
        "rows": table([*records, *more]),
        "categories": categories(records),
        "environment": ENVIRONMENT,
        "complete": complete,
        "compile_seconds": 0.0,
        "plain_across_batch_sizes": across,
        "divergences": [divergence.as_row() for divergence in divergences],
        "memory": [MEMORY],
        "fidelity": [],
    }


def report(*arguments, **changes) -> str:
    return markdown(summary(*arguments, **changes))


def test_table_explains_itself():
    text = report()
    assert text.startswith("# Evaluation")
    assert "| ngram | 2 | 1.50 | 25.0% | 4.0 | 2.00x [2.00, 2.00] | 2.00x [2.00, 2.00] | 100.0% | 0 of 2 |" in text
    assert "| hf | 2 | - | - | 2.0 | 1.00x [1.00, 1.00] |" in text
    assert all(f"**{name}**" in text for name in MAIN if name not in ("batch", "vs plain", "vs HF", "vs vLLM"))
    assert "`specdec eval --out x`" in text and "- torch: 2.13" in text
    assert "- ngram, batch 2: draft 10.0%, forward 60.0%, verify 20.0%, loop 10.0%" in text
    assert "None." in text and "Interrupted" not in text


def test_lossy_rule_is_on_the_first_line():
    first = report(lossless=False, verifier="typical").splitlines()[0]
    assert "LOSSY" in first and "ngram (verifier typical)" in first


def test_divergences_are_listed_and_ties_counted():
    found = [
        Divergence("float32", 0.0, "ngram", 2, "a", 17, 5, 6, margin=3e-5, gap=3e-5),
        Divergence("float32", 0.0, "hf", 2, "b", 3, 5, None, margin=0.25, gap=None),
        Divergence("float32", 0.0, "hf", 2, "a", 4, 7, 8, margin=3e-5, gap=0.5),
    ]
    text = report(found)
    assert "3 in all" in text and "1 of the 2 measured" in text
    assert "| ngram | 2 | 0.0 | float32 | a | 17 | 5 | 6 | 3e-05 | 3e-05 |" in text
    assert "| hf | 2 | 0.0 | float32 | b | 3 | 5 | None | 0.25 | - |" in text


def test_what_the_batch_size_alone_changes():
    line = (
        "plain decoding at batch 8 differs from plain decoding at batch 1 in 7 of 60 requests (float32, temperature 0)"
    )
    assert line in report()


def test_memory_is_in_words():
    line = "ngram, batch 8, 2048 tokens of context: weights 3.0 MiB, cache 1.0 MiB, everything else at a decode step's "
    assert line + "peak 0.5 MiB (12.5% of weights + cache), at a prefill step's peak 2.5 MiB" in report()
    assert Memory("x", 8, 2048, 3, 1, 0, 1).share == 0.25


def test_interrupted_run_says_so():
    assert "Interrupted" in report(complete=False)


def test_acceptance_and_speed_have_tables_of_their_own():
    text = report()
    assert (
        "| ngram | 2 | 1.50 [1.50, 1.50] | 25.0% [25.0%, 25.0%] | 50.0% [50.0%, 50.0%] | 2.00 | 50%, 0% | 50%, 0% |"
        in text
    )
    speed = next(line for line in text.split("## Speed")[1].splitlines() if line.startswith("| ngram"))
    assert "| 6 | 6.0 | 3.00x [3.00, 3.00] | 3333.3 ms |" in speed  # prefill, decode, decode vs plain, step


def test_compiling_is_said_beside_the_speeds():
    text = markdown(summary() | {"compile_seconds": 95.7})
    assert text.split("## Speed\n\n")[1].startswith("Compiling took 96 s, which is in no figure.\n\n| method |")
    assert "ompiling" not in report()


def test_temperature_and_dtype_are_columns_where_they_differ():
    assert "| method | batch | accepted length |" in report()
    other = [record("ngram", temperature=0.8), record("plain", temperature=0.8)]
    text = report(more=other)
    assert "| method | batch | T | accepted length |" in text and "| ngram | 2 | 0.8 | 1.50 |" in text
    assert "- ngram, batch 2, T 0.8: draft" in text
    assert "| method | batch | dtype | accepted" in report(more=[record("ngram", dtype="bfloat16")])


def test_a_failed_row_is_announced_and_its_traceback_shown():
    text = report(more=[failure("mtp")])
    assert text.startswith("**Failed: mtp, batch 2.")
    assert "| mtp (FAILED) | 2 | - | - | - |" in text and "Traceback (most recent call last)" in text


def test_categories_are_tabled_where_there_are_several():
    assert "## Categories" not in report()
    both = [record("ngram", id="c", category="code", batch_size=1), record("ngram", id="d", batch_size=1)]
    found = summary()
    found["categories"] = categories(both)
    assert "| ngram | 1 | code | 1.50 | 25.0% | - | 1 |" in markdown(found)


def test_fidelity_is_said_before_any_number():
    found = summary() | {
        "fidelity": [
            {"run": "a", "verdict": "NOT lossless: 3 x rule", "causes": {"rule": 3, "batch": 1, "unexplained": 0}},
            {"run": "b", "verdict": "differs: precision only", "causes": {"rule": 0, "batch": 3, "unexplained": 1}},
        ]
    }
    text = markdown(found)
    assert text.startswith("**a: NOT lossless: 3 x rule**\n\n# Evaluation")
    assert "8 in all, of which unexplained 1, 12.5%." in text
    assert "| run | verdict | rule | batch | unexplained |" in text
    assert "| b | differs: precision only | 0 | 3 | 1 |" in text
    assert text.index("## Fidelity") < text.index("## Results")
    assert by_cause(found["fidelity"]) == {"rule": 3, "batch": 4, "unexplained": 1}


def test_cells_cannot_break_a_table():
    text = report(more=[record("plain", batch_size=4), record("x|y", batch_size=4)])
    assert "| x\\|y | 4 |" in text
    assert markdown_table(["id"], [["two\nlines"]]).splitlines()[2:] == ["| two lines |"]


def test_terminal_table_has_a_row_per_method():
    assert terminal_table(summary()["rows"]).row_count == 3
