"""Runs forward on copies of what a module holds, puts everything back, and tells what forward has changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ortmodule.core.errors import Unguardable
from ortmodule.core.objects.tensor_copies import with_attributes
from ortmodule.core.pytree import CONSTANTS
from ortmodule.core.rng_state import States
from ortmodule.core.snapshot import Items, SlotItems, Snapshot
from ortmodule.core.structures.attributes import attributes_of, slots_of
from ortmodule.guards.descriptions import Description, describe
from ortmodule.guards.fields import in_class, is_plain
from ortmodule.guards.inventory import Inventory, is_coded
from ortmodule.guards.module_hooks import HOOK_FLAGS, HOOKS
from ortmodule.guards.sharding.local_parameters import of_part
from ortmodule.guards.sharding.sharded import SHARDING_STATE

#: Dictionaries inside a module that are restored one level deeper than its attributes.
_INNER = ("_parameters", "_buffers", "_modules")
#: Attributes that every module has.
OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def _frozen(tensor: torch.Tensor) -> nn.Parameter:
    return with_attributes(nn.Parameter(tensor, False), tensor)  # type: ignore[return-value]  # it is the first


@contextmanager
def isolated(inventory: Inventory) -> Iterator[dict[str, torch.Tensor]]:
    """Inside, buffers, plain tensors and what is like them are copies: {name: tensor}. Afterwards all is as it was.

    Covers the attributes of every submodule with the containers in them, and the states of generators. A parameter
    that forward changes in place is not covered (a trace puts it back, trace_mode.py).
    """
    inventory.refresh()
    modules = list(inventory.modules.values())
    snapshot = Snapshot([States()])
    for module in modules:
        for name in (*_INNER, *HOOKS, *HOOK_FLAGS):
            snapshot.add(Items(module.__dict__[name]))
        snapshot.add(Items(module.__dict__))
    for items in containers(inventory):
        snapshot.add(items)
    with snapshot.around():
        same = {}
        copies = {}
        for slot in (*inventory.others, *inventory.held):
            tensor = slot.get()
            copy = with_attributes(tensor.detach().clone().requires_grad_(tensor.requires_grad), tensor)
            copies[slot.name] = same[id(tensor)] = _frozen(copy) if slot in inventory.written else copy
        holders = [m._buffers for m in modules] + [m.__dict__ for m in modules]
        if inventory.written:
            holders += [m._parameters for m in modules]
        for holder in holders:
            for key, tensor in list(holder.items()):
                if id(tensor) in same and isinstance(tensor, torch.Tensor):
                    holder[key] = same[id(tensor)]
        for slot in (*inventory.held, *inventory.held_again):  # the containers around them are put back, too
            if (key := id(slot.get())) in same:
                slot.set(same[key])
        yield copies


def replace_parameters(
    inventory: Inventory, change: Callable[[torch.Tensor], torch.Tensor]
) -> dict[int, torch.Tensor]:  # fmt: skip
    """Inside `isolated`: what ``change`` makes of each parameter, of a DTensor this rank's part, takes its place;
    returned by the ids of both. Hooks on the parameters are not called then."""
    made: dict[int, torch.Tensor] = {}
    for module in inventory.modules.values():
        if id(module) in inventory.within_sharded:
            continue
        for key, parameter in module._parameters.items():
            if parameter is not None and not is_coded(parameter):
                other = made.get(id(parameter))
                if other is None:
                    own = parameter.detach()
                    own = of_part(change, own) if hasattr(own, "to_local") else change(own)
                    other = torch.nn.Parameter(own, parameter.requires_grad)
                    with_attributes(other, parameter)
                    made[id(parameter)] = made[id(other)] = other
                module._parameters[key] = other
    return made


def places_of(tensor: torch.Tensor, inventory: Inventory) -> list[tuple[dict | list, Any]]:
    """All places of modules, and of containers in their attributes, that hold this very tensor."""
    holders = [h for m in inventory.modules.values() for h in (m._parameters, m._buffers, m.__dict__)]
    holders += [items.container for items in containers(inventory) if isinstance(items.container, (dict, list))]
    items = [(h, h.items() if isinstance(h, dict) else enumerate(h)) for h in holders]
    return [(holder, key) for holder, pairs in items for key, value in pairs if value is tensor]


# --- what a module holds ----------------------------------------------------------------------------------------------


def containers(inventory: Inventory) -> list[Items]:
    """Every container inside of an attribute, and every object with slots, with what is in it now."""
    found: dict[int, Items] = {}
    for held in contents(inventory).values():
        for description in filter(None, held.inside.values()):
            found |= {id(c): Items(c) for c in description.mutable() if id(c) not in found}
            with_slots = (each for each in description.objects if slots_of(type(each)) and id(each) not in found)
            found |= {id(each): SlotItems(each) for each in with_slots}
    return [*found.values()]


def contents(inventory: Inventory) -> dict[str, Contents]:
    """The contents of every module, by its path."""
    names = inventory.names()
    known: dict[int, Description | None] = {}
    return {path: Contents(module, names, known) for path, module in inventory.modules.items()}


class Contents:
    """What one module holds at some time: attributes, and what is inside of those that are no constants."""

    def __init__(self, module: nn.Module, names: dict[int, str], known: dict[int, Description | None]) -> None:
        """``known``: descriptions by the ids of what they describe."""
        self.module = module
        self.attributes = dict(module.__dict__)
        self.inner = {name: dict(module.__dict__[name]) for name in _INNER}
        self.inside: dict[str, Description | None] = {}
        for name, value in self.attributes.items():
            if name in OF_EVERY_MODULE or name.startswith(SHARDING_STATE):
                continue
            if not isinstance(value, (torch.Tensor, *CONSTANTS)):
                self.inside[name] = _describe_once(value, names, known)

    def take(self, now: Contents, holder: dict, key: str) -> None:
        """One entry, which is in ``holder``, becomes what it is ``now``."""
        inner = [kept for name, kept in self.inner.items() if holder is self.module.__dict__[name]]
        kept = inner[0] if inner else self.attributes
        kept.pop(key, None)
        if key in holder:
            kept[key] = holder[key]
        if kept is self.attributes:
            self.inside.pop(key, None)
            if key in now.inside:
                self.inside[key] = now.inside[key]

    def changed(self, now: Contents) -> Iterator[tuple[dict, str]]:
        """Dictionaries and keys whose entries were set since, to a value or to other contents."""
        module = self.module
        for key in {**self.attributes, **now.attributes}:
            if not _same(module, key, self.attributes, now.attributes) or self.inside.get(key) != now.inside.get(key):
                yield module.__dict__, key
        for name, then in self.inner.items():
            for key in {**then, **now.inner[name]}:
                if then.get(key) is not now.inner[name].get(key):
                    yield module.__dict__[name], key


def _describe_once(value: Any, names: dict[int, str], known: dict[int, Description | None]) -> Description | None:
    if id(value) not in known:
        try:
            known[id(value)] = describe(value, names)
        except Unguardable:
            known[id(value)] = None
    return known[id(value)]


def _same(module: nn.Module, key: str, then: dict, now: dict) -> bool:
    a, b = then.get(key, _same), now.get(key, _same)
    if a is b:
        return True
    if a is _same or b is _same:
        # A method that was patched and put back is an attribute now, but no other method.
        value, method = (a if b is _same else b), getattr(type(module), key, None)
        return getattr(value, "__func__", _same) is method and getattr(value, "__self__", None) is module
    try:
        return _alike(a, b)
    except Exception:
        return False


def _alike(a: Any, b: Any) -> bool:
    """Equal, without a look at the elements of tensors: a trace would see it."""
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, torch.Tensor):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_alike(value, b[key]) for key, value in a.items())
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(_alike, a, b))
    cls = type(a)
    compares = in_class(cls, "__eq__") is not vars(object)["__eq__"]
    if compares and (cls is SimpleNamespace or is_plain(cls)):  # dataclasses, too
        return _alike(attributes_of(a), attributes_of(b))
    return bool(a == b)
