"""Finds what forward reads outside of its module: globals, attributes of global objects, classes and modules, closures.

They are found in the code of its functions, not while it runs: a name that may be read is taken for one that is. What
users write is followed everywhere; of libraries only the plain globals of their own files are.
"""

from __future__ import annotations

import dis
import enum
import functools
import inspect
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy
import torch
from torch import nn

from ortmodule.core.snapshot import put_back, same_items, snapshot

MOST_ITEMS = 4096  # of a container whose contents are looked at
_MISSING = object()
_HEAP_TYPE = 1 << 9  # a class that was made by a class statement
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_MUTABLE = (dict, list, set, deque, bytearray, numpy.ndarray)

#: An object, and the name of an attribute of it.
Place = tuple[Any, str]


def _found(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name, _MISSING)
    except ValueError:  # an empty cell
        return _MISSING


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, enum.Enum))


def _is_held(value: Any) -> bool:
    """Can it be compared from call to call, and is it no function?"""
    return _is_plain(value) or isinstance(value, (*_MUTABLE, tuple, frozenset, torch.Tensor))


def _is_library(module: Any) -> bool:
    if getattr(module, "__name__", "").partition(".")[0] in ("torch", "ortmodule"):
        return True
    file = getattr(module, "__file__", None)
    if file is None:
        return getattr(module, "__name__", "") != "__main__"
    return file.startswith(_LIBRARIES)


def _is_librarys(cls: type) -> bool:
    return _is_library(sys.modules.get(cls.__module__))


def read_by(function: types.FunctionType, seen: set[Any]) -> Iterator[Place]:
    """What a function may read, and those that it calls. ``seen``: functions and code that were looked at."""
    function = inspect.unwrap(function)
    if not isinstance(function, types.FunctionType):  # a builtin that was wrapped
        return
    owner, codes = sys.modules.get(function.__module__ or ""), [function.__code__]
    if owner is None or vars(owner) is not function.__globals__ or owner.__name__.startswith("torch."):
        return
    users = not _is_library(owner)
    if users and function not in seen:
        seen.add(function)
        for cell in function.__closure__ or ():
            value = _found(cell, "cell_contents")
            if _is_held(value):
                yield cell, "cell_contents"
            elif isinstance(value, types.FunctionType):
                yield from read_by(value, seen)
    while codes:
        code = codes.pop()
        if code in seen:
            continue
        seen.add(code)
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        for name in _globals_in(code, vars(owner)):
            value = vars(owner).get(name, _MISSING)
            if isinstance(value, types.FunctionType):
                yield from read_by(value, seen)
            if _is_plain(value) or (users and (_is_held(value) or isinstance(value, types.FunctionType))):
                yield owner, name
            elif users:
                yield from _attributes(value, code.co_names)


def _globals_in(code: types.CodeType, known: dict[str, Any]) -> Iterable[str]:
    """Names of ``known`` globals that code reads or sets: among its names are those of attributes, too."""
    if known.keys().isdisjoint(code.co_names):
        return ()
    return filter(known.__contains__, _names_of_globals(code))


@functools.lru_cache(maxsize=4096)
def _names_of_globals(code: types.CodeType) -> tuple[str, ...]:
    used = (step.argval for step in dis.get_instructions(code) if step.opname.endswith(("_GLOBAL", "_NAME")))
    return tuple(dict.fromkeys(used))


def read_of(cls: type, function: types.FunctionType) -> Iterator[Place]:
    """Attributes of a module's class that its method may read by way of the class."""
    function = inspect.unwrap(function)
    if isinstance(function, types.FunctionType) and not _is_librarys(cls):
        yield from _attributes(cls, function.__code__.co_names)


def _attributes(value: Any, names: Iterable[str]) -> Iterator[Place]:
    if isinstance(value, types.ModuleType):
        looked_in = {} if _is_library(value) else vars(value)
    elif isinstance(value, type):
        bases = [base for base in reversed(value.__mro__) if base.__flags__ & _HEAP_TYPE and not _is_librarys(base)]
        looked_in = {name: part for base in bases for name, part in vars(base).items()}
    elif type(value).__flags__ & _HEAP_TYPE and not isinstance(value, nn.Module):
        looked_in = getattr(value, "__dict__", {})
    else:
        return
    for name in names:
        if _is_held(looked_in.get(name, _MISSING)):
            yield value, name


class GlobalState:
    """What the methods of ``modules`` that users wrote may read and change around them, as it is now."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        seen: set[Any] = set()
        self._held: dict[tuple[int, str], tuple[Any, str, Any, Any]] = {}
        for cls in dict.fromkeys(base for module in modules for base in type(module).__mro__):
            if _is_librarys(cls):
                continue
            for method in [part for part in vars(cls).values() if isinstance(part, types.FunctionType)]:
                for owner, name in (*read_by(method, seen), *read_of(cls, method)):
                    value = _found(owner, name)
                    if isinstance(owner, types.ModuleType) and _is_library(owner):
                        continue
                    if _is_plain(value) or isinstance(value, (tuple, frozenset, torch.Tensor)):
                        self._held[id(owner), name] = owner, name, value, value
                    elif isinstance(value, _MUTABLE) and len(value) <= MOST_ITEMS:
                        self._held[id(owner), name] = owner, name, value, snapshot(value)

    def changed(self) -> str | None:
        """The first that is not as it was."""
        for owner, name, value, then in self._held.values():
            if _found(owner, name) is not value or not _is_same(value, then):
                return name
        return None

    def put_back(self) -> None:
        for owner, name, value, then in self._held.values():
            if _found(owner, name) is not value:
                setattr(owner, name, value)
            if not _is_same(value, then):
                put_back(value, then)


def _is_same(value: Any, then: Any) -> bool:
    """Is in a container what was in it when ``then`` was copied from it?"""
    return value is then or not isinstance(value, _MUTABLE) or same_items(value, then)
