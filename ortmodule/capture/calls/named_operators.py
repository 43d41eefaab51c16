"""Calls an operator of `torch.ops.aten` as torch's function of the same name, which takes the sizes of a trace.

A size of a trace is a tensor that Python takes for a number. Functions of torch accept it; an operator that is called
by its name, as in a graph of `torch.export`, refuses it. Writes in place are told by the name as well.
"""

from __future__ import annotations

from typing import Any

import torch

from ortmodule.core.objects.tensor_memory import is_in_place
from ortmodule.core.size_expr import is_number
from ortmodule.core.torch_private import operator_name

_ATEN = "aten::"
#: What graphs of `torch.export` call, and others do not: a size, and a copy of a constant.
_ALWAYS = {"sym_size": torch.Tensor.size, "lift_fresh_copy": torch.clone}


def as_function(function: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, tuple, dict[str, Any]]:
    """Torch's call for an operator that writes in place, or takes or gives sizes of a trace; others as they are."""
    if not (found := operator_name(function)).startswith(_ATEN):
        return function, args, kwargs
    name = found.removeprefix(_ATEN)
    if name in _ALWAYS:
        return _ALWAYS[name], args, kwargs
    if not is_in_place(name) and not _has_size((args, (*kwargs.values(),))):
        return function, args, kwargs
    if name == "slice":
        return torch.Tensor.__getitem__, _index(*args, **kwargs), {}
    owner: Any = torch.Tensor if args and isinstance(args[0], torch.Tensor) and not is_number(args[0]) else torch
    return getattr(owner, name, None) or getattr(torch, name, function), args, kwargs


def _has_size(argument: Any) -> bool:
    if isinstance(argument, (tuple, list)):
        return any(map(_has_size, argument))
    return isinstance(argument, torch.Tensor) and is_number(argument)


def _index(tensor: torch.Tensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> tuple:
    return tensor, (*[slice(None)] * (dim % tensor.dim()), slice(start, end, step))
