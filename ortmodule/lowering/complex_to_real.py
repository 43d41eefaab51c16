"""Replaces complex numbers of a trace by pairs of real ones: the engine has no type for them.

Every complex value becomes what `torch.view_as_real` makes of it. What moves elements about does the same with pairs,
arithmetic is composed of real operators, and whatever has no rule here (transforms, decompositions) gets complex
numbers again, for itself alone. Gradients are PyTorch's: those of a complex number are those of its two parts.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ortmodule.core import devices
from ortmodule.core.dtypes import REAL_TYPES, is_complex, is_tensor
from ortmodule.core.errors import Leave, NotTraceable
from ortmodule.core.torch_private import (
    ListType,
    TracedGraph,
    TracedNode,
    TracedValue,
    get_trace_graph,
    jit_pass_dce,
    jit_pass_inline,
    jit_pass_lower_all_tuples,
)
from ortmodule.lowering import export
from ortmodule.lowering.decompositions.table import sloped
from ortmodule.lowering.traced_tensors import dtype_of, sizes_of


def use_pairs(graph: TracedGraph) -> None:
    """Complex values of a trace become pairs, in place; inputs of the graph, too. Raises NotTraceable for a result."""
    complexes = [value for value in _values(graph) if is_complex(value)]
    if not complexes or any(_real(value) is None for value in complexes) or any(map(_changes_some, graph.nodes())):
        return
    pairs = _Pairs(graph)
    for value in graph.inputs():
        if is_complex(value):
            _become_pairs(value, value)
            pairs.of[value.unique()] = value
    for node in list(graph.nodes()):
        pairs.visit(node)
    for value in graph.return_node().inputs():
        if value.unique() in pairs.of:
            raise NotTraceable(f"{value.node().kind()} gives the module a result that the engine has no type for")
    jit_pass_dce(graph)


def _values(graph: TracedGraph) -> Iterable[TracedValue]:
    yield from graph.inputs()
    for node in graph.nodes():
        yield from node.outputs()


def _real(value: TracedValue) -> torch.dtype | None:
    """The type of its parts, if pairs can have them."""
    dtype = value.type().dtype()
    return None if dtype is None or value.type().sizes() is None else REAL_TYPES.get(dtype)


def _changes_some(node: TracedNode) -> bool:
    """Does it write into complex numbers, other than as a whole?"""
    name = node.kind()
    if name == "aten::copy_" and all(map(is_complex, list(node.inputs())[:2])):
        return False
    return name.endswith("_") and not name.endswith("__") and any(map(is_complex, (*node.inputs(), *node.outputs())))


def _become_pairs(value: TracedValue, like: TracedValue) -> None:
    """``value`` gets the type of the pairs of ``like``."""
    dtype = REAL_TYPES[dtype_of(like)]
    value.inferTypeFrom(torch.empty((*sizes_of(like), 2), dtype=dtype).requires_grad_(like.requires_grad()))


#: What becomes of the arguments of operators that move elements about: `d` is a dimension, `D` are several, `P` a whole
#: order of them, `S` sizes, `R` repetitions, `L` a list of tensors, `p` a complex one; anything else stays. Longer
#: forms come last.
_MOVES = {
    f"aten::{name}": form
    for name, form in {
        "transpose": ".dd", "swapaxes": ".dd", "swapdims": ".dd", "permute": ".P", "unsqueeze": ".d", "squeeze": ".d",
        "movedim": ".dd", "slice": ".d...", "select": ".d.", "narrow": ".d..", "view": ".S", "reshape": ".S",
        "expand": ".S.", "repeat": ".R", "flatten": ".dd", "unflatten": ".d.", "clone": "..", "contiguous": "..",
        "detach": ".", "alias": ".", "index": "..", "index_select": ".d.", "cat": "Ld", "stack": "Ld", "flip": ".D",
        "chunk": "..d", "split": "..d", "split_with_sizes": "..d", "unbind": ".d", "copy_": "pp.",
        "expand_as": "pp", "reshape_as": "pp", "view_as": "pp", "select_scatter": "ppd.", "slice_scatter": "ppd...",
    }.items()
}  # fmt: skip


class _Pairs:
    """A graph whose complex values are becoming pairs; ``of``: the pairs of those that have."""

    def __init__(self, graph: TracedGraph) -> None:
        self.graph = graph
        self.of: dict[int, TracedValue] = {}
        self.lists: set[int] = set()  # lists of pairs

    def visit(self, node: TracedNode) -> None:
        kind = node.kind()
        if kind == "prim::Constant" or kind == "prim::ListConstruct":
            return  # the nodes that use it
        if kind == "prim::ListUnpack" and next(node.inputs()).unique() in self.lists:
            for value in node.outputs():
                _become_pairs(value, value)
                self.of[value.unique()] = value
            return
        touched = any(is_complex(value) for value in (*node.outputs(), *_operands(node)))
        touched = touched or any(value.unique() in self.of for value in _operands(node))
        if not touched:
            return
        with self.graph.insert_point_guard(node):
            done = self._same(node) or (kind in _MOVES and self._moved(node))
            if not done and not (kind in _ARITHMETIC and self._computed(node)):
                self._left(node)

    # --- in place of an operator --------------------------------------------------------------------------------------

    def _same(self, node: TracedNode) -> bool:
        """Real numbers seen as complex ones, and back; a size. Nothing is computed for these."""
        value = next(iter(node.inputs()), None)
        if value is None:
            return False
        if node.kind() == "aten::view_as_complex" and not self._is_pair(value):
            self.of[node.output().unique()] = value
        elif node.kind() == "aten::view_as_real" and self._is_pair(value):
            pair = self._pair(value)
            if pair.unique() == value.unique():  # from here on these are real numbers
                pair = self.graph.insertNode(self.graph.create("aten::alias", [pair], 1)).output()
                pair.setType(value.type())
            node.output().replaceAllUsesWith(pair)
        elif node.kind() == "aten::size" and node.inputsSize() == 2 and self._is_pair(value):
            if (dim := self._argument("d", list(node.inputs())[1])) is None:
                return False
            node.replaceInput(0, self._pair(value))
            node.replaceInput(1, dim)
        else:
            return False
        return True

    def _moved(self, node: TracedNode) -> bool:
        """The same operator for pairs. False: not in this form."""
        new, output = [], node.output()
        for how, value in zip(_MOVES[node.kind()], node.inputs(), strict=False):
            if (argument := self._argument(how, value)) is not None:
                new.append(argument)
        listed = isinstance(output.type(), ListType)
        if len(new) != node.inputsSize():
            return False
        if listed and any(use.user.kind() != "prim::ListUnpack" for use in output.uses()):
            return False
        # Nodes that read later what was written read the result.
        moved = self.graph.insertNode(self.graph.create(node.kind().removesuffix("_"), new, 1))
        moved.copyMetadata(node)
        if listed:
            moved.output().setType(output.type())
            self.lists.add(moved.output().unique())
            output.replaceAllUsesWith(moved.output())
        else:
            _become_pairs(moved.output(), output)
            self.of[output.unique()] = moved.output()
        return True

    def _argument(self, how: str, value: TracedValue) -> TracedValue | None:
        if how == "L":
            items = _items(value)
            if not items or not all(map(self._is_pair, items)):
                return None
            return self._list([self._pair(item) for item in items], ListType.ofTensors())
        if self._is_pair(value) or how == "p":
            return self._pair(value) if self._is_pair(value) else None
        constant = value.node().kind() == "prim::Constant"
        if how == "d":
            dim = value.toIValue() if constant else None
            return self.graph.insertConstant(_shifted(dim)) if isinstance(dim, int) else None
        if how in "DP":
            dims = value.toIValue() if constant else [item.toIValue() for item in _items(value)]
            if not dims or not all(isinstance(dim, int) for dim in dims):
                return None
            return self.graph.insertConstant([*map(_shifted, dims), *([-1] if how == "P" else [])])
        if how in "SR":
            if constant and not isinstance(value.toIValue(), list) or not constant and not _items(value):
                return None
            last = 2 if how == "S" else 1
            if constant:
                return self.graph.insertConstant([*value.toIValue(), last])
            return self._list([*_items(value), self.graph.insertConstant(last)], ListType.ofInts())
        return value

    def _computed(self, node: TracedNode) -> bool:
        """Its definition in terms of real numbers. False: there is none for this form."""
        tensors: list[TracedValue] = []
        arguments = [self._operand(value, tensors) for value in node.inputs()]
        output = node.output()
        if _MISSING in arguments:
            return False
        dtype = output.type().dtype()
        real = None if dtype is None else REAL_TYPES.get(dtype)
        definition = _Definition(_ARITHMETIC[node.kind()], arguments, real)
        try:
            traced = _trace(definition, tensors)
        except Leave:
            return False
        if definition.gives_pairs != is_complex(output):
            return False
        (result,) = self.graph.insertGraph(traced, tensors)
        step = node.prev()
        for _ in traced.nodes():
            step.copyMetadata(node)
            step = step.prev()
        if definition.gives_pairs:
            self.of[output.unique()] = result
        else:
            output.replaceAllUsesWith(result)
        return True

    def _operand(self, value: TracedValue, tensors: list[TracedValue]) -> Any:
        if value.node().kind() == "prim::Constant":
            constant = value.toIValue()
            if not isinstance(constant, torch.Tensor):
                return constant
            if constant.dim() == 0:
                return constant.item()
        if not is_tensor(value) or (not self._is_pair(value) and value.type().sizes() is None):
            return _MISSING
        pair = self._is_pair(value)
        tensors.append(self._pair(value) if pair else value)
        return _Place(len(tensors) - 1, pair)

    def _left(self, node: TracedNode) -> None:
        """The operator computes with complex numbers, by itself."""
        for i, value in enumerate(list(node.inputs())):
            if value.node().kind() == "prim::ListConstruct" and any(map(self._is_pair, value.node().inputs())):
                items = [self.joined(item) if self._is_pair(item) else item for item in value.node().inputs()]
                node.replaceInput(i, self._list(items, value.type()))
            elif value.unique() in self.of:
                node.replaceInput(i, self.joined(value))
        for value in list(node.outputs()):
            if not is_complex(value):
                continue
            plain = self.graph.create("aten::resolve_conj", [value], 1)
            plain.insertAfter(node)
            plain.output().setType(value.type())
            parts = self.graph.create("aten::view_as_real", [plain.output()], 1)
            parts.insertAfter(plain)
            _become_pairs(parts.output(), value)
            for new in (plain, parts):
                new.copyMetadata(node)
            self.of[value.unique()] = parts.output()

    def joined(self, value: TracedValue) -> TracedValue:
        """The complex numbers again, for the operator at the point of insertion."""
        if value.node().kind() == "prim::Constant":
            return value
        pair = self.of[value.unique()]
        node = self.graph.insertNode(self.graph.create("aten::view_as_complex", [pair], 1))
        if pair.node().kind() != "prim::Param":
            node.copyMetadata(pair.node())
        kind = torch.complex64 if pair.type().dtype() == torch.float32 else torch.complex128
        node.output().inferTypeFrom(torch.empty(sizes_of(pair)[:-1], dtype=kind).requires_grad_(pair.requires_grad()))
        return node.output()

    def _is_pair(self, value: TracedValue) -> bool:
        constant = value.node().kind() == "prim::Constant"
        return value.unique() in self.of or (constant and is_complex(value) and value.type().dim() != 0)

    def _pair(self, value: TracedValue) -> TracedValue:
        if value.unique() not in self.of:
            with self.graph.insert_point_guard(value.node()):
                pair = self.graph.insertConstant(torch.view_as_real(value.toIValue().resolve_conj()).clone())
            pair.inferTypeFrom(pair.toIValue())
            self.of[value.unique()] = pair
        return self.of[value.unique()]

    def _list(self, items: list[TracedValue], kind: Any) -> TracedValue:
        node = self.graph.insertNode(self.graph.create("prim::ListConstruct", items, 1))
        node.output().setType(kind)
        return node.output()


def _items(value: TracedValue) -> list[TracedValue]:
    return list(value.node().inputs()) if value.node().kind() == "prim::ListConstruct" else []


def _operands(node: TracedNode) -> Iterable[TracedValue]:
    """The tensors that it is given, those in lists, too."""
    for value in node.inputs():
        yield from _items(value) or [value]


def _shifted(dim: int) -> int:
    """A dimension that is counted from the end: pairs have one more."""
    return dim if dim >= 0 else dim - 1


# --- arithmetic -------------------------------------------------------------------------------------------------------

_MISSING = object()


class _Place:
    """Stands for an operand that is a tensor, or pairs."""

    def __init__(self, index: int, pair: bool) -> None:
        self.index, self.pair = index, pair


class Complex:
    """Complex numbers in terms of their parts, each a tensor or a number."""

    def __init__(self, real: Any, imaginary: Any) -> None:
        self.real, self.imaginary = real, imaginary

    def joined(self) -> torch.Tensor:
        return torch.stack(torch.broadcast_tensors(self.real, self.imaginary), -1)


class _Definition(nn.Module):
    def __init__(self, function: Callable, arguments: list, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.function, self.arguments, self.dtype = function, arguments, dtype
        self.gives_pairs = False

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        result = self.function(*(self._argument(argument, tensors) for argument in self.arguments))
        self.gives_pairs = isinstance(result, Complex)
        return result.joined() if self.gives_pairs else result

    def _argument(self, argument: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
        if isinstance(argument, complex):
            return Complex(argument.real, argument.imag)
        if not isinstance(argument, _Place):
            return argument
        tensor = tensors[argument.index]
        if self.dtype is not None and tensor.dtype is not self.dtype:
            tensor = tensor.to(self.dtype)
        return Complex(tensor.select(-1, 0), tensor.select(-1, 1)) if argument.pair else tensor


def _trace(definition: nn.Module, tensors: list[TracedValue]) -> TracedGraph:
    examples = tuple(torch.ones(sizes_of(v), dtype=v.type().dtype()) for v in tensors)
    with torch.no_grad(), devices.autocast_as(devices.autocast_off()), export.tracing(definition):
        graph, _ = get_trace_graph(definition, examples, strict=False)
    jit_pass_inline(graph)
    jit_pass_lower_all_tuples(graph)
    jit_pass_dce(graph)
    return graph


def _both(function: Callable) -> Callable:
    """An operator that does the same with each part."""

    def combined(a: Any, b: Any, alpha: Any = 1) -> Complex:
        a, b = (x if isinstance(x, Complex) else Complex(x, 0) for x in (a, b))
        if alpha != 1:
            raise Leave("a multiple of the second operand")
        parts: tuple[Any, ...] = function(a.real, b.real), function(a.imaginary, b.imaginary)
        if not all(isinstance(part, torch.Tensor) for part in parts):
            shape = next(part for part in parts if isinstance(part, torch.Tensor))
            parts = tuple(p if isinstance(p, torch.Tensor) else torch.full_like(shape, p) for p in parts)
        return Complex(*parts)

    return combined


def _multiplied(a: Any, b: Any) -> Complex:
    if not isinstance(a, Complex):
        a, b = b, a
    if not isinstance(b, Complex):
        return Complex(a.real * b, a.imaginary * b)
    return Complex(a.real * b.real - a.imaginary * b.imaginary, a.real * b.imaginary + a.imaginary * b.real)


def _divided(a: Any, b: Any, rounding: Any = None) -> Complex:
    if isinstance(b, Complex) or rounding is not None:
        raise Leave("a complex divisor, or rounding")
    return Complex(a.real / b, a.imaginary / b)


def _converted(x: Any, *rest: Any) -> Any:
    """To another type of complex numbers, or from real ones."""
    return x if isinstance(x, Complex) else Complex(x, torch.zeros_like(x))


def _polar(size: torch.Tensor, angle: torch.Tensor) -> Complex:
    """PyTorch's derivative takes the absolute value for positive, also where it is not."""
    size, angle = torch.broadcast_tensors(size, angle)
    cos, sin = angle.cos(), angle.sin()
    real, imaginary, sign = size * cos, size * sin, size.sign()
    return Complex(
        sloped(real, (size, sign * cos), (angle, -imaginary)), sloped(imaginary, (size, sign * sin), (angle, real))
    )


def _exponential(x: Complex) -> Complex:
    size = x.real.exp()
    return Complex(size * x.imaginary.cos(), size * x.imaginary.sin())


def _from_complex(function: Callable) -> Callable:
    """Of complex numbers alone: of real ones the operator is another."""

    def checked(x: Any, *rest: Any) -> Any:
        if not isinstance(x, Complex):
            raise Leave("of real numbers")
        return function(x)

    return checked


_ARITHMETIC: dict[str, Callable] = {
    "aten::complex": Complex,
    "aten::polar": _polar,
    "aten::real": _from_complex(lambda x: x.real),
    "aten::imag": _from_complex(lambda x: x.imaginary),
    "aten::conj": _from_complex(lambda x: Complex(x.real, -x.imaginary)),
    "aten::resolve_conj": _from_complex(lambda x: x),
    "aten::resolve_neg": _from_complex(lambda x: x),
    "aten::neg": _from_complex(lambda x: Complex(-x.real, -x.imaginary)),
    "aten::exp": _from_complex(_exponential),
    "aten::mul": _multiplied,
    "aten::add": _both(operator.add),
    "aten::sub": _both(operator.sub),
    "aten::rsub": _both(lambda a, b: b - a),
    "aten::mT": _from_complex(lambda x: Complex(x.real.mT, x.imaginary.mT)),
    "aten::t": _from_complex(lambda x: Complex(x.real.t(), x.imaginary.t())),
    "aten::div": _divided,
    "aten::to": _converted,
}
_ARITHMETIC |= {
    "aten::_conj": _ARITHMETIC["aten::conj"],
    "aten::conj_physical": _ARITHMETIC["aten::conj"],
    "aten::multiply": _multiplied,
    "aten::true_divide": _divided,
}
