"""Follows what `math` and NumPy's functions compute with numbers that know their tensors, while a module is traced.

Functions of `math` are others for that time (:mod:`data_numbers`), and NumPy asks its operands. Square roots and the
like are the same to the last digit in the graph; others are near (:mod:`symbolic_numbers`). Functions that are not here
read the value.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy
import torch

from ortmodule.capture.numbers import numpy_numbers
from ortmodule.capture.numbers.symbolic_numbers import (
    BINARY,
    Float,
    Int,
    as_type,
    filled_like,
    is_float,
    is_one,
    known,
    marked,
    read_condition,
    tensor_first,
    value_of,
)
from ortmodule.core.torch_private import get_tracing_state


def _scaled(by: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * by


def _beside(function: Callable) -> Callable:
    """`function`, which wants tensors, of a tensor and a plain number, in any order."""

    def call(a: Any, b: Any) -> torch.Tensor:
        one = a if isinstance(a, torch.Tensor) else b
        return function(*(x if isinstance(x, torch.Tensor) else filled_like(one, x) for x in (a, b)))

    return call


#: Names of `math` -> the same of tensors, to the last digit.
_EXACT: dict[str, Callable] = {
    "sqrt": torch.sqrt, "fabs": torch.abs, "fmod": _beside(torch.fmod), "copysign": _beside(torch.copysign),
    "degrees": _scaled(180 / math.pi), "radians": _scaled(math.pi / 180),
}  # fmt: skip
_NEAR: dict[str, Callable] = {
    **{
        name: getattr(torch, name)
        for name in ("exp", "exp2", "expm1", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan",
                     "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc")
    },
    "log": lambda x, base=None: x.log() if base is None else x.log() / as_tensor_of(x, base).log(),
    "pow": _beside(torch.pow), "atan2": _beside(torch.atan2), "hypot": _beside(torch.hypot),
}  # fmt: skip
_ASKED = {"isfinite": torch.isfinite, "isnan": torch.isnan, "isinf": torch.isinf}


def as_tensor_of(beside: torch.Tensor, value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else filled_like(beside, value)


def _of_math(original: Callable, of_tensors: Callable, near: bool) -> Callable:
    @functools.wraps(original)
    def function(*args: Any) -> Any:
        if not any(map(is_one, args)):
            return original(*args)
        fitting = len(args) <= 2 and all(is_one(a) or type(a) in (int, float) for a in args)
        value = original(*(a.value if is_one(a) else a for a in args)) if fitting else math.nan
        if not math.isfinite(value):
            return original(*(value_of(a) if is_one(a) else a for a in args))
        operands: list[Any] = [as_type(a.tensor, torch.float64) if is_one(a) else float(a) for a in args]
        if not isinstance(operands[0], torch.Tensor):
            operands[0] = filled_like(operands[1], operands[0])
        tensor = of_tensors(*operands)
        read_condition(tensor.isfinite())  # where it is not, Python raises an error for most
        number = known(value, tensor, *args)
        return marked(number, args) if near else number

    return function


def _question(original: Callable, of_tensor: Callable) -> Callable:
    return functools.wraps(original)(lambda x: read_condition(of_tensor(x.tensor)) if is_one(x) else original(x))


#: Functions of `math` -> what is called instead in a trace.
OF_MATH: dict[Callable, Callable] = {
    **{getattr(math, name): _of_math(getattr(math, name), function, name in _NEAR)
       for name, function in (_EXACT | _NEAR).items() if hasattr(math, name)},
    **{getattr(math, name): _question(getattr(math, name), function) for name, function in _ASKED.items()},
}  # fmt: skip

# --- NumPy's functions ------------------------------------------------------------------------------------------------


def _of_fraction(function: Callable) -> Callable:
    """`function`; whole numbers are as they are."""
    return lambda x: function(x) if x.is_floating_point() else x.clone()


#: In the type of the result.
_TYPED: dict[Any, Callable] = {
    numpy.add: BINARY["add"][1], numpy.subtract: BINARY["sub"][1], numpy.multiply: BINARY["mul"][1],
    numpy.divide: BINARY["truediv"][1], numpy.floor_divide: BINARY["floordiv"][1], numpy.remainder: BINARY["mod"][1],
    numpy.power: BINARY["pow"][1],
}  # fmt: skip
_TYPED = {ufunc: tensor_first(function) for ufunc, function in _TYPED.items()}
_TYPED |= {
    numpy.maximum: _beside(torch.maximum), numpy.minimum: _beside(torch.minimum), numpy.negative: torch.neg,
    numpy.positive: torch.clone, numpy.absolute: torch.abs, numpy.fabs: torch.abs, numpy.square: torch.square,
    numpy.sign: torch.sign, numpy.floor: _of_fraction(torch.floor), numpy.ceil: _of_fraction(torch.ceil),
    numpy.trunc: _of_fraction(torch.trunc), numpy.rint: torch.round,
}  # fmt: skip
#: In float64, rounded to the type of the result.
_WIDE: dict[Any, tuple[Callable, bool]] = {
    getattr(numpy, {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "asinh": "arcsinh", "acosh": "arccosh",
                    "atanh": "arctanh"}.get(name, name)): (function, True)
    for name, function in _NEAR.items() if name not in ("erf", "erfc", "log", "pow", "atan2", "hypot")
}  # fmt: skip
_WIDE |= {numpy.sqrt: (torch.sqrt, False), numpy.log: (torch.log, True)}
_WIDE |= {numpy.arctan2: (_NEAR["atan2"], True), numpy.hypot: (_NEAR["hypot"], True)}
_WIDE |= {numpy.deg2rad: (_scaled(math.pi / 180), True), numpy.rad2deg: (_scaled(180 / math.pi), True)}
_WIDE |= {numpy.radians: _WIDE[numpy.deg2rad], numpy.degrees: _WIDE[numpy.rad2deg]}
_QUESTIONS = {getattr(numpy, name): function for name, function in _ASKED.items()}


#: Logarithms, and of which numbers they are whole ones.
_BASES = {numpy.log2: 2.0, numpy.log10: 10.0}


def _exact_of_powers(ufunc: Any, of: Any, number: Any) -> Any:
    """A logarithm, which is exact where it is that of a power."""
    if (base := _BASES.get(ufunc)) is None or is_float(of) or of.near:
        return number
    nearest = number.tensor.round()
    number.exact = filled_like(nearest, base) ** nearest == of.tensor
    number.tensor = torch.where(number.exact, nearest, number.tensor)
    number.tensor._ortmodule_number = True  # as :func:`known` notes
    return number


def _asks_itself(value: Any) -> bool:
    """Is it an array of a trace, or another object that knows what to do?"""
    kind = type(value)
    return hasattr(kind, "__array_ufunc__") and not (is_one(value) or issubclass(kind, (numpy.ndarray, numpy.generic)))


def _array_ufunc(self: Any, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
    if any(map(_asks_itself, inputs)):
        return NotImplemented
    plain = method == "__call__" and not kwargs and all(map(numpy_numbers.is_number, inputs))
    if plain and get_tracing_state() is not None:
        if ufunc in _TYPED:
            return numpy_numbers.computed(ufunc, _TYPED[ufunc], *inputs)
        if ufunc in _WIDE:
            function, near = _WIDE[ufunc]
            number = numpy_numbers.computed(ufunc, function, *inputs, wide=True)
            if not near or not is_one(number):
                return number
            return _exact_of_powers(ufunc, inputs[0], marked(number, inputs))
        if ufunc in _QUESTIONS:
            return numpy.bool_(read_condition(_QUESTIONS[ufunc](inputs[0].tensor)))
    return getattr(ufunc, method)(*map(_all_read, inputs), **{name: _all_read(a) for name, a in kwargs.items()})


def _all_read(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(_all_read, value))
    return numpy_numbers.read(value) if is_one(value) else value


def _clip(a: Any, a_min: Any = None, a_max: Any = None) -> Any:
    a = a if a_min is None else numpy.maximum(a, a_min)
    return a if a_max is None else numpy.minimum(a, a_max)


def _round(a: Any) -> Any:
    return numpy.rint(a) if is_float(a) else numpy.positive(a)


#: With the names of arguments that they know.
_FUNCTIONS: dict[Any, tuple[Callable, int, frozenset[str]]] = {
    numpy.clip: (_clip, 3, frozenset(("a_min", "a_max"))),
    numpy.round: (_round, 1, frozenset()),
    numpy.around: (_round, 1, frozenset()),
}


#: Functions that follow numbers which know their tensors.
OF_NUMPY = frozenset((*_TYPED, *_WIDE, *_QUESTIONS, *_FUNCTIONS))


def _array_function(self: Any, function: Any, types: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    ours, most, names = _FUNCTIONS.get(function, (None, 0, frozenset()))
    numbers = all(value is None or numpy_numbers.is_number(value) for value in (*args, *kwargs.values()))
    if ours is not None and len(args) <= most and kwargs.keys() <= names and numbers and is_one(args[0]):
        return ours(*args, **kwargs)
    return function(*_all_read(args), **{name: _all_read(a) for name, a in kwargs.items()})


for _kind in (Float, Int):
    _numbers: Any = _kind
    _numbers.__array_ufunc__, _numbers.__array_function__ = _array_ufunc, _array_function
