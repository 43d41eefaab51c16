"""Replaces attributes of classes and modules for a while, and undoes it in any order: traces register here.

Several replacements of one attribute may be in place at a time, of one thread or of several. The latest is what all
threads call, so each looks by itself whether, and for what, its thread wants it; what it calls is the original. They
may end in any order, and the last of them leaves the attribute as it was found, also where it was inherited.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_MISSING = object()
_lock = threading.RLock()


@dataclass(frozen=True, eq=False)
class Replacement:
    """What stands in place of ``owner.name``."""

    owner: Any
    name: str
    value: Any

    @classmethod
    def around(cls, owner: Any, name: str, make: Callable[[Callable], Callable]) -> Replacement:
        """``make`` is given the function of that name, and returns what is called instead."""
        function = original(owner, name)
        return cls(owner, name, functools.wraps(function)(make(function)))


def own(owner: Any, name: str) -> Any:
    """What it has itself: a class may inherit more. A variable of a closure has its ``cell_contents``."""
    return getattr(owner, name) if isinstance(owner, types.CellType) else vars(owner).get(name, _MISSING)


class _Place:
    """One attribute that is replaced: how it was found, and the replacements, the latest last."""

    __slots__ = ("owner", "name", "found", "original", "latest")

    def __init__(self, owner: Any, name: str, found: Any) -> None:
        self.owner, self.name, self.found = owner, name, found
        self.original = getattr(owner, name, None)
        self.latest: list[Replacement] = []

    def update(self) -> None:
        value = self.latest[-1].value if self.latest else self.found
        if value is own(self.owner, self.name):
            return
        if value is _MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)


_places: dict[tuple[int, str], _Place] = {}


def original(owner: Any, name: str) -> Any:
    """What ``owner`` has under this name where nothing is replaced."""
    with _lock:
        place = _places.get((id(owner), name))
        return getattr(owner, name) if place is None else place.original


def _enter_all(replacements: Iterable[Replacement], made: list[Replacement]) -> None:
    """A trace makes hundreds. Each is added to ``made`` before."""
    for replacement in replacements:
        made.append(replacement)
        owner, name = replacement.owner, replacement.name
        key = id(owner), name
        with _lock:
            now = own(owner, name)
            place = _places.get(key) or _Place(owner, name, now)
            place.latest.append(replacement)
            _places[key] = place  # it keeps the owner, whose id is no other's meanwhile
            if now is not replacement.value:
                setattr(owner, name, replacement.value)


@contextmanager
def replaced(replacements: Iterable[Replacement]) -> Iterator[None]:
    """Inside, these are in place; the last goes first. Where one cannot be made, those before it are undone."""
    made: list[Replacement] = []
    try:
        _enter_all(replacements, made)
        yield
    finally:
        _leave_all(made)


def _leave_all(made: list[Replacement]) -> None:
    """The last goes first; an error or an interrupt in between keeps none of them in place. One that was not entered,
    or halfway, is left all the same: an error or an interrupt may come anywhere."""
    try:
        while made:
            replacement = made.pop()
            key = id(replacement.owner), replacement.name
            with _lock:
                place = _places.get(key)
                if place is not None and replacement in place.latest:
                    place.latest.remove(replacement)
                    if not place.latest:
                        del _places[key]
                    place.update()
    finally:
        if made:
            _leave_all(made)


@contextmanager
def as_found(owner: Any, name: str) -> Iterator[None]:
    """Inside, an attribute that is replaced is as it was before; no other thread replaces anything meanwhile."""
    with _lock:
        place = _places.get((id(owner), name))
        if place is None:
            yield
            return
        latest, place.latest = place.latest, []
        place.update()
        try:
            yield
        finally:
            place.latest = latest
            place.update()
