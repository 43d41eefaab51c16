"""Reads ONNX graphs: attributes, constants, nodes that outputs depend on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx
import torch
from onnx import numpy_helper

#: Operators that draw random numbers. Dropout's second output is its mask.
RANDOM = {
    "Dropout",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
    "Bernoulli",
    "Multinomial",
}
#: Operators whose results are functions of their operands' sizes, not of elements.
OF_SIZES = ("Shape", "Size")


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """A node's attributes by name; text as `str`."""
    found = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in found.items()}


def tensor(proto: onnx.TensorProto) -> torch.Tensor:
    """A constant of a graph as a tensor of its own."""
    if proto.data_type == onnx.TensorProto.BFLOAT16:
        return torch.from_numpy(numpy_helper.to_array(proto).astype("float32")).to(torch.bfloat16)
    return torch.from_numpy(numpy_helper.to_array(proto).copy())


def constant(node: onnx.NodeProto) -> torch.Tensor:
    """The value of a Constant node. Raises ValueError for one without a value."""
    value = constant_of(attributes(node))
    if value is None:
        raise ValueError(f"the constant {node.output[0]} has no value")
    return value


def constant_of(attributes: dict[str, Any]) -> torch.Tensor | None:
    """The value of a Constant node with these attributes; None without one."""
    for name, value in attributes.items():
        if name == "value":
            return tensor(value)
        return torch.tensor(value, dtype=torch.float32 if "float" in name else torch.int64)
    return None


def constants(model: onnx.ModelProto) -> dict[str, torch.Tensor]:
    """The constants of a graph by name: its initializers and its Constant nodes."""
    found = {proto.name: tensor(proto) for proto in model.graph.initializer}
    return found | {node.output[0]: constant(node) for node in model.graph.node if node.op_type == "Constant"}


def drawing(model: onnx.ModelProto) -> Iterator[tuple[onnx.NodeProto, float]]:
    """The nodes of a graph that draw numbers, with what share a Dropout drops; one that drops nothing draws none."""
    known: dict[str, torch.Tensor] | None = None
    for node in model.graph.node:
        if node.op_type not in RANDOM or node.domain:
            continue
        if node.op_type != "Dropout":
            yield node, 0.0
            continue
        known = constants(model) if known is None else known
        values = [known[name].item() if name in known else None for name in node.input[1:3]]
        ratio = 0.5 if not values or values[0] is None else float(values[0])
        if len(values) == 2 and values[1] and ratio:
            yield node, ratio


def without_dead(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with the nodes that the outputs depend on."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    wanted, alive = {value.name for value in model.graph.output}, []
    for node in reversed(model.graph.node):
        if wanted.intersection(node.output):
            wanted |= set(node.input)
            alive.append(node)
    del changed.graph.node[:]
    changed.graph.node.extend(reversed(alive))
    return changed
