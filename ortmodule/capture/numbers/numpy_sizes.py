"""Follows what NumPy computes with sizes, while a module is traced.

In a trace a size is a tensor of rank 0, which NumPy would make an array of. So NumPy's functions are others for that
time (:mod:`data_numbers`): a size, and what is computed from sizes, is given to them as a number that knows its tensor
(:mod:`symbolic_numbers`), also in a list. Operators of a size and a number of NumPy's are NumPy's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy
import torch

from ortmodule.capture.numbers.number_functions import OF_NUMPY
from ortmodule.capture.numbers.symbolic_numbers import BINARY, is_one, of_size

#: The names of NumPy's functions that follow numbers -> the functions.
BY_NAME: dict[str, Callable[..., Any]] = {
    name: function for name, function in vars(numpy).items() if callable(function) and function in OF_NUMPY
}


def with_sizes(args: tuple) -> tuple:
    """Arguments with numbers in place of sizes, in lists, too."""
    return tuple(map(_with_sizes, args))


def _with_sizes(argument: Any) -> Any:
    if isinstance(argument, (tuple, list)) and any(isinstance(each, torch.Tensor) for each in argument):
        return [of_size(each) for each in argument]
    return of_size(argument)


class FollowingUfunc:
    """What stands in place of a universal function, which NumPy's own code looks up, too."""

    __class__ = property(lambda self: numpy.ufunc)  # for `isinstance(f, numpy.ufunc)`

    def __init__(self, original: Any, call: Callable[..., Any]) -> None:
        self._original, self._call = original, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __hash__(self) -> int:
        return hash(self._original)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._original


def following(original: Callable[..., Any], follows: Callable[[], bool]) -> Any:
    """``original``, which is given numbers in place of sizes where it ``follows`` them."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not follows():
            return original(*args, **kwargs)
        return original(*map(of_size, args), **{name: of_size(each) for name, each in kwargs.items()})

    return FollowingUfunc(original, call) if isinstance(original, numpy.ufunc) else call


#: Operators of Python's that torch's functions have other names for.
_TORCH_NAMES = {"truediv": "div", "floordiv": "floor_divide", "mod": "remainder"}
#: By the names of torch's functions: Python's operator, and whether the second operand is its first.
_OPERATORS: dict[str, tuple[Callable[..., Any], bool]] = {}
for _name, (_apply, _) in BINARY.items():
    _torch_name = _TORCH_NAMES.get(_name, _name)
    _OPERATORS |= dict.fromkeys((_torch_name, f"__{_name}__"), (_apply, False))
    _OPERATORS |= dict.fromkeys((f"r{_name}", f"__r{_name}__", f"__r{_torch_name}__"), (_apply, True))


def computed(function: Any, args: tuple, kwargs: dict[str, Any] | None) -> Any:
    """What an operator, which torch knows as ``function``, gives of a size and a number of NumPy's; NotImplemented:
    these are none."""
    if kwargs or len(args) != 2 or not any(isinstance(each, numpy.generic) for each in args):
        return NotImplemented
    known = _OPERATORS.get(function.__name__)
    numbers = [of_size(each) for each in args]
    if known is None or not any(map(is_one, numbers)):
        return NotImplemented
    apply, backwards = known
    return apply(*(reversed(numbers) if backwards else numbers))
