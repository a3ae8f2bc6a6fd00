"""The C++ matrix product of compiled forwards against float64, and where a compiled graph takes it."""

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, LlamaConfig

from specdec import compiled, cpu_linear
from specdec.target import Target

DTYPES = [torch.float32, torch.bfloat16]
EPS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}


@pytest.fixture(autouse=True)
def machine():
    if not cpu_linear.available():
        pytest.skip("not a machine for it")


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def product(x, weight, bias=None):
    return torch.ops.specdec.linear(x, cpu_linear.laid_out(weight), bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N, K, bias", [(32, 1, False), (96, 45, True), (64, 700, False)])
@pytest.mark.parametrize("M", [1, 2, 13, 14, 15, 28, 29, 400])
def test_it_is_the_product_of_float64(M, N, K, bias, dtype):
    weight, x = random(N, K).to(dtype), random(M, K, seed=1).to(dtype)
    b = random(N, seed=2).to(dtype) if bias else None
    exact = linear(x.double(), weight.double(), None if b is None else b.double())
    # K roundings of a sum of K products in float32, one of the result
    allowed = K * EPS[torch.float32] * linear(x.double().abs(), weight.double().abs()) + EPS[dtype] * (exact.abs() + 1)
    assert ((product(x, weight, b).double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_bits_whatever_others_there_are(dtype):
    weight, x = random(64, 300).to(dtype), random(1000, 300, seed=1).to(dtype)
    alone = torch.cat([product(x[m : m + 1], weight) for m in range(40)])
    for M in (2, 14, 15, 40, 1000):
        assert torch.equal(product(x[:M], weight)[:40], alone[:M])


def test_rows_may_lie_apart_or_across():
    weight, wide = random(32, 20), random(6, 50, seed=1)
    for x in (wide[:, 5:25], wide[:, ::2][:, :20], random(20, 6).T):
        torch.testing.assert_close(product(x, weight), linear(x, weight), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_panels_of_the_other_dtype_would_be_caught(dtype, controls):
    weight, x = random(32, 40), random(3, 40, seed=1).to(dtype)
    other = cpu_linear.laid_out(weight.to(*(d for d in DTYPES if d != dtype))).to(dtype)
    wrong = torch.ops.specdec.linear(x, other, None)
    assert (wrong - linear(x, weight.to(dtype))).abs().max() > 1
    controls("panels in another order", "the float64 product")


def graph_of(module, *inputs):
    """What the pass leaves of the module's frozen graph: how many of our products, and of torch's."""
    counts = []

    class Counted(cpu_linear.OwnProducts):
        def __call__(self, graph):
            super().__call__(graph)
            targets = [node.target for node in graph.nodes]
            own = targets.count(torch.ops.specdec.linear.default)
            counts.append((own, sum(targets.count(each) for each in cpu_linear.PRODUCTS)))

    options = {"cpp.weight_prepack": False, "post_grad_custom_pre_pass": Counted()}
    with torch.no_grad(), torch._inductor.config.patch(freezing=True):
        found = torch.compile(module, options=options)(*inputs)
        torch.testing.assert_close(found, module(*inputs), rtol=1e-4, atol=1e-4)
    return counts[0]


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.plain, self.biased = nn.Linear(20, 64, bias=False), nn.Linear(64, 32)
        self.narrow = nn.Linear(32, 7)

    def forward(self, x):
        return self.narrow(self.biased(self.plain(x)) @ torch.ones(32, 32).to(x))


class Biased(nn.Module):
    """A product whose bias is not one value per column, one after the other, or is scaled."""

    def __init__(self, bias, **factors):
        super().__init__()
        self.w, self.bias, self.factors = nn.Parameter(random(20, 64)), nn.Parameter(bias), factors

    def forward(self, x):
        return torch.addmm(self.bias, x, self.w, **self.factors)


def test_products_with_frozen_weights_are_ours_and_no_others():
    assert graph_of(Several().eval(), random(5, 20)) == (2, 2)  # not those with 7 columns, and with no weight
    assert graph_of(Several().double().eval(), random(5, 20).double()) == (0, 4)


@pytest.mark.parametrize(
    "module", [Biased(random(1)), Biased(random(1).expand(64)), Biased(random(64), beta=0.5, alpha=2.0)]
)
def test_what_the_function_cannot_add_is_left_to_torch(module):
    assert graph_of(module.eval(), random(5, 20)) == (0, 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_forwards_run_it(monkeypatch):
    """q, k, v and gate, up are one product each, of which there are four a layer, and the head is one more."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, head_dim=16, num_hidden_layers=2, vocab_size=96))
    replaced = []
    monkeypatch.setattr(
        cpu_linear.OwnProducts,
        "_replace",
        lambda self, *inputs, run=cpu_linear.OwnProducts._replace: replaced.append(1) or run(self, *inputs),
    )
    target = Target(model.eval())
    target.compile()
    assert target.graph is not None and len(replaced) == 4 * 2 + 1
    assert compiled.graph_for(target) is target.graph
