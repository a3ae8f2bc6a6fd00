"""The joint law of an output's first tokens, against the exact one: for vocabularies small enough to list it.

Only this sees that a random number was used twice: every token by itself may follow p, and their joint law not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from eval.fidelity.distribution import Statistic, joint_test
from eval.fidelity.ladder import Ladder
from eval.fidelity.rescore import processed
from eval.methods import EncodedPrompt

NARROW = 32  # largest vocabulary whose joint laws are listed
CELLS = 256  # of the joint law, at most
BATCH = 2000  # rows per call
FIRST_ID = 2**20  # request ids from here on, apart from the prompts' own


def joint_law(ladder: Ladder, rows: int) -> Statistic:
    """Chi-square of the first tokens of at least `rows` speculative requests, all with the ladder's first prompt."""
    return next(test for done, test in joint_laws(ladder) if done >= rows)


def joint_laws(ladder: Ladder) -> Iterator[tuple[int, Statistic]]:
    """The same without end: after each batch the requests so far, and their test.

    The law is that of k tokens, as many as CELLS allow. Requests go on for a whole draft more, so that all k tokens may
    be drafted ones."""
    V = vocabulary(ladder)
    k = max(1, int(np.log(CELLS) / np.log(V) + 1e-9))
    longer = replace(ladder, max_new_tokens=k + ladder.draft_length + 1)
    law, counts = exact_law(longer, ladder.prompts[0], k), np.zeros(V**k)
    done = 0
    while True:
        numbers = range(FIRST_ID + done, FIRST_ID + done + BATCH)
        prompts = [EncodedPrompt(number, f"joint {number}", "", ladder.prompts[0].tokens) for number in numbers]
        found = longer.decode(longer.model, prompts, longer.drafter, lambda row, step: False, longer.seed)
        for log in found.recorder.rows:
            counts[_cell(log.tokens, k, V)] += 1
        done += BATCH
        yield done, joint_test(counts, law, tokens=done * k)


def vocabulary(ladder: Ladder) -> int:
    """V of the target."""
    return ladder.model.get_output_embeddings().weight.shape[0]


@torch.no_grad()
def exact_law(ladder: Ladder, prompt: EncodedPrompt, k: int) -> np.ndarray:
    """[V**k] probability of each sequence of k tokens, the first one the most significant digit of its index.

    What follows a stop counts as the stop again."""
    processors = ladder.processors([prompt])
    law, prefixes = np.ones(1), [[]]
    for _ in range(k):
        ids = torch.tensor([[*prompt.tokens, *prefix] for prefix in prefixes], device=ladder.model.device)
        logits = ladder.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1]
        scores = torch.cat([processed(processors, row, [0], logits[i : i + 1]) for i, row in enumerate(ids.tolist())])
        p = scores.double().softmax(-1).cpu().numpy()
        for i, prefix in enumerate(prefixes):
            if prefix and prefix[-1] in ladder.stops:
                p[i] = np.eye(len(p[i]))[prefix[-1]]
        law = (law[:, None] * p).ravel()
        prefixes = [[*prefix, token] for prefix in prefixes for token in range(p.shape[1])]
    return law


def _cell(tokens: list[int], k: int, V: int) -> int:
    tokens = [*tokens[:k], *[tokens[-1]] * (k - len(tokens))]
    return int(sum(token * V**place for place, token in enumerate(reversed(tokens))))
