"""Matrix products with frozen weights on a CPU as one C++ function, for compiled forwards.

In place of oneDNN's, which are made for many rows: with the 1 to 64 rows of a decoding step they wait for memory longer
than they need to, and in bfloat16 they multiply at half of float32's rate where a processor has AVX512-BF16 but no
AMX. The function, in cpu_linear.cpp, reads every weight once per step, in order, and multiplies in float32.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

from specdec.own_cpp import loaded

SOURCE = Path(__file__).with_name("cpu_linear.cpp")
LANES = 16
COLUMNS = 2 * LANES  # of a panel: output features are a multiple of it
aten = torch.ops.aten
PRODUCTS = {aten.mm.default: (None, 0, 1), aten.addmm.default: (0, 1, 2)}  # bias, x, w among their arguments
BATCHED = {aten.bmm.default: (None, 0, 1), aten.baddbmm.default: (0, 1, 2)}


@functools.cache
def available() -> bool:
    """Whether this machine is one where `specdec::linear` was measured to be the faster one, and can compile it."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or torch.cpu._is_amx_tile_supported():
        return False
    if loaded(SOURCE, "matrix products are oneDNN's") is None:
        return False

    @torch.library.register_fake("specdec::linear")
    def _(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        return x.new_empty(x.shape[0], w.shape[0] * COLUMNS)

    return True


def laid_out(weight: Tensor) -> Tensor:
    """[N / COLUMNS, K, COLUMNS] panels of a weight [N, K], in which columns c and c + LANES of a bfloat16 panel lie
    side by side."""
    N, K = weight.shape
    panels = weight.reshape(N // COLUMNS, 2, LANES, K)
    order = (0, 3, 2, 1) if weight.dtype == torch.bfloat16 else (0, 3, 1, 2)
    return panels.permute(order).reshape(N // COLUMNS, K, COLUMNS).contiguous()


class OwnProducts(CustomGraphPass):
    """Puts `specdec::linear` in place of the products with frozen weights of a graph.

    are_all: whether it left no product of torch's that sums, in an order which may depend on the shape."""

    are_all = False  # before it has run

    def __call__(self, graph: Graph) -> None:
        for node in graph.nodes:
            if node.op == "call_function" and node.target in PRODUCTS:
                self._replace(graph, node)
        self.are_all = not any(_sums(node) for node in graph.nodes)

    def uuid(self) -> None:
        """None: graphs with frozen weights are not cached."""

    def _replace(self, graph: Graph, node: Node) -> None:
        bias, x, w = (None if at is None else node.args[at] for at in PRODUCTS[node.target])
        owner = graph.owning_module
        if w.op != "get_attr" or node.kwargs:  # addmm's factors
            return
        weight = getattr(owner, w.target)
        if weight.dtype not in (torch.float32, torch.bfloat16) or weight.shape[1] % COLUMNS or not weight.numel():
            return
        if bias is not None:
            held = bias.meta["val"]
            if held.shape != weight.shape[1:] or held.dtype != weight.dtype or not held.is_contiguous():
                return
        name = f"{w.target}_panels"
        if not hasattr(owner, name):
            owner.register_buffer(name, laid_out(weight.T))
        with graph.inserting_before(node):
            panels = graph.get_attr(name)
            panels.meta["val"] = w.meta["val"].new_empty(getattr(owner, name).shape)
            new = graph.call_function(torch.ops.specdec.linear.default, (x, panels, bias))
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        if not w.users:
            graph.erase_node(w)


def _sums(node: Node) -> bool:
    """Whether a node is a product of torch's of more than one term."""
    places = (PRODUCTS | BATCHED).get(node.target)
    if places is not None:
        return node.args[places[1]].meta["val"].shape[-1] != 1
    return node.target in (aten.convolution.default, aten.mv.default, aten.dot.default)
