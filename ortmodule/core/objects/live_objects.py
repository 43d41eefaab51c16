"""Finds live objects of some types without looking at all objects each time.

Looking at all that the garbage collector knows takes tens of milliseconds in a large program. Only the young
generations, which are small, are looked at here: when it is asked for, and before each collection that makes them old.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from ortmodule import _core

#: The generations whose objects a collection of the last of them makes old.
YOUNG = (0, 1) if sys.version_info < (3, 14) else (0,)

#: Calling it gives the object, or None if it is gone.
_Reference = Callable[[], Any]


def _reference(each: Any) -> _Reference:
    try:
        return weakref.ref(each)
    except TypeError:
        return lambda: each


def _young(kinds: tuple[type, ...]) -> Iterator[Any]:
    for generation in YOUNG:
        yield from _core.objects(kinds, generation)


class Noted:
    """The objects of ``kinds`` (with subtypes) that have become old since this was made, until :meth:`close`."""

    def __init__(self, kinds: tuple[type, ...]) -> None:
        self._kinds = kinds
        self._old: dict[int, _Reference] = {}
        self._found: list[Any] = []
        self._lock = threading.Lock()
        self._callback = _core.noting(kinds, self._found, YOUNG[-1])
        gc.callbacks.append(self._callback)
        self.close = weakref.finalize(self, _remove, self._callback)  # once, however often it is called

    def add(self, objects: list[Any]) -> None:
        self._found.extend(objects)

    def all(self) -> list[Any]:
        """The noted ones that are alive, and the young ones."""
        if gc.callbacks[-1] is not self._callback and self.close.alive:
            # What is called later lets other threads run between the look at young objects and the collection.
            _remove(self._callback)
            gc.callbacks.append(self._callback)
        young = list(_young(self._kinds))  # first: what becomes old meanwhile has been seen
        with self._lock:
            self._sort()
            old = [reference() for reference in self._old.values()]
        return [*{id(each): each for each in (*old, *young) if each is not None}.values()]

    def _sort(self) -> None:
        """Takes in the new ones, and lets go of those that nothing else holds. With the lock."""
        while self._found:
            each = self._found.pop()
            self._old[id(each)] = _reference(each)
        for key, reference in list(self._old.items()):
            each = reference()
            # This name, the call's argument, and what the reference holds.
            if each is None or (type(reference) is not weakref.ref and sys.getrefcount(each) <= 3):
                del self._old[key]


def _remove(callback: Any) -> None:
    if callback in gc.callbacks:
        gc.callbacks.remove(callback)


class LiveObjects:
    """All live objects of ``kinds`` (with subtypes), also of a program that has frozen objects (`gc.freeze`)."""

    def __init__(self, kinds: tuple[type, ...]) -> None:
        self._kinds = kinds
        self._noted: Noted | None = None
        self._frozen = -1
        self._lock = threading.Lock()

    def all(self) -> list[Any]:
        with self._lock:
            if self._noted is None:
                self._noted = Noted(self._kinds)
            if gc.get_freeze_count() != self._frozen:
                # The first time; or the program has frozen objects since, young ones too, which become old unseen.
                self._noted.add(_core.objects(self._kinds))
                self._frozen = gc.get_freeze_count()
            return self._noted.all()
