"""Finds what refers to objects, frozen ones included, and counts Python's references to tensors without that search.

Looking for what refers to an object takes a look at all objects: tens of milliseconds in a large program.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ortmodule.core.torch_private import use_count

_INTERPRETERS = 1000  # so many frozen objects are the interpreter's own, which it makes at its start


def has_frozen() -> bool:
    """Has the program frozen objects (`gc.freeze`)? Python's collector does not look at those."""
    return gc.get_freeze_count() > _INTERPRETERS


@contextmanager
def unfrozen() -> Iterator[None]:
    """Inside, no object is frozen. In a program that has frozen some, all are afterwards."""
    frozen = has_frozen()
    if frozen:
        gc.unfreeze()
    try:
        yield
    finally:
        if frozen:
            gc.freeze()


def referrers(objects: list[Any]) -> list[Any]:
    """What refers to ``objects``, this list aside."""
    with unfrozen():
        return [each for each in gc.get_referrers(*objects) if each is not objects]


def _counts(objects: list[Any]) -> list[int]:
    return [sys.getrefcount(each) for each in objects]


_OF_LISTS = _counts([object()])[0]  # of an object that nothing but such a list refers to


def _is_counted() -> bool:
    """Is what C++ holds of a tensor one reference of Python's, no more and no less?"""
    tensor = torch.ones(1)
    if use_count is None or _counts([tensor])[0] != _OF_LISTS + 1 or use_count(tensor) != 1:
        return False
    views = [tensor.view(1) for _ in range(2)]  # which know their base
    return use_count(tensor) > len(views) and _counts([tensor])[0] == _OF_LISTS + 2


_COUNTED = _is_counted()


def other_references(tensors: list[torch.Tensor]) -> list[int]:
    """How often Python's names and objects refer to each of ``tensors``, this list aside, which has each once. Where
    PyTorch does not tell, what autograd holds counts, too."""
    own = [_OF_LISTS + (use_count(each) > 1 if _COUNTED else 0) for each in tensors]
    return [max(count - mine, 0) for count, mine in zip(_counts(tensors), own, strict=True)]
