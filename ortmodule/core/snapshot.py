"""Copies the contents of containers (dictionaries, lists and so on), compares them, and puts them back.

It calls the methods of the built-in types, not those of classes derived from them: such a class may store another key
than it is given (transformers' registries take a model, and keep the name of its class), or count its updates.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

import numpy

#: The types whose contents are known, each before those that it is derived from.
KINDS = (OrderedDict, dict, list, set, deque, bytearray)


def _kind(container: Any) -> Any:
    return next(kind for kind in KINDS if isinstance(container, kind))


def snapshot(container: Any) -> Any:
    """What is in a container, in one of the built-in type (or a NumPy array)."""
    if isinstance(container, numpy.ndarray):
        return container.copy()
    kind = _kind(container)
    return kind(kind.items(container) if issubclass(kind, dict) else kind.__iter__(container))


def same_items(container: Any, then: Any) -> bool:
    """Is in a container what was in it when ``then`` was its ``snapshot``?"""
    if isinstance(container, numpy.ndarray):
        return numpy.array_equal(container, then)
    kind = _kind(container)
    if kind.__len__(container) != len(then):
        return False
    if issubclass(kind, dict):
        return all(dict.get(container, key, same_items) is value for key, value in then.items())
    if kind in (set, bytearray):
        return kind.__eq__(container, then)
    return all(a is b for a, b in zip(kind.__iter__(container), then, strict=True))


def put_back(container: Any, then: Any) -> None:
    """Gives a container the contents of its ``snapshot``."""
    if isinstance(container, numpy.ndarray):
        container[...] = then
        return
    kind = _kind(container)
    if kind in (list, bytearray):
        kind.__setitem__(container, slice(None), then)
        return
    kind.clear(container)
    if issubclass(kind, dict):
        for key, value in then.items():
            kind.__setitem__(container, key, value)
    elif kind is set:
        set.update(container, then)
    else:
        deque.extend(container, then)
