"""Finds what forward reads outside of its module: globals, attributes of global objects, classes and modules, closures.

They are found in the code of its functions, not while it runs: a name that may be read is taken for one that is. What
users write is followed everywhere; of libraries only the plain globals of their own files are.
"""

from __future__ import annotations

import array
import ctypes
import enum
import functools
import inspect
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import nn

from ortmodule.core import torch_private
from ortmodule.core.objects.references import referrers
from ortmodule.core.snapshot import found_in
from ortmodule.core.structures.classes import is_made_by_statement
from ortmodule.guards import code_reader
from ortmodule.guards.code_reader import is_library, is_librarys, module_of
from ortmodule.guards.fields import functions_behind, is_machinery

_MISSING = object()
MUTABLE = (dict, list, set, deque, bytearray, numpy.ndarray)
CDATA = ctypes.Structure.__mro__[1]  # what all classes of ctypes are derived from
#: Others that hold values which change without them.
_BEHIND = (array.array, types.MappingProxyType, weakref.ReferenceType, functools.partial, types.MethodType, CDATA)
#: Another one may be put in the place of one.
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, torch.jit.ScriptFunction)
SPACES = (types.SimpleNamespace, threading.local)  # classes of libraries whose objects are what users make of them

MOST_DEPTH = 3  # of modules and classes in each other

#: An object, and the name of an attribute of it.
Place = tuple[Any, str]
Objects = list[tuple[str, Any]]  # with their names


def is_plain_value(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, enum.Enum))


def is_held(value: Any) -> bool:
    """Can it be compared from call to call, and is it no function?"""
    return is_plain_value(value) or isinstance(value, (*MUTABLE, *SPACES, *_BEHIND, tuple, frozenset, torch.Tensor))


def is_object(value: Any) -> bool:
    """Is it an object of a class that users wrote, or of another one that is no part of Python or torch?"""
    cls = type(value)
    return is_made_by_statement(cls) and not isinstance(value, (nn.Module, type)) and not is_machinery(cls)


def read_by(function: types.FunctionType, seen: set[Any], objects: Objects | None = None) -> Iterator[Place]:
    """What a function may read, and those that it calls. ``seen``: functions and code that were looked at. ``objects``:
    takes what is around those that users wrote, with its names."""
    wrapped = getattr(function, "__wrapped__", None)
    if isinstance(wrapped, types.FunctionType) and wrapped not in seen:
        yield from read_by(wrapped, seen, objects)
    owner, codes = module_of(function.__globals__), [function.__code__]
    if owner.__name__.startswith("torch."):
        return
    users = not is_library(owner)
    if users and function not in seen:
        seen.add(function)
        yield from _defaults(function, objects)
        for cell in function.__closure__ or ():
            value = found_in(cell, "cell_contents")
            if objects is not None:
                objects.append(("a closure's variable", value))
            if is_held(value) or isinstance(value, FUNCTIONS):
                yield cell, "cell_contents"
            if isinstance(value, types.FunctionType):
                yield from read_by(value, seen, objects)
    while codes:
        code = codes.pop()
        if code in seen:
            continue
        seen.add(code)
        codes += code_reader.inner(code)
        if objects is not None and users:
            yield from ((owner, name) for name in code_reader.read(code).globals_set if name not in vars(owner))
        for name in _globals_in(code, vars(owner)):
            value = vars(owner).get(name, _MISSING)
            if objects is not None and users:
                objects.append((name, value))
                objects += _named_in(value, code.co_names)
            if isinstance(value, types.FunctionType):
                yield from read_by(value, seen, objects)
            if is_plain_value(value) or (users and (is_held(value) or isinstance(value, FUNCTIONS))):
                yield owner, name
            elif users:
                yield from _attributes(value, code.co_names)
        if users:
            yield from _imported_in(code)


def _defaults(function: types.FunctionType, objects: Objects | None) -> Iterator[Place]:
    """Defaults of parameters: a container among them may be changed."""
    for name in ("__defaults__", "__kwdefaults__"):
        found = getattr(function, name) or ()
        values = list(found.values() if isinstance(found, dict) else found)
        if objects is not None:
            objects += [(f"a default of {function.__name__}", value) for value in values]
        if any(not is_plain_value(value) for value in values):
            yield function, name


def read_by_code(
    ran: Mapping[types.CodeType, dict[str, Any]], classes: Iterable[type], modules: Iterable[type] = ()
) -> Iterator[tuple[Any, str, str]]:  # fmt: skip
    """What code that users wrote, and that has run, may have read around it, and where. ``ran``: with its globals;
    ``classes``: of objects, which it may be a method of; ``modules``: classes of modules, which any code may be given
    (`type(module).scale`)."""
    users: dict[types.CodeType, Any] = {}  # the module of each
    for code, space in ran.items():
        module = module_of(space)
        if not is_library(module):
            users[code] = module
    held = {cls: _held_by(cls) for cls in dict.fromkeys(modules)}
    for code, module in users.items():
        where, space = f"{code.co_filename}:{code.co_firstlineno}", vars(module)
        for name in _globals_in(code, space):
            value = space.get(name, _MISSING)
            if is_held(value) or isinstance(value, FUNCTIONS) or is_object(value):
                yield module, name, where
            yield from ((owner, each, where) for owner, each in _attributes(value, code.co_names))
        yield from ((owner, each, where) for owner, each in _imported_in(code))
        yield from ((cls, each, where) for cls, names in held.items() for each in names.intersection(code.co_names))
    for cls in {base for each in classes for base in each.__mro__ if not is_librarys(base)}:
        for part in vars(cls).values():
            for function in functions_behind(part):
                if function.__code__ in users:
                    where = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
                    yield from ((owner, name, where) for owner, name in _attributes(cls, function.__code__.co_names))
    for cls in {base for each in held for base in each.__mro__ if not is_librarys(base)}:
        for function in (function for part in vars(cls).values() for function in functions_behind(part)):
            if function.__code__ in users:  # one that `super()` finds is no attribute of a module
                yield function, "__code__", f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
    for function in _closures(users):
        where = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
        yield from ((owner, name, where) for owner, name in _defaults(function, None))
        for cell in function.__closure__ or ():
            value = found_in(cell, "cell_contents")
            if is_held(value) or isinstance(value, FUNCTIONS) or is_object(value):
                yield cell, "cell_contents", where


def _closures(users: Collection[types.CodeType]) -> list[types.FunctionType]:
    """The functions with this code that were not made by code of these: all that have variables of a closure."""
    made = {part for code in users for part in code_reader.inner(code)}
    codes = [code for code in users if code.co_freevars and code not in made]
    found = referrers(codes) if codes else []
    return [each for each in found if isinstance(each, types.FunctionType) and each.__code__ in users]


def _imported_in(code: types.CodeType) -> Iterator[Place]:
    """What code may read of modules that it imports itself."""
    if sys.modules.keys().isdisjoint(code.co_names):
        return
    for name in code_reader.read(code).imports:
        for each in {name, name.partition(".")[0]}:
            yield from _attributes(sys.modules.get(each), code.co_names)


def _globals_in(code: types.CodeType, known: dict[str, Any]) -> Iterable[str]:
    """Names of ``known`` globals that code reads or sets: among its names are those of attributes, too."""
    if known.keys().isdisjoint(code.co_names):
        return ()
    return filter(known.__contains__, code_reader.read(code).globals)


def read_of(cls: type, function: types.FunctionType) -> Iterator[Place]:
    """Attributes of a module's class that its method may read by way of the class."""
    for each in {function, inspect.unwrap(function)}:
        if isinstance(each, types.FunctionType) and not is_librarys(cls):
            yield from _attributes(cls, each.__code__.co_names)


def read_by_arguments(classes: Iterable[type]) -> dict[tuple[int, str], tuple[Any, str]]:
    """What forward may read by way of arguments of these ``classes``, the arguments' own attributes aside: attributes
    of the classes, and what their methods read. {(id of an object, name): (the object, where it is read)}"""
    found: dict[tuple[int, str], tuple[Any, str]] = {}
    seen: set[Any] = set()
    for cls in {base for each in classes for base in each.__mro__ if is_made_by_statement(base)}:
        if is_librarys(cls):
            continue
        parts = {name: part for name, part in vars(cls).items() if not name.startswith("__")}
        places: list[Place] = [(cls, name) for name, part in parts.items() if is_held(part)]
        methods = [getattr(part, "fget", part) for part in vars(cls).values()]
        for method in [part for part in methods if isinstance(part, types.FunctionType)]:
            places += [*read_by(method, seen), *read_of(cls, method)]
        found |= {(id(owner), name): (owner, f"an argument ({cls.__name__})") for owner, name in places}
    return found


def _attributes(value: Any, names: Iterable[str], depth: int = 0) -> Iterator[Place]:
    library = isinstance(value, types.ModuleType) and is_library(value)
    if isinstance(value, types.ModuleType):
        looked_in = vars(torch_private.module_behind(value))
    elif isinstance(value, type):
        bases = [base for base in reversed(value.__mro__) if is_made_by_statement(base) and not is_librarys(base)]
        looked_in = {name: part for base in bases for name, part in vars(base).items()}
    elif isinstance(value, types.FunctionType):
        looked_in = vars(value)
    elif is_made_by_statement(type(value)) and not isinstance(value, nn.Module):
        looked_in = getattr(value, "__dict__", {})
    else:
        return
    for name in names:
        found = looked_in.get(name, _MISSING)
        found = found.__func__ if isinstance(found, (staticmethod, classmethod)) else found
        if is_held(found) or (isinstance(found, FUNCTIONS) and not library):
            yield value, name
        elif depth < MOST_DEPTH and (isinstance(found, (types.ModuleType, type)) or (library and _is_made(found))):
            yield from _attributes(found, names, depth + 1)


def _named_in(module: Any, names: Iterable[str], depth: int = 0) -> Objects:
    """What has one of these names in a module that users wrote, or in one inside: `helpers.register(loss)`."""
    if not isinstance(module, types.ModuleType) or is_library(module) or depth > MOST_DEPTH:
        return []
    found = [(name, vars(module)[name]) for name in names if name in vars(module)]
    return [*found, *(each for _, part in found for each in _named_in(part, names, depth + 1))]


def _held_by(cls: type) -> set[str]:
    """The names under which a class that users wrote, or one that it is derived from, has a value."""
    bases = [base for base in cls.__mro__ if is_made_by_statement(base) and not is_librarys(base)]
    return {name for base in bases for name, part in vars(base).items() if not name.startswith("__") and is_held(part)}


def _is_made(value: Any) -> bool:
    """Is it an object of a class that a class statement has made (a logger)?"""
    return is_made_by_statement(type(value)) and not isinstance(value, (nn.Module, type))


def read_by_modules(modules: list[nn.Module], seen: set[Any], objects: Objects | None = None) -> Iterator[Place]:
    """As :func:`read_by`, of the methods of ``modules`` that users wrote, and of functions that are attributes."""
    for cls in dict.fromkeys(base for module in modules for base in type(module).__mro__):
        if not is_librarys(cls):
            for method in [part for part in vars(cls).values() if isinstance(part, types.FunctionType)]:
                yield from read_by(method, seen, objects)
                yield from read_of(cls, method)
    for module in modules:
        for name, value in vars(module).items():
            if isinstance(value, types.FunctionType):
                yield from read_by(value, seen, objects)
            elif objects is not None and isinstance(value, types.BuiltinMethodType):  # `losses.append`
                objects.append((name, value))
