"""Operands of an operator get one type, as PyTorch would choose it: tensors before numbers."""

import pytest
import torch
from torch._C import parse_ir

from ortmodule.lowering.onnx_types import settle


def settled(body, inputs="%x : Float(2, 3)"):
    graph = parse_ir(f"graph({inputs}):\n{body}\n  return (%y)\n", parse_tensor_constants=True)
    settle(graph)
    return graph


def node_of(graph, kind):
    (found,) = [node for node in graph.nodes() if node.kind() == kind]
    return found


def types(node):
    return [value.type().dtype() for value in node.inputs()]


NUMBER = "  %c : {kind}(requires_grad=0, device=cpu) = onnx::Constant[value={{{value}}}]()\n"


@pytest.mark.parametrize(
    "x, number, wanted",
    [
        ("Float(2)", ("Double", "2."), torch.float32),
        ("Half(2)", ("Float", "2."), torch.float16),
        ("Long(2)", ("Long", "2"), torch.int64),
        ("Long(2)", ("Float", "0.5"), torch.float32),  # of a higher category
    ],
)
def test_a_number_beside_a_tensor(x, number, wanted):
    body = NUMBER.format(kind=number[0], value=number[1]) + f"  %y : {x} = onnx::Mul(%x, %c)"
    mul = node_of(settled(body, f"%x : {x}"), "onnx::Mul")
    assert types(mul) == [wanted, wanted] and mul.output().type().dtype() is wanted
    constant = list(mul.inputs())[1].node()
    assert constant.kind() == "onnx::Constant" and constant.t("value").dtype is wanted


def test_a_tensor_is_cast():
    graph = settled("  %y : Float(2) = onnx::Add(%x, %z)", "%x : Float(2), %z : Half(2)")
    cast = node_of(graph, "onnx::Cast")
    assert cast.i("to") == 1 and types(node_of(graph, "onnx::Add")) == [torch.float32] * 2


def test_the_condition_of_where_stays():
    graph = settled("  %y : Double(2) = onnx::Where(%c, %x, %z)", "%c : Bool(2), %x : Double(2), %z : Float(2)")
    assert types(node_of(graph, "onnx::Where")) == [torch.bool, torch.float64, torch.float64]


def test_a_comparison_keeps_its_result():
    graph = settled("  %y : Bool(2) = onnx::Less(%x, %z)", "%x : Float(2), %z : Double(2)")
    less = node_of(graph, "onnx::Less")
    assert types(less) == [torch.float64] * 2 and less.output().type().dtype() is torch.bool


def test_results_follow_operands():
    graph = settled(NUMBER.format(kind="Double", value="2.") + "  %m : Double(2) = onnx::Mul(%x, %c)\n"
                    "  %y : Double(2) = onnx::Relu(%m)", "%x : Float(2)")  # fmt: skip
    assert node_of(graph, "onnx::Relu").output().type().dtype() is torch.float32


def test_others_stay():
    graph = settled("  %y : Float(2) = onnx::Foo(%x, %z)", "%x : Float(2), %z : Half(2)")
    assert types(node_of(graph, "onnx::Foo")) == [torch.float32, torch.float16]
