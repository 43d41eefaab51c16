"""Operands of a trace are cast to the types that PyTorch computes with."""

import pytest
import torch
from torch import nn
from torch._C import parse_ir

from ortmodule import ORTModule, explain
from ortmodule.lowering.type_promotion import promote, takes_a_wide_factor


def graph_of(body, inputs):
    return parse_ir(f"graph({inputs}):\n  %one : int = prim::Constant[value=1]()\n{body}\n  return (%y)\n")


def node_of(graph, kind):
    (found,) = [node for node in graph.nodes() if node.kind() == kind]
    return found


def promoted(body, inputs):
    graph = graph_of(body, inputs)
    promote(graph)
    graph.lint()
    return graph


def cast(graph, node, i):
    """The type that the operand is cast to; None: it is not."""
    made = list(node.inputs())[i].node()
    return made.output().type().dtype() if made.kind() == "aten::to" else None


def test_to_the_type_of_the_result():
    graph = promoted("  %y : Float(2) = aten::mul(%x, %n)", "%x : Float(2), %n : Long(2)")
    mul = node_of(graph, "aten::mul")
    assert cast(graph, mul, 0) is None and cast(graph, mul, 1) is torch.float32


def test_a_comparison_is_made_in_the_common_type():
    graph = promoted("  %y : Bool(2) = aten::lt(%x, %n)", "%x : Float(2), %n : Long(2)")
    less = node_of(graph, "aten::lt")
    assert cast(graph, less, 1) is torch.float32 and less.output().type().dtype() is torch.bool


def test_equal_types_stay():
    graph = promoted("  %y : Float(2) = aten::mul(%x, %z)", "%x : Float(2), %z : Float(2)")
    assert [node.kind() for node in graph.nodes()] == ["prim::Constant", "aten::mul"]


@pytest.mark.parametrize(
    "body, wide",
    [
        ("%y : Half(2) = aten::mul(%x, %s)", True), ("%y : Half(2) = aten::mul(%s, %x)", True),
        ("%y : Half(2) = aten::div(%x, %s)", True), ("%y : Half(2) = aten::div(%s, %x)", False),
        ("%y : Half(2) = aten::add(%x, %s, %one)", False), ("%y : Half(2) = aten::mul(%x, %h)", False),
        ("%y : Float(2) = aten::mul(%x, %s)", False),
    ],
)  # fmt: skip
def test_factors_of_float16(body, wide):
    graph = graph_of(f"  {body}", "%x : Half(2), %s : Float(), %h : Half()")
    assert takes_a_wide_factor(list(graph.nodes())[-1]) is wide


def test_a_wide_factor_is_rounded_once():
    graph = promoted("  %y : Half(2) = aten::mul(%x, %s)", "%x : Half(2), %s : Float()")
    mul = node_of(graph, "aten::mul")
    assert mul.output().type().dtype() is torch.float32 and cast(graph, mul, 0) is torch.float32
    (result,) = graph.outputs()
    assert result.node().kind() == "aten::to" and result.type().dtype() is torch.float16


class Chooses(nn.Module):
    def __init__(self, one, other):
        super().__init__()
        self.one, self.other = one, other

    def forward(self, x, mask):
        return torch.where(mask, self.one(x), self.other(x))


def of(value, dtype):
    return lambda x: torch.tensor(value, dtype=dtype)


#: What a choice is between, where one is a tensor of rank 0 that forward makes.
CHOICES = {
    "number": lambda x: 0.3,
    "integer": lambda x: 3,
    "tensor": lambda x: x,
    "filled": lambda x: torch.full((), 0.1, dtype=torch.float64),
    "one element": lambda x: torch.tensor([0.3]),
    **{str(dtype).removeprefix("torch."): of(0.1, dtype) for dtype in (torch.float64, torch.float32, torch.float16)},
    "int16": of(5, torch.int16),
    "lowest": of(torch.finfo(torch.float64).min, torch.float64),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("one", CHOICES)
@pytest.mark.parametrize("other", ["float64", "float16", "int16", "lowest"])
def test_choices_of_tensors_of_rank_0(one, other):
    """They are of PyTorch's type, bit for bit: the exporter takes two of rank 0 for numbers, of float32."""
    eager = Chooses(CHOICES[one], CHOICES[other])
    ours = ORTModule(eager)
    for rows in (4, 6):
        x, mask = torch.randn(rows, 3, requires_grad=True), torch.rand(rows, 3) > 0.5
        found, expected = ours(x, mask), eager(x, mask)
        assert found.dtype == expected.dtype and torch.equal(found, expected)
    assert explain(ours).captured, explain(ours).fallback
