"""Tells where a tensor's memory is, and which of torch's functions write into one."""

from __future__ import annotations

from typing import Any

import torch

#: Functions that give others a tensor's memory, to write into.
GIVES_MEMORY = ("numpy", "__array__", "__dlpack__")


def memory_of(tensor: torch.Tensor) -> int:
    """The address of its memory; 0: it has none, or none that is known."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def version_of(tensor: torch.Tensor) -> int:
    """How often it was changed in place. One of inference mode has no count: 0, as it stays outside of that mode."""
    return 0 if tensor.is_inference() else tensor._version


def is_of_data(function: Any, name: str) -> bool:
    """Does it read (``name`` is `__get__`), or set (`__set__`), `x.data`?"""
    return getattr(function, "__self__", None) is torch.Tensor.data and function.__name__ == name


#: Methods of tensors whose names begin as those of operators in place do.
_NOT_IN_PLACE = frozenset(["__index__", "__init__", "__init_subclass__", "__int__", "__invert__", "__iter__"])


def is_in_place(name: str) -> bool:
    """Is a function of this name one that changes its first operand: `add_`, `__iadd__`?"""
    return (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name not in _NOT_IN_PLACE)
