"""Finds what forward sets in dictionaries that attributes hold: `self.memo["hidden"] = h`.

An item is set again in every run, as an attribute is. Reads of an item that forward has set before are its own: what
was there before the call is no matter (`item_reads.are_own`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ortmodule.capture.side_effects import ChangesAround
from ortmodule.core import pytree
from ortmodule.core.errors import NotTraceable, Unflattenable
from ortmodule.core.pytree import CONSTANTS
from ortmodule.core.snapshot import Items
from ortmodule.guards.inventory import Slot


@dataclass(frozen=True, eq=False)
class ItemSlot(Slot):
    """An item of the dictionary that is in an attribute then."""

    attribute: Slot

    def set(self, tensor: Any) -> None:
        self.attribute.holder[self.attribute.key][self.key] = tensor


def changed_items(
    inside: Sequence[tuple[Slot, str | None, str]], before: Sequence[Items]
) -> tuple[list[Slot], list[tuple[Slot, Any]]]:
    """Items that forward has set in what the attributes ``inside`` (with where they are read, and a path) hold; and
    those that it sets once (`self.config.kind = "text"`): constants, where none was.

    Raises ChangesAround for another change, NotTraceable for a value that no run could set.
    """
    found: list[Slot] = []
    settled: list[tuple[Slot, Any]] = []
    for kept in before:
        container, then = kept.container, kept.then
        if not kept.changed():
            continue
        grows = isinstance(container, dict) and then.keys() <= container.keys()
        holders = [slot for slot, _, _ in inside if slot.holder[slot.key] is container]
        for key, new in container.items() if grows else [(None, [])]:
            old = then.get(key) if isinstance(then, dict) else None
            if new is old:
                continue
            if isinstance(new, CONSTANTS) and (old is None or type(old) is bool):
                settled.append((Slot(f"{inside[0][0].name}.{key}", container, key), new))
                continue
            if not grows or len(holders) != 1 or isinstance(new, CONSTANTS) or type(key) is not str:
                slot, place, _ = inside[0]
                where = f" (read at {place})" if place else ""
                raise ChangesAround(f"forward changes what is in the attribute {slot.name}{where}")
            check_value(f"an item of the attribute {holders[0].name}", new)
            found.append(ItemSlot(f"{holders[0].name}[{key!r}]", container, key, holders[0]))
    return found, settled


def check_value(what: str, value: Any) -> None:
    """Raises NotTraceable for one that forward sets ``what`` to, and no run could make again."""
    try:
        _, structure = pytree.flatten(value, results=True)
    except Unflattenable as error:
        raise NotTraceable(f"forward sets {what} to {error}") from None
    if structure.objects:
        raise NotTraceable(f"forward sets {what} to an object")
