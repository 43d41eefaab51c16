"""Finds which values of a graph in pieces carry a gradient, and which inputs of a piece one reaches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import onnx

from ortmodule.core.dtypes import TORCH_TYPES
from ortmodule.core.names import STATE
from ortmodule.core.onnx_utils import OF_SIZES, attributes
from ortmodule.lowering.cuts.graph_cuts import Piece, used_by

#: Operators that no gradient passes.
_STOPPING = ("StopGradient", *OF_SIZES)
#: Those whose results are no floats.
_WHOLE = (
    "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal", "Not", "And", "Or", "Xor", "IsNaN", "IsInf", "NonZero",
    "ArgMax", "ArgMin", "Unique",
)  # fmt: skip


def carrying(
    nodes: Iterable[onnx.NodeProto], leaves: Iterable[str], said: Mapping[str, bool], flags: Sequence[Sequence[bool]]
) -> set[str]:
    """The values that carry a gradient: ``leaves``, and what is computed with one that does, unless ``said`` tells.

    ``flags``: of each node that PyTorch runs, which of its results do.
    """
    found = set(leaves)
    for node in nodes:
        if node.op_type == "PythonOp":
            own = zip(node.output[1:], flags[attributes(node)["number"]], strict=False)
            found.update(name for name, flag in own if flag)
            carries = False
        else:
            carries = node.op_type not in _STOPPING and not found.isdisjoint(used_by(node))
        found.update(name for name in node.output if said.get(name, carries))
    return found


def reached_by(step: Piece, differentiable: Set[str], leaves: Set[Any]) -> list[frozenset[Any]]:
    """For each output of a piece: the numbers of its inputs, and the names of those parameters and buffers among
    ``leaves``, that it may have a gradient for. ``differentiable``: the values that carry one."""
    producer = {name: node for node in step.nodes for name in node.output}
    places = {name: place for place, name in enumerate(step.inputs)}
    found = []
    for output in step.outputs:
        waiting, seen = [output], set()
        while waiting:
            name = waiting.pop()
            if name in seen or name not in differentiable:
                continue
            seen.add(name)
            if name in producer and _has_gradient(name, producer[name]):
                waiting += used_by(producer[name])
        states = {name.removeprefix(STATE) for name in seen if name.startswith(STATE)} & leaves
        found.append(frozenset(states | {places[name] for name in seen if name in places}))
    return found


def _has_gradient(name: str, node: onnx.NodeProto) -> bool:
    """May this result of a node have a gradient with respect to operands?"""
    if node.op_type == "Cast":
        return TORCH_TYPES[attributes(node)["to"]].is_floating_point
    return node.op_type not in _STOPPING + _WHOLE and not (node.op_type == "TopK" and name == node.output[1])
