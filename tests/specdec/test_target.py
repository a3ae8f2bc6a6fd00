"""The engine's forwards against a cache-free forward of each row alone, for every supported family."""

import numpy as np
import pytest
import torch

from specdec.contracts import Draft
from specdec.step import Segment
from specdec.target import Target
from tests.tiny_models import tiny

FAMILIES = [
    "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt2", "phi3", "mixtral", "qwen3_moe", "deepseek_v3",
    "gpt_oss", "glm4_moe", "olmo2", "cohere2", "granite", "starcoder2", "opt", "gpt_neox",
]  # fmt: skip
PADDED_ONLY = ["falcon"]
# Largest |difference| allowed in float64; families that compute parts of themselves in float32 differ by that part's
# rounding (softmax in float32 for soft-capped scores and sinks, expert routing in float32).
LIMITS = {"gemma2": 5e-6, "deepseek_v3": 5e-6, "glm4_moe": 5e-6, "gpt_oss": 5e-6}
VOCAB = 97


@torch.no_grad()
def alone(model, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), V] logits of one row, without a cache, padding or a batch."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0]


class Rows:
    """Drives a Target by hand and compares every scored node with the cache-free forward of its own prefix."""

    def __init__(self, model, lengths, padded, seed=0):
        self.model, self.target = model, Target(model, padded=padded)
        self.random = torch.Generator().manual_seed(seed)
        self.tokens = {row: self.draw(n) for row, n in enumerate(lengths)}
        self.cache = self.target.new_cache()
        self.cache.admit(list(self.tokens))
        self.worst = 0.0

    def draw(self, n):
        return torch.randint(0, VOCAB, (n,), generator=self.random).tolist()

    def run(self, feed: dict[int, int], drafts: dict[int, tuple[list[int], list[int] | None]]):
        """feed: row -> committed tokens to run; drafts: row -> (tokens, parents or None)."""
        segments = []
        for row, count in feed.items():
            start = self.cache.lengths[row]
            ids = np.asarray(self.tokens[row][start : start + count])
            segments.append(Segment(row, ids, start, scored=start + count == len(self.tokens[row])))
        scored = [s.row for s in segments if s.scored]
        width = max((len(drafts.get(row, ([],))[0]) for row in scored), default=0)
        tokens = torch.randint(0, VOCAB, (len(scored), width), generator=self.random)  # junk past the lengths
        parents = torch.randint(0, max(width, 1), (len(scored), width), generator=self.random)
        is_tree = any(p is not None for _, p in drafts.values())
        for b, row in enumerate(scored):
            ids, tree = drafts.get(row, ([], None))
            tokens[b, : len(ids)] = torch.tensor(ids, dtype=torch.long)
            chain = list(range(-1, len(ids) - 1))
            parents[b, : len(ids)] = torch.tensor(tree or chain, dtype=torch.long)
        draft = Draft(tokens, [len(drafts.get(row, ([],))[0]) for row in scored], parents if is_tree else None)
        step = self.target.pack(segments, draft, self.cache)
        logits, _ = self.target.forward(step, self.cache)
        for segment in segments:
            self.cache.lengths[segment.row] += len(segment.tokens)
        for b, row in enumerate(scored):
            ids, tree = drafts.get(row, ([], None))
            for node in range(len(ids) + 1):
                path, at = [], node - 1
                while at >= 0:
                    path.insert(0, ids[at])
                    at = tree[at] if tree else at - 1
                expected = alone(self.model, self.tokens[row] + path)[-1]
                self.worst = max(self.worst, (logits[step.index[b, node]] - expected).abs().max().item())

    def commit(self, row, tokens, cached_drafts):
        """Append tokens; the first `cached_drafts` of them are already in the cache."""
        self.tokens[row] += tokens
        self.cache.lengths[row] += cached_drafts


def scenario(model, padded):
    rows = Rows(model, [5, 13, 1, 9], padded)
    rows.run({0: 5, 1: 6, 2: 1}, {})  # ragged prompts; row 1 enters in chunks
    rows.commit(0, rows.draw(1), 0)
    rows.commit(2, rows.draw(1), 0)
    rows.run({0: 1, 1: 7, 2: 1, 3: 4}, {0: (rows.draw(3), None)})  # decode beside the last and a middle chunk
    rows.commit(0, rows.draw(1), 0)  # all drafts of row 0 rejected: their slots are overwritten below
    rows.commit(1, rows.draw(1), 0)
    rows.commit(2, rows.draw(1), 0)
    draft = rows.draw(4)
    rows.run({0: 1, 1: 1, 2: 1, 3: 5}, {0: (draft, None), 1: (rows.draw(2), None)})
    rows.commit(0, [*draft[:2], 3], 2)  # two accepted, then a correction
    rows.commit(1, rows.draw(1), 0)
    rows.commit(3, rows.draw(1), 0)
    rows.cache.release([2])  # a finished row: the last place moves into its hole
    trees = {0: (rows.draw(5), [-1, -1, 0, 0, 2]), 1: (rows.draw(2), None), 3: (rows.draw(3), [-1, 0, 0])}
    rows.run({0: 1, 1: 1, 3: 1}, trees)
    path = torch.tensor([[1, -1, -1], [0, 1, -1], [0, 2, -1]])  # accepted nodes by row, not contiguous
    rows.cache.keep_path(
        [(0, rows.cache.lengths[0] - 1), (1, rows.cache.lengths[1] - 1), (3, rows.cache.lengths[3] - 1)], path
    )
    rows.commit(0, [trees[0][0][1], 7], 1)
    rows.commit(1, [*trees[1][0], 8], 2)
    rows.commit(3, [trees[3][0][0], trees[3][0][2], 9], 2)
    rows.run({0: 1, 1: 1, 3: 1}, {3: (rows.draw(6), None)})
    return rows


@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_forward_equals_cache_free_forward_of_each_row(family, padded):
    rows = scenario(tiny(family), padded)
    assert rows.worst <= LIMITS.get(family, 1e-9)


@pytest.mark.parametrize("family", PADDED_ONLY)
def test_families_without_attention_interface_use_the_padded_forward(family):
    rows = scenario(tiny(family), None)
    assert rows.target.padded
    assert rows.worst <= LIMITS.get(family, 1e-9)
