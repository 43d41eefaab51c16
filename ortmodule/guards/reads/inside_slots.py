"""Finds containers and plain objects inside of attributes again, and sets what forward sets in them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ortmodule.core.pytree import CONSTANTS
from ortmodule.core.snapshot import fill
from ortmodule.guards.fields import attributes_of
from ortmodule.guards.inventory import Slot
from ortmodule.guards.reads.item_reads import FIELD, ITEM, Step

MOST_VALUES = 4096  # that are looked at
_MISSING = object()


@dataclass(frozen=True)
class Way:
    """To a container: an attribute, and steps from there. Of an object with attributes, its `__dict__`."""

    attribute: Slot
    steps: tuple[Step, ...]

    def find(self) -> Any:
        """The container of now. Raises LookupError, TypeError."""
        value: Any = self.attribute.holder[self.attribute.key]
        for kind, key in self.steps:
            value = attributes_of(value)[key] if kind == FIELD else value[key]
        return value if isinstance(value, (dict, list, deque)) else attributes_of(value)

    def label(self) -> str:
        parts = [f".{key}" if kind == FIELD else f"[{key!r}]" for kind, key in self.steps]
        return "".join([self.attribute.name, *parts])


@dataclass(frozen=True, eq=False)
class InsideSlot(Slot):
    """An item of a container that is found in ``places`` then, or all of it (``whole``). ``number``: of the container
    among those that forward changes."""

    places: tuple[Way, ...]
    number: int
    whole: bool = False

    def find(self, missing: Any = None) -> Any:
        container = self.places[0].find()
        if self.whole:
            return container
        return container.get(self.key, missing)

    def get(self) -> Any:
        return self.find()

    def set(self, value: Any) -> None:
        container = self.places[0].find()
        if self.whole:
            fill(container, value)
        else:
            container[self.key] = value


def are_found(slots: Iterable[Slot]) -> bool:
    """Do all ways to a container lead to one, and those to others to others?"""
    containers: dict[int, int] = {}
    numbers: dict[int, int] = {}
    for slot in slots:
        if not isinstance(slot, InsideSlot):
            continue
        for place in slot.places:
            try:
                found, number = id(place.find()), slot.number
            except (LookupError, TypeError):
                return False
            if containers.setdefault(number, found) != found or numbers.setdefault(found, number) != number:
                return False
    return True


def steps_to(value: Any, container: Any) -> tuple[Step, ...] | None:
    """The shortest way from ``value`` to a container inside, which may be the `__dict__` of an object."""
    waiting: deque[tuple[Any, tuple[Step, ...]]] = deque([(value, ())])
    met: set[int] = set()
    while waiting and len(met) < MOST_VALUES:
        each, steps = waiting.popleft()
        if each is container or attributes_of(each) is container:
            return steps
        if id(each) in met or isinstance(each, (torch.Tensor, nn.Module, *CONSTANTS)):
            continue
        met.add(id(each))
        waiting += ((item, (*steps, step)) for step, item in _items(each))
    return None


def _items(value: Any) -> Iterator[tuple[Step, Any]]:
    if isinstance(value, dict):
        yield from (((ITEM, key), item) for key, item in list(value.items()))
    elif isinstance(value, (list, tuple, deque)):
        yield from (((ITEM, i), item) for i, item in enumerate(value))
    yield from (((FIELD, name), item) for name, item in list(attributes_of(value).items()))
