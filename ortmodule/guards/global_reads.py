"""Finds what forward reads outside of its module: globals, attributes of global objects, classes and modules, closures.

They are found in the code of its functions, not while it runs: a name that may be read is taken for one that is. What
users write is followed everywhere; of libraries only the plain globals of their own files are.
"""

from __future__ import annotations

import enum
import inspect
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy
import torch
from torch import nn

from ortmodule.core.snapshot import Attribute, Items, Snapshot, found_in
from ortmodule.guards import code_reader
from ortmodule.guards.code_reader import is_library, is_librarys, is_made_by_statement

MOST_ITEMS = 4096  # of a container whose contents are looked at
_MISSING = object()
_MUTABLE = (dict, list, set, deque, bytearray, numpy.ndarray)

#: An object, and the name of an attribute of it.
Place = tuple[Any, str]


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, enum.Enum))


def _is_held(value: Any) -> bool:
    """Can it be compared from call to call, and is it no function?"""
    return _is_plain(value) or isinstance(value, (*_MUTABLE, tuple, frozenset, torch.Tensor))


def read_by(function: types.FunctionType, seen: set[Any]) -> Iterator[Place]:
    """What a function may read, and those that it calls. ``seen``: functions and code that were looked at."""
    function = inspect.unwrap(function)
    if not isinstance(function, types.FunctionType):  # a builtin that was wrapped
        return
    owner, codes = sys.modules.get(function.__module__ or ""), [function.__code__]
    if owner is None or vars(owner) is not function.__globals__ or owner.__name__.startswith("torch."):
        return
    users = not is_library(owner)
    if users and function not in seen:
        seen.add(function)
        for cell in function.__closure__ or ():
            value = found_in(cell, "cell_contents")
            if _is_held(value):
                yield cell, "cell_contents"
            elif isinstance(value, types.FunctionType):
                yield from read_by(value, seen)
    while codes:
        code = codes.pop()
        if code in seen:
            continue
        seen.add(code)
        codes += code_reader.inner(code)
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
    return filter(known.__contains__, code_reader.read(code).globals)


def read_of(cls: type, function: types.FunctionType) -> Iterator[Place]:
    """Attributes of a module's class that its method may read by way of the class."""
    function = inspect.unwrap(function)
    if isinstance(function, types.FunctionType) and not is_librarys(cls):
        yield from _attributes(cls, function.__code__.co_names)


def _attributes(value: Any, names: Iterable[str]) -> Iterator[Place]:
    if isinstance(value, types.ModuleType):
        looked_in = {} if is_library(value) else vars(value)
    elif isinstance(value, type):
        bases = [base for base in reversed(value.__mro__) if is_made_by_statement(base) and not is_librarys(base)]
        looked_in = {name: part for base in bases for name, part in vars(base).items()}
    elif is_made_by_statement(type(value)) and not isinstance(value, nn.Module):
        looked_in = getattr(value, "__dict__", {})
    else:
        return
    for name in names:
        if _is_held(looked_in.get(name, _MISSING)):
            yield value, name


def global_state(modules: Iterable[nn.Module]) -> Snapshot:
    """What the methods of ``modules`` that users wrote, and functions that are attributes of modules, may read and
    change around them, as it is now, by name."""
    seen: set[Any] = set()
    known: set[tuple[int, str]] = set()
    found = Snapshot()
    for owner, name in _read_by_all(list(modules), seen):
        if (id(owner), name) in known or (isinstance(owner, types.ModuleType) and is_library(owner)):
            continue
        known.add((id(owner), name))
        value = found_in(owner, name)
        fixed = _is_plain(value) or isinstance(value, (tuple, frozenset, torch.Tensor))
        if fixed or (isinstance(value, _MUTABLE) and len(value) <= MOST_ITEMS):
            found.add_named(name, Attribute(owner, name))
            if not fixed:
                found.add_named(name, Items(value))
    return found


def reads_any(modules: Iterable[nn.Module], changed: Iterable[Any]) -> str | None:
    """The name of something around ``modules`` that their methods may read, and that is one of these containers, or
    attributes (`snapshot.Attribute`)."""
    changed = list(changed)
    containers = {id(each) for each in changed}
    places = {(id(each.owner), each.name) for each in changed if isinstance(each, Attribute)}
    for owner, name in _read_by_all(list(modules), set()):
        if (id(owner), name) in places or id(found_in(owner, name)) in containers:
            return name
    return None


def _read_by_all(modules: list[nn.Module], seen: set[Any]) -> Iterator[Place]:
    for cls in dict.fromkeys(base for module in modules for base in type(module).__mro__):
        if not is_librarys(cls):
            for method in [part for part in vars(cls).values() if isinstance(part, types.FunctionType)]:
                yield from read_by(method, seen)
                yield from read_of(cls, method)
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, types.FunctionType):
                yield from read_by(value, seen)
