"""What a module is made of: its submodules and every tensor they hold, found again on every call.

A captured graph takes the module's tensors as inputs. They are looked up anew for every run, in the dictionaries that
hold them, so that `.to()`, `load_state_dict(assign=True)` or a replaced buffer need no new capture. :meth:`Tree.key`
is what a graph assumes about them; :meth:`Tree.isolated` lets forward run without leaving a trace in the module.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: Dictionaries inside a module that are restored one level deeper than its attributes.
_INNER = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True, eq=False)
class Slot:
    """A place that holds a tensor: an entry of a module's parameters, buffers or attributes."""

    name: str
    holder: dict[str, Any]
    key: str

    def get(self) -> torch.Tensor:
        return self.holder[self.key]

    def set(self, tensor: torch.Tensor) -> None:
        self.holder[self.key] = tensor


class Tree:
    """The submodules and tensors of ``module`` at the time of making."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = dict(module.named_modules())
        self._children = [(m._modules, tuple(m._modules.items())) for m in self.modules.values()]
        self._attributes = [m.__dict__ for m in self.modules.values()]
        self._inner = [(name, m.__dict__) for name, m in self.modules.items() if m is not module]
        self.parameters: list[Slot] = []
        self.others: list[Slot] = []  # buffers, and plain tensors held by attributes
        self._ties: list[tuple[Slot, Slot]] = []  # one tensor in two places
        found: dict[int, Slot] = {}
        for path, part in self.modules.items():
            for holder, slots in (
                (part._parameters, self.parameters),
                (part._buffers, self.others),
                (part.__dict__, self.others),
            ):
                for key, tensor in holder.items():
                    if isinstance(tensor, torch.Tensor):
                        slot = Slot(f"{path}.{key}" if path else key, holder, key)
                        if id(tensor) in found:
                            self._ties.append((found[id(tensor)], slot))
                        else:
                            found[id(tensor)] = slot
                            slots.append(slot)
        self.slots = {slot.name: slot for slot in (*self.parameters, *self.others)}
        self._holders = [(m._parameters, m._buffers) for m in self.modules.values()]
        self._counts = [(len(p), len(b)) for p, b in self._holders]

    def is_current(self) -> bool:
        """Are these still the module's parts, and the tensors where they were?"""
        for children, then in self._children:
            if tuple(children.items()) != then:
                return False
        if [(len(p), len(b)) for p, b in self._holders] != self._counts:
            return False
        for slot in self.slots.values():
            if not isinstance(slot.holder.get(slot.key), torch.Tensor):
                return False
        return all(a.get() is b.holder.get(b.key) for a, b in self._ties)

    def key(self) -> tuple:
        """What a captured graph assumes: training flags; type, shape and need for a gradient of every tensor."""
        tensors = [slot.holder[slot.key] for slot in self.slots.values()]
        return (
            tuple([attributes["training"] for attributes in self._attributes]),
            tuple([(type(t), t.dtype, t.requires_grad, t.device, t.shape) for t in tensors]),
        )

    def hooked(self) -> str | None:
        """The path of a submodule with hooks (those of the root run around the graph), or None."""
        for name, attributes in self._inner:
            for hooks in _HOOKS:
                if attributes[hooks]:
                    return name
        return None

    def foreign(self) -> str | None:
        """The name of a tensor that the engine cannot use, with the reason, or None."""
        for slot in self.slots.values():
            tensor = slot.get()
            if tensor.device.type != "cpu":
                return f"{slot.name} is on {tensor.device}"
            if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer) or tensor.layout is not torch.strided:
                return f"{slot.name} is a {type(tensor).__name__} with layout {tensor.layout}"
        return None

    @contextmanager
    def isolated(self) -> Iterator[dict[str, torch.Tensor]]:
        """Inside, buffers and plain tensors are copies: {name: tensor}. Afterwards all is as it was.

        Covers the attributes of every submodule and the states of torch's, Python's and NumPy's generators. A
        parameter that forward changes in place is not covered.
        """
        modules = list(self.modules.values())
        before = [(m, dict(m.__dict__), [dict(m.__dict__[name]) for name in _INNER]) for m in modules]
        states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
        same = {}
        copies = {}
        for slot in self.others:
            copies[slot.name] = same[id(slot.get())] = slot.get().detach().clone()
        for holder in [m._buffers for m in modules] + [m.__dict__ for m in modules]:
            for key, tensor in list(holder.items()):
                if id(tensor) in same and isinstance(tensor, torch.Tensor):
                    holder[key] = same[id(tensor)]
        try:
            yield copies
        finally:
            for module, attributes, inner in before:
                _restore(module.__dict__, attributes)
                for name, then in zip(_INNER, inner, strict=True):
                    _restore(module.__dict__[name], then)
            torch.set_rng_state(states[0])
            random.setstate(states[1])
            numpy.random.set_state(states[2])

    def changed(self, before: dict[str, dict[str, Any]]) -> Iterator[str]:
        """Names of attributes that are not what they were at the time of :meth:`attributes`; tensors aside."""
        slots = {(id(slot.holder), slot.key) for slot in self.others}
        for path, module in self.modules.items():
            then, now = before[path], module.__dict__
            for key in {**then, **now}:
                if (id(now), key) not in slots and not _same(module, key, then, now):
                    yield f"{path}.{key}" if path else key

    def attributes(self) -> dict[str, dict[str, Any]]:
        return {path: dict(module.__dict__) for path, module in self.modules.items()}


def _restore(target: dict, then: dict) -> None:
    if len(target) != len(then) or any(target.get(key, target) is not value for key, value in then.items()):
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
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return False
    try:
        return type(a) is type(b) and bool(a == b)
    except Exception:
        return False
