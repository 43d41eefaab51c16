"""Replaces operators of a trace by others that the exporter can say in ONNX.

Two sources: our own definitions (`definitions`), in terms of torch, for operators that the exporter translates
wrongly or in a way that does not train; and torch's own decompositions for whatever the exporter does not know. A
definition is traced on tensors like the operator's operands, and the result put in the operator's place. An operator
that changes its operand becomes one that does not, and a copy.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ortmodule.core import devices
from ortmodule.core.dtypes import dtype_of
from ortmodule.core.errors import ExportError, Keep, Leave, NotTraceable
from ortmodule.core.torch_private import (
    DispatchKey,
    ListType,
    TensorType,
    TracedGraph,
    TracedNode,
    TracedValue,
    decomposition_table,
    dispatch_has_kernel,
    get_trace_graph,
    jit_pass_dce,
    jit_pass_inline,
    jit_pass_lower_all_tuples,
    parse_schema,
)
from ortmodule.lowering import export
from ortmodule.lowering.aten_nodes import leave_to_torch
from ortmodule.lowering.complex_to_real import use_pairs
from ortmodule.lowering.decompositions import DEFINITIONS
from ortmodule.lowering.draws import OUT_OF_PLACE
from ortmodule.lowering.traced_tensors import dtype_of as known_dtype
from ortmodule.lowering.traced_tensors import sizes_of
from ortmodule.lowering.type_promotion import promote, takes_a_wide_factor
from ortmodule.lowering.uninitialized import EMPTY, check_written

MOST_ROUNDS = 4  # definitions that use operators which need a definition


def rewrite(graph: TracedGraph, opset: int, regions: Any) -> None:
    """Replaces what has to be replaced in a TorchScript trace, in place. Draws random numbers.

    Raises what a definition raises.
    """
    use_pairs(graph)
    _all_out_of_place(graph, but=())
    for node in graph.findAllNodes("aten::floor_divide"):
        if node.output().requires_grad():
            raise NotTraceable("floor_divide has no gradient")
    promote(graph)
    left = regions.opaque.kinds
    traced: dict[Any, TracedGraph | None] = {}
    replaced: dict[str, bool] = {}  # kinds of operators
    for _ in range(MOST_ROUNDS):
        changed = False
        # With an operator that returns a list goes the node that takes it apart.
        for node in [n for n in graph.nodes() if n.kind() != "prim::ListUnpack"]:
            kind = node.kind()
            if kind not in replaced:
                replaced[kind] = kind not in left and (
                    kind in DEFINITIONS or (kind.startswith("aten::") and not export.knows(kind, opset))
                )
            changed = (replaced[kind] and _rewrite_node(graph, node, traced)) or changed
        if not changed:
            break
        _all_out_of_place(graph, but=("aten::copy_",))  # as they have been said
    leave_to_torch(graph, opset, regions)
    jit_pass_dce(graph)


def _all_out_of_place(graph: TracedGraph, but: Sequence[str]) -> None:
    """Operators that change their operand, and have a definition: of the form that changes nothing."""
    for node in list(graph.nodes()):
        kind = node.kind()
        plain = kind.removesuffix("_")
        if kind in DEFINITIONS or kind in but:
            continue
        if plain in DEFINITIONS or kind in OUT_OF_PLACE or (kind != plain and takes_a_wide_factor(node)):
            _out_of_place(graph, node)


def _out_of_place(graph: TracedGraph, node: TracedNode) -> None:
    """`x.f_(...)` becomes `x.copy_(x.f(...))`, which the exporter can say, also where x is a part of something. Of an
    input, or of memory that nothing has written, it cannot; nodes that read that later read the result anyway."""
    target, dtype = next(node.inputs()), dtype_of(node.output())
    with graph.insert_point_guard(node):
        kind = OUT_OF_PLACE.get(node.kind(), node.kind().removesuffix("_"))
        computed = graph.insertNode(graph.create(kind, list(node.inputs()), 1))
        if target.node().kind() == "prim::Param" or target.node().kind() in EMPTY:
            kind, operands = "aten::to", [computed.output(), *map(graph.insertConstant, (dtype, False, False, None))]
        else:
            kind, operands = "aten::copy_", [target, computed.output(), graph.insertConstant(False)]
        result = graph.insertNode(graph.create(kind, operands, 1))
    for made in (computed, result):
        made.copyMetadata(node)
        made.output().setType(node.output().type())
    node.output().replaceAllUsesWith(result.output())
    node.destroy()


def _rewrite_node(graph: TracedGraph, node: TracedNode, traced: dict) -> bool:
    tensors: list[TracedValue] = []
    own = DEFINITIONS.get(node.kind())
    try:
        arguments = [_argument(value, tensors, own is None or getattr(own, "sizes", False)) for value in node.inputs()]
        types = tuple((str(v.type().scalarType()), tuple(sizes_of(v)), v.requires_grad()) for v in tensors)
        key = node.schema(), types, _text(arguments)
    except (Keep, RuntimeError):  # conversions of numbers have no schema
        return False
    if key not in traced:
        traced[key] = _traced(node, arguments, tensors)
    definition = traced[key]
    if definition is None:
        return False
    with graph.insert_point_guard(node):
        results = graph.insertGraph(definition, tensors)
    inserted = node.prev()
    for _ in definition.nodes():
        inserted.copyMetadata(node)
        inserted = inserted.prev()
    unpacked = _unpacked(node)
    for old, new in zip(_outputs(node), results, strict=True):
        old.replaceAllUsesWith(new)
    if unpacked is not None:
        unpacked.destroy()
    node.destroy()
    return True


def _unpacked(node: TracedNode) -> TracedNode | None:
    """Where the list that an operator returns is taken apart."""
    outputs = list(node.outputs())
    if len(outputs) == 1 and isinstance(outputs[0].type(), ListType):
        users = [use.user for use in outputs[0].uses()]
        if len(users) == 1 and users[0].kind() == "prim::ListUnpack":
            return users[0]
    return None


def _outputs(node: TracedNode) -> list[TracedValue]:
    """The tensors that an operator returns."""
    return list((_unpacked(node) or node).outputs())


class _Place(int):
    """Stands for an operand that is a tensor."""

    def __repr__(self) -> str:
        return f"tensor {int(self)}"


def _argument(value: TracedValue, tensors: list[TracedValue], sizes: bool) -> Any:
    """``sizes``: numbers computed from sizes as they are in the trace; otherwise they are none of a definition's."""
    if value.node().kind() == "prim::Constant":
        return value.toIValue()
    if isinstance(value.type(), TensorType):
        if value.type().sizes() is None or value.type().dtype() is None:
            raise Keep
        tensors.append(value)
        return _Place(len(tensors) - 1)
    if value.node().kind() == "prim::ListConstruct":
        return [_argument(item, tensors, sizes) for item in value.node().inputs()]
    if sizes and type(number := number_in_trace(value)) is int:
        return number
    raise Keep


#: Arithmetic of sizes.
_NUMBERS: dict[str, Any] = {
    "aten::add": operator.add, "aten::sub": operator.sub, "aten::mul": operator.mul, "aten::neg": operator.neg,
    "aten::floor_divide": operator.floordiv, "aten::floordiv": operator.floordiv, "aten::remainder": operator.mod,
    "aten::Int": int, "prim::NumToTensor": lambda x: x, "aten::floor": math.floor,
    "aten::detach": lambda x: x,
}  # fmt: skip


def number_in_trace(value: TracedValue) -> int | float | None:
    """What a number that is computed from sizes is in the trace; None if it depends on data. Fractions are float32, as
    interpolation has them."""
    node = value.node()
    kind, operands = node.kind(), list(node.inputs())
    if kind == "prim::Constant":
        constant = value.toIValue()
        constant = constant.item() if isinstance(constant, torch.Tensor) and constant.numel() == 1 else constant
        return constant if type(constant) in (int, float) else None
    if kind == "aten::to" and _float32(value):
        return number_in_trace(operands[0])
    if kind == "aten::size" and len(operands) == 2:
        sizes, dim = operands[0].type().sizes(), number_in_trace(operands[1])
        return None if sizes is None or dim is None else sizes[int(dim)]
    if kind not in _NUMBERS:
        return None
    if kind in ("aten::add", "aten::sub") and len(operands) == 3 and number_in_trace(operands.pop()) != 1:
        return None
    numbers = [number_in_trace(operand) for operand in operands]
    if None in numbers:
        return None
    result = _NUMBERS[kind](*numbers)
    return torch.tensor(result, dtype=torch.float32).item() if type(result) is float else result


def _float32(value: TracedValue) -> bool:
    return isinstance(value.type(), TensorType) and value.type().dtype() == torch.float32


def _text(arguments: Any) -> Any:
    """`arguments` as something hashable that is equal for equal ones."""
    if isinstance(arguments, list):
        return tuple(map(_text, arguments))
    if isinstance(arguments, torch.Tensor):
        return str(arguments.dtype), tuple(arguments.shape), tuple(arguments.reshape(-1).tolist())
    return repr(arguments)


def _traced(node: TracedNode, arguments: list, tensors: Sequence[TracedValue]) -> TracedGraph | None:
    """The definition as a graph of `tensors`, or None if there is none."""
    own = DEFINITIONS.get(node.kind())
    function = own or _decomposition(node)
    if function is None:
        return None
    try:
        definition = _Definition(function, arguments, own is None or getattr(own, "grads", False))
        graph = _trace(definition, tensors, asks=own is None)
        if not _holds_for_others(graph, definition, tensors, asks=own is None):
            raise Leave("values of its operands decide what it does")
    except Keep:
        return None
    except Exception as error:
        if own is None:
            return None
        raise ExportError(f"{node.kind()} with these arguments: {error}", node.kind()) from error
    # An operator that is defined by itself would be replaced for ever.
    kinds = {n.kind() for n in graph.nodes()}
    if own is None and any(kind.startswith("prims::") for kind in kinds):
        return None
    if node.kind() in kinds and not getattr(own, "recursive", False):
        return None
    return graph if len(list(graph.outputs())) == len(_outputs(node)) else None


def _holds_for_others(graph: TracedGraph, module: _Definition, tensors: Sequence[TracedValue], asks: bool) -> bool:
    """Is ``graph`` the same for integers with other values? Operators read some (lengths) without a sign."""
    if all(known_dtype(v).is_floating_point for v in tensors):
        return True
    try:
        other = _trace(module, tensors, asks, fillers=(0,))
    except (IndexError, RuntimeError):  # zeros are nothing that it takes
        return True
    return _outline(graph) == _outline(other)


def _outline(graph: TracedGraph) -> list[Any]:
    constants = [node.output() for node in graph.findAllNodes("prim::Constant")]
    return [node.kind() for node in graph.nodes()] + [_text(value.toIValue()) for value in constants]


def _trace(
    module: _Definition, tensors: Sequence[TracedValue], asks: bool, fillers: tuple[int, ...] = (1, 0)
) -> TracedGraph:
    """Of ones; of zeros where ones are no indices. ``asks``: what it does may depend on who needs a gradient."""
    for filler in fillers:
        examples = [
            torch.full(sizes_of(v), filler, dtype=dtype_of(v)).requires_grad_(module.grads and v.requires_grad())
            for v in tensors
        ]
        try:
            with (
                torch.set_grad_enabled(asks and torch.is_grad_enabled()),
                devices.autocast_as(devices.autocast_off()),
                export.tracing(module),
            ):
                graph, _ = get_trace_graph(module, tuple(examples), strict=False)
            break
        except (IndexError, RuntimeError):
            if filler == fillers[-1] or not any(t.dtype == torch.int64 for t in examples):
                raise
    jit_pass_inline(graph)
    jit_pass_lower_all_tuples(graph)
    if asks and any(_writes_aside(node) for node in graph.nodes()):
        raise Keep
    check_written(graph)
    jit_pass_dce(graph)
    promote(graph)
    return graph


def _writes_aside(node: TracedNode) -> bool:
    """Does it change a tensor that others are seen through (`x.real = y`)? A trace does not know."""
    kind = node.kind()
    return kind.endswith("_") and not kind.endswith("__") and not any(v.uses() for v in node.outputs())


class _Definition(nn.Module):
    def __init__(self, function: Callable, arguments: list, grads: bool) -> None:
        """``grads``: operands say whether they need a gradient."""
        super().__init__()
        self.function, self.arguments, self.grads = function, arguments, grads

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(*_with_tensors(self.arguments, tensors))


def _with_tensors(arguments: list, tensors: Sequence[torch.Tensor]) -> list:
    return [
        tensors[a] if isinstance(a, _Place) else _with_tensors(a, tensors) if isinstance(a, list) else a
        for a in arguments
    ]


def _decomposition(node: TracedNode) -> Callable | None:
    schema = parse_schema(node.schema())
    packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"), None)
    overload = getattr(packet, schema.overload_name or "default", None)
    if overload is None or overload._schema.is_mutable or not dispatch_has_kernel(overload.name()):
        return None
    if overload.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd):
        return overload.decompose
    return decomposition_table.get(overload)
