"""Replaces methods of another library's optimizer, without ever changing what they mean."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ortmodule import _core
from ortmodule.core.torch_private import foreach_norm

#: Their squares are finite in double.
NARROW = (torch.float32, torch.bfloat16, torch.float16)


class StandIn:
    """An object with some attributes replaced, for a method that is to see them so; all else is the object's own."""

    def __init__(self, target: Any, **attributes: Any) -> None:
        object.__setattr__(self, "_target", target)
        self.__dict__.update(attributes)

    @property  # type: ignore[misc]  # it is read alone
    def __class__(self) -> type:  # for isinstance and super
        return type(self._target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._target, name, value)


def has_method(target: Any, name: str, *parameters: str) -> bool:
    """Whether there is a method that takes at least these parameters, or hides behind a decorator what it takes."""
    method = getattr(type(target), name, None)
    if not callable(method):
        return False
    try:
        known = inspect.signature(method).parameters
    except (TypeError, ValueError):
        return False
    hidden = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in known.values())
    return hidden or all(parameter in known for parameter in parameters)


def replace(target: Any, name: str, ours: Callable[..., Any]) -> None:
    """Puts ``ours(original, *args, **kwargs)`` in the place of a method of ``target``.

    The first call asks both. When they do not return the same (type, dtype, shape, device; value within a hundredth),
    the method stays the original, with a warning.
    """
    original = getattr(target, name)
    proved = False

    def method(*args: Any, **kwargs: Any) -> Any:
        nonlocal proved
        if proved:
            return ours(original, *args, **kwargs)
        expected = original(*args, **kwargs)
        try:
            found = ours(original, *args, **kwargs)
            proved = same(found, expected)
        except Exception as error:
            found = error
        if not proved:
            setattr(target, name, original)
            what = f"{type(target).__qualname__}.{name}"
            warnings.warn(
                f"{what} is not what FP16_Optimizer takes it for, and stays as it is: it returned {expected!r}, "
                f"ours {found!r}",
                stacklevel=2,
            )
        return expected

    setattr(target, name, method)


def same(found: Any, expected: Any) -> bool:
    """As `replace` compares them."""
    if type(found) is not type(expected):
        return False
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, torch.Tensor):
        if (found.dtype, found.shape, found.device) != (expected.dtype, expected.shape, expected.device):
            return False
        return torch.allclose(found.double(), expected.double(), rtol=1e-2, atol=0, equal_nan=True)
    if isinstance(expected, float):
        return same(torch.tensor(found), torch.tensor(expected))
    return found == expected


def fits(tensors: Iterable[Any]) -> bool:
    """Whether `square_sums` tells infinite elements from large ones: all are dense and of at most 32 bits."""
    return all(
        isinstance(t, torch.Tensor) and t.layout is torch.strided and t.dtype in NARROW and type(t.data) is torch.Tensor
        for t in tensors
    )


def square_sums(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The sum of squares of each tensor, a float64 scalar on its device; all in one pass, without waiting for a device.

    A sum is infinite or NaN exactly when an element is (see `fits`).
    """
    if not tensors:
        return []
    tensors = [t.detach() for t in tensors]
    if all(t.device.type == "cpu" for t in tensors):
        dense = [t if torch.ops.aten.is_non_overlapping_and_dense(t) else t.contiguous() for t in tensors]
        return list(torch.tensor(_core.sums_of_squares(dense), dtype=torch.float64).unbind())
    return [norm.square() for norm in foreach_norm(tensors)]
