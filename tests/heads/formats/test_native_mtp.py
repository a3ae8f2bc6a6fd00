"""MTP weights under each family's names against what that family computes, and what is refused."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from heads.formats import native_mtp
from heads.mtp import MTPConfig, MTPHead
from tests.heads.formats.stock import SECOND_STAGE, STOCK, D, Reference, V, mtp_tensors, write_sharded
from tests.tiny_models import tiny

T = 7
MISTAKES = ("swapped", "no_enorm", "no_hnorm", "no_final", "no_centre", "other_zero", "gate_up")
TOLERANCE = 1e-4  # transformers' norms compute in float32


def text():
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(1, V, (T,), generator=generator)
    return tokens, torch.randn(T, D, generator=generator, dtype=torch.float64)


def reference_logits(reference, tokens, hidden):
    """Logits of every chain at depths 1 and 2 of one stage that is applied again: [T - 1, V] and [T - 2, V]. At depth 2
    chain t stands in slot t + 1 after the depth-1 entries of the slots up to t."""
    entries = [reference.entry(tokens[t + 1], hidden[t], t) for t in range(T - 1)]
    first = reference.run(entries)
    second = [
        reference.run([*entries[: t + 1], reference.entry(tokens[t + 2], first[t], t + 1)])[-1] for t in range(T - 2)
    ]
    return reference.project(first), reference.project(torch.stack(second))


def head_logits(head, tokens, hidden):
    states = head(tokens[None], hidden[None], depths=2)
    return tuple(head.project(state[0, : T - depth]) for depth, state in enumerate(states, start=1))


def differences(ours, theirs):
    """Largest difference per depth, in units of the largest logit."""
    return [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, theirs, strict=True)]


@pytest.mark.parametrize("family", STOCK)
@torch.no_grad()
def test_reading_gives_the_familys_computation(family, tmp_path):
    stock, (tokens, hidden) = STOCK[family], text()
    model = stock.target()
    tensors = mtp_tensors(stock, model)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    head = native_mtp.read(tmp_path, model)
    assert (head.config.hidden_contract, head.config.layers) == (stock.state, 1)
    found = head_logits(head, tokens, hidden)
    assert max(differences(found, reference_logits(Reference(stock, model, tensors), tokens, hidden))) < TOLERANCE
    noticed = {}
    for mistake in MISTAKES:
        wrong = reference_logits(Reference(stock, model, tensors, mistake), tokens, hidden)
        noticed[mistake] = [difference > 100 * TOLERANCE for difference in differences(found, wrong)]
    experts = any(".experts." in name for name in tensors)
    assert noticed == {mistake: [mistake != "gate_up" or experts] * 2 for mistake in MISTAKES}


@torch.no_grad()
def test_a_stage_for_each_depth(tmp_path):
    """DeepSeek-V3's own modules: the second reads the first one's states and has its own entries alone."""
    stages, (tokens, hidden) = (STOCK["deepseek_v3"], SECOND_STAGE), text()
    model = stages[0].target()
    tensors = mtp_tensors(stages[0], model) | mtp_tensors(stages[1], model, seed=1)
    write_sharded(tmp_path, [tensors])
    head = native_mtp.read(tmp_path, model)
    assert head.config.layers == 2

    def expected(first_stage, second_stage):
        one, two = (Reference(stage, model, tensors) for stage in (first_stage, second_stage))
        first = one.run([one.entry(tokens[t + 1], hidden[t], t) for t in range(T - 1)])
        second = two.run([two.entry(tokens[t + 2], first[t], t) for t in range(T - 2)])
        return one.project(first), two.project(second)

    found = head_logits(head, tokens, hidden)
    assert max(differences(found, expected(*stages))) < TOLERANCE
    assert min(differences(found, expected(*stages[::-1]))) > 100 * TOLERANCE


def test_only_mtp_tensors_of_a_whole_checkpoint_are_read(tmp_path):
    stock = STOCK["deepseek_v3"]
    model = stock.target()
    tensors = mtp_tensors(stock, model)
    copies = dict(zip(stock.copies, (model.get_input_embeddings().weight, model.lm_head.weight), strict=True))
    rest = {name: tensor for name, tensor in model.state_dict().items() if "lm_head" not in name}
    half = len(tensors) // 2
    names = list(tensors)
    write_sharded(
        tmp_path, [rest, {n: tensors[n] for n in names[:half]}, {n: tensors[n] for n in names[half:]} | copies]
    )
    (tmp_path / "model-00001-of-00003.safetensors").write_bytes(b"never opened")
    head = native_mtp.read(tmp_path, model)
    assert torch.equal(head.stages[0].enorm.weight, tensors[stock.enorm])


def test_what_does_not_fit_is_named(tmp_path):
    stock = STOCK["deepseek_v3"]
    model = stock.target()
    tensors = mtp_tensors(stock, model)
    embedding, other_head = stock.copies[0], torch.zeros(V, D, dtype=torch.float64)

    def reading(changed):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        write_sharded(folder, [changed])
        return pytest.raises(ValueError), folder

    changes = {
        rf"missing {stock.hnorm}, unknown none": {n: t for n, t in tensors.items() if n != stock.hnorm},
        rf"missing none, unknown {stock.fc}_scale_inv": tensors | {f"{stock.fc}_scale_inv": torch.ones(1)},
        rf"{stock.enorm} of shape \(5,\) where the target asks for \(32,\)": tensors | {stock.enorm: torch.ones(5)},
        rf"{embedding} that is not the target's": tensors | {embedding: other_head},
        r"no key matches model.layers": {"model.embed_tokens.weight": other_head},
        r"missing model.layers.2.eh_proj.weight": {n.replace("layers.2", "layers.3"): t for n, t in tensors.items()},
    }
    for message, changed in changes.items():
        raises, folder = reading(changed)
        with raises as raised:
            native_mtp.read(folder, model)
        assert raised.match(message), raised.value
        assert str(folder) in str(raised.value)


def random_head(model, **settings):
    head = MTPHead(MTPConfig(**{"layers": 1, "hidden_size": D, "vocab_size": V} | settings), model)
    generator = torch.Generator().manual_seed(2)
    for parameter in head.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return head


@pytest.mark.parametrize("concat", ["embedding_first", "hidden_first"])
@pytest.mark.parametrize("family", STOCK)
@torch.no_grad()
def test_what_is_written_is_read_back(family, concat, tmp_path):
    """Under every family's names, whichever way round the head's own fc is."""
    stock, (tokens, hidden) = STOCK[family], text()
    model = stock.target()
    head = random_head(model, concat=concat, hidden_contract=stock.state, zero_first_embedding=stock.zero_first)
    native_mtp.write(head, model, tmp_path, "a target")
    written = set(load_file(tmp_path / "model.safetensors"))
    assert written == {*mtp_tensors(stock, model), *stock.copies}
    again = native_mtp.read(tmp_path, model)
    assert max(differences(head_logits(again, tokens, hidden), head_logits(head, tokens, hidden))) < 1e-12


def test_several_stages_are_written_where_the_names_have_room(tmp_path):
    model = tiny("deepseek_v3")
    native_mtp.write(random_head(model, layers=2), model, tmp_path, "a target")
    assert native_mtp.read(tmp_path, model).config.layers == 2
    with pytest.raises(ValueError, match="a target are one stage, not 2"):
        model = STOCK["qwen3_5"].target()
        native_mtp.write(random_head(model, layers=2), model, tmp_path, "a target")


@pytest.mark.parametrize(
    ("family", "setting", "value"),
    [
        ("deepseek_v3", "hidden_contract", "pre_norm"),
        ("glm4_moe", "zero_first_embedding", True),
        ("qwen3_5", "recycled", "pre_norm"),
        ("mimo", "hidden_contract", "post_norm"),
    ],
)
def test_a_head_that_works_otherwise_than_the_family_is_not_written(family, setting, value, tmp_path):
    stock = STOCK[family]
    model = stock.target()
    fitting = {"hidden_contract": stock.state, "zero_first_embedding": stock.zero_first}
    with pytest.raises(ValueError, match=f"{setting} .* but the head has {value!r}"):
        native_mtp.write(random_head(model, **fitting | {setting: value}), model, tmp_path, "a target")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_targets_that_no_family_is_like(family):
    with pytest.raises(ValueError, match="no family ships MTP weights .* deepseek_v3, glm4_moe"):
        native_mtp.family_of(tiny(family))


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
@torch.no_grad()
def test_transformers_own_loader_agrees(family, tmp_path):
    """The target's folder with our file in it, as transformers' `generate(use_mtp=True)` reads it."""
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpModel"):
        pytest.skip("this transformers has no MtpModel")
    model, (tokens, hidden) = tiny(family), text()
    head = random_head(model)
    native_mtp.write(head, model, tmp_path, "a target")
    write_sharded(tmp_path, [model.state_dict(), load_file(tmp_path / "model.safetensors")])
    (tmp_path / "model.safetensors").unlink()
    model.config.name_or_path = str(tmp_path)
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2\."]  # it knows published models' numbers alone
    theirs = layers.MtpModel.from_pretrained(model)
    states = theirs.forward_layer(
        0, hidden[None, :-1], torch.arange(1, T)[None], None, inputs_embeds=head.embed(tokens[None, 1:])
    )
    found = head_logits(head, tokens, hidden)[0]
    assert differences([found], [theirs._project_to_logits(states)[0]])[0] < TOLERANCE
    swapped = head_logits(native_mtp.read(tmp_path, model), tokens.flip(0), hidden)[0]
    assert differences([found], [swapped])[0] > 100 * TOLERANCE
