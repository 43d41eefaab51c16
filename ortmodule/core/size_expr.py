"""Computes sizes as Python would, while a module is traced.

Without a trace the sizes of a tensor are Python's numbers; in a trace they are tensors of rank 0, and fractions of them
are float32. Python has to get the same number with and without a trace: `int(100 * 0.29)` is 28, but 29 in float32. So
the expression is found in the traced graph, and Python computes it once more.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ortmodule.core.torch_private import TensorType, TracedNode, TracedValue, get_value_trace


def _quotient(a: float, b: float, rounding: str | None = None) -> float:
    return a / b if rounding is None else a // b if rounding == "floor" else math.trunc(a / b)


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
    "aten::pow": operator.pow,
    "aten::neg": operator.neg,
    "aten::abs": operator.abs,
    "aten::gt": operator.gt,
    "aten::ge": operator.ge,
    "aten::lt": operator.lt,
    "aten::le": operator.le,
    "aten::eq": operator.eq,
    "aten::ne": operator.ne,
}
ARITHMETIC = frozenset(_ARITHMETIC)
_Value = TracedValue


def is_number(tensor: torch.Tensor) -> bool:
    """Is this traced tensor what a trace makes of a Python number, computed from sizes?"""
    if tensor.dim() or type(tensor) is not torch.Tensor:
        return False
    found, open_values = False, [get_value_trace(tensor)]
    while open_values:
        node = open_values.pop().node()
        if node.kind() == "prim::NumToTensor":
            found = True
        elif node.kind() in _ARITHMETIC:
            open_values += node.inputs()
        elif node.kind() != "prim::Constant" or not _is_plain(node.output().toIValue()):
            return False
    return found


def is_whole(tensor: torch.Tensor) -> bool:
    """Is it an `int` without a trace, by :func:`is_number`?"""
    return tensor.dtype is torch.int64 and is_number(tensor)


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
        except (ArithmeticError, TypeError):
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
    if node.kind() not in _ARITHMETIC:
        return []
    first, *others = node.inputs()
    return [*first.node().inputs(), *others] if _divides(node) else [first, *others]


def _divides(node: TracedNode) -> bool:
    return node.kind() == "aten::mul" and next(node.inputs()).node().kind() == "aten::reciprocal"


def _step(node: TracedNode, operands: list[int], sizes: list[int]) -> tuple[Any, Any]:
    """Raises LookupError where no size is known."""
    if node.kind() == "prim::Constant":
        constant = node.output().toIValue()
        return _constant, constant.item() if isinstance(constant, torch.Tensor) else constant
    if node.kind() == "prim::NumToTensor":
        sizes.append(_size(next(node.inputs()).node()))
        return _size, len(sizes) - 1
    return (_divided if _divides(node) else _ARITHMETIC[node.kind()]), operands


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
