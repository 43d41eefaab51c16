"""Finds what refers to objects, frozen ones included, and counts Python's references to tensors without that search.

Looking for what refers to an object takes a look at all objects: tens of milliseconds in a large program.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from ortmodule import _core
from ortmodule.core.torch_private import use_count


def referrers(objects: list[Any]) -> list[Any]:
    """What refers to ``objects``, this list aside."""
    return _core.referrers(objects)


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
