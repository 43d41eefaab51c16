"""Operands of a trace are cast to the types that PyTorch computes with."""

import pytest
import torch
from torch._C import parse_ir

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
