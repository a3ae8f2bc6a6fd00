"""The reduced vocabulary against counts made by hand."""

import pytest
import torch

from train.batches import Example
from train.vocabulary import most_frequent

# prompts 3 3 3 7 and 3, which only break ties; responses 5 5 7 7 9 and 9 9 1
EXAMPLES = [Example("a", [3, 3, 3, 7, 5, 5, 7, 7, 9], 4), Example("b", [3, 9, 9, 1], 1)]


@pytest.mark.parametrize(
    ("size", "always", "ids", "coverage"),
    [
        (1, [], [9], 3 / 8),
        (2, [], [7, 9], 5 / 8),  # 5 and 7 are equally frequent in the responses, 7 is in a prompt
        (3, [], [5, 7, 9], 7 / 8),
        (4, [], [1, 5, 7, 9], 1.0),
        (6, [], [0, 1, 3, 5, 7, 9], 1.0),  # then those of count 0: the prompts' 3, the rest by id
        (3, [2], [2, 7, 9], 5 / 8),
        (3, [1, 1, 2, 8], [1, 2, 8], 1 / 8),
        (10, [2], list(range(10)), 1.0),
    ],
)
def test_most_frequent(size, always, ids, coverage):
    found, covered = most_frequent(EXAMPLES, size, 10, always)
    assert found.dtype == torch.int64 and found.tolist() == ids
    assert covered == coverage


def test_prints_the_share_covered(capsys):
    most_frequent(EXAMPLES, 3, 10, [])
    assert capsys.readouterr().err == "draft vocabulary: 3 of 10 tokens, 87.50% of the response tokens\n"


@pytest.mark.parametrize(("size", "always"), [(0, []), (11, []), (1, [2, 8])])
def test_impossible_sizes_are_refused(size, always):
    with pytest.raises(ValueError, match=f"draft vocabulary of {size} tokens"):
        most_frequent(EXAMPLES, size, 10, always)
