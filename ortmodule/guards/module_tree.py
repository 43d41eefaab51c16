"""Keeps together what is known of one tree of modules: its inventory, attributes, hooks, and what was captured of it.

:meth:`Tree.key` is what a graph assumes about the tensors; :meth:`Tree.isolated` lets forward run without leaving a
trace in the module.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from ortmodule import _core
from ortmodule.core.errors import CountsAttribute, NotInEngine, WritesParameter
from ortmodule.core.objects.tensor_memory import memory_of
from ortmodule.guards import isolation
from ortmodule.guards.code_reader import globals_of
from ortmodule.guards.fields import FieldReads
from ortmodule.guards.guards import Attributes, Guards, Sites
from ortmodule.guards.inventory import PLAIN_TENSORS, Inventory, Slot, path_of
from ortmodule.guards.module_hooks import GLOBAL_HOOKS, HOOKS, ModuleHooks
from ortmodule.guards.reads.held_tensors import held_in, kind_of
from ortmodule.guards.reads.size_tables import Key, SizeNumber, SizeTable
from ortmodule.guards.writes.holders import Holders
from ortmodule.guards.writes.surroundings import GlobalState

MOST_KEYS = 1024  # of one tree
_numbers = itertools.count()


@dataclass
class Caches:
    """What was captured of one tree, what could not be, and why."""

    graphs: dict[tuple, list] = field(default_factory=dict)  # by the key of a call
    refused: dict[object, NotInEngine] = field(default_factory=dict)
    changing: dict[tuple, Any] = field(default_factory=dict)  # numbers among the arguments, by kind of call
    opaque: dict[int, dict[str, str]] = field(default_factory=dict)  # submodules for PyTorch, and why, by the number
    #: Of these submodules, by the same number: the switches that led there; they are captured again when one changes.
    switches: dict[int, dict[str, Guards]] = field(default_factory=dict)
    kinds: frozenset[str] = frozenset()  # of ATen operators that PyTorch runs
    left_for: tuple[str, frozenset[str]] = ("", frozenset())  # the latest of them, and the error they are for
    cuts: bool = True  # may graphs be cut at values that forward puts into the caller's containers?
    parted: dict[str, str] = field(default_factory=dict)  # breaks for what their runs have shown, and why
    unsized: frozenset[str] = frozenset()  # those among these that return tensors of sizes that nothing tells
    varying: frozenset[str] = frozenset()  # those that return what they are given in some calls, and not in others
    whole: frozenset[str] = frozenset()  # those that were breaks for that, and no graph could be made so
    reads: dict[tuple[int, str], str] = field(default_factory=dict)  # of the latest traces, also of those that failed
    holders: Holders = field(default_factory=Holders)


class Tree(Inventory):
    """A module with its submodules, from one change of its structure to the next."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.attributes = Attributes(self.modules)
        self.hooks = ModuleHooks(module, self.modules, self.sharded, self.parallel)
        self.caches = Caches()
        self.globals = globals_of(map(type, self.modules.values()))  # held here, so that captures find their caches
        self.may_fill = False  # may PyTorch run a call that fills a cache, before anything is captured?
        self.fills = 0  # such calls
        self.changes = 0  # how often the module has got other submodules or parameters
        self.may_keep = False  # the same of one that puts tables for sizes into a dictionary
        self.size_numbers: dict[str, SizeNumber] = {}  # attributes that such calls set to numbers, by their names
        self._keys: dict[tuple, int] = {}  # numbers of keys
        self._buffers: tuple = ()  # what they were at the latest look

    def adopt(self, tensors: Iterable[torch.Tensor], second: bool) -> bool:
        may_be_met = super().adopt(tensors, second)
        self.attributes.outside = self.outside
        return may_be_met

    def vary(self, path: str) -> bool:
        """The submodule there, and others of its class, return what they are given in some calls. False: known."""
        new, cls = path not in self.caches.varying, type(self.modules[path])
        self.caches.varying |= {p for p, module in self.modules.items() if type(module) is cls}
        return new

    def count(self, path: str, key: str) -> bool:
        self.attributes.counted.add((id(self.modules[path]), key))
        return super().count(path, key)

    def knows_now(self, failure: BaseException | None) -> bool:
        """Has a trace failed for what the next one knows of the module?"""
        if isinstance(failure, CountsAttribute):
            return self.count(failure.path, failure.key)
        return isinstance(failure, WritesParameter) and self.treat_as_buffer(failure.parameter)

    def hold(self, path: str, key: str) -> None:
        """The attribute ``key`` of the submodule at ``path`` holds other tensors again and again: they are inputs."""
        self.attributes.held.add((id(self.modules[path]), key))
        self.refresh()

    def _held_places(self) -> Iterable[Slot]:
        attributes: Attributes | None = getattr(self, "attributes", None)  # it is made behind the first look
        for identity, key in attributes.held if attributes else ():
            path, module = next((p, m) for p, m in self.modules.items() if id(m) == identity)
            yield from held_in(path_of(path, key), module.__dict__, key)

    def described_names(self) -> dict[int, str]:
        """:meth:`names`, and of :attr:`held` tensors, whichever these are by now, what graphs rest on."""
        held = {id(tensor): kind_of(slot.name, tensor) for slot in self.held if (tensor := slot.find()) is not None}
        return held | self.names()

    def resize(self, holder: Any, key: Any) -> None:
        super().resize(holder, key)
        owner = next((m for m in self.modules.values() if m.__dict__ is holder), None)
        if owner is not None:
            self.attributes.resized.add((id(owner), key))

    def around(self, modules: Iterable[nn.Module], hooks: Iterable[Any] = ()) -> GlobalState:
        """What ``modules`` and ``hooks`` may change around them, as it is now; its tensors are none of this tree."""
        found = self.caches.holders.snapshot(modules, hooks)
        if found.tensors:
            slots = (*self.parameters, *self.buffers, *self.plain)
            held = [tensor for slot in slots if isinstance(tensor := slot.find(), torch.Tensor)]
            own = {id(tensor) for tensor in held} | {memory for tensor in held if (memory := memory_of(tensor))}
            others = [t for t in found.tensors.values() if id(t) not in own and memory_of(t) not in own]
            found.tensors = {id(t): t for t in others}
        return found

    def fill(
        self, tensors: Iterable[Slot], numbers: Iterable[SizeNumber], shapes: Sequence[Sequence[int]] = ()
    ) -> None:  # fmt: skip
        """PyTorch is about to run a call, with inputs of these ``shapes``, that puts ``tensors`` into attributes, where
        later ones find them, and ``numbers`` beside them."""
        self.fills += 1
        for slot in tensors:
            self.resize(slot.holder, slot.key)
        for number in numbers:
            number.fill(shapes)
            self.size_numbers[number.attribute.name] = number
            self.count(number.attribute.name.rpartition(".")[0], str(number.attribute.key))

    def following(self, shapes: Sequence[Sequence[int]]) -> dict[str, Key]:
        """Attributes with numbers that are what a call with inputs of these ``shapes`` would set them to."""
        known = [(slot, self.size_numbers[slot.name]) for slot in self.counters if slot.name in self.size_numbers]
        found = {slot.name: number.key_of(slot.get().item(), shapes) for slot, number in known}
        return {name: key for name, key in found.items() if key is not None}

    def keep(self, tables: Iterable[SizeTable], refused: Iterable[SizeTable], shapes: Sequence[Sequence[int]]) -> None:
        """PyTorch is about to run a call, with inputs of these sizes, that fills ``tables``, or takes those that are
        ``refused`` for something else."""
        for table in refused:
            table.refused = True
        for table in tables:
            table.place.fill(shapes)
            self._add_table(table)

    def _add_table(self, table: SizeTable) -> None:
        owner = next((m for m in self.modules.values() if m.__dict__ is table.attribute.holder), None)
        if owner is not None:
            self.tables.append(table)
            self.attributes.tables.setdefault((id(owner), table.attribute.key), []).append(table)

    def learn_changes(self) -> None:
        """What changes again and again graphs take as it is from now on: numbers, and the sizes of tables."""
        for identity, key in self.attributes.varying:
            path, module = next((p, m) for p, m in self.modules.items() if id(m) == identity)
            value = module.__dict__.get(key)
            if isinstance(value, torch.Tensor):
                self.resize(module.__dict__, key)
            elif type(value) in (int, float):
                self.count(path, key)
            else:
                self.hold(path, key)
        self.attributes.varying.clear()
        kinds = tuple(_kind_and_shape(slot) for slot in self.buffers)
        for slot, now, then in zip(self.buffers, kinds, self._buffers, strict=False):
            if now is not None and then is not None and now[0] == then[0] and now[1] != then[1]:
                self.resize(slot.holder, slot.key)
        self._buffers = kinds

    def _outline(self) -> tuple:
        return [*map(id, self.modules.values())], [slot.name for slot in self.parameters]

    def inherit(self, other: Tree) -> None:
        """What was known of the same module with other tensors in it."""
        self.fills, self.size_numbers = other.fills, dict(other.size_numbers)
        self.changes = other.changes + (self._outline() != other._outline())
        for holder, key in other.resized:
            self.resize(holder, key)
        for table in other.tables:
            self._add_table(table)
        paths = {id(module): path for path, module in other.modules.items()}
        for identity, key in other.attributes.held:
            if (path := paths[identity]) in self.modules and key in self.modules[path].__dict__:
                self.hold(path, key)
        for slot in other.counters:
            path = slot.name.rpartition(".")[0]
            if path in self.modules and slot.key in self.modules[path].__dict__:
                self.count(path, str(slot.key))

    def learn(self, attributes: dict[tuple[int, str], str], read: FieldReads, sites: Sites) -> None:
        """What a trace, which may have failed, has read."""
        self.caches.reads |= attributes
        self.attributes.learn(read, sites)

    def watch(self) -> _core.Watch:
        """Sees any change of what :meth:`is_current`, :attr:`hooks` and :meth:`key` say and of what graphs read."""
        inside = [getattr(nn_module, name) for name in GLOBAL_HOOKS]
        for module in self.modules.values():
            attributes = module.__dict__
            inside += (attributes, attributes["_buffers"], attributes["_modules"])
            if id(module) not in self.within_sharded:  # there they come and go
                inside.append(attributes["_parameters"])
            inside += [attributes[name] for name in HOOKS]
        inside += [slot.holder for slot in self.outside]
        exact, classes = self.attributes.watched()
        inside = [container for container in inside if isinstance(container, (dict, list))]
        return _core.Watch(inside, exact, classes, self.classes, PLAIN_TENSORS)

    @property
    def polled(self) -> bool:
        """Can it change without a sign?"""
        return self.attributes.polled or bool(self.scripted)

    def moved(self) -> bool:
        """Has it, where it is :attr:`polled`? A scripted submodule does not tell."""
        return bool(self.scripted) or self.attributes.moved()

    def key(self) -> tuple:
        """What every captured graph assumes: training flags, the kinds of tensors, the hooks that are followed."""
        return tuple([module.training for module in self.modules.values()]), self.kinds_of_tensors(), self.hooks.key

    def number(self) -> int:
        """:meth:`key` as a number, the same for equal ones."""
        key = self.key()
        if key not in self._keys:
            if len(self._keys) == MOST_KEYS:
                self._keys.clear()
            self._keys[key] = next(_numbers)
        return self._keys[key]

    def key_of(self, number: int) -> tuple | None:
        """The key that has this number."""
        return next((key for key, found in self._keys.items() if found == number), None)

    # --- running forward aside ----------------------------------------------------------------------------------------

    def isolated(self) -> AbstractContextManager[dict[str, torch.Tensor]]:
        """As :func:`ortmodule.guards.isolation.isolated`."""
        return isolation.isolated(self)

    def unhooked(self) -> AbstractContextManager[None]:
        """As :meth:`ModuleHooks.suspended`."""
        return self.hooks.suspended()

    def replace_parameters(self, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[int, torch.Tensor]:
        """As :func:`ortmodule.guards.isolation.replace_parameters`."""
        return isolation.replace_parameters(self, change)


def _kind_and_shape(slot: Slot) -> tuple[tuple, torch.Size] | None:
    """Of a plain buffer without a gradient."""
    t = slot.get()
    if type(t) not in PLAIN_TENSORS or t.requires_grad:
        return None
    return (t.dtype, t.dim(), t.device), t.shape
