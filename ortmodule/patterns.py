"""A user's own fusions: wherever a captured graph computes one function, it shall compute another.

    from ortmodule import patterns

    patterns.register("softsign", lambda x: x / (1 + x.abs()), torch.nn.functional.softsign, [torch.randn(2, 3)])

Both functions are exported as a module would be, once for each type that a graph has, and the nodes of the first are
looked for in every graph that is captured from then on. What is replaced gets the gradient of its replacement.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx
import torch
from torch import nn

from ortmodule import blame, devices, export, io
from ortmodule.logger import LOGGER
from ortmodule.reference import DTYPES
from ortmodule.regions import Opaque
from ortmodule.state import Tree

Tensors = Sequence[torch.Tensor]

_COMMUTATIVE = {"Add", "Mul", "And", "Or", "Xor", "Equal", "Max", "Min", "Sum"}
#: How far the two functions may be apart on the examples, in float64 and relative to the largest element.
_TOLERANCE = 1e-6

_lock = threading.RLock()
_registered: dict[str, _Pattern] = {}


def register(
    name: str, pattern: Callable, replacement: Callable, examples: Sequence[torch.Tensor], check: bool = True
) -> None:
    """Replaces what ``pattern`` computes by what ``replacement`` computes, in all graphs captured from now on.

    Both take the same tensors and return one tensor. ``examples``: operands of the kinds that they are meant for, with
    no size 1 unless every operand there has it; numbers inside the functions (a scale, an epsilon, a rate of dropout)
    must be the graph's very numbers. A match may neither be looked into by anything outside of it nor be an output
    before its end. Patterns are tried in the order of their registration; what one has put in is not looked at again.

    ``check``: compares both on the examples in float64, results and gradients. Leave it off for functions that draw
    random numbers; a captured graph is compared with its module in any case.

    Raises ValueError for a name that is taken, for functions that cannot be exported, and for functions that differ.
    """
    with _lock:
        if name in _registered:
            raise ValueError(f"there is a pattern {name!r} already: unregister it first")
        found = _Pattern(name, pattern, replacement, [t.detach() for t in examples])
        if check:
            _compare(found)
        found.variant(_dtypes(found.examples)[:1], export.DEFAULT_OPSET)
        _registered[name] = found


def unregister(name: str) -> None:
    """Graphs that are captured from now on keep what the pattern describes. Raises KeyError for an unknown name."""
    with _lock:
        if name not in _registered:
            raise KeyError(f"there is no pattern {name!r}")
        del _registered[name]


def registered() -> list[str]:
    """The names of all patterns, in the order in which they are tried."""
    return list(_registered)


def apply(model: onnx.ModelProto, opset: int) -> dict[str, int]:
    """Rewrites ``model``; how often each pattern was found, those that were not found left out."""
    counts: dict[str, int] = {}
    with _lock:
        for pattern in list(_registered.values()):
            for types in _types_of(model):
                try:
                    variant = pattern.variant(types, opset)
                except ValueError as error:
                    LOGGER.warning("pattern %s is left out: %s", pattern.name, error)
                    continue
                if count := _rewrite(model, pattern.name, variant):
                    counts[pattern.name] = counts.get(pattern.name, 0) + count
    return counts


# --- what is registered -----------------------------------------------------------------------------------------------


@dataclass
class _Half:
    """One function as a graph: operands are inputs "input/0", ..., there is one output."""

    graph: onnx.GraphProto
    constants: dict[str, torch.Tensor]


@dataclass
class _Pattern:
    name: str
    pattern: Callable
    replacement: Callable
    examples: list[torch.Tensor]
    variants: dict[Any, tuple[_Half, _Half]] = field(default_factory=dict)

    def variant(self, types: Sequence[torch.dtype], opset: int) -> tuple[_Half, _Half]:
        """Both functions for floats of a type. Raises ValueError."""
        key = (tuple(types), opset, devices.autocast())
        if key not in self.variants:
            tensors = [t.to(types[0]) if types and t.is_floating_point() else t.clone() for t in self.examples]
            first, second = (
                self._export(function, what, tensors, opset)
                for function, what in ((self.pattern, "the pattern"), (self.replacement, "the replacement"))
            )
            self._check_operands(first)
            self.variants[key] = first, second
        return self.variants[key]

    def _export(self, function: Callable, what: str, tensors: Tensors, opset: int) -> _Half:
        from ortmodule.capture import CaptureError, capture  # which applies patterns

        module = _Function(function)
        leaves = [t.requires_grad_(t.is_floating_point()) for t in tensors]
        inputs, arguments = io.flatten((tuple(leaves), {}))
        if len(inputs) != len(leaves):
            raise ValueError("a tensor stands twice among the examples")
        try:
            with torch.enable_grad():
                opaque = Opaque({}, frozenset(), functions=False)
                found = capture(module.forward, module, Tree(module), arguments, inputs, opset, opaque, rewritten=False)
        except (CaptureError, io.Unflattenable) as error:
            raise ValueError(f"{what} of {self.name!r} cannot be exported: {error}") from error
        if found.trace.nodes:
            raise ValueError(
                f"{what} of {self.name!r} has an operator that PyTorch would run: {found.trace.nodes[0].name}"
            )
        graph = found.model.graph
        strange = [v.name for v in graph.input if not v.name.startswith(export.INPUT)]
        if strange:
            raise ValueError(f"{what} of {self.name!r} uses a tensor that is not among its operands")
        if len(graph.output) != 1 or len(found.trace.sources) != 1:
            raise ValueError(f"{what} of {self.name!r} does not return one computed tensor")
        return _Half(graph, blame.constants(found.model))

    def _check_operands(self, half: _Half) -> None:
        used = {name for node in half.graph.node for name in node.input}
        for i in range(len(self.examples)):
            if f"{export.INPUT}{i}" not in used:
                raise ValueError(f"the pattern of {self.name!r} does not use its operand {i}")


class _Function(nn.Module):
    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function = function

    def forward(self, *operands: torch.Tensor) -> torch.Tensor:
        result = self.function(*operands)
        # An operand as it is would be no part of the graph.
        return result.clone() if any(result is operand for operand in operands) else result


def _dtypes(tensors: Tensors) -> list[torch.dtype]:
    return list(dict.fromkeys(t.dtype for t in tensors if t.is_floating_point()))


def _types_of(model: onnx.ModelProto) -> list[tuple[torch.dtype, ...]]:
    """The types of floats in a graph's inputs and casts, one for each variant to look for."""
    found = [DTYPES.get(value.type.tensor_type.elem_type) for value in model.graph.input]
    found += [DTYPES.get(a.i) for node in model.graph.node if node.op_type == "Cast" for a in node.attribute]
    return [(dtype,) for dtype in dict.fromkeys(found) if dtype is not None and dtype.is_floating_point] or [()]


def _compare(pattern: _Pattern) -> None:
    """Raises ValueError where the functions differ on the examples."""
    both = []
    for function in (pattern.pattern, pattern.replacement):
        leaves = [t.double().requires_grad_() if t.is_floating_point() else t for t in pattern.examples]
        wrt = [t for t in leaves if t.requires_grad]
        result = function(*leaves)
        if not isinstance(result, torch.Tensor):
            raise ValueError(f"the functions of {pattern.name!r} must return one tensor")
        grads: Sequence[Any] = ()
        if result.requires_grad:
            dy = torch.linspace(0.5, 1.5, result.numel(), dtype=result.dtype).view(result.shape)
            grads = torch.autograd.grad(result, wrt, dy, allow_unused=True, materialize_grads=True)
        both.append((result.detach(), *grads))
    (first, *first_grads), (second, *second_grads) = both
    if first.shape != second.shape or first.dtype != second.dtype or len(first_grads) != len(second_grads):
        raise ValueError(f"the functions of {pattern.name!r} return tensors of another type or shape")
    for i, (a, b) in enumerate(zip([first, *first_grads], [second, *second_grads], strict=True)):
        scale = max(1e-30, float(a.double().abs().max())) if a.numel() else 1.0
        if not torch.allclose(a.double(), b.double(), rtol=0, atol=_TOLERANCE * scale, equal_nan=True):
            what = f"gradients of operand {i - 1}" if i else "results"
            raise ValueError(f"the {what} of the two functions of {pattern.name!r} differ")


# --- finding it -------------------------------------------------------------------------------------------------------


class _Host:
    """A graph in which a pattern is looked for."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.graph = model.graph
        self.constants = blame.constants(model)
        self.makers = {name: node for node in self.graph.node for name in node.output if name}
        self.outputs = {value.name for value in self.graph.output}
        self.users: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in self.graph.node:
            for name in node.input:
                self.users[name].append(node)


class _Search:
    """The pattern's values and nodes, and what they are in the host."""

    def __init__(self, half: _Half, host: _Host) -> None:
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
            if _same_constant(self.half.constants[ours], self.host.constants.get(theirs)):
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
        return a == b or (a in constants and _same_constant(constants[a], constants.get(b)))

    def _is_private(self, result: str, nodes: list[onnx.NodeProto]) -> bool:
        inside = {id(node) for node in nodes}
        for node in nodes:
            for name in node.output:
                if name == result:
                    continue
                if name in self.host.outputs or any(id(user) not in inside for user in self.host.users[name]):
                    return False
        return True


def _same_constant(a: torch.Tensor, b: torch.Tensor | None) -> bool:
    return b is not None and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def _same_operator(a: onnx.NodeProto, b: onnx.NodeProto) -> bool:
    def attributes(node: onnx.NodeProto) -> list[bytes]:
        return sorted(a.SerializeToString(deterministic=True) for a in node.attribute)

    if (a.op_type, a.domain, len(a.input), len(a.output)) != (b.op_type, b.domain, len(b.input), len(b.output)):
        return False
    return attributes(a) == attributes(b)


# --- replacing it -----------------------------------------------------------------------------------------------------


def _rewrite(model: onnx.ModelProto, name: str, variant: tuple[_Half, _Half]) -> int:
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


def _first(half: _Half, host: _Host, own: set[str]) -> tuple[int, dict[str, str], list[onnx.NodeProto]] | None:
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
