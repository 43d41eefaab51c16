"""Finds the fields of plain objects (a configuration, a helper that users wrote) that forward reads, and their values.

A graph rests on the fields that were read while it was traced, not on the whole object: libraries write into
configurations (transformers' `Trainer` notes the type of the weights there when it saves a checkpoint).
"""

from __future__ import annotations

import enum
import functools
import sys
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from ortmodule.core.objects import interception
from ortmodule.core.structures.classes import is_made_by_statement

MISSING = object()
#: Who asks for one of these sees all fields.
WHOLE = frozenset({"__dict__", "__getstate__", "__reduce__", "__reduce_ex__"})

#: What the first two find is computed anew; the others are for who sets a field.
_SEEN = {"__getattribute__", "__getattr__", "__setattr__", "__delattr__", "__init__"}
_IMMUTABLE = 1 << 8  # a class whose attributes cannot be set
#: Packages whose objects have much in them that is no matter of a model, but for those that hold what users put there.
HOLDING = {"argparse", "collections", "multiprocessing", "queue", "weakref"}
_MACHINERY = {"torch", "ortmodule", *sys.stdlib_module_names} - HOLDING
_OTHERS = (enum.Enum, BaseException, nn.Module, torch.Tensor)


class Found(NamedTuple):
    """A field: its value, and what that hangs on: "object" (its dictionary), "slot", "class", or "code", which may
    read anything."""

    value: Any
    place: str


@dataclass
class FieldReads:
    """What one trace has read of the plain objects that were there before it."""

    objects: dict[int, Any] = field(default_factory=dict)  # by their ids
    around: set[int] = field(default_factory=set)  # ids of those that forward has from elsewhere than its module
    names: dict[tuple[int, str], str] = field(default_factory=dict)  # (id of an object, name): where it is read
    ran: dict[types.CodeType, dict[str, Any]] = field(default_factory=dict)  # code with its globals
    #: Of which attributes were read, by their ids. Those that forward makes go with the trace.
    modules: weakref.WeakValueDictionary[int, nn.Module] = field(default_factory=weakref.WeakValueDictionary)

    def classes(self) -> set[type]:
        """Those of which every read was noted."""
        return {type(value) for value in self.objects.values()}


@dataclass
class FieldSet:
    """The fields that are read of the objects of one class."""

    names: set[str] = field(default_factory=set)
    whole: bool = False


def slot_names(cls: type) -> list[str]:
    found = [vars(base).get("__slots__", ()) for base in cls.__mro__]
    names = [name for slots in found for name in ((slots,) if isinstance(slots, str) else slots)]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def is_plain(cls: type) -> bool:
    """Is an object of this class what its attributes are?"""
    made = all(map(is_made_by_statement, cls.__mro__[:-1]))
    return made and (cls.__dictoffset__ != 0 or bool(slot_names(cls)))


def is_holding(cls: type) -> bool:
    """Is it a class of Python's whose objects are what users put there?"""
    return cls.__module__.partition(".")[0] in HOLDING


def is_machinery(cls: type) -> bool:
    """Is it a class of Python's, torch's or ours whose objects are no settings?"""
    return cls.__module__.partition(".")[0] in _MACHINERY


def is_watchable(cls: type) -> bool:
    """Is every read of a field of such objects an attribute read, which can be seen?"""
    if not is_plain(cls) or issubclass(cls, _OTHERS) or is_machinery(cls) or any(
        base.__flags__ & _IMMUTABLE for base in cls.__mro__[:-1]
    ):  # fmt: skip
        return False
    kind: Any = type(cls)
    changeable = kind.__setattr__ is type.__setattr__ and kind.__delattr__ is type.__delattr__
    implicit = [name for base in cls.__mro__[:-1] for name in vars(base) if name.startswith("__")]
    return changeable and not any(_reads_past(cls, name) for name in implicit if name not in _SEEN)


def shows_all(cls: type, name: str) -> bool:
    """May who reads this attribute of an object see any of its fields?"""
    return name in WHOLE or (name not in _SEEN and _reads_past(cls, name))


def _reads_past(cls: type, name: str) -> bool:
    """Is it a method that reads fields where that cannot be seen (`super().__getattribute__(name)`)?"""
    parts = [vars(base).get(name) for base in cls.__mro__[:-1]]
    return any("__getattribute__" in each.__code__.co_names for part in parts for each in functions_behind(part))


def functions_behind(value: Any) -> Iterator[types.FunctionType]:
    """The functions that run when ``value`` is called, or read as the attribute of a class."""
    if isinstance(value, types.FunctionType):
        yield value
    elif isinstance(value, property):
        yield from functions_behind(value.fget)
    elif isinstance(value, (types.MethodType, classmethod, staticmethod)):
        yield from functions_behind(value.__func__)
    elif isinstance(value, (functools.partial, functools.cached_property)):
        yield from functions_behind(value.func)


def in_class(cls: type, name: str) -> Any:
    """What the class, or one that it is derived from, has under this name, as it is there; or MISSING."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), MISSING)


def attributes_of(value: Any) -> dict[str, Any]:
    found = getattr(value, "__dict__", None)
    return found if isinstance(found, dict) else {}


def found(value: Any, name: str) -> Found:
    """A field of a plain object, or what stands in its place."""
    cls, attributes = type(value), attributes_of(value)
    of_class = in_class(cls, name)
    if interception.original(cls, "__getattribute__") is not object.__getattribute__:
        return _computed(value, name, attributes, of_class)
    if isinstance(of_class, types.MemberDescriptorType):
        return Found(getattr(value, name, MISSING), "slot")
    if name in attributes and (of_class is MISSING or not hasattr(type(of_class), "__set__")):
        return Found(attributes[name], "object")
    if of_class is not MISSING:
        return Found(of_class, "class")
    if hasattr(cls, "__getattr__"):
        return _computed(value, name, attributes, of_class)
    return Found(MISSING, "object")


def _computed(value: Any, name: str, attributes: dict[str, Any], of_class: Any) -> Found:
    """A field as the object's own code finds it."""
    try:
        result = getattr(value, name)
    except Exception:
        return Found(MISSING, "code")
    if isinstance(of_class, types.MemberDescriptorType):
        return Found(result, "slot")
    if any(result is each for each in attributes.values()):  # under this name, or another one
        return Found(result, "object")
    if of_class is not MISSING and (result is of_class or getattr(result, "__func__", MISSING) is of_class):
        return Found(of_class, "class")
    return Found(result, "code")
