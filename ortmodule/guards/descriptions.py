"""Describes values as something that is equal for equal ones: what guards keep of an attribute, and compare."""

from __future__ import annotations

import array
import functools
import random
import types
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import torch
from torch import nn

from ortmodule.core.errors import Unguardable
from ortmodule.core.pytree import CONSTANTS
from ortmodule.core.snapshot import found_in
from ortmodule.guards import fields
from ortmodule.guards.code_reader import is_users_function
from ortmodule.guards.fields import FieldSet, attributes_of, functions_behind, is_plain, slot_names
from ortmodule.guards.global_reads import CDATA
from ortmodule.guards.reads import item_reads
from ortmodule.guards.reads.item_reads import FIELD, ITEM, ItemReads

MOST_PARTS = 4096  # of one attribute
MOST_BYTES = 1 << 16  # of a NumPy array

MISSING = object()
#: The fields that are read of plain objects, by their classes; of other classes every field counts.
Fields = Mapping[type, FieldSet]


@dataclass(eq=False)
class Is:
    """Equal to the same object only."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Is) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]  # there is no hash


@dataclass(eq=False)
class SomeFields:
    """Fields of a plain object: equal where those that were read on both sides are. ``order``: of all fields, where
    all were."""

    values: dict[Any, list[Any]]  # by the names of fields, or `item_reads.Step`
    order: tuple[Any, ...] | None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SomeFields):
            return False
        if self.order is not None and other.order is not None:
            return self.order == other.order and self.values == other.values
        names = self.values.keys() & other.values.keys()
        return all(self.values[name] == other.values[name] for name in names)

    __hash__ = None  # type: ignore[assignment]  # there is no hash


@dataclass
class Description:
    """A value, comparable; and where a change of it would show."""

    parts: list[Any] = field(default_factory=list)
    containers: list[dict | list] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)  # sets, deques, arrays
    attributes: list[tuple[Any, str, Any]] = field(default_factory=list)  # (of an object or a class, name, value)
    objects: list[Any] = field(default_factory=list)  # plain ones
    polled: bool = False  # it can change without a sign in `containers` and `attributes`

    def mutable(self) -> list[Any]:
        """Everything in it that can be changed in place."""
        return [*self.containers, *self.others]

    def without_tensors(self) -> Description:
        """The same, whichever tensors are in its containers."""
        return replace(self, parts=_without_tensors(self.parts))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Description) and self.parts == other.parts


def _without_tensors(parts: list[Any]) -> list[Any]:
    return [_without_tensor(part) if isinstance(part, (Is, SomeFields)) else part for part in parts]


def _without_tensor(part: Is | SomeFields) -> Any:
    if isinstance(part, SomeFields):
        return SomeFields({name: _without_tensors(parts) for name, parts in part.values.items()}, part.order)
    return "a tensor" if isinstance(part.value, torch.Tensor) else part


class OfKind(Description):
    """A number whatever its value is, or a tensor whatever its sizes are."""

    def __eq__(self, other: object) -> bool:
        pairs = [(p[0], p[1][:-1] if isinstance(p[1], tuple) else None) for p in (self.parts, other.parts)]  # type: ignore[attr-defined]  # a Description
        return pairs[0] == pairs[1]


def describe(
    value: Any, names: dict[int, str] | None = None, read: Fields | None = None, items: ItemReads | None = None
) -> Description:  # fmt: skip
    """``value`` as something that is equal for equal ones. ``names``: of modules and tensors, by their ids. ``read``:
    what counts of plain objects; ``items``: of the value, a dictionary or a namespace.

    Raises Unguardable.
    """
    found = Description()
    _Walk(found, found.parts, names or {}, read or {}).add(value, items)
    return found


def describe_around(owner: Any, name: str, read: Fields, items: ItemReads | None = None) -> Description:
    """An attribute of something around the module. Plain objects in it are themselves: what is read of them is
    described by itself. ``items``: as of :func:`describe`."""
    found = Description()
    walk = _Walk(found, found.parts, {}, read, shallow=True)
    try:
        if items is not None:
            walk.depth = 1
            walk.add(found_in(owner, name), items)
        elif type(owner) not in read:
            walk.add((found_in(owner, name),))  # a tensor is itself there
        elif fields.shows_all(type(owner), name):
            walk.whole(owner)
        else:
            walk.depth = 1
            walk.field(owner, name, watched=True)
    except Unguardable:
        found.parts[:] = [Is(found_in(owner, name))]
    return found


def describe_other(owner: nn.Module, value: Any, read: Fields) -> Description:
    """An attribute of a module that is none of the tree's: tensors and modules are themselves there."""
    found = Description(containers=[owner.__dict__])
    try:
        _Walk(found, found.parts, {}, read).add((value,))
    except Unguardable:
        found.parts[:] = [Is(value)]
    return found


def plain_objects(value: Any) -> list[Any]:
    """Those in ``value``, or in as much of it as is looked at."""
    found = Description()
    with suppress(Unguardable):
        _Walk(found, found.parts, {}, {}).add(value)
    return found.objects


def shown(parts: list[Any]) -> str:
    """What has these ``parts``, of a :class:`Description`, for a sentence: constants and containers of such as they
    are."""
    if parts[:2] == [tuple, 1] and len(parts) > 2:  # :func:`describe_around`
        parts = parts[2:]
    cls: Any
    rest: list[Any]
    cls, *rest = parts or [type(None)]
    if isinstance(cls, Is):  # a method
        cls, rest = types.FunctionType, [cls.value]
    if not isinstance(cls, type) or not rest:
        return str(cls if not isinstance(cls, type) else f"a {cls.__name__}")
    value, *inside = rest
    if issubclass(cls, torch.Tensor) and isinstance(value, tuple):
        return f"a tensor of {str(value[1]).removeprefix('torch.')} and shape {list(value[-1])}"
    if issubclass(cls, (types.FunctionType, types.CodeType)):
        return f"another function, or other code ({getattr(value, '__name__', getattr(value, 'co_name', ''))})"
    if isinstance(value, bytes):
        return repr(value.decode(errors="replace"))
    if cls in (dict, list, tuple) and all(each in (int, str, float, bool, type(None)) for each in inside[::2]):
        values: list[Any] = [
            float.fromhex(v) if kind is float else v for kind, v in zip(inside[::2], inside[1::2], strict=False)
        ]
        return repr(dict(zip(values[::2], values[1::2], strict=False)) if cls is dict else cls(values))
    if inside or isinstance(value, (Is, SomeFields)):
        return f"another {cls.__name__}"
    return repr(float.fromhex(value) if cls is float else value)


class _Walk:
    """``found`` is what is described, and ``parts`` a list of it that values are added to. ``shallow``: plain objects
    are themselves."""

    def __init__(
        self, found: Description, parts: list[Any], names: dict[int, str], read: Fields, shallow: bool = False,
        met: dict[int, int] | None = None,
    ) -> None:  # fmt: skip
        self.found, self.names, self.read, self.shallow = found, names, read, shallow
        self.parts, self.containers = parts, found.containers
        self.met: dict[int, int] = met or {}
        self.depth = len(self.met)

    def add(self, value: Any, items: ItemReads | None = None) -> None:
        """``items``: what counts of a dictionary or a namespace, and of those inside."""
        cls, parts = type(value), self.parts
        if len(parts) > MOST_PARTS:
            raise Unguardable(f"it holds more than {MOST_PARTS} values")
        if cls is float:
            parts += (cls, value.hex())  # NaN equals itself, and -0.0 is not 0.0
        elif isinstance(value, torch.Tensor):
            parts += (cls, self.names.get(id(value)) or self._tensor(value))
        elif isinstance(value, (nn.Module, random.Random)):  # a generator's fields are its state
            parts += (cls, self.names.get(id(value)) or Is(value))
        elif isinstance(value, CONSTANTS):
            parts += (cls, value)
            self._code(value)
        elif id(value) in self.met:
            parts += ("same", self.met[id(value)])
        else:
            self.met[id(value)] = len(self.met)
            self.depth += 1
            if items is not None and cls in item_reads.WITH_ITEMS:
                parts += (cls, self._some_items(value, items))
            else:
                self._container(value, cls)
            self.depth -= 1

    def whole(self, value: Any) -> None:
        """All fields of a plain object."""
        self.parts.append(type(value))
        self._slots(value, type(value))
        self._attributes(value)

    def field(self, value: Any, name: str, watched: bool = False) -> None:
        """One field of a plain object. ``watched``: by itself, and not with all other fields."""
        cls, now = type(value), fields.found(value, name)
        held = now.value
        if now.place == "class":
            self.found.attributes.append((cls, name, getattr(cls, name, None)))
            self.found.polled |= getattr(cls, name, None) is not getattr(cls, name, None)
        elif watched and now.place != "code" and held is not fields.MISSING:
            self.found.attributes.append((value, name, held))
        elif now.place == "slot":
            self.found.polled = True
        else:
            self.containers.append(attributes_of(value))
        if now.place == "code":
            self._signs(value)
        if held is fields.MISSING:
            self.parts.append("missing")
        elif now.place == "class" and hasattr(type(held), "__get__"):
            self.parts.append(Is(held))
            self._code(held)
        else:
            self.add(held)

    def _code(self, value: Any) -> None:
        """Of functions, which may get another one (`%autoreload` of notebooks gives it to those that there are)."""
        for function in filter(is_users_function, functions_behind(value)):
            if id(function) in self.met:  # a default of its own
                continue
            self.met[id(function)] = len(self.met)
            defaults = [name for name in ("__defaults__", "__kwdefaults__") if getattr(function, name)]
            self.found.attributes += [(function, name, getattr(function, name)) for name in ("__code__", *defaults)]
            self.parts.append(function.__code__)
            self._all(getattr(function, name) for name in defaults)

    def _signs(self, value: Any) -> None:
        """Where a change of anything in a plain object would show."""
        try:
            _Walk(self.found, [], self.names, {}, met={}).whole(value)
        except Unguardable:
            self.found.polled = True

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
        elif isinstance(value, array.array):
            self.found.polled = True
            parts += (cls, value.typecode, value.tobytes())
        elif isinstance(value, CDATA):
            self.found.polled = True
            parts += (cls, bytes(value))  # type: ignore[call-overload]  # they have a buffer
        elif isinstance(value, types.MappingProxyType):
            self.found.polled = True  # the dictionary behind it cannot be had
            self._container(dict(value), cls)
        elif isinstance(value, weakref.ReferenceType):
            self.found.polled = True
            self._all((value(),))
        elif isinstance(value, types.MethodType):
            parts += (cls, Is(value.__func__))
            self._code(value)
            self.add(value.__self__)
        elif isinstance(value, functools.partial):
            parts += (cls,)
            self._all((value.func, value.args, value.keywords))
        elif is_plain(cls):
            self.found.objects.append(value)
            if self.shallow and (cls in self.read or fields.is_machinery(cls)):
                parts += (cls, Is(value))
                return
            parts += (cls,)
            if cls in self.read:
                parts.append(self._some_fields(value, self.read[cls]))
                return
            self._slots(value, cls)
        elif cls is types.CodeType:
            parts += (cls, value)
        else:
            parts += (cls, Is(value))
            self._code(value)
        if not isinstance(value, (types.ModuleType, types.MethodType)):
            self._attributes(value)

    def _open(self, value: Any, cls: type, length: int) -> None:
        self.parts += (cls, length)
        if isinstance(value, (dict, list)):
            self.containers.append(value)
        elif isinstance(value, deque):
            self._other(value)

    def _other(self, value: Any) -> None:
        self.found.polled = True
        self.found.others.append(value)

    def _attributes(self, value: Any) -> None:
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):  # of `set[int]` it is the class's
            self.containers.append(attributes)
            self.parts += (len(attributes), *attributes)
            self._all(list(attributes.values()))

    def _some_fields(self, value: Any, read: FieldSet) -> SomeFields:
        names, order = set(read.names), None
        if read.whole:
            order = (*attributes_of(value), *slot_names(type(value)))
            names.update(order)
        values: dict[str, list[Any]] = {}
        for name in names:
            # What is met in one field is no matter of another one, which other graphs may not read.
            parts: list[Any] = []
            walk = _Walk(self.found, parts, self.names, self.read, self.shallow, dict(self.met))
            walk.field(value, name)
            values[name] = parts
        return SomeFields(values, order)

    def _some_items(self, value: Any, read: ItemReads) -> SomeFields:
        kind = ITEM if isinstance(value, dict) else FIELD
        held: dict[Any, Any] = value if isinstance(value, dict) else vars(value)
        self.containers.append(held)
        everything = read.whole or any(step[0] != kind for step in read.items)  # `options.keys()`
        if len(held) > MOST_PARTS and everything:
            raise Unguardable(f"it holds more than {MOST_PARTS} values")
        order = tuple((kind, key) for key in held) if everything else None
        known = ItemReads(everything, read.items)
        values: dict[Any, list[Any]] = {}
        for step in order or read.items:
            parts: list[Any] = []
            if step[1] not in held:
                parts.append("missing")
            else:
                walk = _Walk(self.found, parts, self.names, self.read, self.shallow, dict(self.met))
                walk.add(held[step[1]], known.of(step))
            values[step] = parts
        return SomeFields(values, order)

    def _slots(self, value: Any, cls: type) -> None:
        for name in slot_names(cls):
            self.found.polled = True
            self.add(getattr(value, name, None))

    def _all(self, values: Iterable[Any]) -> None:
        for value in values:
            self.add(value)
