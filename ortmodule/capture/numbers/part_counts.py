"""Counts the parts that a tensor is cut into, and the steps of ranges over it, where sizes decide these.

A trace has as many results as there are then. So the number is computed from sizes, as PyTorch computes it, and is a
read that runs compare: one graph is for all sizes that give as many parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ortmodule.capture.numbers.size_functions import is_size
from ortmodule.core.torch_private import vf_split


def _split(size: Any, length: Any) -> Any:
    """Into parts of this length, the last one shorter; None: lengths say how many."""
    if isinstance(length, (list, tuple)):
        return None
    length = _positive(length)
    return (size + length - 1) // length


def _chunk(size: Any, count: Any) -> Any:
    """There may be fewer parts than are asked for: four elements in three parts are two of two."""
    return _split(size, (size + count - 1) // count)


def _positive(number: Any) -> Any:
    return number + (number == 0)


def _unbind(size: Any) -> Any:
    return size


_COUNTS: dict[str, Callable[..., Any]] = {
    "split": _split, "unsafe_split": _split, "split_copy": _split, "chunk": _chunk, "unsafe_chunk": _chunk,
    "unbind": _unbind, "unbind_copy": _unbind,
}  # fmt: skip
#: Names of what follows the tensor, and the dimension, in their order.
_NAMES = {_split: ("split_size", "split_size_or_sections"), _chunk: ("chunks",), _unbind: ()}
_FUNCTIONS = {
    getattr(owner, name): count
    for owner in (torch, torch.Tensor)
    for name, count in _COUNTS.items()
    if hasattr(owner, name)
}
_FUNCTIONS[vf_split] = _split
#: Refuse sizes that they cannot cut into so many equal parts.
_EQUAL_PARTS = {getattr(owner, f"{axis}split"): axis for owner in (torch, torch.Tensor) for axis in "hvd"}


def part_count(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, bool] | None:
    """How many results a call has that cuts a tensor into parts, a traced number; and whether the same number may come
    of other sizes. None: another call, or no size decides."""
    count = _FUNCTIONS.get(function)
    if function in _EQUAL_PARTS:
        return _left_over(_EQUAL_PARTS[function], *args, **kwargs)
    if count is None:
        return None
    names = _NAMES[count]
    named = dict(kwargs)
    tensor, *given = args if args else (named.pop("input", named.pop("self", None)),)
    if names and not given:
        given = [named.pop(next((n for n in names if n in named), names[0]), None)]
    dim = given[len(names[:1])] if len(given) > len(names[:1]) else named.get("dim", 0)
    sized = isinstance(tensor, torch.Tensor) and isinstance(dim, int) and -tensor.dim() <= dim < tensor.dim()
    if not sized or (names and not isinstance(given[0], (int, torch.Tensor))):
        return None  # an error of the caller's, or there are as many as there are lengths
    found = count(tensor.size(dim), *given[: len(names[:1])])
    return None if found is None else (found, count is not _unbind)


def range_count(start: Any, stop: Any, step: Any) -> Any:
    """How many numbers `range(start, stop, step)` has, computed from a ``stop`` that sizes decide; None: other numbers
    are no plain ones, or tell each ``stop`` from the next."""
    if type(start) is not int or type(step) is not int or abs(step) < 2 or not is_size(stop):
        return None
    return (stop - start + step - 1) // step if step > 0 else (start - stop - step - 1) // -step


def _left_over(axis: str, tensor: Any, *given: Any, **named: Any) -> tuple[Any, bool] | None:
    """The elements that do not fit into equal parts, which PyTorch refuses."""
    parts = (*given, *named.values())[0]
    dim = {"h": min(tensor.dim() - 1, 1), "v": 0, "d": 2}[axis]
    if not isinstance(parts, int) or not 0 <= dim < tensor.dim() or not parts:
        return None
    return tensor.size(dim) % parts, True
