"""Lets sizes, and other numbers of a trace, pass for Python's where forward asks for their type.

In a trace a size is a tensor of rank 0. So `isinstance` is another function for that time: code of users, and of
torch's modules and distributions, is told of a size what it would be told of the number (`nn.LayerNorm(x.shape[-1])`
asks for `numbers.Integral`). Whatever else asks (`type(n) is int`, C code) sees a tensor; what that decides shows when
the graph is compared with the module. Numbers that know their tensors (:mod:`symbolic_numbers`), which C code takes for
tensors, are none for that code, too.
"""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ortmodule.capture.numbers.symbolic_numbers import as_given, is_one
from ortmodule.capture.scalar_guards import active
from ortmodule.core.names import PACKAGE
from ortmodule.core.objects.interception import Replacement
from ortmodule.core.size_expr import is_number
from ortmodule.core.torch_private import get_tracing_state

_TORCH = torch.__path__[0]
_MODULES = (
    *(os.path.join(_TORCH, *parts, "") for parts in (("nn", "modules"), ("distributions",))),
    os.path.join(_TORCH, "fx", "experimental", "symbolic_shapes.py"),  # torch's own questions about sizes
)
#: What Python has that tensors have not.
_OF_NUMBERS = ("bit_length", "conjugate", "to_bytes", "is_integer", "as_integer_ratio", "numerator", "denominator")


def as_numbers(made: Callable[[list[torch.Tensor]], None]) -> list[Replacement]:
    """What stands in place of functions of Python's and torch's. ``made``: is told of parameters that forward makes."""
    return [
        Replacement.around(builtins, "isinstance", _isinstance),
        Replacement.around(torch, "is_tensor", lambda original: lambda value: not is_one(value) and original(value)),
        Replacement(nn.Parameter, "__new__", staticmethod(_parameters(made))),
        *(Replacement(torch.Tensor, name, property(_attribute(name))) for name in _OF_NUMBERS),
        Replacement.around(torch.Tensor, "__deepcopy__", _copied),
    ]


def _kind(tensor: torch.Tensor) -> Any:
    """A number of the kind that a size, or what is computed from sizes, has without a trace."""
    return False if tensor.dtype is torch.bool else 0.0 if tensor.is_floating_point() else 0


def _isinstance(original: Callable[..., bool]) -> Callable[..., bool]:
    tensor_class = torch.Tensor

    def isinstance_of(value: Any, classes: Any, /) -> bool:
        if is_one(value):
            return original(as_given(value) if _asks(sys._getframe(1).f_code) else value, classes)
        if type(value) is tensor_class and get_tracing_state() is not None and _asks(sys._getframe(1).f_code):
            recorder = active()
            if recorder is not None:
                with recorder.paused():
                    if is_number(value):
                        return original(_kind(value), classes)
        return original(value, classes)

    return isinstance_of


def _asks(code: Any) -> bool:
    """May a function learn that a size is a number? One that asks whether it is traced knows what sizes are then."""
    file = code.co_filename
    if "is_tracing" in code.co_names:
        return False
    return file.startswith(_MODULES) or not file.startswith((_TORCH, PACKAGE))


def _parameters(made: Callable[[list[torch.Tensor]], None]) -> Callable[..., Any]:
    original = nn.Parameter.__new__

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        parameter = original(cls, *args, **kwargs)
        if active() is not None:
            made([parameter])
        return parameter

    return new


def _attribute(name: str) -> Callable[[torch.Tensor], Any]:
    def attribute(tensor: torch.Tensor) -> Any:
        if active() is None or not is_number(tensor):
            raise AttributeError(f"'Tensor' object has no attribute '{name}'")
        return getattr(tensor.item(), name)

    return attribute


def _copied(original: Callable[..., Any]) -> Callable[..., Any]:
    def copied(tensor: torch.Tensor, memo: Any) -> Any:
        return tensor if active() is not None and is_number(tensor) else original(tensor, memo)

    return copied
