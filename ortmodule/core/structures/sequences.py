"""Writes and reads sequences and classes that torch knows, for :mod:`ortmodule.core.pytree`.

A kind has ``write(writer, value, cls)`` and ``read(reader, cls, target)``: into ``target``, if there is one.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from ortmodule.core.structures import attributes
from ortmodule.core.structures.classes import is_made_by_statement
from ortmodule.core.structures.made_alike import token_of
from ortmodule.core.torch_private import registered_nodes


class Container:
    container = True


class Sequence(Container):
    """Lists, tuples, named tuples."""

    @staticmethod
    def write(writer: Any, value: Any, cls: type) -> None:
        writer.tokens += (token_of(cls) if writer.makes else cls, len(value))
        writer.add_all(value, value)
        if _has_attributes(cls):
            attributes.write(writer, value)

    @staticmethod
    def read(reader: Any, cls: Any, target: Any) -> Any:
        items = reader.values(next(reader.tokens))
        if cls is list and target is None:
            return items
        value = _around(items, cls, target)
        return attributes.read(reader, value) if _has_attributes(cls) else value


def _has_attributes(cls: type) -> bool:
    return cls.__dictoffset__ != 0 and is_made_by_statement(cls)


def _around(items: list[Any], cls: Any, target: Any) -> Any:
    """A sequence of this class, of which no `__init__` runs; ``target``, if that can have these items."""
    if isinstance(target, list):
        list.__setitem__(target, slice(None), items)
        return target
    if target is not None and len(target) == len(items) and all(a is b for a, b in zip(target, items, strict=True)):
        return target
    if hasattr(cls, "_make"):
        return cls._make(items)
    if not is_made_by_statement(cls):
        return cls(items)
    if issubclass(cls, tuple):
        return tuple.__new__(cls, items)
    value = list.__new__(cls)
    list.extend(value, items)
    return value


class Slice(Container):
    """Its bounds may be others in each call."""

    @staticmethod
    def write(writer: Any, value: slice, cls: type) -> None:
        writer.tokens.append(cls)
        writer.add_all(value, (value.start, value.stop, value.step))

    @staticmethod
    def read(reader: Any, cls: type, target: Any) -> slice:
        made = slice(*reader.values(3))
        return made if target is None else target


class Deque(Container):
    @staticmethod
    def write(writer: Any, value: deque, cls: type) -> None:
        writer.tokens += (cls, len(value), value.maxlen)
        writer.add_all(value, value)

    @staticmethod
    def read(reader: Any, cls: type, target: Any) -> deque:
        count, most = next(reader.tokens), next(reader.tokens)
        items = reader.values(count)
        if target is None:
            return deque(items, most)
        target.clear()
        target.extend(items)
        return target


class Registered(Container):
    """An object of a class that is no plain one, and that torch.utils._pytree was told how to take apart."""

    @staticmethod
    def write(writer: Any, value: Any, cls: type) -> None:
        children, context = registered_nodes[cls].flatten_fn(value)
        writer.tokens += (cls, len(children), context)
        writer.add_all(value, children)

    @staticmethod
    def read(reader: Any, cls: type, target: Any) -> Any:
        count, context = next(reader.tokens), next(reader.tokens)
        return registered_nodes[cls].unflatten_fn(reader.values(count), context)
