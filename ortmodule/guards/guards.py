"""Guards what a captured graph assumes of Python: the attributes of modules that forward read.

While a module is traced, every attribute that is read of it or of one of its submodules is noted
(`scalar_guards.py`). A graph holds as long as these attributes have the values they had: numbers, strings and other
constants are compared by value, containers and plain objects (a configuration) by what is in them, tensors by their
kind, everything else by identity.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import nn

from ortmodule.core.errors import Unguardable
from ortmodule.core.pytree import CONSTANTS
from ortmodule.core.snapshot import Attribute
from ortmodule.guards.code_reader import is_made_by_statement
from ortmodule.guards.global_reads import read_by, read_of

MOST_PARTS = 4096  # of one attribute
MOST_BYTES = 1 << 16  # of a NumPy array
MOST_SHOWN = 64  # parts of an attribute that a text shows

_MISSING = object()


@dataclass(eq=False)
class Is:
    """Equal to the same object only."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Is) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]  # there is no hash


@dataclass
class Description:
    """A value, comparable; and where a change of it would show."""

    parts: list[Any] = field(default_factory=list)
    containers: list[dict | list] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)  # sets, deques, arrays
    polled: bool = False  # it can change without a sign in `containers`

    def mutable(self) -> list[Any]:
        """Everything in it that can be changed in place."""
        return [*self.containers, *self.others]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Description) and self.parts == other.parts


def describe(value: Any, names: dict[int, str] | None = None) -> Description:
    """``value`` as something that is equal for equal ones. ``names``: of modules and tensors, by their ids.

    Raises Unguardable.
    """
    found = Description()
    _Walk(found, names or {}).add(value)
    return found


class _Walk:
    def __init__(self, found: Description, names: dict[int, str]) -> None:
        self.found, self.names = found, names
        self.parts, self.containers = found.parts, found.containers
        self.met: dict[int, int] = {}
        self.depth = 0

    def add(self, value: Any) -> None:
        cls, parts = type(value), self.parts
        if len(parts) > MOST_PARTS:
            raise Unguardable(f"it holds more than {MOST_PARTS} values")
        if cls is float:
            parts += (cls, value.hex())  # NaN equals itself, and -0.0 is not 0.0
        elif isinstance(value, torch.Tensor):
            parts += (cls, self.names.get(id(value)) or self._tensor(value))
        elif isinstance(value, nn.Module):
            parts += (cls, self.names.get(id(value)) or Is(value))
        elif isinstance(value, CONSTANTS):
            parts += (cls, value)
        elif id(value) in self.met:
            parts += ("same", self.met[id(value)])
        else:
            self.met[id(value)] = len(self.met)
            self.depth += 1
            self._container(value, cls)
            self.depth -= 1

    def _tensor(self, value: torch.Tensor) -> Any:
        """A tensor that is the attribute itself is an input of graphs; one in a container is a part of them."""
        if self.depth:
            return Is(value)
        return str(value.layout), value.dtype, value.requires_grad, value.device, value.shape

    def _container(self, value: Any, cls: type) -> None:
        parts = self.parts
        if isinstance(value, dict):
            self._open(value, cls, len(value))
            for key, item in list(value.items()):
                self.add(key)
                self.add(item)
        elif isinstance(value, (list, tuple, deque)):
            self._open(value, cls, len(value))
            self._all(list(value))
        elif isinstance(value, (set, bytearray)):
            self._other(value)
            parts += (cls, value.copy())
        elif isinstance(value, numpy.ndarray):
            if value.nbytes > MOST_BYTES or value.dtype.hasobject:
                raise Unguardable(f"it holds a NumPy array of {value.nbytes} bytes")
            self._other(value)
            parts += (cls, value.dtype, value.shape, value.tobytes())
        elif isinstance(value, types.MethodType):
            parts += (cls, Is(value.__func__))
            self.add(value.__self__)
        elif isinstance(value, functools.partial):
            parts += (cls,)
            self._all((value.func, value.args, value.keywords))
        elif is_plain(cls):
            parts += (cls,)
            self._slots(value, cls)
        else:
            parts += (cls, Is(value))
        if hasattr(value, "__dict__") and not isinstance(value, (types.ModuleType, types.MethodType)):
            self._attributes(vars(value))

    def _open(self, value: Any, cls: type, length: int) -> None:
        self.parts += (cls, length)
        if isinstance(value, (dict, list)):
            self.containers.append(value)
        elif isinstance(value, deque):
            self._other(value)

    def _other(self, value: Any) -> None:
        self.found.polled = True
        self.found.others.append(value)

    def _attributes(self, attributes: dict[str, Any]) -> None:
        self.containers.append(attributes)
        self.parts += (len(attributes), *attributes)
        self._all(list(attributes.values()))

    def _slots(self, value: Any, cls: type) -> None:
        for name in _slot_names(cls):
            self.found.polled = True
            self.add(getattr(value, name, None))

    def _all(self, values: Iterable[Any]) -> None:
        for value in values:
            self.add(value)


def _slot_names(cls: type) -> list[str]:
    found = [vars(base).get("__slots__", ()) for base in cls.__mro__]
    names = [name for slots in found for name in ((slots,) if isinstance(slots, str) else slots)]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def is_plain(cls: type) -> bool:
    """Is an object of this class what its attributes are?"""
    made = all(map(is_made_by_statement, cls.__mro__[:-1]))
    return made and (cls.__dictoffset__ != 0 or bool(_slot_names(cls)))


# --- what graphs read -------------------------------------------------------------------------------------------------

Key = tuple[int, str]  # id of a module, name of an attribute

#: What is a matter of the tree of modules, or of PyTorch's own machinery.
MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) | {"__class__", "__dict__"}
MODULE_ATTRIBUTES |= {"_call_impl", "_wrapped_call_impl", "_compiled_call_impl", "_slow_forward"}


class Attributes:
    """The attributes that the graphs of one tree of modules have read, and what they are now."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self._modules = modules
        self._paths = {id(module): path for path, module in modules.items()}
        self._read: dict[Key, Any] = {}  # modules, and what is around them
        self.outside: list[Any] = []  # slots with tensors that forward has from elsewhere
        self.counted: set[Key] = set()  # numbers that graphs take as they are: their types count
        self.now: dict[Key, Description | None] = {}  # None: cannot be compared
        self.polled = False  # can one change without a sign in what is to be watched?

    def add(self, reads: dict[Key, str]) -> dict[Key, str]:
        """Those of ``reads`` ({attribute: place}) that a graph has to watch, with the globals that methods read."""
        kept = {}
        codes: set[Any] = set()
        for (identity, name), place in reads.items():
            path = self._paths.get(identity)
            if path is None:
                continue
            module = self._modules[path]
            for each in list(module.__dict__) if name == "__dict__" else (name,):
                skipped = each in MODULE_ATTRIBUTES or each in module._parameters or each in module._modules
                if not skipped and each not in module._buffers:
                    self._read[identity, each] = module
                    kept[identity, each] = place
                method = None if each in module.__dict__ else getattr(type(module), each, None)
                if isinstance(method, types.FunctionType):
                    for owner, key in (*read_by(method, codes), *read_of(type(module), method)):
                        if _is_small(getattr(owner, key, None)):
                            self._read[id(owner), key] = owner
                            kept[id(owner), key] = place
        return kept

    def add_outside(self, reads: dict[Key, tuple[Any, str]]) -> dict[Key, str]:
        """``reads``: {attribute: (the object, the place)}. Raises Unguardable for one that cannot be compared."""
        for (_, name), (owner, place) in reads.items():
            if not _is_small(getattr(owner, name)):
                raise Unguardable(f"{place} reads {owner.__name__}, which cannot be compared from call to call")
        self._read |= {key: owner for key, (owner, _) in reads.items()}
        return {key: place for key, (_, place) in reads.items()}

    def look(self, names: dict[int, str]) -> None:
        """Describes all attributes anew; ``names`` as in :func:`describe`."""
        known: dict[int, Description | None] = {}
        self.now = {
            key: describe(type(module.__dict__.get(key[1]))) if key in self.counted
            else _described(module, key[1], names, known)
            for key, module in self._read.items()
        }  # fmt: skip
        self.now |= {(0, slot.name): describe(slot.get()) for slot in self.outside}
        self.polled = any(d is None or d.polled for d in self.now.values())

    def label(self, key: Key) -> str:
        path = self._paths.get(key[0])
        if path is None:
            owner = self._read[key]
            return f"{getattr(owner, '__name__', type(owner).__name__)}.{key[1]}"
        return f"{path}.{key[1]}" if path else key[1]

    def watched(self) -> tuple[list[dict | list], list[tuple[type, str, Any]]]:
        """Containers whose contents matter, and attributes of classes with their values."""
        containers: dict[int, dict | list] = {}
        classes: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        for description in self.now.values():
            containers |= {id(c): c for c in (description.containers if description else ())}
        for (_, name), module in self._read.items():
            if not isinstance(module, nn.Module):
                classes[id(module), name] = module, name, getattr(module, name, None)
                continue
            cls = type(module)
            if name not in module.__dict__ and (id(cls), name) not in classes:
                value = getattr(cls, name, _MISSING)
                if value is not _MISSING and value is getattr(cls, name):
                    classes[id(cls), name] = cls, name, value
        return list(containers.values()), list(classes.values())


def _is_small(value: Any) -> bool:
    """Of what is around a module: does comparing it cost little, and is a change of it seen without looking?"""
    try:
        return not describe(value).polled
    except Unguardable:
        return False


def _described(module: Any, name: str, names: dict[int, str], known: dict) -> Description | None:
    if not isinstance(module, nn.Module):
        value = getattr(module, name, _MISSING)
        return describe((value,))  # a tensor is itself there
    value = module.__dict__.get(name, _MISSING)
    if value is _MISSING:
        value = getattr(type(module), name, _MISSING)
    if id(value) not in known:
        try:
            known[id(value)] = describe(value, names)
        except Unguardable:
            known[id(value)] = None
        known[None, id(value)] = value  # no other object gets this id meanwhile
    return known[id(value)]


class Guards:
    """The attributes that one graph rests on, and what they have to be."""

    def __init__(
        self, attributes: Attributes, reads: dict[Key, str], names: dict[int, str],
        outside: dict[Key, tuple[Any, str]] | None = None,
    ) -> None:  # fmt: skip
        """``reads``: as noted while tracing; ``outside``: of objects that are no modules. Raises Unguardable."""
        kept = attributes.add(reads) | attributes.add_outside(outside or {})
        attributes.look(names)
        self._attributes = attributes
        self.values: dict[Key, Description] = {}
        self.places = kept
        for key, place in kept.items():
            value = attributes.now[key]
            if value is None:
                text = (
                    f"{place} reads the attribute {attributes.label(key)}, which cannot be compared from call to call"
                )
                raise Unguardable(text)
            self.values[key] = value
        self.values |= {key: value for key, value in attributes.now.items() if key[0] == 0 and value is not None}
        #: The epoch of the latest look, and what it found.
        self.epoch, self.held = -1, True

    def label(self, key: Key) -> str:
        return self._attributes.label(key)

    def reading(self, changed: Iterable[Any]) -> Key | None:
        """The first attribute that is, or has in it, one of these containers, or attributes (`snapshot.Attribute`)."""
        containers = {id(each) for each in changed}
        names = {(id(each.owner), each.name) for each in changed if isinstance(each, Attribute)}
        for key, value in self.values.items():
            if key in names or any(id(c) in containers for c in value.mutable()):
                return key
        return None

    def hold(self, epoch: int) -> bool:
        """Are all attributes as they were? ``epoch``: the same number if nothing has changed since the last time."""
        if epoch != self.epoch:
            self.held = self.broken() is None
            self.epoch = epoch
        return self.held

    def broken_name(self) -> str | None:
        """The name of the first attribute that is not as it was."""
        key = self.broken()
        return None if key is None or key[0] == 0 else self._attributes.label(key)

    def broken_place(self) -> str:
        """The line that reads that attribute."""
        key = self.broken()
        return "" if key is None else self.places.get(key, "")

    def broken_value(self) -> str | None:
        """The value of that attribute now, as a text."""
        key = self.broken()
        if key is None:
            return None
        now = self._attributes.now.get(key)
        parts = [] if now is None else now.parts[:MOST_SHOWN]
        if len(parts) == 2 and parts[0] is float:
            return str(float.fromhex(parts[1]))
        return repr(parts[1]) if len(parts) == 2 else repr(parts)

    def broken(self) -> Key | None:
        """The first attribute that is not as it was."""
        now = self._attributes.now
        return next((key for key, value in self.values.items() if now.get(key) != value), None)
