"""Writes and reads the attributes of objects, those in slots too, for :mod:`ortmodule.core.pytree`.

They are set as `object` sets them: a class's `__init__`, `__post_init__` and `__setattr__` do not run.
"""

from __future__ import annotations

import contextlib
import types
from typing import Any
from weakref import WeakKeyDictionary

from ortmodule.core.structures.classes import is_made_by_statement
from ortmodule.core.structures.leaves import PrivateLeaf, Unseen
from ortmodule.core.structures.made_alike import is_found

_known: WeakKeyDictionary[type, tuple[Any, ...]] = WeakKeyDictionary()


def slots_of(cls: type) -> tuple[Any, ...]:
    """The descriptors of the attributes in slots of a class that class statements have made."""
    if (found := _known.get(cls)) is None:
        parts = [part for base in reversed(cls.__mro__) if is_made_by_statement(base) for part in vars(base).values()]
        found = tuple(part for part in parts if isinstance(part, types.MemberDescriptorType))
        if is_found(cls):  # descriptors keep their class alive
            _known[cls] = found
    return found


def are_all(cls: type) -> bool:
    """Are objects of this class nothing but their attributes, some of which may be in slots?"""
    return cls.__dictoffset__ != 0 or (bool(slots_of(cls)) and all(map(is_made_by_statement, cls.__mro__[:-1])))


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of ``value`` that are set: its dictionary itself, unless some are in slots."""
    return in_slots(value) | getattr(value, "__dict__", {}) if slots_of(type(value)) else vars(value)


def in_slots(value: Any) -> dict[str, Any]:
    """The attributes of ``value`` in slots that are set."""
    found = {}
    for slot in slots_of(type(value)):
        with contextlib.suppress(AttributeError):  # it is not set
            found[slot.__name__] = slot.__get__(value)
    return found


def write(writer: Any, value: Any) -> None:
    attributes = attributes_of(value)
    writer.tokens.append(tuple(attributes))
    hidden = [name[:1] == "_" and not writer.results for name in attributes]
    if any(hidden):
        values = zip(attributes.values(), hidden, strict=True)
        writer.add_all(attributes, (PrivateLeaf(v) if private else v for v, private in values))
    else:
        writer.add_all(attributes, attributes.values())


def read(reader: Any, value: Any) -> Any:
    """``value`` with the attributes that were written, and no others."""
    names, before = next(reader.tokens), attributes_of(value)
    for name in before.keys() - set(names):
        object.__delattr__(value, name)
    for name in names:
        item = reader.value()
        if type(item) is not Unseen or name not in before:
            object.__setattr__(value, name, item)
    return value
