"""Finds attributes in which forward keeps what it has computed for later calls: masks, tables of positions.

A call that fills such a cache, or makes it larger, is seldom; the calls behind it find it there. So PyTorch runs that
call, and the next one is captured, with the tables as inputs of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch

from ortmodule.capture import symbolic_numbers
from ortmodule.capture.read_causes import OPAQUE, RANDOM, causes, causes_of_size
from ortmodule.core.size_expr import is_number
from ortmodule.core.torch_private import TracedValue, get_value_trace
from ortmodule.guards.inventory import Slot

MOST_CALLS = 2  # that a module gets for filling its caches


class FillsCache(BaseException):
    """Forward fills a cache. It goes through the user's code, whose handlers of errors must not take it."""

    def __init__(self, slots: list[Slot], numbers: list[Slot]) -> None:
        """``slots``: with tensors, ``numbers``: that it sets beside them."""
        super().__init__(f"forward fills a cache ({', '.join(slot.name for slot in slots)}), which later calls find")
        self.slots, self.numbers = slots, numbers


def filled(
    slots: Iterable[Slot], met: Mapping[Any, int], before: Callable[[Slot], Any], given: Iterable[torch.Tensor]
) -> list[Slot]:  # fmt: skip
    """Those of ``slots``, which forward has set, that hold tables now, where it is a cache that it has filled: it has
    looked first at what one of them held, and what they hold does not follow from the values of the call's tensors.

    ``met``: the ids of what attributes were when forward looked at them first, by slots; ``before``: says what was in a
    slot; ``given``: the call's tensors."""
    call = {get_value_trace(tensor).unique() for tensor in given}
    tables, asked = [], False
    for slot in slots:
        value: Any = slot.find()
        tensor = value.tensor if symbolic_numbers.is_one(value) else value
        if not isinstance(tensor, torch.Tensor) or tensor.requires_grad or _follows_from(get_value_trace(tensor), call):
            continue
        asked = asked or met.get((id(slot.holder), slot.key)) == id(before(slot))
        if tensor is value and not is_number(tensor):
            tables.append(slot)
    return tables if asked else []


def _follows_from(value: TracedValue, call: Container[int]) -> bool:
    """Does ``value`` follow from the elements of tensors of the ``call``, or from chance?"""
    asked, known = [(value, False)], set()
    while asked:
        value, of_size = asked.pop()
        if (value.unique(), of_size) in known:
            continue
        known.add((value.unique(), of_size))
        if not of_size and value.unique() in call:
            return True
        behind, least = causes_of_size(value) if of_size else causes(value.node())
        if least in (RANDOM, OPAQUE):
            return True
        asked += behind
    return False
