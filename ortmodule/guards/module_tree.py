"""Lists a module's submodules and every tensor they hold, found again on every call.

A captured graph takes the module's tensors as inputs. They are looked up anew for every run, in the dictionaries that
hold them, so that `.to()`, `load_state_dict(assign=True)` or a replaced buffer need no new capture. :meth:`Tree.key`
is what a graph assumes about them; :meth:`Tree.isolated` lets forward run without leaving a trace in the module.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from ortmodule import _core
from ortmodule.core.errors import NotInEngine, Unguardable
from ortmodule.core.pytree import CONSTANTS
from ortmodule.core.rng_state import States
from ortmodule.core.snapshot import put_back, same_items, snapshot
from ortmodule.guards.guards import Attributes, Description, describe
from ortmodule.guards.hook_analysis import Reach, reach_of

MOST_KEYS = 1024  # of one tree
_numbers = itertools.count()

#: Classes of tensors that a graph can take in; others need PyTorch.
PLAIN_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)

_GLOBAL_HOOKS = (
    "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks"
)  # fmt: skip
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: What else is known of hooks, by their keys.
_MARKS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
#: Dictionaries inside a module that are restored one level deeper than its attributes.
_INNER = ("_parameters", "_buffers", "_modules")
#: Attributes that every module has.
_APART = frozenset(vars(nn.Module()))


class Holder(Protocol):
    """A dictionary or a list."""

    def __getitem__(self, key: Any, /) -> Any: ...
    def __setitem__(self, key: Any, value: Any, /) -> None: ...
    def __contains__(self, key: Any, /) -> bool: ...
    def pop(self, key: Any, /) -> Any: ...


@dataclass(frozen=True, eq=False)
class Slot:
    """A place that holds a tensor: an entry of a module's parameters, buffers or attributes."""

    name: str
    holder: Holder
    key: str | int

    def get(self) -> torch.Tensor:
        return self.holder[self.key]

    def find(self, missing: Any = None) -> Any:
        """The tensor in this place, or ``missing``. The holder is a dictionary, or a scripted module's."""
        if self.key not in self.holder:
            return missing
        return self.holder[self.key]

    def set(self, tensor: torch.Tensor) -> None:
        self.holder[self.key] = tensor


class Tree:
    """The submodules, parameters and buffers of ``module`` at the time of making.

    Plain tensors held by attributes come and go: :meth:`refresh` finds those of now.
    """

    def __init__(self, module: nn.Module) -> None:
        self.modules = dict(module.named_modules())
        #: Scripted submodules: their dictionaries are no dictionaries, and nothing shows when they change.
        self.scripted = [path for path, m in self.modules.items() if isinstance(m, torch.jit.ScriptModule)]
        self._types = [(m, type(m)) for m in self.modules.values()]
        self._children = [(m, tuple(m._modules.items())) for m in self.modules.values()]
        self._inner = [(name, m.__dict__) for name, m in self.modules.items() if m is not module]
        self.parameters: list[Slot] = []
        self.buffers: list[Slot] = []
        self.plain: list[Slot] = []
        self._ties: list[tuple[Slot, Slot]] = []  # one tensor in two places
        self._holders = [
            (m, name, m.__dict__[name], _entries_with_tensor(m.__dict__[name]))
            for m in self.modules.values()
            for name in ("_parameters", "_buffers")
        ]
        found: dict[int, Slot] = {}
        for path, part in self.modules.items():
            for holder, slots in ((part._parameters, self.parameters), (part._buffers, self.buffers)):
                for slot in _slots_in(path, holder):
                    if id(slot.get()) in found:
                        self._ties.append((found[id(slot.get())], slot))
                    else:
                        found[id(slot.get())] = slot
                        slots.append(slot)
        self.outside: list[Slot] = []  # tensors that forward takes from elsewhere: a list, an object, a global
        self._candidates: list[Slot] = []  # those that were met once
        self._fresh = 0  # how many are others in every trace
        self.attributes = Attributes(self.modules)
        self.slots: dict[str, Slot] = {}
        self.refresh()
        self.graphs: dict[tuple, list] = {}  # what was captured of this tree
        self.changing: dict[tuple, Any] = {}  # numbers among the arguments, by kind of call
        self.refused: dict[object, NotInEngine] = {}
        self.failures: dict[tuple, int] = {}
        self.opaque: dict[int, dict[str, str]] = {}  # submodules that PyTorch runs, and why, by :meth:`number`
        self.kinds: frozenset[str] = frozenset()  # of ATen operators that PyTorch runs
        self.left_for: tuple[str, frozenset[str]] = ("", frozenset())  # the latest of them, and the error they are for
        self.reads: dict[tuple[int, str], str] = {}  # what the latest traces read, also those that failed
        self._numbers: dict[tuple, int] = {}
        self._reaches: dict[int, tuple[Any, Reach | None]] = {}  # of forward hooks that were met, by their ids
        self.reach: Reach | None = None  # of the hooks that graphs follow
        self.followed: dict[str, dict[int, Any]] = {}  # those hooks, by the paths of their modules
        self._following: tuple = ()

    def refresh(self) -> None:
        """Finds the plain tensors that attributes hold now."""
        known = {id(slot.get()) for slot in (*self.parameters, *self.buffers)}
        self.plain = []
        for path, part in self.modules.items():
            for slot in _slots_in(path, part.__dict__):
                if id(slot.get()) not in known:
                    known.add(id(slot.get()))
                    self.plain.append(slot)
        self._name_slots()

    def _name_slots(self) -> None:
        every = (*self.parameters, *self.buffers, *self.plain, *self.outside)
        self.slots = {slot.name: slot for slot in every}

    def adopt(self, tensors: Iterable[torch.Tensor], second: bool) -> bool:
        """Makes slots of tensors that a trace met and that are none yet. Is there one that may be met again?

        ``second``: the trace was the second one; what it did not meet is made anew by every forward, and no slot.
        """
        met = {id(tensor): tensor for tensor in tensors}
        known = {id(slot.get()) for slot in self.outside}
        if second:
            lost = [slot for slot in self._candidates if id(slot.get()) not in met]
            self.outside = [slot for slot in self.outside if slot not in lost]
            self._fresh = max(self._fresh, len(lost))
            self._candidates = []
        elif len(met.keys() - known) > self._fresh:
            self._candidates = [Slot(f"outside/{next(_numbers)}", [t], 0) for key, t in met.items() if key not in known]
            self.outside = self.outside + self._candidates
        self.attributes.outside = self.outside
        self._name_slots()
        return bool(self._candidates)

    def places(self, tensor: torch.Tensor) -> list[tuple[dict | list, Any]]:
        """All places of modules, and of containers in their attributes, that hold this very tensor."""
        holders = [h for m in self.modules.values() for h in (m._parameters, m._buffers, m.__dict__)]
        holders += [c for c, _ in self.containers() if isinstance(c, (dict, list))]
        items = [(h, h.items() if isinstance(h, dict) else enumerate(h)) for h in holders]
        return [(holder, key) for holder, pairs in items for key, value in pairs if value is tensor]

    @property
    def others(self) -> list[Slot]:
        """Buffers and plain tensors."""
        return self.buffers + self.plain

    def names(self) -> dict[int, str]:
        """What modules, parameters and buffers are called, by their ids."""
        found = {id(module): path for path, module in self.modules.items()}
        return found | {id(slot.get()): slot.name for slot in (*self.parameters, *self.buffers)}

    def is_current(self) -> bool:
        """Are the submodules the same, and the tensors in the same places?"""
        for module, cls in self._types:
            if type(module) is not cls:
                return False
        for module, then in self._children:
            if tuple(module._modules.items()) != then:
                return False
        for module, name, holder, filled in self._holders:
            if module.__dict__[name] is not holder or ((holder or filled) and _entries_with_tensor(holder) != filled):
                return False
        return all(a.get() is b.get() for a, b in self._ties)

    def watch(self) -> _core.Watch:
        """Sees any change of what :meth:`is_current`, :meth:`hooked` and :meth:`key` say and of what graphs read."""
        inside = [getattr(nn_module, name) for name in _GLOBAL_HOOKS]
        for module in self.modules.values():
            attributes = module.__dict__
            inside += (attributes, attributes["_parameters"], attributes["_buffers"], attributes["_modules"])
            inside += [attributes[name] for name in _HOOKS]
        inside += [slot.holder for slot in self.outside]
        exact, classes = self.attributes.watched()
        inside = [container for container in inside if isinstance(container, (dict, list))]
        return _core.Watch(inside, exact, classes, self._types, PLAIN_TENSORS)

    @property
    def polled(self) -> bool:
        """Can it change without a sign?"""
        return self.attributes.polled or bool(self.scripted)

    def key(self) -> tuple:
        """What every captured graph assumes: training flags; type, shape and need for a gradient of every tensor."""
        tensors = [slot.holder[slot.key] for slot in (*self.parameters, *self.buffers)]
        return (
            tuple([module.training for module in self.modules.values()]),
            tuple([_kind(t) for t in tensors]),
            self._following,
        )

    def number(self) -> int:
        """:meth:`key` as a number, the same for equal ones."""
        key = self.key()
        if key not in self._numbers:
            if len(self._numbers) == MOST_KEYS:
                self._numbers.clear()
            self._numbers[key] = next(_numbers)
        return self._numbers[key]

    def hooked(self) -> tuple[str, ...]:
        """The submodules with hooks that a graph would not call (those of the root run around it); "": all.

        Looks at the hooks anew: :attr:`followed` and :meth:`key` say which ones are a part of forward.
        """
        self.reach, self.followed, self._following = None, {}, ()
        if any(getattr(nn_module, name) for name in _GLOBAL_HOOKS):
            return ("",)
        found = []
        for path, attributes in self._inner:
            count = sum([len(attributes[hooks]) for hooks in _HOOKS])
            if count and len(self._follow(path, attributes)) < count:
                found.append(path)
        if self.followed:
            hooks = tuple([(path, tuple(hooks.items())) for path, hooks in self.followed.items()])
            self._following = hooks, self.reach.values()
        return tuple(found)

    def _follow(self, path: str, attributes: dict[str, Any]) -> dict[int, Any]:
        """The transparent hooks of a submodule by their keys: those behind which nothing else follows."""
        kept: dict[int, Any] = {}
        for key, hook in attributes["_forward_hooks"].items():
            if (reach := self.reach_of(hook)) is None or any(key in attributes[marks] for marks in _MARKS):
                kept.clear()
            else:
                kept[key] = hook
                self.reach = self.reach or Reach()
                self.reach.include(reach)
        if kept:
            self.followed[path] = kept
        return kept

    def reach_of(self, hook: Any) -> Reach | None:
        """What a forward hook reads, if it is transparent; as it was found the last time, if that still holds."""
        _, reach = known = self._reaches.get(id(hook), (None, None))
        if known[0] is None or (reach is not None and not reach.holds()):
            reach = reach_of(hook)
            self._reaches[id(hook)] = hook, reach
        return reach

    def follows(self) -> bool:
        """Is all that transparent hooks read as it was when :meth:`hooked` looked at them?"""
        return self.reach is None or self.reach.holds()

    def hooks(self) -> dict[tuple[str, str], tuple[dict, dict]]:
        """The dictionaries of hooks, and copies of them, by their modules' paths and their names."""
        return {(path, name): (m.__dict__[name], dict(m.__dict__[name]))
                for path, m in self.modules.items() for name in _HOOKS}  # fmt: skip

    def busy_hooks(self, module: nn.Module, path: str) -> bool:
        """Would PyTorch, running ``module`` as a host node, leave out what hooks inside of it do for this forward?"""
        followed = self.followed.get(path, {})
        hooks = [h for h in module._forward_hooks.items() if h[0] not in followed]
        hooks += [h for part in module.modules() if part is not module for h in part._forward_hooks.items()]
        known = [self._reaches.get(id(hook)) for _, hook in hooks if not is_torchs(hook)]
        return any(found is None or (found[1] is not None and found[1].busy()) for found in known)

    @contextmanager
    def unhooked(self) -> Iterator[None]:
        """Inside, hooks on submodules are not called, but transparent ones and those with which torch makes weights."""
        changed = []
        for _, attributes in self._inner:
            for name in _HOOKS:
                hooks = attributes[name]
                own = {
                    key: hook
                    for key, hook in hooks.items()
                    if not is_torchs(hook) and self._reaches.get(id(hook), (None, None))[1] is None
                }
                if own:
                    changed.append((hooks, dict(hooks)))
                    for key in own:
                        del hooks[key]
        try:
            yield
        finally:
            for hooks, then in changed:
                hooks.clear()
                hooks.update(then)

    def unsupported_tensor(self) -> str | None:
        """The name of a tensor that the engine cannot use, with the reason, or None."""
        self.refresh()
        for slot in self.slots.values():
            tensor = slot.get()
            if type(tensor) not in PLAIN_TENSORS or tensor.layout is not torch.strided:
                return f"{slot.name} is a {type(tensor).__name__} with layout {tensor.layout}"
        return None

    @contextmanager
    def isolated(self) -> Iterator[dict[str, torch.Tensor]]:
        """Inside, buffers and plain tensors are copies: {name: tensor}. Afterwards all is as it was.

        Covers the attributes of every submodule with the containers in them, and the states of generators. A parameter
        that forward changes in place is not covered (a trace puts it back, trace_mode.py).
        """
        self.refresh()
        modules = list(self.modules.values())
        containers = self.containers()
        before = [(m, dict(m.__dict__), [dict(m.__dict__[name]) for name in _INNER]) for m in modules]
        hooks = [(m.__dict__[name], dict(m.__dict__[name])) for m in modules for name in (*_HOOKS, *_MARKS)]
        generators = States()
        same = {}
        copies = {}
        for slot in self.others:
            tensor = slot.get()
            copies[slot.name] = same[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        for holder in [m._buffers for m in modules] + [m.__dict__ for m in modules]:
            for key, tensor in list(holder.items()):
                if id(tensor) in same and isinstance(tensor, torch.Tensor):
                    holder[key] = same[id(tensor)]
        try:
            yield copies
        finally:
            for container, then in containers:
                if not same_items(container, then):
                    put_back(container, then)
            for holder, then in hooks:
                if len(holder) != len(then) or any(holder.get(key) is not hook for key, hook in then.items()):
                    _restore(holder, then)
            for module, attributes, inner in before:
                _restore(module.__dict__, attributes)
                for name, then in zip(_INNER, inner, strict=True):
                    _restore(module.__dict__[name], then)
            generators.put_back()

    def replace_parameters(self, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[int, torch.Tensor]:
        """Inside `isolated`: what ``change`` makes of each parameter takes its place; returned by the ids of both.
        Hooks on the parameters are not called then."""
        made: dict[int, torch.Tensor] = {}
        for module in self.modules.values():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    other = made.get(id(parameter))
                    if other is None:
                        other = torch.nn.Parameter(change(parameter.detach()), parameter.requires_grad)
                        made[id(parameter)] = made[id(other)] = other
                    module._parameters[key] = other
        return made

    def containers(self) -> list[tuple[Any, Any]]:
        """Every container inside of an attribute, and a shallow copy of it."""
        found: dict[int, Any] = {}
        for contents in self.contents().values():
            for description in contents.inside.values():
                found |= {id(c): c for c in (description.mutable() if description else ())}
        return [(c, snapshot(c)) for c in found.values()]

    def contents(self) -> dict[str, Contents]:
        """The contents of every module, by its path."""
        names = self.names()
        known: dict[Any, Any] = {}
        return {path: Contents(module, names, known) for path, module in self.modules.items()}


class Contents:
    """What one module holds at some time: attributes, and what is inside of those that are no constants."""

    def __init__(self, module: nn.Module, names: dict[int, str], known: dict[int, Description | None]) -> None:
        """``known``: descriptions by the ids of what they describe."""
        self.module = module
        self.attributes = dict(module.__dict__)
        self.inner = {name: dict(module.__dict__[name]) for name in _INNER}
        self.inside = {}
        for name, value in self.attributes.items():
            if name not in _APART and not isinstance(value, (torch.Tensor, *CONSTANTS)):
                self.inside[name] = _describe_once(value, names, known)

    def take(self, now: Contents, holder: dict, key: str) -> None:
        """One entry, which is in ``holder``, becomes what it is ``now``."""
        kept = self.attributes if holder is self.module.__dict__ else None
        for name in _INNER:
            if holder is self.module.__dict__[name]:
                kept = self.inner[name]
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


def _describe_once(value: Any, names: dict, known: dict) -> Description | None:
    if id(value) not in known:
        try:
            known[id(value)] = describe(value, names)
        except Unguardable:
            known[id(value)] = None
    return known[id(value)]


@contextmanager
def without(hooks: dict[int, Any], left: Iterable[int]) -> Iterator[None]:
    """Inside, the hooks with these keys are not called."""
    then = dict(hooks)
    try:
        for key in left:
            hooks.pop(key, None)
        yield
    finally:
        if len(hooks) != len(then):
            _restore(hooks, then)


def is_torchs(hook: Any) -> bool:
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return isinstance(module, str) and module.partition(".")[0] == "torch"


def _slots_in(path: str, holder: dict[str, Any]) -> list[Slot]:
    return [
        Slot(f"{path}.{key}" if path else key, holder, key)
        for key, value in list(holder.items())
        if isinstance(value, torch.Tensor)
    ]


def _kind(t: torch.Tensor) -> tuple:
    # Parameters that are not initialised have no shape.
    return type(t), t.dtype, t.requires_grad, t.device, t.layout, t.shape if type(t) in PLAIN_TENSORS else None


def _entries_with_tensor(holder: dict[str, Any]) -> tuple[tuple[str, bool], ...]:
    """Which entries hold a tensor."""
    return tuple([(key, isinstance(value, torch.Tensor)) for key, value in holder.items()])


def _restore(target: dict, then: dict) -> None:
    if not isinstance(target, dict):  # of a scripted module: its keys are fixed
        for key, value in then.items():
            if target[key] is not value:
                target[key] = value
    elif len(target) != len(then) or any(target.get(key, target) is not value for key, value in then.items()):
        target.clear()
        target.update(then)


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
    if is_dataclass(a) and not isinstance(a, type):
        return _alike(vars(a), vars(b))
    return bool(a == b)
