"""Follows what Python's and `math`'s functions make of numbers that are computed from sizes, while a module is traced.

In a trace such a number is a tensor of rank 0, and a fraction of them float32. What is rounded to a whole number has
Python's in the trace (:mod:`size_expr`), and in the graph, which computes with fractions in float64. Logarithms and the
like have another last digit there: where that may decide to which number one is rounded, it is read. Logarithms of
powers, and roots of squares, are whole in both.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from ortmodule.core.size_expr import (
    FUNCTIONS,
    as_tensor,
    is_itself,
    is_number,
    near_parts,
    number_of,
)
from ortmodule.core.torch_private import TracedValue, untraced

_DIGITS = 1e-9  # what last digits may make of a number, of it and of 1
_MOST_ROOT = 2**52  # up to which the root of a whole number is rounded as `math.isqrt` does
_ROUNDING: dict[Callable, Callable[[torch.Tensor], torch.Tensor]] = {
    int: torch.trunc, math.trunc: torch.trunc, math.floor: torch.floor, math.ceil: torch.ceil, round: torch.round,
}  # fmt: skip


def is_size(value: Any) -> bool:
    """Is it a number that is computed from sizes?"""
    return isinstance(value, torch.Tensor) and is_number(value) and value.dtype is not torch.bool


def rounded(kind: Callable[..., int], value: torch.Tensor, read: Callable[[torch.Tensor], None]) -> Any:
    """What `int`, `round` and the like make of such a number; None: it has to be read. ``read``: notes a read."""
    if not value.is_floating_point():
        return value
    number = number_of(value)
    if number is None or not math.isfinite(number):
        return None
    if (parts := near_parts(value)) and not _is_steady(value, parts, read):
        return None
    found = _ROUNDING[kind](value).to(torch.int64)
    with untraced():
        found.fill_(kind(number))  # its fraction is float32 in a trace
    return found


def _is_finite(value: torch.Tensor) -> torch.Tensor:
    return value - value == 0


def _is_steady(value: torch.Tensor, parts: list[TracedValue], read: Callable[[torch.Tensor], None]) -> bool:
    """Is a number rounded as Python's is, although these parts of it may have another last digit?"""
    twice = value * 2
    steady = ((twice - twice.round()).abs() > (twice.abs() + 1) * _DIGITS) * 1
    exact = [found for part in parts if (found := _is_exact(part)) is not None]
    if len(exact) == len(parts):
        steady = steady + functools.reduce(operator.mul, exact)
    if not number_of(steady > 0):
        return False
    read(steady > 0)
    return True


#: Logarithms, and of which numbers they are whole ones.
_BASES = {"aten::log2": 2, "aten::log10": 10}


def _is_exact(part: TracedValue) -> torch.Tensor | None:
    """1 where the logarithm, or the square root, of a whole number is one, and 0 where not; None: it is neither."""
    node = part.node()
    operands = list(node.inputs())
    result, of = as_tensor(part), as_tensor(operands[0])
    if result is None or of is None or of.is_floating_point():
        return None
    if node.kind() in _BASES:
        return (_BASES[node.kind()] ** _nearest(result) == of) * 1
    if node.kind() == "aten::pow" and operands[1].node().kind() == "prim::Constant":
        return (_nearest(result) ** 2 == of) * 1 if operands[1].toIValue() == 0.5 else None
    return None


def _nearest(value: torch.Tensor) -> torch.Tensor:
    nearest, number = value.round().to(torch.int64), number_of(value)
    with untraced():
        nearest.fill_(round(number or 0))
    return nearest


def _logarithm(x: Any, base: Any = None) -> Any:
    above, below = (each.log() if isinstance(each, torch.Tensor) else math.log(each) for each in (x, base or math.e))
    return above if base is None else above / below


def _of_base(base: int, logarithm: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """That of a power is the whole number that it is in Python."""

    def of(x: torch.Tensor) -> torch.Tensor:
        found = logarithm(x)
        if x.is_floating_point():
            return found
        nearest = _nearest(found)
        return found + (base**nearest == x) * (nearest - found)

    return of


def _isqrt(x: torch.Tensor) -> Any:
    return rounded(int, x.sqrt(), lambda _: None) if (number_of(x) or 0) < _MOST_ROOT else None


#: Functions of `math` -> what they are of tensors.
_OF_MATH: dict[Callable, Callable[..., Any]] = {
    **{function: getattr(torch, kind.removeprefix("aten::")) for kind, function in FUNCTIONS.items()},
    math.log: _logarithm,
    math.log2: _of_base(2, torch.log2),
    math.log10: _of_base(10, torch.log10),
    math.pow: lambda x, y: (x * 1.0) ** (y * 1.0),
    math.fabs: lambda x: abs(x) * 1.0,
    math.degrees: lambda x: x * (180 / math.pi),
    math.radians: lambda x: x * (math.pi / 180),
    math.isqrt: _isqrt,
}
_NEVER_FAIL = frozenset((math.sin, math.cos, math.tanh, math.atan, math.asinh, math.erf, math.erfc, math.fabs,
                         math.degrees, math.radians))  # fmt: skip
_OF_ANY_SIZE = (math.sqrt, math.isqrt)
#: What is called for other numbers: Python's own, which reads them.
OF_SIZES_ALONE = {math.isqrt: math.isqrt}


def of_math(function: Callable, args: tuple, read: Callable[[torch.Tensor], None]) -> Any:
    """What a function of `math` gives for such numbers; None: Python's own does, which reads them. ``read``: notes a
    read."""
    if function not in _OF_MATH or not any(map(is_size, args)):
        return None
    if not all(type(a) in (int, float) or is_size(a) for a in args):
        return None
    numbers = [number_of(a) if isinstance(a, torch.Tensor) else a for a in args]
    try:
        if None in numbers or not math.isfinite(function(*numbers)):
            return None
    except (ArithmeticError, ValueError):
        return None  # Python raises it
    found = _OF_MATH[function](*args)
    if found is not None and function not in _NEVER_FAIL and not (function in _OF_ANY_SIZE and is_itself(args[0])):
        read(_is_finite(found) if found.is_floating_point() else args[0] >= 0)  # Python raises an error where it is not
    return found
