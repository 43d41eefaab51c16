"""Bounds plans that are kept, by their number and by their bytes: the least recently used go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

#: Plans kept for shapes seen before, and what they may take themselves (not the memory of their runs).
MOST_PLANS, MOST_PLAN_BYTES = 128, 1 << 30

V = TypeVar("V")


def drop_oldest(kept: OrderedDict[tuple, V] | OrderedDict[int, V], bytes_of: Callable[[V], int]) -> list[V]:
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
