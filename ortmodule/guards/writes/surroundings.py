"""Finds what the methods of modules may change around them: globals, closures, and all that those hold.

From the names in code it goes on into objects of classes that users wrote, containers, functions and context variables,
as deep as they go: a method of a global object changes what the code that calls it does not name.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import numpy
import torch
from torch import nn

from ortmodule.core.objects.tensor_memory import memory_of
from ortmodule.core.pytree import CONSTANTS
from ortmodule.core.snapshot import Attribute, ContextValue, Items, NewAttributes, Snapshot, found_in
from ortmodule.core.structures.classes import is_made_by_statement
from ortmodule.guards.code_reader import MODULES, is_library, is_librarys, module_of
from ortmodule.guards.fields import is_holding
from ortmodule.guards.global_reads import MUTABLE, SPACES, Objects, Place, is_plain_value, read_by, read_by_modules
from ortmodule.guards.writes.outside_writes import SMALL, OutsideWrites, StorageContents

MOST_ITEMS = 4096  # of a container whose contents are looked at
MOST_OBJECTS = 4096  # that are looked at
#: Constants that hold something: `CONSTANTS` are not looked into.
_HOLD = (type, frozenset, types.FunctionType, types.BuiltinFunctionType)
_LEFT = (*(kind for kind in CONSTANTS if kind not in _HOLD), torch.Tensor, nn.Module, types.ModuleType)
#: Classes of modules are named where these are made; autograd functions run by themselves, at each call.
_APART = (nn.Module, torch.autograd.Function)


class GlobalState(Snapshot):
    """A snapshot of what is around modules, and all the ``values`` that were looked at for it. ``tensors``: those in
    it, and those of modules in it."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Any] = []
        self.tensors: dict[int, torch.Tensor] = {}  # by their ids
        self.written: dict[int, torch.Tensor] = {}  # those of them that code would have written into
        self.known: MutableMapping[int, torch.Tensor] = {}  # and that earlier code would have
        self.used: list[torch.Tensor] = []  # what was written into: those, or copies of them

    def writes(self) -> AbstractContextManager[Any]:
        """Afterwards the tensors are as they were."""
        if not self.tensors:
            return nullcontext()
        return OutsideWrites(self.tensors.values(), self.written, self.known, self.used)

    @contextmanager
    def around(self) -> Iterator[None]:
        with super().around(), self.writes():
            yield


def global_state(modules: Iterable[nn.Module], hooks: Iterable[Any] = ()) -> GlobalState:
    """What the methods of ``modules`` that users wrote, functions that are attributes of modules, and ``hooks`` may
    read and change around them, as it is now, by name."""
    return _Surroundings(modules, [("a hook", hook) for hook in hooks]).found


def state_of_function(cls: type) -> GlobalState:
    """The same of a custom autograd function, which runs by itself in each run, and in traces and checks besides; with
    the elements of tensors that are not large. (Torch's tracer, in whose call it runs, does not bear a mode.)"""
    found = _Surroundings((), [(cls.__name__, cls)], nn.Module).found
    for tensor in found.tensors.values():
        if memory_of(tensor) and tensor.untyped_storage().nbytes() <= SMALL:
            found.add(StorageContents(tensor))
    found.tensors = {}
    return found


def values_around(objects: Iterable[Any]) -> list[Any]:
    """The values in and around ``objects``."""
    return _Surroundings((), [("", each) for each in objects]).found.values


def reads_any(modules: Iterable[nn.Module], changed: Iterable[Any]) -> str | None:
    """The name of something around ``modules`` that their methods may read, and that is one of these containers, or
    attributes (`snapshot.Attribute`)."""
    changed = list(changed)
    containers = {id(each) for each in changed}
    places = {(id(each.owner), each.name) for each in changed if isinstance(each, Attribute)}
    objects: Objects = []
    for owner, name in read_by_modules(list(modules), set(), objects):
        if (id(owner), name) in places or id(found_in(owner, name)) in containers:
            return name
    for name, kept in _Surroundings((), objects).entries:
        if isinstance(kept, Attribute) and (id(kept.owner), kept.name) in places:
            return name
        if isinstance(kept, Items) and id(kept.container) in containers:
            return name
    return None


def _is_looked_into(value: Any) -> bool:
    if isinstance(value, numpy.ndarray):
        return value.size <= MOST_ITEMS
    return isinstance(value, MUTABLE) and len(value) <= MOST_ITEMS


def _is_users(cls: type) -> bool:
    return is_made_by_statement(cls) and not is_librarys(cls)


class _Surroundings:
    """Walks through what is around ``modules``, and ``objects``, near ones first."""

    def __init__(self, modules: Iterable[nn.Module], objects: Objects | None = None, others: Any = _APART) -> None:
        """``others``: classes that are not looked into."""
        self._others = others
        self.found, self.entries = GlobalState(), list[tuple[str, Any]]()
        self._objects = objects if objects is not None else []
        self._seen: set[Any] = set()
        self._places: set[tuple[int, str]] = set()
        self._containers: set[int] = set()
        self._met: dict[int, Any] = {}
        modules = list(modules)
        self._add_places(read_by_modules(modules, self._seen, self._objects))
        waiting = deque(self._objects)
        for cls in dict.fromkeys(map(type, modules)):  # its attributes are changed by way of objects: `type(self).n`
            self._objects = []
            waiting += self._in_class(cls)
            waiting += self._objects
        while waiting and len(self._met) < MOST_OBJECTS:
            name, value = waiting.popleft()
            if isinstance(value, (torch.Tensor, nn.Module)):
                self._add_tensors(value)
            if isinstance(value, _LEFT) or id(value) in self._met:
                continue
            self._met[id(value)] = value
            self._objects = []
            waiting += self._inside(name, value)
            waiting += self._objects
        self.found.values = list(self._met.values())

    def _add_tensors(self, value: torch.Tensor | nn.Module) -> None:
        if isinstance(value, torch.Tensor):
            self.found.tensors[id(value)] = value
        elif id(value) not in self._met and not isinstance(value, torch.jit.ScriptModule):
            self._met[id(value)] = value
            self.found.tensors |= {id(t): t for t in (*value.parameters(), *value.buffers())}

    def _add(self, name: str, kept: Any) -> None:
        self.entries.append((name, kept))
        self.found.add_named(name, kept)

    def _add_container(self, name: str, value: Any) -> None:
        if id(value) not in self._containers:
            self._containers.add(id(value))
            self._add(name, Items(value))

    def _add_places(self, places: Iterable[Place]) -> None:
        for owner, name in places:
            if (id(owner), name) in self._places or (isinstance(owner, MODULES) and is_library(owner)):
                continue
            self._places.add((id(owner), name))
            if isinstance(owner, MODULES) and id(owner) not in self._containers:
                self._containers.add(id(owner))
                self._add(owner.__name__, NewAttributes(owner))
            value = found_in(owner, name)
            fixed = is_plain_value(value) or isinstance(value, (tuple, frozenset, torch.Tensor))
            if fixed or _is_looked_into(value):
                self._add(name, Attribute(owner, name))
                if not fixed:
                    self._add_container(name, value)

    def _inside(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Notes what can be changed of a value; gives what is in it."""
        if _is_looked_into(value):
            self._add_container(name, value)
            yield from ((f"{name}[...]", each) for each in Items(value).items())
        elif isinstance(value, (tuple, frozenset)):
            yield from ((name, each) for each in value)
        elif isinstance(value, functools.partial):
            yield from ((name, each) for each in (value.func, value.args, value.keywords))
        elif isinstance(value, types.MethodType):
            yield from ((name, value.__self__), (name, value.__func__))
        elif isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType)):
            yield name, value.__self__
        elif isinstance(value, types.FunctionType):
            yield from self._in_function(name, value)
        elif isinstance(value, ContextVar):
            self._add(f"the context variable {value.name}", held := ContextValue(value))
            yield name, held.then
        elif isinstance(value, type):
            yield from () if issubclass(value, self._others) else self._in_class(value)
        elif isinstance(value, weakref.ReferenceType):
            yield name, value()
        elif type(value) in SPACES or is_holding(type(value)) or _is_users(type(value)):
            yield from self._in_object(name, value)

    def _in_function(self, name: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
        if is_library(module_of(function.__globals__)):
            return
        self._add_places(read_by(function, self._seen, self._objects))
        self._add_container(name, vars(function))
        for each in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            yield f"a default of {name}", each
        yield from ((f"{name}.{key}", each) for key, each in vars(function).items())

    def _in_class(self, cls: type) -> Iterator[tuple[str, Any]]:
        inherited: dict[str, None] = {}  # by this class, or one that it is derived from
        for base in reversed(cls.__mro__):
            if is_librarys(base) or not is_made_by_statement(base):
                continue
            known = base is not cls and id(base) in self._met
            self._met[id(base)] = base
            for key, part in list(vars(base).items()):
                part = getattr(part, "__func__", getattr(part, "fget", part))
                if isinstance(part, types.FunctionType):
                    self._add_places(read_by(part, self._seen, self._objects))
                elif not key.startswith("__"):
                    inherited[key] = None
                    if not known:
                        yield f"{base.__name__}.{key}", part
            if not known:
                for key in inherited:
                    self._add(f"{base.__name__}.{key}", Attribute(base, key))
                self._add(base.__name__, NewAttributes(base))

    def _in_object(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(attributes := getattr(value, "__dict__", None), dict):
            self._met[id(attributes)] = attributes
            self._add_container(name, attributes)
            yield from ((f"{name}.{key}", each) for key, each in attributes.items())
        for base in type(value).__mro__:
            for key, part in vars(base).items():
                if isinstance(part, types.MemberDescriptorType):
                    self._add(f"{name}.{key}", kept := Attribute(value, key))
                    yield f"{name}.{key}", kept.then
        yield name, type(value)
