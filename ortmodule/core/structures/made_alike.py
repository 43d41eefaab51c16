"""Tells whether classes and functions that each call makes anew were made alike, for :mod:`ortmodule.core.pytree`.

Such classes (named tuples, dataclasses, plain ones) are alike where all that is in them is: code, defaults, what their
functions close over. What may change counts by identity, so a class with a list of its own is like no other.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections import namedtuple
from collections.abc import Mapping
from typing import Any

from ortmodule.core.structures.classes import is_made_by_statement

_CONSTANTS = (type(None), type(Ellipsis), type(NotImplemented), bool, int, float, complex, str, bytes)
#: Entries of classes that decide nothing, or that the others follow from.
_LEFT_OUT = frozenset(
    ("__dict__", "__weakref__", "_abc_impl", "__annotate__", "__annotate_func__", "__annotations_cache__")
    + ("__orig_bases__", "__parameters__")
)
#: Modules whose `__repr__` keeps the set of the objects that it is showing, which is empty otherwise.
_SHOWING = ("dataclasses", "reprlib")
_OF_PROPERTIES = operator.attrgetter("fget", "fset", "fdel")
#: That of an item of a named tuple. (Its module has other names in other versions of Python.)
_POSITION: type = type(vars(namedtuple("_Any", ("item",)))["item"])
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)


class MadeAlike:
    """A class or a function that is not found under its name: equal to others that were made like it, and read as
    this very one."""

    __slots__ = ("made", "key")

    def __init__(self, made: Any, key: Any) -> None:
        self.made, self.key = made, key

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MadeAlike) and self.key == other.key


class _Same:
    """Stands for a value that is like itself alone."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


def is_found(value: Any) -> bool:
    """Is a class, or a function, what its name says, in its module?"""
    if "<locals>" in value.__qualname__:
        return False
    found: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def token_of(cls: type) -> Any:
    """What stands for ``cls`` in a structure: itself, or what is equal for all classes that were made like it."""
    if not is_made_by_statement(cls) or is_found(cls):
        return cls
    return MadeAlike(cls, _Keys().of(cls))


def function_token_of(function: types.FunctionType) -> Any:
    """The same for a function."""
    return function if is_found(function) else MadeAlike(function, _Keys().of(function))


class _Keys:
    """Makes what two alike values have in common, and others do not."""

    def __init__(self) -> None:
        self.met: dict[int, int] = {}  # the numbers of classes and functions, by their ids: they may hold themselves

    def of(self, value: Any) -> Any:
        kind = type(value)
        if kind in _CONSTANTS:
            return kind, repr(value) if isinstance(value, (float, complex)) else value
        if kind in (tuple, frozenset):
            return kind, kind(map(self.of, value))
        if isinstance(value, type):
            return self.of_class(value) if is_made_by_statement(value) and not is_found(value) else value
        if kind is types.FunctionType:
            return self._of_function(value)
        if kind in (staticmethod, classmethod):
            return kind, self.of(value.__func__)
        if kind is property:
            return kind, tuple(map(self.of, _OF_PROPERTIES(value)))
        if kind is functools.cached_property:
            return kind, self.of(value.func), value.attrname
        if kind in _DESCRIPTORS:
            return (kind, value.__name__, self.of(value.__objclass__))
        if kind.__module__ == "dataclasses" and "__slots__" in vars(kind):  # a field, or what the decorator was told
            return kind, tuple(self.of_item(name, getattr(value, name, None)) for name in kind.__slots__)
        if kind is _POSITION:
            return kind, value.__reduce__()[1]
        return _Same(value)

    def of_item(self, name: str, value: Any) -> Any:
        """Of what has this name in a class, or in a field."""
        if name in ("__dataclass_fields__", "__annotations__", "_field_defaults", "metadata") and isinstance(
            value, Mapping
        ):
            return tuple((self.of(key), self.of(item)) for key, item in value.items())
        return self.of(value)

    def _number(self, value: Any) -> tuple[str, int] | None:
        """That of a class or a function which was met before."""
        if id(value) in self.met:
            return "met", self.met[id(value)]
        self.met[id(value)] = len(self.met)
        return None

    def of_class(self, cls: type) -> Any:
        if (number := self._number(cls)) is not None:
            return number
        items = [(name, self.of_item(name, value)) for name, value in vars(cls).items() if name not in _LEFT_OUT]
        return type(cls), cls.__name__, cls.__qualname__, tuple(map(self.of, cls.__bases__)), tuple(items)

    def _of_function(self, function: types.FunctionType) -> Any:
        if (number := self._number(function)) is not None:
            return number
        shows = function.__globals__.get("__name__") in _SHOWING
        cells = tuple(self._of_cell(cell, shows) for cell in function.__closure__ or ())
        named = function.__kwdefaults__ or {}
        defaults = self.of(function.__defaults__), tuple((name, self.of(value)) for name, value in named.items())
        attributes = tuple((name, self.of(value)) for name, value in vars(function).items())
        return function.__code__, defaults, cells, attributes, self._of_globals(function.__globals__)

    def _of_cell(self, cell: types.CellType, shows: bool) -> Any:
        try:
            value = cell.cell_contents
        except ValueError:  # nothing is in it yet
            return None
        return None if shows and value == set() else self.of(value)

    def _of_globals(self, names: dict[str, Any]) -> Any:
        """Those of a module are the same. Named tuples' functions have some of their own."""
        if names is vars(sys.modules.get(names.get("__name__", ""), types)):
            return _Same(names)
        return tuple((name, self.of(value)) for name, value in names.items() if name != "__builtins__")
