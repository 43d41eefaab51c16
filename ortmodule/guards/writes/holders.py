"""Finds what holds a tensor, outwards from it: containers, and attributes of objects, classes, modules and closures.

Forward may hide a tensor where neither its code nor attributes show it: by a method of a global object, in a closure's
list, with a logging handler. After a trace such a tensor is still alive. What holds it is remembered, so that the next
trace shows which submodule changes it, and puts it back.
"""

from __future__ import annotations

import contextvars
import gc
import types
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from ortmodule.core.objects.references import other_references, referrers
from ortmodule.core.snapshot import CONTAINERS, Attribute, Compared, ContextValue, Items, NewAttributes, Snapshot
from ortmodule.guards.code_reader import is_of, module_of
from ortmodule.guards.writes.surroundings import GlobalState, global_state

MOST_STEPS = 6  # outwards from a tensor: a list in a dictionary in an object in a list ...
MOST_HOLDERS = 256
#: Functions' caches hold what they computed: `capture/calls/function_caches.py`.
_CACHES = ("_lru_list_elem", "_lru_cache_wrapper")


@dataclass
class _Place:
    """A container, an attribute of an ``owner`` or a context variable."""

    label: str
    owner: Any
    name: str | None = None  # of an attribute
    inside: list[Any] = field(default_factory=list)  # what a trace has put there, or what holds that
    attributes: bool = False  # the container is the `__dict__` of an object
    changes: bool = False  # in each trace

    def kept(self) -> Compared:
        if isinstance(self.owner, contextvars.ContextVar):
            return ContextValue(self.owner)
        return Items(self.owner) if self.name is None else Attribute(self.owner, self.name)

    def stale(self, kept: Any) -> list[Any]:
        """What an earlier trace has left there, where the latest one has left as much: keys of dictionaries, else
        items. ``kept``: the place as it was before the latest."""
        ids, then = {id(each) for each in self.inside}, kept.then
        if not isinstance(kept, Items):
            return [then] if id(then) in ids else []
        now: Any = self.owner
        grown = max(len(now) - len(then), 0)
        if isinstance(then, dict):
            new = list(then)[len(then) - grown :]
            keys = [key for key, value in then.items() if id(value) in ids or id(key) in ids]
            return [key for key in keys if key in new or now.get(key) is not then[key]]
        items = list(then)
        ends = items if isinstance(then, set) else items[:grown] + items[len(items) - grown :]
        return [each for each in ends if id(each) in ids]

    def let_go(self, stale: list[Any]) -> None:
        """Takes out what is :meth:`stale`. What an attribute was before is not known: None."""
        owner, self.inside = self.owner, []
        for each in stale:
            if isinstance(owner, contextvars.ContextVar):
                owner.set(None)
            elif self.name is not None:
                setattr(owner, self.name, None)
            elif self.attributes:
                owner[each] = None
            elif isinstance(owner, dict):
                dict.pop(owner, each, None)
            elif isinstance(owner, set):
                set.discard(owner, each)
            elif (at := next((i for i, item in enumerate(owner) if item is each), None)) is not None:
                del owner[at]


@dataclass
class Held:
    """``tensors`` that something holds, a ``word`` on it, and where that is."""

    tensors: list[torch.Tensor]
    word: str
    places: list[_Place]


class Holders:
    """Where the traces of one tree of modules have left tensors."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, str | None], _Place] = {}
        #: Tensors around the modules that these write into, by their ids.
        self._written: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()

    def snapshot(self, modules: Iterable[nn.Module], hooks: Iterable[Any] = ()) -> GlobalState:
        """What ``modules`` may change around them, as it is now, by name: see :func:`global_state`."""
        found = global_state(modules, hooks)
        found.known = self._written
        for place in self._places.values():
            kept: Any = place.kept()
            found.add_named(place.label, kept)
            held = kept.items() if isinstance(kept, Items) else (kept.then,)
            found.tensors |= {id(each): each for each in held if isinstance(each, torch.Tensor)}
        return found

    def put_back(self, around: Snapshot) -> None:
        """Puts back ``around``, of :meth:`snapshot`. What has changed takes tensors in each trace, and lets go of what
        earlier ones have left there."""
        changed = [(place, each) for _, each in around.all_changed() if (place := self._places.get(_key(each)))]
        stale = [(place, place.stale(each)) for place, each in changed]
        around.put_back()
        for place, left in stale:
            place.changes = True
            place.let_go(left)

    def forget(self) -> None:
        """Traces are over: what they did not change was not there before them, or holds what was."""
        self._places = {key: place for key, place in self._places.items() if place.changes}
        for place in self._places.values():
            place.inside = []

    def learn(self, tensors: list[torch.Tensor]) -> Held:
        """Remembers what holds ``tensors``, beside that list and caches of functions."""
        found = Held([], "", [])
        level: list[Any] = []
        skipped: list[Any] = [tensors, level, found.tensors]
        for tensor, word in _not_in_caches(tensors, skipped):
            found.tensors.append(tensor)
            found.word = found.word or word
        level += found.tensors
        met = {id(each) for each in level}
        for _ in range(MOST_STEPS):
            ids = {id(each): each for each in level}
            holders = holders_of(level, [*skipped, ids])
            level = []
            skipped += [ids, holders, level]
            for holder in holders:
                inside = [ids[id(each)] for each in gc.get_referents(holder) if id(each) in ids]
                skipped.append(inside)
                known = self._places.get((id(holder), None))
                for new in _places_of(holder, inside) if known is None else [known]:  # it looks at all objects
                    place = self._places.setdefault((id(new.owner), new.name), new)
                    place.inside += inside
                    skipped.append(place.inside)
                    found.places.append(place)
                if id(holder) not in met and _is_passed(holder) and len(met) < MOST_HOLDERS:
                    met.add(id(holder))
                    level.append(holder)
        return found


def _key(kept: Any) -> tuple[int, str | None]:
    if isinstance(kept, Attribute):
        return id(kept.owner), kept.name
    if isinstance(kept, NewAttributes):
        return id(kept.owner), None
    return id(kept.container if isinstance(kept, Items) else kept.variable), None


def holders_of(objects: list[Any], skipped: list[Any]) -> list[Any]:
    """What refers to ``objects``, but for frames, what is autograd's or of this package, and those ``skipped``."""
    ids = {id(each) for each in (*skipped, skipped, objects)}
    found = referrers(objects) if objects else []
    return [each for each in found if id(each) not in ids and not isinstance(each, _PASSING) and not _is_ours(each)]


_PASSING = types.FrameType, BackwardCFunction


def _is_ours(holder: Any) -> bool:
    """Is it an object of this package, which is no module of the user's, and no number of a trace?"""
    return type(holder).__module__.startswith("ortmodule.") and not isinstance(holder, (nn.Module, torch.Tensor))


def _not_in_caches(tensors: list[torch.Tensor], skipped: list[Any]) -> list[tuple[torch.Tensor, str]]:
    """Those that something holds, with a word on it, and caches of functions do not."""
    held = referred_to(tensors)
    ids: dict[int, list[Any]] = {id(each): [] for each in held}
    for holder in holders_of(held, [*skipped, ids]):
        for each in {id(each) for each in gc.get_referents(holder)} & ids.keys():
            ids[each].append(type(holder).__name__)
    names = [(tensor, ids[id(tensor)]) for tensor in held]
    return [(tensor, f"a {of[0]}") for tensor, of in names if of and not any(name in _CACHES for name in of)]


def is_of_context(holder: Any) -> bool:
    """Is it the dictionary of a custom autograd function's context?"""
    return type(holder) is dict and any(isinstance(each, BackwardCFunction) for each in referrers([holder]))


def referred_to(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Those that a name or an object of Python refers to, that list aside."""
    counts = other_references(tensors)
    return [tensor for tensor, count in zip(tensors, counts, strict=True) if count]


def is_held(tensors: list[torch.Tensor]) -> bool:
    """Does anything but that list, frames and what is autograd's refer to one of these?"""
    return bool(holders_of(referred_to(tensors), [tensors]))


def _is_passed(holder: Any) -> bool:
    """May something that existed before hold this? A function's cache is everywhere where the function is."""
    if isinstance(holder, (types.ModuleType, types.FunctionType, type, nn.Module)) or type(holder).__name__ in _CACHES:
        return False
    return not (type(holder) is dict and _namespace(holder) is not None)


def _namespace(holder: dict) -> Any:
    """The module or class whose dictionary it is."""
    if "__builtins__" in holder:
        return module_of(holder)
    if "__module__" in holder:
        return next((each for each in referrers([holder]) if isinstance(each, type)), None)
    return None


def _places_of(holder: Any, inside: list[Any]) -> list[_Place]:
    """``holder`` as places that hold ``inside``."""
    ids = {id(each) for each in inside}
    if isinstance(holder, types.CellType):
        return [_Place("a variable of a closure", holder, "cell_contents")]
    if type(holder).__name__.startswith("hamt"):
        found = [variable for variable, value in contextvars.copy_context().items() if id(value) in ids]
        return [_Place(f"the context variable {variable.name}", variable) for variable in found]
    if type(holder) is dict and (owner := _namespace(holder)) is not None:
        names = [name for name, value in holder.items() if id(value) in ids]
        return [_Place(f"{owner.__name__}.{name}", owner, name) for name in names]
    if isinstance(holder, CONTAINERS):
        owner = next((each for each in referrers([holder]) if getattr(each, "__dict__", None) is holder), None)
        return [_Place(_label(holder) if owner is None else type(owner).__name__, holder, attributes=owner is not None)]
    if isinstance(getattr(holder, "__dict__", None), dict) and any(id(v) in ids for v in vars(holder).values()):
        return [_Place(type(holder).__name__, vars(holder), attributes=True)]
    slots = [name for base in type(holder).__mro__ for name in vars(base) if isinstance(vars(base)[name], _SLOT)]
    held = [name for name in slots if id(getattr(holder, name, None)) in ids]
    return [_Place(f"{type(holder).__name__}.{name}", holder, name) for name in held]


_SLOT = types.MemberDescriptorType


def _label(container: Any) -> str:
    """``Tracker.losses``: the attribute that holds it, or what it is."""
    for holder in referrers([container]):
        if type(holder) is dict:
            key = next((key for key, value in holder.items() if value is container and isinstance(key, str)), None)
            if key is None:
                continue
            if (owner := _namespace(holder)) is not None:
                return f"{owner.__name__}.{key}"
            owners = [each for each in referrers([holder]) if getattr(each, "__dict__", None) is holder]
            if owners and is_of(type(owners[0]), ("ortmodule",)):
                continue
            return f"{type(owners[0]).__name__}.{key}" if owners else f"[{key!r}] of a dictionary"
    return f"a {type(container).__name__}"
