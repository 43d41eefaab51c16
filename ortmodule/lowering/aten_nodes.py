"""Leaves ATen operators without ONNX to PyTorch, inside the graph and backward included.

The engine has no type for some values (complex numbers, lists of tensors): the operators that exchange these form one
host node. Numbers that an operator takes are computed once more inside of the node, from the sizes and values of
tensors, which are the node's operands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ortmodule.core import devices, pytree
from ortmodule.core.dtypes import DTYPES, is_tensor, same_tensor
from ortmodule.core.errors import NotTraceable
from ortmodule.core.torch_private import ListType, TracedGraph, TracedNode, TracedValue, jit_pass_dce, parse_schema
from ortmodule.host.host_node import Modes, Node, Spec
from ortmodule.host.opaque_regions import CALL, Regions
from ortmodule.lowering import export
from ortmodule.lowering.traced_tensors import dtype_of, sizes_of

#: What only carries values.
_CARRIERS = {"prim::ListConstruct", "prim::TupleConstruct", "prim::ListUnpack", "prim::TupleUnpack", "prim::Constant"}


def leave_to_torch(graph: TracedGraph, opset: int, regions: Regions) -> None:
    """Operators of a trace that cannot be exported become nodes that PyTorch runs, in place."""
    is_engines = _Types(graph)
    left = _not_in_onnx(graph, opset, regions.opaque.kinds, is_engines)
    if not left:
        return
    differentiable = _differentiable(graph, regions)
    for members in _groups(list(graph.nodes()), left, is_engines):
        _replace(graph, members, regions, differentiable, is_engines)
    jit_pass_dce(graph)


def _differentiable(graph: TracedGraph, regions: Regions) -> set[int]:
    """The values that carry a gradient. (What was put in an operator's place was traced without.)"""
    found = {value.unique() for value in graph.inputs() if is_tensor(value) and value.requires_grad()}
    for node in graph.nodes() if regions.nodes or torch.is_grad_enabled() else ():
        if node.kind() == "aten::detach" or not any(value.unique() in found for value in node.inputs()):
            continue
        for value in node.outputs():
            dtype = value.type().dtype() if is_tensor(value) else torch.float32
            if dtype is None or dtype.is_floating_point or dtype.is_complex:
                found.add(value.unique())
    return found


def _not_in_onnx(graph: TracedGraph, opset: int, kinds: frozenset[str], is_engines: _Types) -> set[TracedNode]:
    """The nodes that ONNX does not say, or that have to do with a type that the engine does not have."""
    untyped = {value.unique() for value in graph.inputs() if is_tensor(value) and not is_engines(value)}
    unknown: dict[str, bool] = {}
    found = set()
    for node in graph.nodes():
        kind = node.kind()
        if kind not in unknown:
            unknown[kind] = kind.startswith("aten::") and (kind in kinds or not export.knows(kind, opset))
        outputs = list(node.outputs())
        has_type = True
        for value in outputs:
            if is_tensor(value) and not is_engines(value):
                untyped.add(value.unique())
                has_type = False
        if kind in _PLAIN or not (unknown[kind] or untyped):
            continue
        if not any(_holds_tensors(value) for value in outputs):
            continue
        if unknown[kind]:
            if kind in _STATISTICS and _changes_statistics(node):
                raise NotTraceable(f"{kind} changes statistics, which PyTorch cannot do inside of a graph")
            if kind != "aten::copy_":
                found.add(node)
        elif kind in ("prim::Constant", CALL):
            continue
        elif not has_type or any(value.unique() in untyped for value in node.inputs()):
            found.add(node)
    return found


#: (..., running mean, running variance, training or `use_input_stats`, ...): no schema says that they are changed.
_STATISTICS = {"aten::batch_norm", "aten::instance_norm"}


def _changes_statistics(node: TracedNode) -> bool:
    return is_tensor(node.inputsAt(3)) and node.inputsAt(5).toIValue() is not False


def _holds_tensors(value: TracedValue) -> bool:
    return "Tensor" in value.type().annotation_str


class _Types:
    """Says of a tensor of a graph whether the engine has its type, and its layout."""

    def __init__(self, graph: TracedGraph) -> None:
        self._sparse: set[int] = set()
        for node in graph.nodes():
            if node.kind() in _SPARSE or any(value.unique() in self._sparse for value in node.inputs()):
                # A trace knows the sizes of dense tensors alone.
                outputs = [value for value in node.outputs() if is_tensor(value)]
                self._sparse |= {value.unique() for value in outputs if value.type().sizes() is None}

    def __call__(self, value: TracedValue) -> bool:
        dtype = value.type().dtype()
        return (dtype is None or dtype in DTYPES) and value.unique() not in self._sparse


#: What makes a sparse tensor of dense ones.
_SPARSE = {"aten::sparse_coo_tensor", "aten::to_sparse"}


def _stays_inside(value: TracedValue, is_engines: _Types) -> bool:
    return not is_tensor(value) or not is_engines(value)


# --- which operators belong together ----------------------------------------------------------------------------------


def _groups(nodes: list[TracedNode], left: set[TracedNode], is_engines: _Types) -> list[list[TracedNode]]:
    """Sets of nodes in program order, such that what is between them are tensors of the engine's types."""
    links = _Links(nodes, is_engines)
    group = {i: {i} for i, node in enumerate(nodes) if node in left}

    def join(a: int, b: int) -> bool:
        group.setdefault(b, {b})
        if group[a] is group[b]:
            return False
        merged = group[a] | group[b]
        for i in merged:
            group[i] = merged
        return True

    changed = True
    while changed:
        changed = False
        for i, node in enumerate(nodes):
            if i in group and node.kind() != "prim::Constant":
                for other in links.tied(i):
                    changed |= join(i, other)
        # What a group waits for while it is needed itself belongs to it.
        for members in {id(g): g for g in group.values()}.values():
            for i in links.after(members) & links.before(members) - members:
                if nodes[i].kind() == CALL:
                    raise NotTraceable("what PyTorch runs inside the graph would have to run in two parts")
                changed |= join(next(iter(members)), i)
    unique = {id(members): members for members in group.values()}
    return [[nodes[i] for i in sorted(members)] for members in unique.values()]


class _Links:
    """Which nodes of a trace follow from which others, by their places: the trace itself takes long to ask."""

    def __init__(self, nodes: list[TracedNode], is_engines: _Types) -> None:
        self._nodes, self._is_engines = nodes, is_engines
        self._place = {node: i for i, node in enumerate(nodes)}
        #: By node, for each of its operands: the node that makes it, or -1, and whether it is a tensor.
        self._operands = [
            [(self._place.get(value.node(), -1), is_tensor(value)) for value in node.inputs()] for node in nodes
        ]
        self._tied: dict[int, list[int]] = {}

    def tied(self, i: int) -> list[int]:
        """The nodes with which this one exchanges what the engine has no type for."""
        if i not in self._tied:
            self._tied[i] = list(dict.fromkeys(self._exchanging(self._nodes[i])))
        return self._tied[i]

    def _exchanging(self, node: TracedNode) -> Iterator[int]:
        for value in node.outputs():
            for use in value.uses() if _stays_inside(value, self._is_engines) else ():
                if use.user not in self._place:
                    raise NotTraceable(f"{node.kind()} gives the module a result that the engine has no type for")
                yield self._place[use.user]
        for value in node.inputs():
            maker = value.node()
            untyped = is_tensor(value) and not self._is_engines(value)
            if untyped and maker in self._place and maker.kind() != "prim::Constant":
                yield self._place[maker]

    def after(self, members: set[int]) -> set[int]:
        """The nodes that need a tensor of these, and these."""
        found = set(members)
        for i in range(min(members), len(self._nodes)):
            if i not in found and any(maker in found for maker, _ in self._operands[i]):
                found.add(i)
        return found

    def before(self, members: set[int]) -> set[int]:
        """The nodes whose tensors these need, and these; numbers are computed anew."""
        found, waiting = set(members), list(members)
        while waiting:
            for maker in self._needed(waiting.pop(), members):
                if maker not in found:
                    found.add(maker)
                    waiting.append(maker)
        return found

    def _needed(self, i: int, members: set[int]) -> Iterator[int]:
        """What makes the tensors that a node needs, those behind numbers and lists included."""
        waiting = [i]
        while waiting:
            for maker, holds_tensor in self._operands[waiting.pop()]:
                if maker >= 0 and (holds_tensor or maker in members):
                    yield maker
                elif maker >= 0:
                    waiting.append(maker)


# --- one group as a function ------------------------------------------------------------------------------------------


class _Program:
    """The operators of a group, called one after the other."""

    def __init__(self, members: Sequence[TracedNode]) -> None:
        self.operands: list[TracedValue] = []
        self.steps: list[tuple[Callable, list[int], list[int]]] = []
        self._given: list[int] = []  # places of the operands
        self._fixed: dict[int, Any] = {}  # constants, by place
        self._places: dict[int, int] = {}
        self._outline: list[tuple[str, list[int], list[int]]] = []
        self._constants: list[Any] = []
        for node in members:
            self._add(node)

    def _add(self, node: TracedNode) -> None:
        places = [self._place(value) for value in node.inputs()]
        results = []
        for value in node.outputs():
            results.append(self._places.setdefault(value.unique(), len(self._places)))
        if node.kind() == "prim::Constant":
            self._fixed[results[0]] = node.output().toIValue()
        else:
            self.steps.append((_function(node), places, results))
        self._outline.append((node.kind(), places, results))
        if node.kind() == "prim::Constant":
            self._constants.append(node.output().toIValue())

    def _place(self, value: TracedValue) -> int:
        if value.unique() not in self._places:
            if is_tensor(value) and value.node().kind() != "prim::Constant":
                self.operands.append(value)
                self._places[value.unique()] = len(self._places)
                self._given.append(self._places[value.unique()])
            else:
                self._add(value.node())
        return self._places[value.unique()]

    def keep(self, results: Sequence[TracedValue]) -> None:
        self.results = [self._places[value.unique()] for value in results]
        self._size = len(self._places)

    def same_as(self, other: _Program) -> bool:
        """Do both do the same with any operands? A size that became a number is a constant."""
        return (
            (self._outline, self.results) == (other._outline, other.results)
            and len(self._constants) == len(other._constants)
            and all(map(_same_argument, self._constants, other._constants))
        )

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        values: list[Any] = [None] * self._size
        for place, constant in self._fixed.items():
            values[place] = constant
        for place, tensor in zip(self._given, tensors, strict=True):
            values[place] = tensor
        for function, places, results in self.steps:
            found = function(*[values[i] for i in places])
            if len(results) == 1:
                values[results[0]] = found
            else:
                for place, value in zip(results, found, strict=True):
                    values[place] = value
        return _each_its_own([values[i] for i in self.results], tensors)


def _each_its_own(found: list[torch.Tensor], operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """An operator that has nothing to do returns what it was given: these become views, since results are told apart by
    identity."""
    seen = {id(tensor) for tensor in operands}
    for i, tensor in enumerate(found):
        if id(tensor) in seen:
            found[i] = tensor.view_as(tensor)
        seen.add(id(found[i]))
    return found


def _same_argument(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return same_tensor(a, b)
    return type(a) is type(b) and repr(a) == repr(b)  # NaN is NaN


_PLAIN: dict[str, Callable] = {
    "prim::ListConstruct": lambda *values: list(values),
    "prim::TupleConstruct": lambda *values: tuple(values),
    "prim::ListUnpack": lambda values: values if len(values) != 1 else values[0],
    "prim::TupleUnpack": lambda values: values if len(values) != 1 else values[0],
    "prim::NumToTensor": torch.tensor,
    "aten::Int": int,
    "aten::Float": float,
    "aten::Bool": bool,
    "aten::IntImplicit": int,
    "aten::FloatImplicit": float,
    "aten::ScalarImplicit": lambda tensor: tensor.item(),
    "aten::item": lambda tensor: tensor.item(),
}


def _function(node: TracedNode) -> Callable:
    """What a node does, as a function of its inputs."""
    kind = node.kind()
    if kind in _PLAIN:
        return _PLAIN[kind]
    try:
        schema = parse_schema(node.schema())
        packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"))
        operator = getattr(packet, schema.overload_name or "default", packet)
    except (RuntimeError, AttributeError):
        raise NotTraceable(f"{kind} is no operator that can be called alone") from None
    by_name = [argument.name for argument in schema.arguments if argument.kwarg_only]
    count = len(schema.arguments) - len(by_name)  # those stand behind the others
    if not by_name:
        return operator

    def call(*values: Any) -> Any:
        return operator(*values[:count], **dict(zip(by_name, values[count:], strict=True)))

    return call


#: Operators that compute vectors where a number (its place) says so, without which they have no gradient. Where an
#: operator was put in another's place it was traced without one.
_VECTORS = {"aten::_linalg_eigh": 2, "aten::_linalg_svd": 2}


def _compute_vectors(graph: TracedGraph, node: TracedNode, differentiable: set[int]) -> None:
    place = _VECTORS.get(node.kind())
    if place is None or not torch.is_grad_enabled() or node.inputsAt(0).unique() not in differentiable:
        return
    with graph.insert_point_guard(node):
        node.replaceInput(place, graph.insertConstant(True))


def _replace(graph: TracedGraph, members: list, regions: Regions, differentiable: set[int], is_engines: _Types) -> None:
    for node in members:
        _compute_vectors(graph, node, differentiable)
    inside = set(members)
    results = [
        value
        for node in members
        for value in node.outputs()
        if not _stays_inside(value, is_engines) and any(use.user not in inside for use in value.uses())
    ]
    if not results:
        return
    program = _Program(members)
    program.keep(results)
    operands = program.operands
    arguments = pytree.flatten((tuple(torch.empty(0) for _ in operands), {}))[1]
    names = [node.kind() for node in members if node.kind() not in _PLAIN and node.kind() != "prim::Constant"]
    needs = [v.unique() in differentiable for v in operands]
    modes = Modes(torch.is_grad_enabled(), devices.autocast_off())
    needs = [need and modes.grad for need in needs]
    node = Node("aten", " ".join(names), program, arguments, list(range(len(operands))), needs, frozenset(), modes)
    node.flags, node.aten = [True] * len(results), sorted(set(names))
    node.clones = any(name.endswith("_") for name in names)
    number = len(regions.nodes)
    regions.nodes.append(node)
    has_numbers = any(v.type().dim() == 0 and v.type().dtype() == torch.int64 for v in operands)
    if not has_numbers and all(v.type().sizes() is not None for v in (*operands, *results)):
        regions.seen.append((number, _specs(operands), _specs(results)))
    with graph.insert_point_guard(members[-1]):
        listed = graph.insertNode(graph.create("prim::ListConstruct", operands, 1))
        listed.output().setType(ListType.ofTensors())
        numbers = [graph.insertConstant(number), graph.insertConstant(len(operands))]
        call = graph.insertNode(graph.create(CALL, [listed.output(), *numbers], 1))
        call.output().setType(ListType.ofTensors())
        unpacked = graph.insertNode(graph.create("prim::ListUnpack", [call.output()], 1 + len(results)))
    for made in (listed, call, unpacked):
        made.copyMetadata(members[-1])
    token, *values = unpacked.outputs()
    token.inferTypeFrom(torch.zeros((), dtype=torch.int64))
    _move_users(members, unpacked)
    for old, new in zip(results, values, strict=True):
        if old.unique() in differentiable:
            differentiable.add(new.unique())
        new.setType(old.type())
        old.replaceAllUsesWith(new)
    for node in reversed(members):
        node.destroy()


def _move_users(members: Sequence[TracedNode], unpacked: TracedNode) -> None:
    """What needs results of the group has to come after all of it."""
    late: list[TracedNode] = []
    seen, waiting = set(members), list(members)
    while waiting:
        for value in waiting.pop().outputs():
            for user in (use.user for use in value.uses()):
                if user not in seen and user.isBefore(unpacked):
                    seen.add(user)
                    late.append(user)
                    waiting.append(user)
    last = unpacked
    for node in sorted(late, key=functools.cmp_to_key(_order)):
        node.moveAfter(last)
        last = node


def _order(a: TracedNode, b: TracedNode) -> int:
    return -1 if a.isBefore(b) else 1


def _specs(values: Sequence[TracedValue]) -> tuple[Spec, ...]:
    return tuple([(DTYPES[dtype_of(v)], tuple(sizes_of(v))) for v in values])
