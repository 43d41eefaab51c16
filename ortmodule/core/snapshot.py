"""Remembers what containers, attributes and tensors hold, and puts it back: whatever undoes changes does it so.

Containers are read and filled by the methods of the built-in types, not those of classes derived from them: such a
class may store another key than it is given (transformers' registries take a model, and keep the name of its class), or
count its updates.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context, ContextVar
from types import ModuleType
from typing import Any, Protocol

import numpy
import torch

from ortmodule.core.objects.tensor_memory import version_of
from ortmodule.core.structures.attributes import in_slots

#: The types whose contents are known, each before those that it is derived from.
CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, set, deque, bytearray)
_MISSING = object()


class Kept(Protocol):
    """Something as it was at some time."""

    def put_back(self) -> None: ...


class Compared(Kept, Protocol):
    """Something that tells whether it is still as it was."""

    def changed(self) -> bool: ...


class Snapshot:
    """What was kept, some of it under names."""

    def __init__(self, kept: Iterable[Kept] = ()) -> None:
        self._kept: list[Kept] = list(kept)
        self._named: list[tuple[str, Compared]] = []

    def add(self, kept: Kept) -> None:
        self._kept.append(kept)

    def add_named(self, name: str, kept: Compared) -> None:
        """``name``: for :meth:`changed`."""
        self._kept.append(kept)
        self._named.append((name, kept))

    def changed(self) -> str | None:
        """The first name of something that is not as it was."""
        return next((name for name, each in self._named if each.changed()), None)

    def all_changed(self) -> Iterator[tuple[str, Compared]]:
        """What is not as it was, with its name."""
        return ((name, each) for name, each in self._named if each.changed())

    def put_back(self) -> None:
        """What was kept last comes first. An error stops nothing, and is raised when all others are back."""
        failure: Exception | None = None
        for each in reversed(self._kept):
            try:
                each.put_back()
            except Exception as error:
                failure = failure or error
        try:
            if failure is not None:
                raise failure
        finally:
            failure = None  # its traceback knows this frame: nothing would be freed

    @contextmanager
    def around(self) -> Iterator[None]:
        """Afterwards everything is as it was."""
        try:
            yield
        finally:
            self.put_back()


class Items:
    """The contents of a container: one of :data:`CONTAINERS`, a NumPy array, or a dictionary of a scripted module's,
    whose keys are fixed."""

    def __init__(self, container: Any) -> None:
        self.container, self.then = container, _copied(container)

    def changed(self) -> bool:
        container, then, kind = self.container, self.then, _kind(self.container)
        if isinstance(container, numpy.ndarray) and container.dtype.hasobject:
            return any(a is not b for a, b in zip(container.flat, then.flat, strict=True))
        if isinstance(container, numpy.ndarray):
            return not numpy.array_equal(container, then)
        if kind is None:
            return any(container[key] is not value for key, value in then.items())
        if kind.__len__(container) != len(then):
            return True
        if issubclass(kind, dict):
            return any(dict.get(container, key, _MISSING) is not value for key, value in then.items())
        if kind in (set, bytearray):
            return not kind.__eq__(container, then)
        return any(a is not b for a, b in zip(kind.__iter__(container), then, strict=True))

    def items(self) -> Iterable[Any]:
        """What is in it now, without the keys of a dictionary."""
        container, kind = self.container, _kind(self.container)
        if isinstance(container, numpy.ndarray):
            return list(container.flat)
        if kind is not None and not issubclass(kind, dict):
            return list(container)
        return list(container.values() if kind is None else dict.values(container))

    def put_back(self) -> None:
        if self.changed():
            fill(self.container, self.then)


class SlotItems(Items):
    """The attributes of an object that are in slots."""

    def __init__(self, container: Any) -> None:
        self.container, self.then = container, in_slots(container)

    def changed(self) -> bool:
        now = in_slots(self.container)
        return now.keys() != self.then.keys() or any(now[name] is not value for name, value in self.then.items())

    def items(self) -> Iterable[Any]:
        return list(in_slots(self.container).values())

    def put_back(self) -> None:
        if self.changed():
            for name in in_slots(self.container):
                object.__delattr__(self.container, name)
            for name, value in self.then.items():
                object.__setattr__(self.container, name, value)


def _kind(container: Any) -> Any:
    return next((kind for kind in CONTAINERS if isinstance(container, kind)), None)


def _copied(container: Any) -> Any:
    """What is in a container, in one of the built-in type (or a NumPy array)."""
    if isinstance(container, numpy.ndarray):
        return container.copy()
    kind = _kind(container)
    if kind is None:
        return dict(container)
    return kind(kind.items(container) if issubclass(kind, dict) else kind.__iter__(container))


def fill(container: Any, then: Any) -> None:
    """Puts the contents of ``then`` into a container in place of its own."""
    kind = _kind(container)
    if isinstance(container, numpy.ndarray):
        container[...] = then
    elif kind is None:
        for key, value in then.items():
            if container[key] is not value:
                container[key] = value
    elif kind in (list, bytearray):
        kind.__setitem__(container, slice(None), then)
    else:
        kind.clear(container)
        if issubclass(kind, dict):
            for key, value in then.items():
                kind.__setitem__(container, key, value)
        elif kind is set:
            set.update(container, then)
        else:
            deque.extend(container, then)


class Attribute:
    """The object that an attribute, or a cell, is bound to; not what is in it. A class may have it from another one."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name, self.then = owner, name, found_in(owner, name)
        self._is_own = self._owns()

    def _owns(self) -> bool:
        return not isinstance(self.owner, type) or self.name in vars(self.owner)

    def changed(self) -> bool:
        return found_in(self.owner, self.name) is not self.then or self._owns() != self._is_own

    def put_back(self) -> None:
        if not self.changed():
            return
        if self.then is _MISSING or not self._is_own:
            with suppress(AttributeError):
                delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.then)


class NewAttributes:
    """What gets into a class, or a module, under a name that nothing had there; but for modules (`import a.b`) and for
    names with two underscores."""

    def __init__(self, owner: Any) -> None:
        self.owner, self.then = owner, frozenset(vars(owner))

    def names(self) -> list[str]:
        new = [(name, value) for name, value in vars(self.owner).items() if name not in self.then]
        return [name for name, value in new if not name.startswith("__") and not isinstance(value, ModuleType)]

    def changed(self) -> bool:
        return bool(self.names())

    def put_back(self) -> None:
        for name in self.names():
            delattr(self.owner, name)


def found_in(owner: Any, name: str, missing: Any = _MISSING) -> Any:
    """The attribute of this name, or ``missing``, as for an empty cell."""
    try:
        return getattr(owner, name, missing)
    except ValueError:
        return missing


class ContextValue:
    """What a context variable holds here. One that held nothing gets its default back: there is no way to empty it."""

    def __init__(self, variable: ContextVar) -> None:
        self.variable, self.then = variable, variable.get(_MISSING)

    def changed(self) -> bool:
        return self.variable.get(_MISSING) is not self.then

    def put_back(self) -> None:
        if self.changed():
            with suppress(LookupError):
                self.variable.set(Context().run(self.variable.get) if self.then is _MISSING else self.then)


class Elements:
    """The elements of a tensor. Its version tells whether they have changed."""

    def __init__(self, tensor: torch.Tensor, contents: torch.Tensor, always: bool = False) -> None:
        """``contents``: a copy. ``always``: put back also where another version counter counts what is written."""
        self.tensor, self._contents, self._always = tensor, contents, always
        self._version = version_of(tensor)

    def changed(self) -> bool:
        return version_of(self.tensor) != self._version

    def put_back(self) -> None:
        if self._always or self.changed():
            self.tensor.detach().copy_(self._contents)


class TensorMemory:
    """A tensor's memory, and the elements in it: also where `x.data` changes either, which no version counts."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self._memory, self._contents = tensor, tensor.detach(), tensor.detach().clone()

    def put_back(self) -> None:
        self._memory.copy_(self._contents)
        if self.tensor.data_ptr() != self._memory.data_ptr():
            self.tensor.data = self._memory
