"""Dictionaries, lists and so on: is in them what was, and making it so again."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy


def same_items(container: Any, then: Any) -> bool:
    if isinstance(container, numpy.ndarray):
        return numpy.array_equal(container, then)
    if len(container) != len(then):
        return False
    if isinstance(container, dict):  # a subclass may have a `get` of its own
        return all(dict.get(container, key, same_items) is value for key, value in then.items())
    if isinstance(container, (set, bytearray)):
        return container == then
    return all(a is b for a, b in zip(container, then, strict=True))


def put_back(container: Any, then: Any) -> None:
    """Gives a container the contents of ``then``, a shallow copy of it that was made before."""
    if isinstance(container, numpy.ndarray):
        container[...] = then
    elif isinstance(container, (list, bytearray)):
        container[:] = then
    elif isinstance(container, deque):
        container.clear()
        container.extend(then)
    else:
        container.clear()
        container.update(then)
