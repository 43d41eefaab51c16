"""Computes sizes as Python would, while a module is traced.

Without a trace the sizes of a tensor are Python's numbers; in a trace they are tensors of rank 0, and fractions of them
are float32. Python has to get the same number with and without a trace: `int(100 * 0.29)` is 28, but 29 in float32. So
the expression is found in the traced graph, and Python computes it once more.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ortmodule.core.torch_private import (
    TensorType,
    TracedNode,
    TracedValue,
    get_value_trace,
    is_vmapped,
    set_value_trace,
    untraced,
)


def _quotient(a: float, b: float, rounding: str | None = None) -> float:
    return a / b if rounding is None else a // b if rounding == "floor" else math.trunc(a / b)


def _raised(a: float, b: float) -> float:
    found = a**b
    return found if isinstance(found, (int, float)) else math.nan  # of a negative number it is a complex one


#: Round a fraction to a whole number, as `int`, `math.floor`, `math.ceil` and `round` do.
ROUNDING: dict[str, Callable] = {
    "aten::trunc": math.trunc, "aten::floor": math.floor, "aten::ceil": math.ceil, "aten::round": round,
}  # fmt: skip
#: What `math` has of the same name. (Only square roots are the same to the last digit wherever they are computed.)
FUNCTIONS: dict[str, Callable] = {
    f"aten::{name}": getattr(math, name)
    for name in ("sqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos",
                 "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc")
    if hasattr(math, name)
}  # fmt: skip
_SQUARE_ROOT = "aten::sqrt"
#: What results of these have for a value.
_ARITHMETIC: dict[str, Callable] = {
    "aten::add": lambda a, b, times=1: a + times * b,
    "aten::sub": lambda a, b, times=1: a - times * b,
    "aten::rsub": lambda a, b, times=1: b - times * a,
    "aten::mul": operator.mul,
    "aten::div": _quotient,
    "aten::reciprocal": lambda a: 1 / a,
    "aten::floor_divide": operator.floordiv,
    "aten::remainder": operator.mod,
    "aten::pow": _raised,
    "aten::neg": operator.neg,
    "aten::abs": operator.abs,
    "aten::gt": operator.gt,
    "aten::ge": operator.ge,
    "aten::lt": operator.lt,
    "aten::le": operator.le,
    "aten::eq": operator.eq,
    "aten::ne": operator.ne,
    **ROUNDING,
    **FUNCTIONS,
}
ARITHMETIC = frozenset(_ARITHMETIC)
_Value = TracedValue


def is_number(tensor: torch.Tensor) -> bool:
    """Is this traced tensor what a trace makes of a Python number, computed from sizes?"""
    if type(tensor) is not torch.Tensor or tensor.dim() or is_vmapped(tensor):
        return False
    found, open_values = False, [get_value_trace(tensor)]
    while open_values:
        node = open_values.pop().node()
        if node.kind() == "prim::NumToTensor":
            found = True
        elif node.kind() in _ARITHMETIC:
            open_values += node.inputs()
        elif is_rounded(node):
            open_values.append(next(node.inputs()))
        elif node.kind() != "prim::Constant" or not _is_plain(node.output().toIValue()):
            return False
    return found


def is_whole(tensor: torch.Tensor) -> bool:
    """Is it an `int` without a trace, by :func:`is_number`?"""
    return tensor.dtype is torch.int64 and is_number(tensor)


def is_rounded(node: TracedNode) -> bool:
    """Is it the integer that a rounded fraction is?"""
    if node.kind() != "aten::to" or next(node.inputs()).node().kind() not in ROUNDING:
        return False
    return node.output().type().dtype() is torch.int64


def near_parts(tensor: torch.Tensor) -> list[TracedValue]:
    """The parts of a fraction, computed from sizes, that may have another last digit in a graph than Python's have."""
    return [value for value in _parts(tensor) if _is_near(value)]


def _is_near(value: TracedValue) -> bool:
    kind = value.node().kind()
    return (kind in FUNCTIONS and kind != _SQUARE_ROOT) or (kind == "aten::pow" and _is_fraction(value))


def _parts(tensor: torch.Tensor) -> Iterator[TracedValue]:
    """What a fraction is computed from, down to what Python's digits do not matter of."""
    met, asked = set[int](), [get_value_trace(tensor)]
    while asked:
        value = asked.pop()
        if value.unique() in met:
            continue
        met.add(value.unique())
        yield value
        kind = value.node().kind()
        if kind in _ARITHMETIC and kind not in ROUNDING and not _is_near(value):  # what is rounded is a whole number
            asked += value.node().inputs()


def is_itself(tensor: torch.Tensor) -> bool:
    """Is it a size, of which nothing has been computed?"""
    return get_value_trace(tensor).node().kind() == "prim::NumToTensor"


def _is_fraction(value: TracedValue) -> bool:
    dtype = value.type().dtype() if isinstance(value.type(), TensorType) else None
    return dtype is None or dtype.is_floating_point


def as_tensor(value: TracedValue) -> torch.Tensor | None:
    """The tensor of a trace that has this value, a number that is computed from sizes; None: it is not known."""
    dtype = value.type().dtype() if isinstance(value.type(), TensorType) else None
    if dtype is None:
        return None
    with untraced():
        tensor = torch.zeros((), dtype=dtype)
    set_value_trace(tensor, value)
    tensor._ortmodule_number = True  # type: ignore[attr-defined]  # it is of the trace (`symbolic_numbers`)
    number = number_of(tensor)
    if number is None:
        return None
    with untraced():
        tensor.fill_(number)
    return tensor


def _is_plain(constant: Any) -> bool:
    """A number that was written into the program: the trace shows some as tensors of rank 0."""
    return (
        constant.dim() == 0
        if isinstance(constant, torch.Tensor)
        else constant is None or isinstance(constant, (int, float, str))
    )


@dataclass(frozen=True)
class SizeFormula:
    """How Python computes a number from sizes. ``sizes``: what they are in the trace. ``steps``: a size by its number,
    a constant, or a function of what earlier steps compute; the last one's is the number."""

    sizes: tuple[int, ...]
    steps: tuple[tuple[Any, Any], ...]

    def at(self, sizes: Sequence[Any]) -> Any:
        """The number for other sizes; None: there is none."""
        known: list[Any] = []
        try:
            for function, operands in self.steps:
                if function is _size:
                    known.append(sizes[operands])
                elif function is _constant:
                    known.append(operands)
                else:
                    known.append(function(*(known[i] for i in operands)))
        except (ArithmeticError, TypeError, ValueError):
            return None
        return known[-1]


def number_of(tensor: torch.Tensor) -> float | int | bool | None:
    """The value of a traced tensor that :func:`is_number`, as Python computes it; None: it is none, or not known."""
    formula = formula_of(tensor)
    return None if formula is None else formula.at(formula.sizes)


def formula_of(tensor: torch.Tensor) -> SizeFormula | None:
    """That of a traced tensor that :func:`is_number`; None: it is none, or a size is not known."""
    if not is_number(tensor):
        return None
    places: dict[int, int] = {}
    sizes: list[int] = []
    steps: list[tuple[Any, Any]] = []
    asked = [get_value_trace(tensor)]
    while asked:
        value = asked[-1]
        operands = _operands(value)
        if unknown := [v for v in operands if v.unique() not in places]:
            asked += unknown
            continue
        asked.pop()
        if value.unique() in places:
            continue
        places[value.unique()] = len(steps)
        try:
            steps.append(_step(value.node(), [places[v.unique()] for v in operands], sizes))
        except LookupError:
            return None
    return SizeFormula(tuple(sizes), tuple(steps))


def _operands(value: _Value) -> list[_Value]:
    """What it is computed from; of 3 / n, which a trace has as 1 / n * 3, n and 3."""
    node = value.node()
    if is_rounded(node):
        return [next(node.inputs())]
    if node.kind() not in _ARITHMETIC:
        return []
    first, *others = node.inputs()
    return [*first.node().inputs(), *others] if divides(node) else [first, *others]


def divides(node: TracedNode) -> bool:
    """Is it 3 / n, which a trace has as 1 / n * 3?"""
    return node.kind() == "aten::mul" and next(node.inputs()).node().kind() == "aten::reciprocal"


def _step(node: TracedNode, operands: list[int], sizes: list[int]) -> tuple[Any, Any]:
    """Raises LookupError where no size is known."""
    if node.kind() == "prim::Constant":
        constant = node.output().toIValue()
        return _constant, constant.item() if isinstance(constant, torch.Tensor) else constant
    if node.kind() == "prim::NumToTensor":
        sizes.append(_size(next(node.inputs()).node()))
        return _size, len(sizes) - 1
    if is_rounded(node):
        return int, operands
    return (_divided if divides(node) else _ARITHMETIC[node.kind()]), operands


def _divided(divisor: Any, number: Any) -> Any:
    return number / divisor


def _constant() -> None:
    """Stands for one among the steps of a formula."""


def _size(node: TracedNode) -> int:
    operands = list(node.inputs())
    sizes = operands[0].type().sizes() if isinstance(operands[0].type(), TensorType) else None
    if sizes is None or None in sizes:
        raise LookupError
    if node.kind() == "aten::size":
        return sizes[operands[1].toIValue()]
    if node.kind() == "aten::numel":
        return math.prod(sizes)
    raise LookupError
