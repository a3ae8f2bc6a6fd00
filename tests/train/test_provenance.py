"""A folder is never used for something that it was not made from."""

import json

import pytest

from train.provenance import claim, digest

MADE_FROM = {"target": "abc", "seed": 0}


def test_the_first_claim_is_recorded_and_equal_ones_pass(tmp_path):
    for _ in range(2):
        claim(tmp_path / "new" / "folder", MADE_FROM)
    assert json.loads((tmp_path / "new" / "folder" / "meta.json").read_text()) == MADE_FROM


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"target": "abd", "seed": 0}, "target='abc', not 'abd'"),
        ({"target": "abc", "seed": 1}, "seed=0, not 1"),
        ({"target": "abc"}, "seed=0, not None"),
        (MADE_FROM | {"batch_size": 2}, "batch_size=None, not 2"),
    ],
)
def test_what_differs_is_named(tmp_path, other, named):
    claim(tmp_path, MADE_FROM)
    with pytest.raises(ValueError, match=named):
        claim(tmp_path, other)
    claim(tmp_path, MADE_FROM)  # the record is as it was


@pytest.mark.parametrize("content", ['{"target": ', "[]"])
def test_a_folder_of_unknown_origin_is_refused(tmp_path, content):
    (tmp_path / "meta.json").write_text(content)
    with pytest.raises(ValueError, match="meta.json is damaged"):
        claim(tmp_path, MADE_FROM)
    (tmp_path / "meta.json").rename(tmp_path / "responses.jsonl")
    with pytest.raises(ValueError, match="other files and no meta.json"):
        claim(tmp_path, MADE_FROM)


def test_digests_tell_values_apart():
    assert digest([("a", [1, 2])]) == digest([("a", [1, 2])])
    assert (
        len({digest(value) for value in (None, "", "a", ["a"], [("a", [1, 2])], [("a", [2, 1])], [("a1", [2])])}) == 7
    )
