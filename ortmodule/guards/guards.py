"""Guards what a captured graph assumes of Python: the attributes of modules that forward read.

While a module is traced, every attribute that is read of it or of one of its submodules is noted
(`scalar_guards.py`). A graph holds as long as these attributes have the values they had: numbers, strings and other
constants are compared by value, containers by what is in them, plain objects (a configuration) by those of their fields
that were read, tensors by their kind, everything else by identity.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ortmodule.core.errors import Unguardable
from ortmodule.core.snapshot import Attribute, found_in
from ortmodule.guards import fields
from ortmodule.guards.code_reader import MODULES
from ortmodule.guards.descriptions import (
    MISSING,
    Description,
    OfKind,
    SomeFields,
    describe,
    describe_around,
    describe_other,
    shown,
)
from ortmodule.guards.fields import FieldReads, FieldSet, functions_behind
from ortmodule.guards.global_reads import Place, read_by, read_by_code, read_of
from ortmodule.guards.inventory import Slot
from ortmodule.guards.reads import item_reads
from ortmodule.guards.reads.inside_slots import InsideSlot, are_found
from ortmodule.guards.reads.item_reads import ITEM, ItemReads
from ortmodule.guards.reads.size_tables import SizeTable

MOST_VALUES = 2  # of a number that graphs are for
MOST_SHOWN = 64  # parts of an attribute that a text shows

#: Attributes that hold dictionaries and namespaces, and which instructions read them: code, and where in it.
Sites = Mapping[tuple[int, str], Iterable[tuple[types.CodeType, int]]]

Key = tuple[int, str]  # id of a module, name of an attribute

#: What is a matter of the tree of modules, or of PyTorch's own machinery.
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_MACHINERY = {"__class__", "__dict__", "_call_impl", "_wrapped_call_impl", "_compiled_call_impl", "_slow_forward"}
MODULE_ATTRIBUTES |= _MACHINERY


class Attributes:
    """The attributes that the graphs of one tree of modules have read, and what they are now."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self._modules = modules
        self._paths = {id(module): path for path, module in modules.items()}
        self._read: dict[Key, Any] = {}  # modules, and what is around them
        self._fields: dict[type, FieldSet] = {}  # of plain objects
        self._items: dict[Key, ItemReads] = {}  # of attributes and globals
        self.outside: list[Any] = []  # slots with tensors that forward has from elsewhere
        self.counted: set[Key] = set()  # numbers that graphs take as they are: their types count
        #: Containers that forward changes: the tensors in them, which earlier calls have left, are no matter.
        self.refilled: set[Key] = set()
        self.tables: dict[Key, list[SizeTable]] = {}  # of attributes that hold dictionaries: inputs of graphs
        self.resized: set[Key] = set()  # tensors whose sizes do not count
        self.held: set[Key] = set()  # what holds other tensors again and again: these are inputs of graphs
        self.varying: list[Key] = []  # numbers that change again and again, and tensors of other sizes than before
        self.now: dict[Key, Description | None] = {}  # None: cannot be compared
        self._values: dict[Key, set[Any]] = {}  # that numbers have had
        self._names: dict[int, str] = {}
        self._polled: list[Key] = []  # those that can change without a sign in what is to be watched

    def learn(self, reads: FieldReads, sites: Sites | None = None) -> None:
        """What a trace, which may have failed, has read of plain objects, and of dictionaries and namespaces."""
        for key, found in (sites or {}).items():
            read = self._items.setdefault(key, ItemReads())
            for code, offset in found:
                read.add(item_reads.at(code, offset, key[1]))
        for cls in reads.classes():
            self._fields.setdefault(cls, FieldSet())
        for identity, name in reads.names:
            cls = type(reads.objects[identity])
            if fields.shows_all(cls, name):
                self._fields[cls].whole = True
            elif name != "__class__":
                self._fields[cls].names.add(name)

    def add(self, reads: dict[Key, str], others: Mapping[int, nn.Module] | None = None) -> dict[Key, str]:
        """Those of ``reads`` ({attribute: place}) that a graph has to watch, with the globals that methods read.
        ``others``: modules, by their ids, of which some are none of the tree's."""
        kept: dict[Key, str] = {}
        codes: set[Any] = set()
        for (identity, name), place in reads.items():
            path = self._paths.get(identity)
            if path is None:
                kept |= self._of_other((others or {}).get(identity), name, place)
                continue
            module = self._modules[path]
            for each in list(module.__dict__) if name == "__dict__" else (name,):
                if name == "__dict__":
                    self._items[identity, each] = item_reads.whole()
                skipped = each in MODULE_ATTRIBUTES or each in module._parameters or each in module._modules
                if not skipped and each not in module._buffers:
                    self._read[identity, each] = module
                    kept[identity, each] = place
                value = module.__dict__.get(each, MISSING)
                held = getattr(type(module), each, None) if value is MISSING else value
                for function in functions_behind(held):
                    kept |= self._around((*read_by(function, codes), *read_of(type(module), function)), place)
        return kept

    def _of_other(self, module: nn.Module | None, name: str, place: str) -> dict[Key, str]:
        """An attribute of a module that is none of the tree's (a teacher in a list), and the tensors of that module."""
        if module is None or name in _MACHINERY:
            return {}
        return self._around([(module, each) for each in (name, "_parameters", "_buffers", "_modules")], place)

    def _around(self, places: Iterable[Place], where: str) -> dict[Key, str]:
        found = {(id(owner), name): owner for owner, name in places}
        self._read |= found
        return dict.fromkeys(found, where)

    def add_outside(self, reads: dict[Key, tuple[Any, str]]) -> dict[Key, str]:
        """``reads``: {attribute: (the object, the place)}. Raises Unguardable for one that cannot be compared."""
        for (_, name), (owner, place) in reads.items():
            try:
                describe(getattr(owner, name), read=self._fields)
            except Unguardable:
                text = f"{place} reads {owner.__name__}, which cannot be compared from call to call"
                raise Unguardable(text) from None
        self._read |= {key: owner for key, (owner, _) in reads.items()}
        return {key: place for key, (_, place) in reads.items()}

    def add_fields(self, reads: FieldReads) -> dict[Key, str]:
        """What was read of plain objects, and by the code that ran."""
        self.learn(reads)
        kept: dict[Key, str] = {}
        codes: set[Any] = set()
        for (identity, name), place in reads.names.items():
            value = reads.objects[identity]
            if identity in reads.around:
                self._read[identity, name] = value
                kept[identity, name] = place
            for function in functions_behind(fields.found(value, name).value):
                kept |= self._around((*read_by(function, codes), *read_of(type(value), function)), place)
        for owner, name, where in read_by_code(reads.ran, reads.classes(), map(type, self._modules.values())):
            kept |= self._around([(owner, name)], where)
        return kept

    def learn_globals(self, kept: Iterable[Key], ran: Mapping[types.CodeType, dict[str, Any]]) -> None:
        """What code that has run, with its globals, reads of dictionaries and namespaces that are ``kept``."""
        for key in kept:
            owner = self._read[key]
            if isinstance(owner, MODULES) and type(vars(owner).get(key[1])) in item_reads.WITH_ITEMS:
                self._items.setdefault(key, ItemReads()).add(item_reads.of_global(key[1], owner, ran))

    def look(self, names: dict[int, str]) -> None:
        """Describes all attributes anew; ``names`` as in :func:`describe`."""
        known: dict[int, Description | None] = {}
        self._names = names
        before = self.now
        self.now = {key: self._described(key, known) for key in self._read}
        self.now |= {(0, slot.name): describe(slot.get()) for slot in self.outside}
        self._polled = [key for key, found in self.now.items() if found is None or found.polled]
        changed = ((key, then, self.now.get(key)) for key, then in before.items())
        self.varying += [
            key for key, then, now in changed if then and now and then != now and self._varies(key, then, now)
        ]

    def _varies(self, key: Key, then: Description, now: Description) -> bool:
        """Is a change that has just been found one of many: a tensor without a gradient has other sizes, a number has
        its third value, a container or an object holds other tensors, and is alike?"""
        owner = self._read.get(key)
        if id(owner) not in self._paths or key in self.counted or key in self.resized or key in self.held:
            return False
        if len(now.parts) != 2 or isinstance(now.parts[1], SomeFields):
            return then.without_tensors() == now.without_tensors()
        cls, value = now.parts
        if cls in (int, float):
            values = self._values.setdefault(key, set())
            values |= {value, *(then.parts[1:] if then.parts[0] is cls else ())}
            return len(values) > MOST_VALUES
        if not isinstance(value, tuple) or not issubclass(cls, torch.Tensor) or then.parts[:1] != now.parts[:1]:
            return False
        *kind, shape = value
        *other, before = then.parts[1]
        return kind == other and len(shape) == len(before) and not value[2]

    def takes(self, key: Key, now: Description) -> bool:
        """Do graphs take it as it is, whatever its value is, or its sizes?"""
        if len(now.parts) != 2:
            return False
        if key in self.resized:
            return issubclass(now.parts[0], torch.Tensor) and isinstance(now.parts[1], tuple)
        return key in self.counted and now.parts[0] in (int, float)

    def _described(self, key: Key, known: dict) -> Description | None:
        owner, name = self._read[key], key[1]
        if not isinstance(owner, nn.Module):
            return describe_around(owner, name, self._fields, self._items.get(key))
        value = owner.__dict__.get(name, MISSING)
        if value is MISSING:
            value = getattr(type(owner), name, MISSING)
        if id(owner) not in self._paths:
            return describe_other(owner, value, self._fields)
        if isinstance(value, dict) and any(not table.refused for table in self.tables.get(key, ())):
            return Description([type(value)])
        items = self._items.get(key) if type(value) in item_reads.WITH_ITEMS else None
        place = id(value) if items is None else key
        if place not in known:
            try:
                known[place] = describe(value, self._names, self._fields, items)
            except Unguardable:
                known[place] = None
            known[None, id(value)] = value  # no other object gets this id meanwhile
        found = known[place]
        return found.without_tensors() if found is not None and key in self.refilled else found

    @property
    def polled(self) -> bool:
        """Can one change without a sign in what is to be watched?"""
        return bool(self._polled)

    def moved(self) -> bool:
        """Has one of those changed since the last look?"""
        return any((now := self._described(key, {})) is None or now != self.now[key] for key in self._polled)

    def label(self, key: Key) -> str:
        path = self._paths.get(key[0])
        if path is None:
            owner = self._read[key]
            return f"{getattr(owner, '__name__', type(owner).__name__)}.{key[1]}"
        return f"{path}.{key[1]}" if path else key[1]

    def watched(self) -> tuple[list[dict | list], list[tuple[Any, str, Any]]]:
        """Containers whose contents matter, and attributes of classes and objects with their values."""
        containers: dict[int, dict | list] = {}
        found: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        for description in self.now.values():
            if description is not None:
                containers |= {id(c): c for c in description.containers}
                found |= {(id(owner), name): (owner, name, value) for owner, name, value in description.attributes}
        for (identity, name), owner in self._read.items():
            if not isinstance(owner, nn.Module):
                if type(owner) not in self._fields:
                    found[identity, name] = owner, name, found_in(owner, name, None)
                continue
            cls = type(owner)
            if name not in owner.__dict__ and (id(cls), name) not in found:
                value = getattr(cls, name, MISSING)
                if value is not MISSING and value is getattr(cls, name):
                    found[id(cls), name] = cls, name, value
        return list(containers.values()), list(found.values())


class Guards:
    """The attributes that one graph rests on, and what they have to be."""

    def __init__(
        self, attributes: Attributes, reads: dict[Key, str], names: dict[int, str],
        outside: dict[Key, tuple[Any, str]] | None = None, read: FieldReads | None = None, exact: bool = False,
        sets: Sequence[Slot] = (),
    ) -> None:  # fmt: skip
        """``reads``: as noted while tracing; ``outside``, ``read``: of objects that are no modules; ``exact``: values
        of numbers, and sizes of tensors, count in any case. ``sets``: what runs set.

        Raises Unguardable.
        """
        kept = attributes.add_fields(read or FieldReads())
        kept |= attributes.add(reads, read.modules if read else None) | attributes.add_outside(outside or {})
        attributes.learn_globals(kept, read.ran if read else {})
        attributes.look(names)
        self._attributes, self._sets = attributes, [slot for slot in sets if isinstance(slot, InsideSlot)]
        self.values: dict[Key, Description] = {}
        self.places = kept
        for key, place in kept.items():
            value = attributes.now[key]
            if value is None:
                text = (
                    f"{place} reads the attribute {attributes.label(key)}, which cannot be compared from call to call"
                )
                raise Unguardable(text)
            self.values[key] = OfKind(**vars(value)) if not exact and attributes.takes(key, value) else value
        self.values |= {key: value for key, value in attributes.now.items() if key[0] == 0 and value is not None}
        #: The epoch of the latest look, and what it found.
        self.epoch, self.held = -1, True

    def label(self, key: Key) -> str:
        return self._attributes.label(key)

    def reading(self, changed: Iterable[Any]) -> Key | None:
        """The first attribute that is, or has in it, one of these containers, or attributes (`snapshot.Attribute`)."""
        containers = {id(each) for each in changed}
        names = {(id(each.owner), each.name) for each in changed if isinstance(each, Attribute)}
        for key, value in self.values.items():
            if key in names or any(id(c) in containers for c in value.mutable()):
                return key
        return None

    def hold(self, epoch: int) -> bool:
        """Are all attributes as they were? ``epoch``: the same number if nothing has changed since the last time."""
        if epoch != self.epoch:
            self.held = self.broken() is None and are_found(self._sets)
            self.epoch = epoch
        return self.held

    def broken_name(self) -> str | None:
        """The name of the first attribute, or field of it, that is not as it was."""
        key = self.broken()
        return None if key is None or key[0] == 0 else self._attributes.label(key) + self._difference(key)[0]

    def broken_place(self) -> str:
        """The line that reads that attribute."""
        key = self.broken()
        return "" if key is None else self.places.get(key, "")

    def broken_by(self) -> str | None:
        """What one graph would be for that holds now: the name of that attribute, where its value does not count, or
        that value."""
        key = self.broken()
        if key is not None and (now := self._attributes.now.get(key)) and self._attributes.takes(key, now):
            return self._attributes.label(key)
        return self.broken_value()

    def broken_value(self) -> str | None:
        """The value of that attribute now, as a text."""
        key = self.broken()
        if key is None:
            return None
        parts = self._difference(key)[1][:MOST_SHOWN]
        if len(parts) == 2 and parts[0] is float:
            return str(float.fromhex(parts[1]))
        return repr(parts[1]) if len(parts) == 2 else repr(parts)

    def broken_text(self) -> str:
        """What that attribute is now, for a sentence."""
        key = self.broken()
        return "" if key is None else shown(self._difference(key)[1])

    def _difference(self, key: Key) -> tuple[str, list[Any]]:
        """The field in which an attribute differs, or "", and what is there now."""
        now = self._attributes.now.get(key)
        return ("", []) if now is None else _changed_field(self.values[key].parts, now.parts)

    def broken(self) -> Key | None:
        """The first attribute that is not as it was."""
        now = self._attributes.now
        return next((key for key, value in self.values.items() if now.get(key) != value), None)


def _changed_field(then: list[Any], now: list[Any]) -> tuple[str, list[Any]]:
    for before, after in zip(then, now, strict=False):
        if isinstance(before, SomeFields) and isinstance(after, SomeFields) and before != after:
            for name in before.values.keys() & after.values.keys():
                if before.values[name] != after.values[name]:
                    path, parts = _changed_field(before.values[name], after.values[name])
                    key = name if isinstance(name, str) else name[1]
                    return (f"[{key!r}]" if name[0] == ITEM else f".{key}") + path, parts
    return "", now
