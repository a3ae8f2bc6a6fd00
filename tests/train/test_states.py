"""The states that training sees are those that the engine hands to a drafter, computed or cached."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train.states
from specdec.contracts import Draft
from specdec.step import Segment
from specdec.target import Target
from tests.tiny_models import tiny
from train.batches import Batch, Example, padded
from train.states import CachedStates, ComputedStates, cache_states, target_states

# Largest |difference| in float64; deepseek_v3 routes to its experts in float32.
LIMITS = {"llama": 1e-12, "gpt2": 1e-12, "gemma3": 1e-12, "deepseek_v3": 5e-6}
LENGTHS = (12, 3, 20, 1)  # longer and shorter than gemma3's window of 8
CONTRACTS = ("post_norm", "pre_norm")


def examples_of(lengths=LENGTHS, seed=0):
    random = np.random.default_rng(seed)
    return [Example(f"e{n}", random.integers(1, 97, length).tolist(), 1) for n, length in enumerate(lengths)]


def engine_states(model, examples, contract):
    """Per example, [T, D] the states that the engine gives for its tokens, run as a prompt in one packed step."""
    target = Target(model)
    cache = target.new_cache()
    cache.admit(list(range(len(examples))))
    segments = [Segment(row, np.array(example.tokens), 0, True) for row, example in enumerate(examples)]
    step = target.pack(segments, Draft.empty(len(examples)), cache)
    _, hidden = target.forward(step, cache, contract)
    return [hidden[step.first[row] :][: len(example.tokens)] for row, example in enumerate(examples)]


def worst(states, expected):
    """Largest difference over the real tokens."""
    return max((states[b, : len(e)] - e).abs().max().item() for b, e in enumerate(expected))


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("family", LIMITS)
def test_states_are_the_engines(family, contract):
    model, examples = tiny(family), examples_of()
    batch = padded(examples, range(len(examples)))
    expected = engine_states(model, examples, contract)
    states = target_states(model, batch.tokens, contract)
    assert worst(states, expected) <= LIMITS[family]
    other = CONTRACTS[contract == "post_norm"]
    assert worst(target_states(model, batch.tokens, other), expected) > 0.01  # the wrong side of the norm is seen
    assert worst(states.roll(1, dims=1), expected) > 0.01  # and a state of the token before
    of_batch = ComputedStates(model, contract).of(batch)
    assert of_batch.dtype == torch.float32 and worst(of_batch, expected) <= max(1e-4, LIMITS[family])


def test_padding_is_seen_by_no_token_but_real_tokens_are():
    model, examples = tiny("llama"), examples_of()
    batch = padded(examples, range(len(examples)))
    before = target_states(model, batch.tokens, "post_norm")
    real = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    other_padding = torch.where(real, batch.tokens, torch.full_like(batch.tokens, 5))
    assert torch.equal(target_states(model, other_padding, "post_norm")[real], before[real])
    other_token = batch.tokens.clone()
    other_token[2, 1] = (other_token[2, 1] + 1) % 97
    assert not torch.equal(target_states(model, other_token, "post_norm")[2, 19], before[2, 19])


def test_the_model_is_left_as_it_was_and_must_not_be_training():
    model = tiny("gpt2")
    tokens = torch.tensor([[1, 2, 3]])
    target_states(model, tokens, "pre_norm")
    assert not model.transformer.ln_f._forward_pre_hooks
    with pytest.raises(ValueError, match="training mode"):
        target_states(model.train(), tokens, "post_norm")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cache_gives_what_was_computed(tmp_path, dtype):
    model, examples = tiny("llama", dtype=dtype), examples_of()
    cache_states(model, "post_norm", examples, tmp_path)
    cached = CachedStates(model, "post_norm", examples, tmp_path)
    batch = padded(examples, range(len(examples)))
    computed, stored = ComputedStates(model, "post_norm").of(batch), cached.of(batch)
    for b, length in enumerate(LENGTHS):
        assert torch.equal(stored[b, :length], computed[b, :length])  # bit for bit: the same forward
    assert stored.dtype == torch.float32 and stored.isfinite().all()
    picked = cached.of(padded(examples, [2, 0]))
    assert torch.equal(picked[0], stored[2]) and torch.equal(picked[1, :12], stored[0, :12])
    assert (tmp_path / "states.bin").stat().st_size == sum(LENGTHS) * 32 * dtype.itemsize


def test_a_batch_that_does_not_say_which_examples_it_holds_gets_no_states(tmp_path):
    model, examples = tiny("llama"), examples_of()
    cache_states(model, "post_norm", examples, tmp_path)
    batch = padded(examples, [0, 1])
    with pytest.raises(ValueError, match="shorter"):
        CachedStates(model, "post_norm", examples, tmp_path).of(Batch(batch.tokens, batch.loss_mask))


def test_a_killed_fill_is_taken_up_at_the_last_whole_group(tmp_path, monkeypatch):
    model, examples = tiny("llama"), examples_of((4, 2, 3, 5, 6))
    monkeypatch.setattr(train.states, "ROWS", 2)
    cache_states(model, "post_norm", examples, tmp_path / "whole")
    whole = (tmp_path / "whole" / "states.bin").read_bytes()
    token = 32 * 8
    forwards = []
    monkeypatch.setattr(
        train.states, "target_states", lambda *arguments: forwards.append(1) or target_states(*arguments)
    )
    for kept, groups_left in [(0, 3), (6 * token - 1, 3), (6 * token, 2), (9 * token + 7, 2), (14 * token + 1, 1)]:
        folder = tmp_path / str(kept)
        shutil.copytree(tmp_path / "whole", folder)
        (folder / "states.bin").unlink()
        (folder / "states.partial").write_bytes(whole[:kept])
        with pytest.raises(ValueError, match="does not hold the states of all examples"):
            CachedStates(model, "post_norm", examples, folder)
        forwards.clear()
        cache_states(model, "post_norm", examples, folder)
        assert (folder / "states.bin").read_bytes() == whole and len(forwards) == groups_left
        assert not (folder / "states.partial").exists()
    forwards.clear()
    cache_states(model, "post_norm", examples, folder)
    assert forwards == []  # complete: nothing to do


def test_the_size_is_printed_first_and_a_disk_without_room_refused(tmp_path, monkeypatch, capsys):
    model, examples = tiny("llama"), examples_of()
    needed = sum(LENGTHS) * 32 * 8

    def free_disk(count):
        monkeypatch.setattr(train.states.shutil, "disk_usage", lambda folder: SimpleNamespace(free=count))

    free_disk(needed - 1)
    with pytest.raises(ValueError, match=r"has 0.000 GB of free disk and the states need 0.000 GB more"):
        cache_states(model, "post_norm", examples, tmp_path)
    assert "0.000 GB" in capsys.readouterr().err and not (tmp_path / "states.bin").exists()
    free_disk(needed)
    cache_states(model, "post_norm", examples, tmp_path)
    assert (tmp_path / "states.bin").stat().st_size == needed


def test_a_cache_of_something_else_is_refused(tmp_path):
    model, examples = tiny("llama"), examples_of()
    cache_states(model, "post_norm", examples, tmp_path)
    others = {
        "target": (tiny("llama", seed=1), "post_norm", examples),
        "dtype": (tiny("llama").float(), "post_norm", examples),
        "hidden_contract": (model, "pre_norm", examples),
        "examples": (model, "post_norm", examples[::-1]),
    }
    for key, arguments in others.items():
        for use in (cache_states, CachedStates):
            with pytest.raises(ValueError, match=f"{key}="):
                use(*arguments, tmp_path)


@pytest.mark.parametrize("size", [0.5, 2])
def test_a_cache_of_another_size_is_refused(tmp_path, size):
    model, examples = tiny("llama"), examples_of()
    cache_states(model, "post_norm", examples, tmp_path)
    whole = (tmp_path / "states.bin").read_bytes()
    (tmp_path / "states.bin").write_bytes((2 * whole)[: int(size * len(whole))])
    with pytest.raises(ValueError, match=f"has {int(size * len(whole))} bytes where the states of all .* {len(whole)}"):
        CachedStates(model, "post_norm", examples, tmp_path)
