"""Finds what forward sets in containers and plain objects that attributes hold: `self.memo["hidden"] = h`.

An item of a dictionary, or a field of an object, is set again in every run, as an attribute is. A list, a deque, or a
dictionary from which keys are taken, gets all its contents again. Reads of what forward has set before are its own:
what was there before the call is no matter. Tensors that an earlier call has left there are none either, where forward
does not touch them (`Attributes.refilled`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ortmodule.core import pytree
from ortmodule.core.errors import ChangesAround, NotTraceable, Unflattenable
from ortmodule.core.pytree import CONSTANTS
from ortmodule.core.snapshot import Items
from ortmodule.guards.inventory import Slot
from ortmodule.guards.isolation import Contents
from ortmodule.guards.reads.inside_slots import InsideSlot, Way, steps_to

#: Attributes that hold something that forward has changed inside, where they are read, and a path.
Inside = Sequence[tuple[Slot, str | None, str]]


def changed_items(
    inside: Inside, before: Sequence[Items], result: Any, learn: Callable[[Slot, Any, Any], None]
) -> tuple[list[Slot], list[tuple[Slot, Any]]]:  # fmt: skip
    """What forward has set in what the attributes ``inside`` hold; and what it sets once
    (`self.config.kind = "text"`): constants, where none was. ``result``: of forward. ``learn``: is told
    of dictionaries, keys and values that no run sets.

    Raises ChangesAround for another change, NotTraceable for a value that no run could set.
    """
    found: list[Slot] = []
    settled: list[tuple[Slot, Any]] = []
    changed = [kept for kept in before if kept.changed()]
    for number, kept in enumerate(changed):
        container, then = kept.container, kept.then
        values = [(slot, slot.holder[slot.key]) for slot, _, _ in inside]
        ways = [(slot, steps_to(value, container)) for slot, value in values]
        places = tuple(Way(slot, steps) for slot, steps in ways if steps is not None)
        if not places or not isinstance(container, (dict, list, deque)) or _gives_away(result, container):
            raise _changes(inside)
        if not (isinstance(container, dict) and then.keys() <= container.keys()):
            found.append(_whole(inside, places, number, then))
            continue
        for key, new in container.items():
            old = then.get(key)
            if new is old:
                continue
            if isinstance(new, CONSTANTS) and (old is None or type(old) is bool):
                settled.append((Slot(f"{places[0].label()}.{key}", container, key), new))
                continue
            cached = type(key) is not str and key not in then and not any(t.requires_grad for t in tensors_in(new))
            if isinstance(new, CONSTANTS) or not _is_key(key) or cached:  # a table for each length
                if len(places) == 1 and not places[0].steps:
                    learn(places[0].attribute, key, new)
                raise _changes(inside)
            check_value(f"an item of the attribute {places[0].label()}", new)
            found.append(InsideSlot(f"{places[0].label()}[{key!r}]", container, key, places, number))
    return found, settled


def _whole(inside: Inside, places: tuple[Way, ...], number: int, then: Any) -> Slot:
    slot = InsideSlot(places[0].label(), places[0].attribute.holder, places[0].attribute.key, places, number, True)
    now = slot.find()
    left = {id(tensor) for tensor in tensors_in(then)}
    keys = now if isinstance(now, dict) else ()
    if any(id(tensor) in left for tensor in tensors_in(now)) or not all(map(_is_key, keys)):
        raise _changes(inside)
    check_value(f"what is in the attribute {slot.name}", now)
    return slot


def _is_key(key: Any) -> bool:
    return all(map(_is_key, key)) if type(key) is tuple else isinstance(key, CONSTANTS)


def _gives_away(result: Any, container: Any) -> bool:
    """Is it in the result itself? There it would be another one."""
    return bool(pytree.flatten_filled(result, [container])[2])


def settle_refilled(
    slots: Sequence[Slot], before: dict[str, Contents], refilled: set[tuple[int, str]], used: bool
) -> None:
    """Of attributes in which forward changes something, notes among ``refilled`` that tensors which earlier calls have
    left there are no matter. ``before``: what submodules held, by their paths. ``used``: forward uses such a tensor.

    Raises ChangesAround where that is not so any more.
    """
    for slot in slots:
        key = id(before[slot.name.rpartition(".")[0]].module), str(slot.key)
        if not used:
            refilled.add(key)
        elif key in refilled:
            raise ChangesAround(f"forward uses what an earlier call has left in the attribute {slot.name}")


def _changes(inside: Inside) -> ChangesAround:
    slot, place, _ = inside[0]
    where = f" (read at {place})" if place else ""
    return ChangesAround(f"forward changes what is in the attribute {slot.name}{where}")


def tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """The tensors in nested containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < pytree.MOST_DEPTH and isinstance(value, (dict, list, tuple, deque)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(each, depth + 1)


def check_value(what: str, value: Any) -> None:
    """Raises NotTraceable for one that forward sets ``what`` to, and no run could make again."""
    try:
        _, structure = pytree.flatten(value, results=True)
    except Unflattenable as error:
        raise NotTraceable(f"forward sets {what} to {error}") from None
    if structure.objects:
        raise NotTraceable(f"forward sets {what} to an object")
