"""Graphs turn out not to do: at sizes other than those of their trace, or in part of the module."""

import copy
from types import SimpleNamespace

import onnx
import torch
from torch import nn

from ortmodule import ORTModule, _core, explain
from ortmodule.capture.partitioner import Partition
from ortmodule.guards.module_tree import Tree
from ortmodule.lowering import symbolics


def step(module, x):
    module.zero_grad()
    y = module(x)
    y.pow(2).sum().backward()
    return [y.detach(), *(p.grad for p in module.parameters())]


class Thinned(nn.Module):
    """Every fourth row, by a mask that `vmap` makes: it writes the length into the trace without a sign, and the
    lengths that are traced first leave as many rows."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)[:, ::4]
        kept = torch.vmap(lambda i: i.new_ones((), dtype=torch.bool) & (i >= 0))(torch.arange(y.shape[1]))
        return y * kept[None, :, None]


def test_a_graph_that_fails_at_other_sizes_is_captured_there():
    torch.manual_seed(0)
    eager = Thinned()
    ours = ORTModule(copy.deepcopy(eager))
    for length in (24, 40, 24):
        x = torch.randn(3, length, 4)
        torch.testing.assert_close(step(ours, x), step(eager, x))
        assert explain(ours).captured, explain(ours).fallback


class WithNothing(nn.Module):
    """Tokens in front, of which there are none."""

    def __init__(self):
        super().__init__()
        self.front, self.linear = nn.Parameter(torch.empty(1, 0, 4)), nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(torch.cat([self.front.expand(x.shape[0], -1, -1), x], 1))


def test_an_empty_parameter_has_an_empty_gradient():
    torch.manual_seed(0)
    eager = WithNothing()
    ours = ORTModule(copy.deepcopy(eager))
    for rows in (2, 3):
        x = torch.randn(rows, 5, 4)
        torch.testing.assert_close(step(ours, x), step(eager, x))
    assert explain(ours).captured and ours.front.grad.shape == (1, 0, 4)


def test_kinds_that_did_not_help_are_taken_back(monkeypatch):
    """The engine refuses a node, and again in the graph where PyTorch runs its kind: what is around it is left."""
    node = onnx.helper.make_node("Erf", ["x"], ["y"], name="/block/Erf")
    graph = onnx.helper.make_graph([node], "graph", [], [])
    captured = SimpleNamespace(model=onnx.helper.make_model(graph), trace=SimpleNamespace(scripted=set()))
    monkeypatch.setattr(symbolics.record, "made", {"Erf": {"aten::erf"}})
    error = _core.UnsupportedError("Erf of strings\n  while emitting Erf (/block/Erf)")

    tree = Tree(nn.ModuleDict({"block": nn.Linear(2, 2)}))
    tree.caches.kinds = frozenset({"aten::histc"})
    partition = Partition(tree, 0, ())
    assert partition.grow(error, captured)
    assert tree.caches.kinds == {"aten::histc", "aten::erf"} and not partition.modules()
    assert partition.grow(error, captured)
    assert tree.caches.kinds == {"aten::histc"} and partition.modules() == {"block": "Erf of strings"}
    assert not partition.grow(error, captured)
