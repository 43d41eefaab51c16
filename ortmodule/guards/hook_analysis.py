"""Sorts forward hooks on submodules: those that are traced, and those that PyTorch has to run.

A hook is *transparent* when all that it can touch are objects of the forward that calls it: what it is given, what a
context variable holds while forward runs, constants. Such a hook is traced like the code around it, also one of a
library's (transformers collects hidden states and attention this way). It is found by looking at the hook's code: no
assignment but to local variables and items, no calls but of pure builtins, of functions that are transparent
themselves and of methods that containers and tensors have, and nothing within its reach that outlives a forward and
can be changed. Every other hook runs in PyTorch, with the submodule that it is on.

What a transparent hook reads are constants of a graph: :class:`Reach` compares them before every call. To a graph,
hooks are the same when their :func:`description` is.
"""

from __future__ import annotations

import builtins
import dis
import functools
import types
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from ortmodule.core.pytree import CONSTANTS
from ortmodule.core.snapshot import found_in
from ortmodule.guards.code_reader import read
from ortmodule.guards.fields import is_plain

_NAMES = ("abs", "all", "any", "bool", "dict", "enumerate", "float", "int", "isinstance", "len", "list", "max", "min",
          "range", "reversed", "set", "sorted", "str", "sum", "tuple", "zip")  # fmt: skip
_PURE = {name: getattr(builtins, name) for name in _NAMES}
_OF_CONTAINERS = frozenset().union(*map(dir, (dict, list, tuple, set, str)))
_OF_TENSORS = frozenset({"shape", "dtype", "device", "ndim", "T", "mT", "float", "double", "half", "bfloat16"})
_VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype)
_MISSING = object()


class Reach:
    """What transparent hooks read from outside of a forward: all of it constants, functions and context variables."""

    def __init__(self) -> None:
        self.cells: dict[int, tuple[Any, Any]] = {}
        self.items: dict[tuple[int, str], tuple[dict, str, Any]] = {}
        self.variables: dict[int, tuple[ContextVar, Any]] = {}

    def holds(self) -> bool:
        """Is all of it as it was?"""
        try:
            return (
                all([cell.cell_contents is value for cell, value in self.cells.values()])
                and all([holder.get(key, _MISSING) is value for holder, key, value in self.items.values()])
                and all([variable.get(None) is value for variable, value in self.variables.values()])
            )
        except ValueError:  # an empty cell
            return False

    def values(self) -> tuple:
        """The constants, hashable; equal for equal ones."""
        found = [value for _, value in self.cells.values()]
        found += [value for _, _, value in self.items.values()]
        found += [value for _, value in self.variables.values()]
        return tuple([_comparable(v) for v in found])

    def busy(self) -> bool:
        """Does a context variable hold another value than outside of forward?"""
        return any(variable.get(None) is not value for variable, value in self.variables.values())

    def include(self, other: Reach) -> None:
        """What ``other`` reads, too."""
        self.cells |= other.cells
        self.items |= other.items
        self.variables |= other.variables


def _comparable(value: Any) -> Any:
    if isinstance(value, types.FunctionType):
        return _code_and_defaults(value)
    if isinstance(value, ContextVar):
        return value
    if isinstance(value, (float, complex)):
        return type(value), repr(value)
    return (type(value), value) if _is_value(value) else type(value)


def _code_and_defaults(function: types.FunctionType) -> tuple:
    named = tuple([(name, _comparable(value)) for name, value in (function.__kwdefaults__ or {}).items()])
    return function.__code__, tuple(map(_comparable, function.__defaults__ or ())), named


def description(hook: types.FunctionType, reach: Reach) -> tuple:
    """Equal for transparent hooks that compute the same, such as one that is made and registered anew each time."""
    return *_code_and_defaults(hook), reach.values()


#: Instructions of a hook without branches that only calls methods of what it is given, by how they begin.
_CALLS_METHODS = (
    "LOAD_FAST", "LOAD_CONST", "LOAD_ATTR", "LOAD_METHOD", "PUSH_NULL", "PRECALL", "CALL", "POP_TOP", "RETURN_",
    "RESUME", "CACHE", "NOP", "KW_NAMES",
)  # fmt: skip
_ASKS = frozenset({"requires_grad_"})  # methods that change nothing when they are called again


@functools.lru_cache(maxsize=1024)
def once_is_enough(code: types.CodeType) -> bool:
    """Does a second hook of this code, right behind the first, change nothing? transformers registers one that asks for
    gradients each time that checkpoints are switched on."""
    steps = list(dis.get_instructions(code))
    kinds = [step.opname for step in steps]
    if not read(code).attributes <= _ASKS or not all(kind.startswith(_CALLS_METHODS) for kind in kinds):
        return False
    loaded = sum(kind.startswith(("LOAD_ATTR", "LOAD_METHOD")) for kind in kinds)
    returned = steps[-1] if kinds[-1] == "RETURN_CONST" else steps[-2]  # what a function without branches returns
    return sum(kind == "CALL" or kind.startswith("CALL_") for kind in kinds) <= loaded and returned.argval is None


def reach_of(hook: Any) -> Reach | None:
    """What a forward hook reads from elsewhere, if it is transparent."""
    if not isinstance(hook, types.FunctionType):
        return None
    code = hook.__code__
    # The module that a hook is on outlives the forward; it is the first argument, or in the first.
    if read(code).locals_read.intersection(code.co_varnames[:1]):
        return None
    look = _Look()
    return look.reach if look.function(hook) and look.fields() else None


class _Look:
    """Looks at a function and at all that it reaches. Methods return whether everything is transparent so far."""

    def __init__(self) -> None:
        self.reach = Reach()
        self._seen: set[int] = set()  # ids of functions
        self._names: set[str] = set()  # of attributes that are read of anything
        self._objects: list[Any] = []

    def function(self, function: types.FunctionType) -> bool:
        code = function.__code__
        if id(function) in self._seen:
            return True
        self._seen.add(id(function))
        constants = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        if code.co_cellvars or code.co_flags & _GENERATORS or not all(map(_is_value, constants)):
            return False
        use = read(code)
        if use.has_effects or use.has_super:
            return False
        self._names |= use.attributes
        return all(map(self._cell, function.__closure__ or ())) and all(
            self._global(name, function.__globals__) for name in use.globals_read
        )

    def fields(self) -> bool:
        """The attributes that are read: of objects within reach, or such as containers and tensors have."""
        done: set[str] = set()
        while left := self._names - done:
            done |= left
            for name in left:
                owners = [o for o in self._objects if name in vars(o) or hasattr(type(o), name)]
                methods = [vars(o).get(name, getattr(type(o), name, None)) for o in owners]
                if not owners and not _is_harmless(name):
                    return False
                if not all(self._value(m) or _is_value(m) for m in methods):
                    return False
        return True

    def _cell(self, cell: types.CellType) -> bool:
        value = found_in(cell, "cell_contents", _MISSING)
        self.reach.cells[id(cell)] = cell, value
        return value is not _MISSING and self._value(value)

    def _global(self, name: str, known: dict[str, Any]) -> bool:
        value = known.get(name, _MISSING)
        self.reach.items[id(known), name] = known, name, value
        if value is _MISSING:
            return name in _PURE and getattr(builtins, name) is _PURE[name]
        return self._value(value)

    def _value(self, value: Any) -> bool:
        if _is_value(value):
            return True
        if isinstance(value, types.FunctionType):
            return self.function(value)
        if isinstance(value, ContextVar):
            self.reach.variables[id(value)] = value, value.get(None)
            return _is_value(value.get(None))
        if isinstance(value, (*CONSTANTS, nn.Module)) or not is_plain(type(value)) or not hasattr(value, "__dict__"):
            return False
        if not any(value is known for known in self._objects):
            self._objects.append(value)
            for name, part in vars(value).items():
                self.reach.items[id(vars(value)), name] = vars(value), name, part
                if not (_is_value(part) or isinstance(part, ContextVar)) or not self._value(part):
                    return False
        return True


_GENERATORS = 0x20 | 0x80 | 0x100 | 0x200  # and coroutines


def _is_value(value: Any) -> bool:
    return type(value) in _VALUES


def _is_harmless(name: str) -> bool:
    """Is it a method or an attribute of containers, context variables or tensors?"""
    if name.startswith("__"):
        return False
    return name in _OF_CONTAINERS or name in _OF_TENSORS or hasattr(torch.ops.aten, name)
