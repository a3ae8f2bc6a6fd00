"""What the README shows is run."""

import re
from pathlib import Path

import torch

import specdec
from tests.specdec.test_target import FAMILIES, PADDED_ONLY
from tests.tiny_models import tiny

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_example_drafter_works_on_a_batch_and_is_short():
    code = next(block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "class BigramDrafter" in block)
    assert len(code.splitlines()) < 40
    scope = {}
    exec(code, scope)
    model = tiny("llama")
    ids = torch.randint(1, 12, (3, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 60, "do_sample": False}
    drafter = scope["BigramDrafter"]()
    out, stats = specdec.generate(model, ids, drafter=drafter, draft_length=5, return_stats=True, **settings)
    assert torch.equal(out, model.generate(ids, **settings))
    assert stats.acceptance_rate > 0 and stats.drafter == "bigram"


def families_table() -> str:
    """The README's table of which family runs which way, from the lists that the forward is tested with."""
    lines = ["| family | packed | padded |", "| --- | --- | --- |"]
    lines += [
        f"| {family} | {'no' if family in PADDED_ONLY else 'yes'} | yes |" for family in [*FAMILIES, *PADDED_ONLY]
    ]
    return "\n".join(lines)


def test_the_table_of_families_is_the_tested_one():
    assert families_table() in README, f"put this table into the README:\n{families_table()}"
