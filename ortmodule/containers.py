"""Dictionaries, lists and so on: what is in them, whether it still is, and making it so again.

A user's class may have methods of its own for all of this (a dictionary that makes keys of what it is given, as
transformers has one): those of the built-in class are called.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from typing import Any

import numpy


def copied(container: Any) -> Any:
    """A shallow copy, of the built-in class if it is a dictionary or list."""
    if isinstance(container, dict):
        return dict(dict.items(container))
    if isinstance(container, list):
        return list(list.__iter__(container))
    return copy.copy(container)


def same_items(container: Any, then: Any) -> bool:
    if isinstance(container, numpy.ndarray):
        return numpy.array_equal(container, then)
    if len(container) != len(then):
        return False
    if isinstance(container, dict):
        return all(dict.get(container, key, same_items) is value for key, value in then.items())  # not its own `get`
    if isinstance(container, (set, bytearray)):
        return container == then
    return all(a is b for a, b in zip(container, then, strict=True))


def put_back(container: Any, then: Any) -> None:
    """Gives a container the contents of ``then``, which :func:`copied` has made before."""
    if isinstance(container, numpy.ndarray):
        container[...] = then
    elif isinstance(container, list):
        list.__setitem__(container, slice(None), then)
    elif isinstance(container, bytearray):
        container[:] = then
    elif isinstance(container, deque):
        container.clear()
        container.extend(then)
    elif isinstance(container, dict):
        kind = OrderedDict if isinstance(container, OrderedDict) else dict
        kind.clear(container)
        for key, value in then.items():
            kind.__setitem__(container, key, value)
    else:
        container.clear()
        container.update(then)
