"""Finds out whether a hook that PyTorch runs inside a graph may change something that forward reads.

Such a hook runs at every step, but forward is traced without it. If the hook changes an attribute, a list or a
dictionary that forward reads, the graph would not see the change. So the objects that a hook can reach (through its
closure, its own object, the globals and the modules' attributes that its code names) are compared with what forward
reads. A container counts as changed whenever a hook can reach it; an attribute only where a hook sets it or changes it
in place.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from inspect import getattr_static
from typing import Any

import torch
from torch import nn

from ortmodule.core.errors import Unguardable
from ortmodule.core.pytree import CONSTANTS
from ortmodule.core.snapshot import found_in
from ortmodule.guards.code_reader import attributes_set_in, is_torchs, names_in
from ortmodule.guards.descriptions import Is, describe
from ortmodule.guards.guards import MODULE_ATTRIBUTES
from ortmodule.guards.module_tree import Tree

#: Code that names one of these may reach all submodules of a module.
_WALKING = {"children", "modules", "named_children", "named_modules", "get_submodule", "_modules", "getattr"}
#: Code that names one of these may set any attribute that it names.
_SETTING = {"setattr", "delattr", "__setattr__", "__dict__", "vars", "register_buffer"}


def conflict(tree: Tree, hooked: Iterable[str], read: Iterable[tuple[int, str]]) -> str | None:
    """A sentence on what forward reads and a hook on one of the submodules ``hooked`` may change; None: nothing.

    ``read``: the attributes that forward looked at, by the ids of their modules.
    """
    paths = {id(module): path for path, module in tree.modules.items()}
    places: list[Any] = []
    for path in hooked:
        module = tree.modules[path]
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if own := [hook for hook in hooks if not is_torchs(hook) and tree.hooks.reach_of(hook) is None]:
            reached = _Reached(module, own)
            places = places or [(key, name, _held(tree, paths[key], name)) for key, name in read if key in paths]
            for key, name, value in places:
                if reached.has(key, name, value):
                    label = f"{paths[key]}.{name}" if paths[key] else name
                    return f"a hook on {path} reaches the attribute {label}, which forward reads"
            for name, value in _globals_of(getattr_static(type(m), "forward") for m in tree.modules.values()):
                if reached.has(0, name, value):
                    return f"a hook on {path} reaches the global {name}, which forward reads"
    return None


class _Reached:
    """What the hooks on one submodule reach."""

    def __init__(self, module: nn.Module, hooks: list[Any]) -> None:
        self._modules = {id(module): module}
        self._objects: dict[int, Any] = {}
        self._inside: set[int] = set()  # ids of containers
        self._names: set[str] = set()
        self._sets: set[str] = set()  # of those, what is assigned
        self._seen: list[Any] = []
        for hook in hooks:
            self._add(hook)
        done: set[tuple[int, str]] = set()
        while new := {(key, name) for key in (*self._modules, *self._objects) for name in self._names} - done:
            done |= new
            for key, name in new:  # methods that they call, what is in attributes, other modules
                if key in self._objects:
                    self._add_method(self._objects[key], name)
                    continue
                found = getattr(self._modules[key], name, None) if name not in MODULE_ATTRIBUTES else None
                if not isinstance(found, nn.Parameter):
                    self._add(found)
            if self._names & _WALKING:
                for each in [part for module in self._modules.values() for part in module.modules()]:
                    self._add(each)

    def has(self, key: int, name: str, value: Any) -> bool:
        """Is this attribute of a module one that they name, or is something in it that they have, too?"""
        if (
            isinstance(value, (nn.Module, nn.Parameter, types.MethodType, types.FunctionType))
            or name in MODULE_ATTRIBUTES
        ):
            return False
        if key in self._modules and name in self._names and (name in self._sets or self._changes(value)):
            return True
        return bool(_containers_of(value) & self._inside)

    def _changes(self, value: Any) -> bool:
        in_place = isinstance(value, torch.Tensor) and any(n[-1:] == "_" != n[:1] for n in self._names)
        return in_place or bool(self._names & _SETTING)

    def _add(self, value: Any) -> None:
        if isinstance(value, nn.Module):
            self._modules[id(value)] = value
            if isinstance(value, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):  # an index leads further
                self._modules |= {id(each): each for each in value.modules()}
        elif isinstance(value, types.FunctionType):
            if not is_torchs(value) and not any(value is known for known in self._seen):
                self._seen.append(value)
                self._names.update(names_in(value.__code__))
                self._sets.update(attributes_set_in(value.__code__))
                cells = [found_in(cell, "cell_contents", None) for cell in value.__closure__ or ()]
                for part in (*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
                    self._add(part)
                for _, part in _globals_of([value]):
                    self._add(part)
        elif isinstance(value, (types.MethodType, types.BuiltinMethodType)):
            self._add(getattr(value, "__func__", None))
            self._add(value.__self__)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._add(part)
        elif not isinstance(value, (*CONSTANTS, torch.Tensor, types.ModuleType)):
            self._add_object(value)

    def _add_object(self, value: Any) -> None:
        if any(value is known for known in self._seen):
            return
        self._seen.append(value)
        found = _containers_of(value)
        self._inside |= found
        self._objects[id(value)] = value
        self._add_method(value, "__call__")
        try:
            parts = describe(value).parts
        except Unguardable:
            return
        for part in parts:
            if isinstance(part, Is) and isinstance(part.value, nn.Module):
                self._add(part.value)

    def _add_method(self, value: Any, name: str) -> None:
        method = getattr(type(value), name, None)
        if isinstance(method, types.FunctionType):
            self._add(method)


def _containers_of(value: Any) -> set[int]:
    """The ids of all in it that can be changed."""
    if isinstance(value, (*CONSTANTS, torch.Tensor)):
        return set()
    try:
        return {id(container) for container in (value, *describe(value).mutable())}
    except Unguardable:
        return {id(value)}


def _held(tree: Tree, path: str, name: str) -> Any:
    module = tree.modules[path]
    buffers = dict(module._buffers.items())  # a scripted module's are no dictionary
    return vars(module).get(name, buffers.get(name, getattr(type(module), name, None)))


def _globals_of(functions: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """The globals that they name, those aside that cannot change."""
    for function in functions:
        if isinstance(function, types.FunctionType) and not is_torchs(function):
            for name in names_in(function.__code__):
                value = function.__globals__.get(name)
                if not isinstance(value, (*CONSTANTS, types.ModuleType)):
                    yield name, value
