"""Finds tensors inside of what attributes hold, and those that take their places later.

`self.state = h, c` at each call: a graph for these two tensors would be another one at each call. So once the tensors
in an attribute are others than before, while all else in it is alike, they are inputs of graphs, as tensors are that
are attributes themselves.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ortmodule.core.errors import NotTraceable, Unguardable
from ortmodule.core.objects.tensor_memory import version_of
from ortmodule.core.pytree import CONSTANTS
from ortmodule.core.structures.attributes import in_slots, slots_of
from ortmodule.guards.descriptions import describe
from ortmodule.guards.fields import is_plain
from ortmodule.guards.inventory import PLAIN_TENSORS, Slot
from ortmodule.guards.reads.item_reads import FIELD, ITEM, Step

_MISSING = object()


class Inside:
    """What the attribute ``name`` of a module holds now, as a :class:`Holder` of the tensors in it: a key is the steps
    to one. ``attributes``: of the module."""

    def __init__(self, attributes: dict[str, Any], name: str) -> None:
        self.attributes, self.name = attributes, name

    def _find(self, steps: tuple[Step, ...]) -> Any:
        value = self.attributes.get(self.name, _MISSING)
        for step in steps:
            value = _inside(value, step)
        return value

    def __getitem__(self, steps: tuple[Step, ...]) -> torch.Tensor:
        if not isinstance(value := self._find(steps), torch.Tensor):
            raise KeyError(self.name + _label(steps))
        return value

    def __contains__(self, steps: tuple[Step, ...]) -> bool:
        return isinstance(self._find(steps), torch.Tensor)

    def __setitem__(self, steps: tuple[Step, ...], tensor: torch.Tensor) -> None:
        value = self.attributes[self.name]
        if (new := _with(value, steps, tensor)) is not value:
            self.attributes[self.name] = new

    def pop(self, steps: tuple[Step, ...]) -> torch.Tensor:
        raise KeyError(f"{self.name}{_label(steps)} cannot be taken out")


def held_in(path: str, attributes: dict[str, Any], name: str) -> Iterator[Slot]:
    """The places of tensors in the attribute ``name``, which is called ``path``, of a module with these ``attributes``;
    none where something is in it that cannot be compared."""
    value = attributes.get(name)
    try:
        describe(value)
    except Unguardable:
        return
    holder = Inside(attributes, name)
    for steps in _ways(value, (), set()):
        yield Slot(path + _label(steps), holder, steps)


def _label(steps: tuple[Step, ...]) -> str:
    return "".join(f".{key}" if kind == FIELD else f"[{key!r}]" for kind, key in steps)


def check_unchanged(
    held: Iterable[Slot], versions: Mapping[str, tuple[torch.Tensor, int]], who: str, moved: Container[int] = ()
) -> None:  # fmt: skip
    """Raises NotTraceable where ``who`` has changed one of these in place, by its version, or given it other memory."""
    for slot in held:
        tensor, version = versions[slot.name]
        if version_of(tensor) != version or id(tensor) in moved:
            raise NotTraceable(f"{who} changes the tensor {slot.name}, which an attribute holds, in place")


def kind_of(name: str, t: torch.Tensor) -> str:
    """What graphs rest on of a tensor in the place that is called ``name``."""
    return f"{name}: {type(t).__name__} {t.layout} {t.dtype} {t.requires_grad} {t.device} {tuple(t.shape)}"


def _ways(value: Any, steps: tuple[Step, ...], met: set[int]) -> Iterator[tuple[Step, ...]]:
    if isinstance(value, torch.Tensor):
        if steps and type(value) in PLAIN_TENSORS and value.layout is torch.strided:
            yield steps
        return
    if isinstance(value, (nn.Module, type, *CONSTANTS)) or id(value) in met:
        return
    met.add(id(value))
    for step, item in _items(value):
        yield from _ways(item, (*steps, step), met)


def _items(value: Any) -> list[tuple[Step, Any]]:
    if isinstance(value, dict):
        return [((ITEM, key), item) for key, item in value.items() if isinstance(key, CONSTANTS)]
    if type(value) is list or (isinstance(value, tuple) and (type(value) is tuple or hasattr(value, "_make"))):
        return [((ITEM, i), item) for i, item in enumerate(value)]
    return [((FIELD, name), item) for name, item in _fields(value).items()]


def _fields(value: Any) -> dict[str, Any]:
    """Of a plain object. That they are read here is no matter of forward's."""
    cls = type(value)
    if cls is not SimpleNamespace and not is_plain(cls):
        return {}
    found = object.__getattribute__(value, "__dict__") if cls.__dictoffset__ else {}
    return in_slots(value) | found if slots_of(cls) else found


def _inside(value: Any, step: Step) -> Any:
    kind, key = step
    if kind == FIELD:
        return _fields(value).get(key, _MISSING)
    if isinstance(value, dict):
        return dict.get(value, key, _MISSING)
    return value[key] if isinstance(value, (list, tuple)) and key < len(value) else _MISSING


def _with(value: Any, steps: tuple[Step, ...], tensor: torch.Tensor) -> Any:
    """``value`` with ``tensor`` in a place inside: itself, but for tuples."""
    if not steps:
        return tensor
    step, (kind, key) = steps[0], steps[0]
    then = _inside(value, step)
    new = _with(then, steps[1:], tensor)
    if new is then:
        return value
    if kind == FIELD:
        object.__setattr__(value, key, new)
    elif isinstance(value, tuple):
        items = [new if i == key else item for i, item in enumerate(value)]
        return value._make(items) if hasattr(value, "_make") else tuple(items)
    elif isinstance(value, dict):
        dict.__setitem__(value, key, new)
    else:
        value[key] = new
    return value
