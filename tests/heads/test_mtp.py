"""MTPHead.forward, which computes all chains at once, against one chain at a time without mask or cache."""

import pytest
import torch

from heads.mtp import MTPConfig, MTPHead
from tests.tiny_models import tiny

FAMILIES = (
    "llama", "gpt2", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", "mixtral", "cohere2", "granite",
)  # fmt: skip
SIZES = {"hidden_size": 32, "vocab_size": 97}
B, T = 2, 11


def random_head(model, seed=0, draft_ids=None, **settings):
    head = MTPHead(MTPConfig(**{"layers": 1} | SIZES | settings), model, draft_ids)
    generator = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.data += 0.2 * noise.to(parameter.device)
    return head


def texts(model):
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, 97, (B, T), generator=generator)
    return tokens, torch.randn(B, T, 32, generator=generator, dtype=torch.float64)


def alone(stage, inputs):
    """[n, D] post-norm states of one sequence of block inputs, by the block's own causal attention."""
    return stage.block.get_decoder()(inputs_embeds=torch.stack(inputs)[None], use_cache=False).last_hidden_state[0]


def chain_by_chain(head, tokens, hidden, t, depths):
    """States of chain t of one text at depths 1..depths, as drafting computes them: the committed slots' entries, then
    its own one by one."""
    embed = head.embed(tokens)

    def entry(stage, slot, token, state):
        return stage.inputs(embed[token], state, torch.tensor(slot))

    if head.config.layers == 1:
        stage = head.stage(1)
        entries = [entry(stage, s, s + 1, hidden[s]) for s in range(t + 1)]
        states = [alone(stage, entries)[-1]]
        for depth in range(2, depths + 1):
            entries.append(entry(stage, t + depth - 1, t + depth, states[-1]))
            states.append(alone(stage, entries)[-1])
        return states
    previous, states = hidden, []
    for depth in range(1, depths + 1):  # a stage per depth: causal over its own entries
        stage = head.stage(depth)
        previous = alone(stage, [entry(stage, s, s + depth, previous[s]) for s in range(t + 1)])
        states.append(previous[-1])
    return states


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layers", [1, 3])
@torch.no_grad()
def test_all_chains_at_once(family, layers):
    model = tiny(family)
    head = random_head(model, layers=layers)
    tokens, hidden = texts(model)
    got = head(tokens, hidden, depths=3)
    assert [state.shape for state in got] == [(B, T, 32)] * 3
    for b in range(B):
        for t in (0, 3, T - 4):
            want = chain_by_chain(head, tokens[b], hidden[b], t, 3)
            for depth in range(3):
                torch.testing.assert_close(got[depth][b, t], want[depth], rtol=0, atol=1e-5)


@torch.no_grad()
def test_the_comparison_notices_a_chain_that_sees_too_much():
    """A further depth that sees the depth-1 entries of later tokens, as a plain causal mask over all entries would."""
    head = random_head(tiny("llama"))
    tokens, hidden = texts(None)
    t, want = 3, chain_by_chain(head, tokens[0], hidden[0], 3, 2)
    stage, embed = head.stage(1), head.embed(tokens[0])
    entries = [stage.inputs(embed[s + 1], hidden[0, s], torch.tensor(s)) for s in range(t + 2)]
    entries.append(stage.inputs(embed[t + 2], want[0], torch.tensor(t + 1)))
    assert (alone(stage, entries)[-1] - want[1]).abs().max() > 1e-3


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt2"])  # which adds positions
@torch.no_grad()
def test_a_new_head_starts_from_the_targets_state(family):
    """Its layer adds nothing yet, whatever its kind calls its projections; the rest is the target's last layer."""
    model = tiny(family)
    for concat in ("embedding_first", "hidden_first"):
        head = MTPHead(MTPConfig(layers=1, **SIZES, concat=concat), model)
        tokens, hidden = texts(model)
        norm = head.stage(1).block.get_decoder().norm
        torch.testing.assert_close(head(tokens, hidden, 1)[0], norm(hidden), rtol=0, atol=1e-4)
    first = next(parameter for name, parameter in head.stage(1).layer.named_parameters() if "q_" in name)
    assert any(torch.equal(first, parameter) for parameter in model.get_decoder().layers[-1].parameters())


@torch.no_grad()
def test_settings_of_the_input():
    model = tiny("llama")
    embeds, state = torch.randn(2, 3, 32, dtype=torch.float64)
    positions = torch.arange(3)

    def norm(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps).sqrt() * weight

    for concat in ("embedding_first", "hidden_first"):
        for zero_first in (False, True):
            stage = random_head(model, concat=concat, zero_first_embedding=zero_first).stage(1)
            halves = [norm(embeds, stage.enorm.weight), norm(state, stage.hnorm.weight)]
            if zero_first:
                halves[0][0] = 0
            if concat == "hidden_first":
                halves.reverse()
            want = torch.cat(halves, -1) @ stage.fc.weight.T
            torch.testing.assert_close(stage.inputs(embeds, state, positions), want, rtol=0, atol=1e-12)


@torch.no_grad()
def test_reduced_vocabulary_covers_the_same_logits():
    model = tiny("gemma2")
    ids = torch.tensor([2, 7, 31])
    head, full = random_head(model, draft_vocab_size=3, draft_ids=ids), random_head(model)
    state = torch.randn(4, 32, dtype=torch.float64)
    torch.testing.assert_close(head.project(state), full.project(state)[:, ids], rtol=0, atol=1e-12)
    tokens = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(head.stage(1).block(tokens).logits, full.stage(1).block(tokens).logits[..., ids])


def test_only_the_head_is_trained():
    """The target's embedding and output head are neither parameters of the head nor given gradients."""
    model = tiny("llama").requires_grad_(False)
    head = random_head(model, layers=2)
    names = {name for name, _ in head.named_parameters()}
    assert {name.split(".", 2)[2].split(".")[0] for name in names} == {"enorm", "hnorm", "fc", "layer", "final"}
    tokens, hidden = texts(model)
    sum(head.project(state).logsumexp(-1).sum() for state in head(tokens, hidden, 2)).backward()
    assert all(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in head.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert sum(p.numel() for p in head.stages[0].layer.parameters()) == sum(
        p.numel() for p in model.model.layers[-1].parameters()
    )


def test_what_cannot_be_computed_is_refused():
    model = tiny("llama")
    tokens, hidden = texts(model)
    with pytest.raises(ValueError, match="depths is 3 but the head has 2 stages"):
        random_head(model, layers=2)(tokens, hidden, 3)
    with pytest.raises(NotImplementedError, match="recycles the pre_norm state"):
        random_head(model, recycled="pre_norm")(tokens, hidden, 2)
    with pytest.raises(ValueError, match="concat is 'emb': give embedding_first or hidden_first"):
        MTPConfig(layers=1, concat="emb", **SIZES)
