"""Bounds plans that are kept, by their number and by their bytes: the least recently used go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

#: Plans kept for shapes seen before, and what they may take themselves (not the memory of their runs).
MOST_PLANS, MOST_PLAN_BYTES = 128, 1 << 30

V = TypeVar("V")


class PlanCache(OrderedDict[tuple, V]):
    """Plans by what they are for, in the order of use. To keep another one costs the same however many there are."""

    def __init__(self, bytes_of: Callable[[V], int]) -> None:
        """``bytes_of``: what a plan takes, which does not change."""
        super().__init__()
        self._bytes_of = bytes_of
        self._most_bytes = 0  # of all; counted when it is too many, since some may be here no longer
        self._keys: dict[int, tuple] = {}  # id() of a plan -> its key

    def add(self, key: tuple, plan: V) -> list[V]:
        """Keeps it as the latest. Returns those that have gone for it."""
        if (same := self.get(key)) is not None:  # another thread has made it, too
            self.discard(same)
        self[key] = plan
        self._keys[id(plan)] = key
        self._most_bytes += self._bytes_of(plan)
        dropped: list[V] = []
        if self._most_bytes > MOST_PLAN_BYTES:
            dropped += drop_oldest(self, self._bytes_of)
            self._count()
        while len(self) > MOST_PLANS:
            dropped.append(self.popitem(last=False)[1])
            self._most_bytes -= self._bytes_of(dropped[-1])
        for each in dropped:
            self._keys.pop(id(each), None)
        return dropped

    def discard(self, plan: V) -> None:
        """It is kept no longer, if it was."""
        key = self._keys.pop(id(plan), None)
        if key is not None and self.get(key) is plan and self.pop(key, None) is not None:
            self._most_bytes -= self._bytes_of(plan)

    def clear(self) -> None:
        super().clear()
        self._keys.clear()
        self._most_bytes = 0

    def exchange(self, others: dict[tuple, V]) -> dict[tuple, V]:
        """Keeps others, in place of those that it returns."""
        own = dict(self)
        self.clear()
        self.update(others)
        self._keys.update((id(plan), key) for key, plan in others.items())
        self._count()
        return own

    def _count(self) -> None:
        self._most_bytes = sum(self._bytes_of(plan) for plan in list(self.values()))


def drop_oldest(kept: OrderedDict[Any, V], bytes_of: Callable[[V], int]) -> list[V]:
    """Those that ``kept``, in the order of use, is too large by are no longer in it. The latest stays in any case."""
    dropped: list[V] = []
    sizes = [bytes_of(value) for value in list(kept.values())]
    total = sum(sizes)
    for size in sizes[:-1]:
        if len(kept) <= MOST_PLANS and total <= MOST_PLAN_BYTES:
            break
        dropped.append(kept.popitem(last=False)[1])
        total -= size
    return dropped
