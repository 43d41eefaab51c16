"""Refuses what Python and torch refuse of numbers that are computed from sizes, while a module is traced.

In a trace such a number is a tensor of rank 0, of which torch divides by zero. Python raises an error, in the trace as
well; that there is none is a read, which runs compare for each new shape. So is that a power is what the graph has: a
whole number of 64 bits, or a fraction; of others the operands are read. Bounds that torch refuses and ONNX does not
(a step of 0) are reads, too.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from ortmodule.core.size_expr import is_itself, is_number, number_of

_MOST = 2**63  # what integers of a graph are below
_LARGE = 2**31  # a factor from which on products with sizes may be more
_LARGEST_FACTORS = 16  # sizes whose product a fraction certainly has
_Read = Callable[[torch.Tensor], None]


def computed(function: Any, args: tuple, kwargs: dict[str, Any], read: _Read) -> Any:
    """What ``function`` gives of numbers from sizes, where that is not what torch computes; NotImplemented: it is, or
    they are none. ``read``: notes a read. Raises what Python raises."""
    known = _OPERATIONS.get(function.__name__)
    if known is None or kwargs or len(args) != 2 or not any(isinstance(a, torch.Tensor) for a in args):
        return NotImplemented
    operation, of_numbers, backwards = known
    numbers = [number_of(x) if isinstance(x, torch.Tensor) else x for x in args]
    if not all(type(number) in (int, float, bool) for number in numbers):
        return NotImplemented
    (a, b), (x, y) = (args[::-1], numbers[::-1]) if backwards else (args, numbers)
    try:
        value = operation(x, y)
    except ArithmeticError:
        _read_all(args, read)
        raise
    return of_numbers(a, b, value, read)


def _read_all(operands: tuple, read: _Read) -> None:
    for each in operands:
        if isinstance(each, torch.Tensor):
            read(each)


def _divided(a: Any, b: Any, value: Any, read: _Read) -> Any:
    if isinstance(b, torch.Tensor):
        read(b != 0)
    return NotImplemented


def _multiplied(a: Any, b: Any, value: Any, read: _Read) -> Any:
    if type(value) is not int or not any(type(x) is int and abs(x) >= _LARGE for x in (a, b)):
        return NotImplemented
    if abs(value) >= _MOST:
        _read_all((a, b), read)
        return value
    read(abs(a * 1.0 * b) < float(_MOST))
    return NotImplemented


def _raised(a: Any, b: Any, value: Any, read: _Read) -> Any:
    whole = _is_whole(a) and _is_whole(b)
    if whole and isinstance(b, torch.Tensor):
        read(b >= 0)
    if isinstance(value, complex) or (abs(value) >= _MOST if type(value) is int else not math.isfinite(value)):
        _read_all((a, b), read)
        return value
    if _is_size_raised(a, b):
        return NotImplemented
    found = (a * 1.0) ** b
    read(abs(found) < float(_MOST) if type(value) is int else found - found == 0)
    return found if whole and type(value) is float else NotImplemented


def _is_whole(operand: Any) -> bool:
    return not operand.is_floating_point() if isinstance(operand, torch.Tensor) else type(operand) is not float


def _is_size_raised(a: Any, b: Any) -> bool:
    """Is it a size, which is not negative, to a power that a graph has in any case?"""
    if not isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor) or not is_itself(a):
        return False
    return 0 <= b <= (_LARGEST_FACTORS if type(b) is float else 2)


_Of = Callable[[Any, Any, Any, _Read], Any]
#: By the names of torch's functions: the same of Python's numbers, and what to see to; whether the first operand is the
#: second one's.
_OPERATIONS: dict[str, tuple[Callable, _Of, bool]] = {
    "div": (operator.truediv, _divided, False), "__rdiv__": (operator.truediv, _divided, True),
    "floor_divide": (operator.floordiv, _divided, False), "__floordiv__": (operator.floordiv, _divided, False),
    "__rfloordiv__": (operator.floordiv, _divided, True),
    "remainder": (operator.mod, _divided, False), "__rmod__": (operator.mod, _divided, True),
    "pow": (operator.pow, _raised, False), "__rpow__": (operator.pow, _raised, True),
    "mul": (operator.mul, _multiplied, False),
}  # fmt: skip

# --- bounds -----------------------------------------------------------------------------------------------------------


def conditions_of_range(start: Any, end: Any = None, step: Any = 1, **_: Any) -> tuple[Any, Any]:
    """What `torch.arange` asks of its bounds: tensors where these are."""
    start, end = (0, start) if end is None else (start, end)
    return (end - start) * step >= 0, step != 0


def _conditions_of_index(x: Any, index: Any, *_: Any) -> list[Any]:
    parts = index if isinstance(index, tuple) else (index,)
    return [part.step > 0 for part in parts if isinstance(part, slice) and part.step is not None]


def _conditions_of_steps(start: Any = 0, end: Any = 1, steps: Any = 0, **_: Any) -> tuple[Any]:
    return (steps >= 0,)


_CONDITIONS: dict[Any, Callable] = {
    torch.arange: conditions_of_range, torch.linspace: _conditions_of_steps, torch.logspace: _conditions_of_steps,
    torch.Tensor.__getitem__: _conditions_of_index, torch.Tensor.__setitem__: _conditions_of_index,
}  # fmt: skip


def read_bounds(function: Any, args: tuple, kwargs: dict[str, Any], read: _Read) -> None:
    """Notes whether torch takes the bounds of a range, or the steps of slices, where sizes decide that."""
    if function not in _CONDITIONS or (function is torch.arange and args and _is_length(args)):
        return
    for condition in _CONDITIONS[function](*args, **kwargs):
        if isinstance(condition, torch.Tensor) and is_number(condition):
            read(condition)


def _is_length(args: tuple) -> bool:
    return len(args) == 1 and isinstance(args[0], torch.Tensor) and is_number(args[0]) and is_itself(args[0])
