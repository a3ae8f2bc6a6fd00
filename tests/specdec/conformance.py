"""`generate` and the drop-in side by side over the grid of tests.specdec.argument_grid, and what is refused.

`python -m tests.specdec.conformance` runs the whole grid on every family and prints what it found; `--write` puts the
table of what is refused into README.md. Both sides get the same arguments, made anew for each; only what speculates
(`drafts`) goes to the drop-in alone, since Hugging Face's assisted search refuses batches, and is greedy search."""

from __future__ import annotations

import argparse
import logging
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

import specdec
from specdec.compat import CACHE_FIELD, cache_argument
from specdec.contracts import BaseDrafter, Draft
from tests.specdec.argument_grid import (
    DEFAULT,
    FAMILIES,
    LEVELS,
    VOCAB,
    WIDTH,
    Combination,
    Prompts,
    Recorder,
    alone,
    combinations,
    prompts_of,
)

README = Path(__file__).parents[2] / "README.md"
MARKERS = ("<!-- refused: begin -->", "<!-- refused: end -->")
NO_TOKEN = "no next-token distribution"  # our error where `generate` takes the arg-max of NaNs


class Guesser(BaseDrafter):
    """Drafts the right tokens, known beforehand, with mistakes, so that some of every length are accepted."""

    def __init__(self, emitted: list[list[int]]):
        self.emitted, self.prompts, self.random = emitted, {}, np.random.default_rng(0)

    def propose(self, rows, budget, draws):
        lengths = [int(self.random.integers(0, limit + 1)) for limit in budget]
        tokens = torch.from_numpy(self.random.integers(0, VOCAB, (len(budget), max(lengths))))
        for b, (row, text) in enumerate(zip(rows.ids, rows.tokens, strict=True)):
            if not lengths[b]:
                continue  # maybe because its prompt is not through
            future = self.emitted[row][len(text) - self.prompts[row] :][: lengths[b]]
            for node, token in enumerate(future):
                if self.random.random() < 0.75:
                    tokens[b, node] = token
        return Draft(tokens, lengths)

    def observe(self, rows, verdict, hidden):
        for row, text in zip(rows.ids, rows.tokens, strict=True):
            self.prompts.setdefault(row, len(text) - 1)  # the step that ends a prompt emits one token


def arguments(combination: Combination, prompts: Prompts) -> dict[str, Any]:
    """What both sides get, made anew."""
    kwargs = {"do_sample": False, "attention_mask": prompts.mask}
    for factor, level in combination.items():
        kwargs |= LEVELS[factor][level](prompts)
    if combination["settings"] == "generation_config":
        known = GenerationConfig().to_dict()
        config = {name: kwargs.pop(name) for name in list(kwargs) if name in known}
        kwargs["generation_config"] = GenerationConfig(**config)
    return kwargs


def ours(combination: Combination, prompts: Prompts, drafter: str | BaseDrafter) -> Any:
    """The drop-in's output and its statistics."""
    kwargs = arguments(combination, prompts) | {"drafter": drafter}
    if combination["drafts"]:
        value = {"prompt_lookup_num_tokens": 3, "assistant_model": prompts.model}[combination["drafts"]]
        kwargs[combination["drafts"]] = value
        del kwargs["drafter"]
    output, stats = specdec.generate(prompts.model, draft_length=3, return_stats=True, **kwargs)
    return output, stats, kwargs.get("streamer")


@dataclass(frozen=True)
class Theirs:
    """What `generate` gave: its output, or the error it raised."""

    output: Any
    streamer: Recorder | None
    error: Exception | None = None

    def emitted(self, combination: Combination) -> Tensor:
        """[B, n] tokens: of embeddings `generate` returns no prompt."""
        return sequences_of(self.output)[:, 0 if combination["prompt"] == "inputs_embeds" else WIDTH :]


def sequences_of(output: Any) -> Tensor:
    return output if torch.is_tensor(output) else output.sequences


def theirs(combination: Combination, prompts: Prompts) -> Theirs:
    kwargs = arguments(combination, prompts)
    try:
        return Theirs(prompts.model.generate(**kwargs), kwargs.get("streamer"))
    except Exception as error:
        return Theirs(None, None, error)


def check(combination: Combination, prompts: Prompts, drafter: str) -> tuple[str, Any]:
    """How the call went and its statistics, or why it was refused. AssertionError where the two sides differ."""
    right = None
    if drafter == "guesses":
        right = theirs(combination, prompts)
        drafter = "ngram" if right.error is not None else Guesser(right.emitted(combination).tolist())
    try:
        output, stats, streamer = ours(combination, prompts, drafter)
    except NotImplementedError as error:
        return "refused by specdec", str(error)
    except Exception as error:
        if NO_TOKEN in str(error) and has_undefined_scores(combination, prompts):
            return "undefined scores", ""
        right = right or theirs(combination, prompts)
        if right.error is None:
            raise
        if isinstance(error, ValueError):
            return "refused by generate", "`generate` refuses it too"
    right = right or theirs(combination, prompts)
    if right.error is not None:
        assert not isinstance(right.error, ValueError), f"generate refuses it, the drop-in does not: {right.error}"
        return "generate breaks", ""
    assert type(output).__mro__[-2:] == type(right.output).__mro__[-2:], "of another type"
    sequences, expected = sequences_of(output), sequences_of(right.output)
    assert torch.equal(sequences, expected), f"sequences {sequences.tolist()}, not {expected.tolist()}"
    if streamer is not None:
        assert streamer.values == right.streamer.values, "the streamer saw something else"
    if not torch.is_tensor(output):
        check_output(combination, prompts, output, right.output)
    return "equal", stats


def has_undefined_scores(combination: Combination, prompts: Prompts) -> bool:
    """Whether the processors leave `generate` a row of scores without a maximum."""
    asked = {"output_scores": "True", "return_dict_in_generate": "True", "settings": "arguments"}
    scores = theirs(combination | asked, prompts).output.scores
    return not all(step.max(-1).values.isfinite().all() for step in scores)


def check_output(combination: Combination, prompts: Prompts, output: Any, right: Any) -> None:
    """All that `return_dict_in_generate` returns."""
    returned = {name for name in right if right[name] is not None}
    assert returned == {name for name in output if output[name] is not None}, f"returns {list(output)}"
    for name in returned & {"scores", "logits", "hidden_states", "attentions"}:
        assert len(output[name]) == len(right[name]), f"{len(output[name])} {name}, not {len(right[name])}"
        for step, (mine, other) in enumerate(zip(output[name], right[name], strict=True)):
            for one, two in [(mine, other)] if torch.is_tensor(mine) else zip(mine, other, strict=True):
                if name == "hidden_states":
                    one, two = one[:, -1], two[:, -1]  # of the prompt, `generate` has the last chunk's
                elif name == "attentions":
                    one, two = one[:, :, -1], two[:, :, -1]
                assert one.shape == two.shape, f"{name} of {tuple(one.shape)}, not {tuple(two.shape)}"
                same = torch.isclose(one, two, atol=1e-5, rtol=0)
                assert same.all(), f"{name} of step {step} are {(~same).sum()} times another"
    if CACHE_FIELD in returned:
        length = int(right[CACHE_FIELD].get_seq_length())
        assert int(output[CACHE_FIELD].get_seq_length()) == length, f"{output[CACHE_FIELD].get_seq_length()} cached"
        goes_on = combination["prompt"] == "input_ids" and type(right[CACHE_FIELD]) is DynamicCache
        if goes_on:
            assert torch.equal(go_on(prompts, output), go_on(prompts, right)), "the cache does not go on as generate's"


def go_on(prompts: Prompts, output: Any) -> Tensor:
    """`generate`'s own next tokens from an output and its cache."""
    new = torch.ones(len(prompts.ids), output.sequences.shape[1] - WIDTH, dtype=torch.long)
    return prompts.model.generate(
        output.sequences, attention_mask=torch.cat([prompts.mask, new], dim=1), do_sample=False, max_new_tokens=2,
        **{cache_argument(prompts.model): output[CACHE_FIELD]},
    )  # fmt: skip


@dataclass
class Findings:
    """What a run over combinations and families found."""

    counts: Counter = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    refused: dict[frozenset, str] = field(default_factory=dict)  # what is not the default -> why

    def run(self, family: str, combination: Combination, drafter: str) -> None:
        """Call both sides and count what came out."""
        prompts = prompts_of(family, combination["rows"], combination["layout"], bool(combination["output_attentions"]))
        changed = frozenset(combination.items() - DEFAULT.items())
        try:
            outcome, found = check(combination, prompts, drafter)
        except Exception as error:
            outcome = "failed"
            self.failures.append(f"{family}, {drafter}, {dict(changed)}: {type(error).__name__}: {error}")
        self.counts[outcome] += 1
        if outcome == "equal":
            drafted, accepted = sum(sum(r.drafted) for r in found.rows), sum(sum(r.accepted) for r in found.rows)
            self.counts.update(drafted=drafted, accepted=accepted, emitted=found.emitted)
        elif outcome.startswith("refused"):
            self.refused[changed] = found


def refused_alone() -> Findings:
    """Of a llama, every level on its own."""
    findings = Findings()
    for combination in alone():
        findings.run("llama", combination, "ngram")
    return findings


def table(findings: Findings) -> str:
    """Markdown: what is refused, and why."""
    lines = ["| refused | why |", "| --- | --- |"]
    for ((factor, level),), why in findings.refused.items():
        what = {"drafts": level, "num_return_sequences": "num_return_sequences=2, do_sample=False"}.get(factor)
        lines.append(f"| `{what or f'{factor}={level}'}` | {why.partition('; ')[0].partition(': leave')[0]} |")
    return "\n".join(lines)


def refused_levels(findings: Findings) -> set[tuple[str, str]]:
    return {next(iter(changed)) for changed in findings.refused if len(changed) == 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    singles = refused_alone()
    print(table(singles))
    if options.write:
        before, _, rest = README.read_text().partition(MARKERS[0])
        after = rest.partition(MARKERS[1])[2]
        README.write_text(f"{before}{MARKERS[0]}\n{table(singles)}\n{MARKERS[1]}{after}")
    grid = combinations(refused_levels(singles))
    findings = Findings()
    for place, family in enumerate(options.families):
        for number, combination in enumerate(grid):
            findings.run(family, combination, ("ngram", "guesses")[(number + place) % 2])
    print(f"{len(grid)} combinations x {len(options.families)} families: {dict(findings.counts)}")
    for failure in findings.failures:
        print("FAILED", failure)
    for changed, why in findings.refused.items():
        print("REFUSED", dict(changed), why)


if __name__ == "__main__":
    main()
