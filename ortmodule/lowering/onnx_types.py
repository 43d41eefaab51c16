"""Settles the types of operands in an exported graph, in the place of the exporter's own pass.

The trace's operators have operands of the types that PyTorch computes with (`type_promotion.py`). What is left are the
constants that translations bring along, as numbers of some type. The exporter would take every value of rank 0 for such
a number, and compute in the default type wherever there is nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ortmodule.core.dtypes import ONNX_TYPES, dtype_of
from ortmodule.core.torch_private import TensorType, TracedGraph, TracedNode, TracedValue

#: Operators whose operands have one type, and the first of these operands.
_ARITHMETIC = {
    f"onnx::{name}": 0 for name in ("Add", "Sub", "Mul", "Div", "Mod", "Min", "Max", "Sum", "Concat", "Clip")
}
_ARITHMETIC |= {"onnx::MatMul": 0, "onnx::Gemm": 0, "onnx::PRelu": 0, "onnx::Pow": 0, "onnx::Where": 1}
_COMPARISONS = {f"onnx::{name}": 0 for name in ("Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual")}
#: Operators whose result has the type of their first operand.
_SAME = {
    f"onnx::{name}"
    for name in (  # noqa: SIM905
        "Abs Neg Exp Log Sqrt Reciprocal Floor Ceil Round Sign Sin Cos Tan Asin Acos Atan Sinh Cosh Tanh "
        "Sigmoid Relu Erf Softplus Softmax LogSoftmax Identity Reshape Squeeze Unsqueeze Transpose Expand "
        "Slice Gather GatherElements GatherND ScatterElements ScatterND Flatten Tile Pad CumSum Trilu "
        "ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceLogSumExp "
        "ReduceSumSquare"
    ).split()
}


def settle(graph: TracedGraph, *_: Any) -> None:
    """Gives the operands of every arithmetic operator and comparison one type, by other constants and casts."""
    for node in _nodes(graph):
        kind = node.kind()
        if kind in _SAME:
            _retype(node, dtype_of(next(node.inputs())))
            continue
        first = _ARITHMETIC.get(kind, _COMPARISONS.get(kind))
        if first is None:
            continue
        wanted = _wanted(list(node.inputs())[first:], None if kind in _COMPARISONS else dtype_of(node.output()))
        if wanted is None:
            continue
        for i, value in enumerate(node.inputs()):
            if i >= first and dtype_of(value) not in (None, wanted):
                node.replaceInput(i, _as(graph, node, value, wanted))
        if kind in _ARITHMETIC:
            _retype(node, wanted)


def _retype(node: TracedNode, dtype: torch.dtype | None) -> None:
    """What translations said of a type may come from a constant that has another one now."""
    kind = node.output().type()
    if dtype is not None and isinstance(kind, TensorType) and kind.dtype() not in (None, dtype):
        node.output().setType(kind.with_dtype(dtype))


def _nodes(block: Any) -> Iterator[TracedNode]:
    for node in list(block.nodes()):
        for inner in node.blocks():
            yield from _nodes(inner)
        yield node


def _constant(value: TracedValue) -> torch.Tensor | None:
    node = value.node()
    if node.kind() == "onnx::Constant" and node.hasAttribute("value") and node.kindOf("value") == "t":
        return node.t("value")
    return None


def _wanted(values: list[TracedValue], result: torch.dtype | None) -> torch.dtype | None:
    """As PyTorch would: by tensors before tensors of rank 0, by those before numbers, unless of a higher category.
    Where no tensor's type is known it is that of the result."""
    numbers, tensors = [], []
    for value in values:
        constant, dtype = _constant(value), dtype_of(value)
        if value.node().mustBeNone():
            continue
        if constant is not None and constant.dim() == 0:
            numbers.append(constant)
        elif dtype is not None:
            rank = value.type().dim()
            tensors.append(torch.empty([1] * (1 if rank is None else min(rank, 1)), dtype=dtype))
    if not tensors:
        return result or (torch.result_type(*numbers[:2]) if len(numbers) > 1 else None)
    wanted = tensors[0]
    for other in tensors[1:]:
        wanted = torch.empty([1] * max(wanted.dim(), other.dim()), dtype=torch.result_type(wanted, other))
    for number in numbers:
        wanted = wanted.to(torch.result_type(wanted, number.item()))
    return wanted.dtype


def _as(graph: TracedGraph, node: TracedNode, value: TracedValue, dtype: torch.dtype) -> TracedValue:
    constant = _constant(value)
    with graph.insert_point_guard(node):
        if constant is not None:
            made = graph.insertNode(graph.create("onnx::Constant", 1))
            made.t_("value", constant.to(dtype))
        else:
            made = graph.insertNode(graph.create("onnx::Cast", [value], 1))
            made.i_("to", ONNX_TYPES[dtype])
        made.copyMetadata(node)
    made.output().setType(value.type().with_dtype(dtype))
    return made.output()
