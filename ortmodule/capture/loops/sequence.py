"""Writes an exported graph as a sequence of items in which one that repeats can be found.

An exported loop is the same nodes again and again, but not quite: its constants are shared with others by chance, a
Concat of its results has as many operands as there were steps. So constants are no items, but operands with a value;
operands of a Concat, parts of a Split, results of the graph and numbers that Python read are items of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import onnx
from onnx import numpy_helper

from ortmodule.capture.scalar_guards import Read
from ortmodule.core.errors import Unrepeatable

#: Operators with as many operands, or results, as there are.
_MANY_OPERANDS = frozenset(("Concat", "Sum", "Max", "Min", "Mean"))
_MANY_RESULTS = frozenset(("Split",))
NODE, OPERAND, PART, RESULT, READ = "node", "operand", "part", "result", "read"


class Ref(NamedTuple):
    """A result of another item."""

    item: int
    port: int


@dataclass(frozen=True)
class Literal:
    """A constant."""

    kind: int  # ONNX's type
    value: numpy.ndarray

    def same(self, other: Literal) -> bool:
        return (
            self.kind == other.kind
            and self.value.shape == other.value.shape
            and self.value.tobytes() == other.value.tobytes()
        )


Operand = Ref | Literal | str  # str: an input of the graph, or "" for none


@dataclass
class Item:
    """A node, or a part of one. Two with one ``token`` do the same, to other operands."""

    what: str
    token: tuple
    operands: list[Operand]
    outputs: list[str]  # names of its results
    node: onnx.NodeProto | None = None
    read: Read | None = None


def sequence(model: onnx.ModelProto, reads: Sequence[Read]) -> list[Item]:
    """The items of ``model``, in order, and of ``reads``, the numbers that its trace has seen Python read from sizes.

    Raises Unrepeatable.
    """
    literals = {proto.name: _literal(proto) for proto in model.graph.initializer}
    inputs = {value.name for value in model.graph.input}
    refs: dict[str, Ref] = {}
    items: list[Item] = []

    def operand(name: str) -> Operand:
        found = literals.get(name) or refs.get(name)
        if found is None and name and name not in inputs:
            raise Unrepeatable(f"{name} is from nowhere")
        return name if found is None else found

    def add(item: Item) -> None:
        for port, name in enumerate(item.outputs):
            refs[name] = Ref(len(items), port)
        items.append(item)

    for node in model.graph.node:
        if node.op_type == "Constant":
            literals[node.output[0]] = _constant(node)
            continue
        many, parts = node.op_type in _MANY_OPERANDS, node.op_type in _MANY_RESULTS
        operands = [operand(name) for name in node.input]
        if many:
            for each in operands:
                add(Item(OPERAND, (OPERAND, node.op_type, _kind(each)), [each], []))
            operands = []
        kinds = tuple(_kind(each) for each in operands)
        outputs = [] if parts else list(node.output)
        token = (node.op_type, node.domain, _attributes(node), kinds, len(outputs))
        add(Item(NODE, token, operands, outputs, node))
        for name in node.output if parts else ():
            add(Item(PART, (PART, node.op_type), [], [name]))
    for value in model.graph.output:
        add(Item(RESULT, (RESULT, value.type.tensor_type.elem_type), [operand(value.name)], []))
    for read in reads:
        number = Literal(onnx.TensorProto.DOUBLE, numpy.array(read.value, dtype=numpy.float64))
        add(Item(READ, (READ, read.place, read.depends, read.submodule), [number], [], read=read))
    return items


def _kind(operand: Operand) -> Any:
    return operand if isinstance(operand, str) else type(operand).__name__


def _literal(proto: onnx.TensorProto) -> Literal:
    if proto.data_type == onnx.TensorProto.STRING:
        raise Unrepeatable("a constant is text")
    if proto.raw_data and proto.data_type == onnx.TensorProto.BFLOAT16:
        return Literal(proto.data_type, numpy.frombuffer(proto.raw_data, dtype=numpy.int16).reshape(tuple(proto.dims)))
    return Literal(proto.data_type, numpy.asarray(numpy_helper.to_array(proto)))


def _constant(node: onnx.NodeProto) -> Literal:
    (attribute,) = node.attribute
    if attribute.type != onnx.AttributeProto.TENSOR:
        raise Unrepeatable(f"the constant {node.output[0]} is no tensor")
    return _literal(attribute.t)


def _attributes(node: onnx.NodeProto) -> tuple[bytes, ...]:
    if any(a.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) for a in node.attribute):
        raise Unrepeatable(f"{node.name} has a graph inside")
    return tuple(sorted(a.SerializeToString(deterministic=True) for a in node.attribute))


def alike(one: Sequence[Item], other: Sequence[Item]) -> bool:
    """Are two sequences the same, up to names?"""

    def same(a: Operand, b: Operand) -> bool:
        return a.same(b) if isinstance(a, Literal) and isinstance(b, Literal) else a == b

    return len(one) == len(other) and all(
        a.token == b.token and len(a.operands) == len(b.operands) and all(map(same, a.operands, b.operands))
        for a, b in zip(one, other, strict=True)
    )
