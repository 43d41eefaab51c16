"""Finds a user's patterns in an exported graph, and puts their replacements in (`patterns.py` registers them)."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import onnx
import torch

from ortmodule.core.dtypes import TORCH_TYPES, same_tensor
from ortmodule.core.logger import warn_once
from ortmodule.core.onnx_utils import constants

_COMMUTATIVE = {"Add", "Mul", "And", "Or", "Xor", "Equal", "Max", "Min", "Sum"}


class Pattern(Protocol):
    """A registered pattern."""

    name: str

    def variant(self, types: Sequence[torch.dtype], opset: int) -> tuple[Function, Function]: ...


LOCK = threading.RLock()
PATTERNS: dict[str, Pattern] = {}  # by name, in the order in which they are tried


def apply(model: onnx.ModelProto, opset: int) -> dict[str, int]:
    """Rewrites ``model``; how often each pattern was found, those that were not found left out."""
    counts: dict[str, int] = {}
    with LOCK:
        for pattern in list(PATTERNS.values()):
            for types in _types_of(model):
                try:
                    variant = pattern.variant(types, opset)
                except ValueError as error:
                    warn_once(f"the pattern {pattern.name} is left out: {error}")
                    continue
                if count := _rewrite(model, pattern.name, variant):
                    counts[pattern.name] = counts.get(pattern.name, 0) + count
    return counts


@dataclass
class Function:
    """One function as a graph: operands are inputs "input/0", ..., there is one output."""

    graph: onnx.GraphProto
    constants: dict[str, torch.Tensor]


def _types_of(model: onnx.ModelProto) -> list[tuple[torch.dtype, ...]]:
    """The types of floats in a graph's inputs and casts, one for each variant to look for."""
    found = [TORCH_TYPES.get(value.type.tensor_type.elem_type) for value in model.graph.input]
    found += [TORCH_TYPES.get(a.i) for node in model.graph.node if node.op_type == "Cast" for a in node.attribute]
    return [(dtype,) for dtype in dict.fromkeys(found) if dtype is not None and dtype.is_floating_point] or [()]


# --- finding it -------------------------------------------------------------------------------------------------------


class _Host:
    """A graph in which a pattern is looked for."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.graph = model.graph
        self.constants = constants(model)
        self.makers = {name: node for node in self.graph.node for name in node.output if name}
        self.outputs = {value.name for value in self.graph.output}
        self.users: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in self.graph.node:
            for name in node.input:
                self.users[name].append(node)


class _Search:
    """The pattern's values and nodes, and what they are in the host."""

    def __init__(self, half: Function, host: _Host) -> None:
        self.half, self.host = half, host
        self.makers = {name: node for node in half.graph.node for name in node.output if name}

    def at(self, root: onnx.NodeProto) -> tuple[dict[str, str], list[onnx.NodeProto]] | None:
        """The host's values by the pattern's, and the nodes that go, when the pattern ends at ``root``."""
        output = self.half.graph.output[0].name
        last = self.makers[output]
        if root.op_type != last.op_type or len(root.output) != len(last.output):
            return None
        place = list(last.output).index(output)
        for values, nodes in self._solve([(output, root.output[place])], {}, {}):
            if self._is_private(root.output[place], list(nodes.values())):
                return values, list(nodes.values())
        return None

    def _solve(self, todo: list[tuple[str, str]], values: dict, nodes: dict) -> Iterator[tuple[dict, dict]]:
        if not todo:
            yield values, nodes
            return
        (ours, theirs), *rest = todo
        if ours in values or not ours or not theirs:
            if self._same_value(values.get(ours, ""), theirs):
                yield from self._solve(rest, values, nodes)
            return
        now = values | {ours: theirs}
        if ours in self.half.constants:
            if (value := self.host.constants.get(theirs)) is not None and same_tensor(self.half.constants[ours], value):
                yield from self._solve(rest, now, nodes)
            return
        node = self.makers.get(ours)
        if node is None:  # an operand
            yield from self._solve(rest, now, nodes)
            return
        other = self.host.makers.get(theirs)
        if other is None or not _same_operator(node, other):
            return
        if list(node.output).index(ours) != list(other.output).index(theirs):
            return
        more = nodes | {id(other): other}
        orders = [list(other.input)]
        if node.op_type in _COMMUTATIVE and len(other.input) == 2:
            orders.append(orders[0][::-1])
        for order in orders:
            yield from self._solve([*zip(node.input, order, strict=True), *rest], now, more)

    def _same_value(self, a: str, b: str) -> bool:
        """One value, or two constants with the same elements: the exporter writes a number wherever it is used."""
        constants = self.host.constants
        return a == b or (a in constants and b in constants and same_tensor(constants[a], constants[b]))

    def _is_private(self, result: str, nodes: list[onnx.NodeProto]) -> bool:
        inside = {id(node) for node in nodes}
        for node in nodes:
            for name in node.output:
                if name == result:
                    continue
                if name in self.host.outputs or any(id(user) not in inside for user in self.host.users[name]):
                    return False
        return True


def _same_operator(a: onnx.NodeProto, b: onnx.NodeProto) -> bool:
    def attributes(node: onnx.NodeProto) -> list[bytes]:
        return sorted(a.SerializeToString(deterministic=True) for a in node.attribute)

    if (a.op_type, a.domain, len(a.input), len(a.output)) != (b.op_type, b.domain, len(b.input), len(b.output)):
        return False
    return attributes(a) == attributes(b)


# --- replacing it -----------------------------------------------------------------------------------------------------


def _rewrite(model: onnx.ModelProto, name: str, variant: tuple[Function, Function]) -> int:
    """Replaces every match; their number."""
    half, replacement = variant
    count = 0
    own: set[str] = set()  # results of what was put in
    while (match := _first(half, _Host(model), own)) is not None:
        place, values, nodes = match
        result = values[half.graph.output[0].name]
        own |= _put_in(model.graph, place, f"pattern/{name}/{len(own)}/", replacement.graph, values, result)
        for node in nodes:
            model.graph.node.remove(node)
        count += 1
    return count


def _first(half: Function, host: _Host, own: set[str]) -> tuple[int, dict[str, str], list[onnx.NodeProto]] | None:
    """The first node at which the pattern ends, and the match. Nodes that make ``own`` are passed over."""
    search = _Search(half, host)
    for place, root in enumerate(host.graph.node):
        if not own.intersection(root.output) and (found := search.at(root)):
            return place, *found
    return None


def _put_in(
    graph: onnx.GraphProto, place: int, prefix: str, source: onnx.GraphProto, operands: dict[str, str], result: str
) -> set[str]:
    """Copies of ``source``'s nodes behind ``graph.node[place]``; the names of their results."""
    last = source.output[0].name
    made = {name for node in source.node for name in node.output} | {t.name for t in source.initializer}

    def renamed(name: str) -> str:
        if name == last and name in made:
            return result
        return prefix + name if name in made else operands.get(name, name)

    copies = []
    for node in source.node:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.name = prefix + node.name
        copy.input[:] = [renamed(n) if n else n for n in node.input]
        copy.output[:] = [renamed(n) if n else n for n in node.output]
        copies.append(copy)
    for tensor in source.initializer:
        graph.initializer.add().CopyFrom(tensor)
        graph.initializer[-1].name = renamed(tensor.name)
    if last not in made:
        copies.append(onnx.helper.make_node("Identity", [operands[last]], [result], name=prefix + "identity"))
    for i, copy in enumerate(copies):
        graph.node.insert(place + 1 + i, copy)
    return {name for copy in copies for name in copy.output}
