"""Remembers what a forward began with and its graph does not know, for the same forward in PyTorch.

The graph has its operands. But what submodules find that PyTorch runs inside of it (islands) is theirs alone, and an
attribute that forward reads and sets is another one afterwards: `create_graph=True` would be of another forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ortmodule.capture.trace_record import Trace
from ortmodule.core.errors import StateError
from ortmodule.core.rng_state import States
from ortmodule.core.snapshot import CONTAINERS, Items, Snapshot, fill
from ortmodule.guards.isolation import OF_EVERY_MODULE
from ortmodule.guards.module_tree import Tree

#: Items of a container in an attribute that is copied in each run.
MOST_COPIED = 64


class _Length:
    """How long a container is that is too long to be copied in each run: a list that has grown is cut."""

    def __init__(self, container: Any) -> None:
        self.container, self.then = container, len(container)

    def put_back(self) -> None:
        if len(self.container) == self.then:
            return
        if type(self.container) is not list or len(self.container) < self.then:
            raise StateError("create_graph=True: a container that the module holds was changed since its forward")
        del self.container[self.then :]


class UnknownState:
    """What a forward may change without its graph: the attributes of submodules that PyTorch runs inside the graph, and
    tensors that these change in place; attributes that forward reads and sets."""

    def __init__(self, tree: Tree, trace: Trace) -> None:
        paths = {node.owner for node in trace.nodes} - {None}
        modules = [m for path in paths if path in tree.modules for m in tree.modules[path].modules()]
        held = [d for m in modules if not type(m).__module__.startswith("torch.nn.") for d in (vars(m), m._buffers)]
        read = {(id(vars(m)), name) for m in tree.modules.values() for i, name in trace.attributes if i == id(m)}
        held += [slot.holder for slot in trace.sets if (id(slot.holder), slot.key) in read]
        self.holders = [*{id(d): d for d in held}.values()]
        self.slots = [slot for node in trace.nodes for slot in node.sets]

    @classmethod
    def of(cls, tree: Tree, trace: Trace) -> UnknownState | None:
        """None: the graph knows all."""
        state = cls(tree, trace)
        return state if state.holders or state.slots else None


@dataclass
class _OfGraph:
    """A tensor with an autograd graph, which is not kept for this: an attribute may hold that of another step."""

    tensor: weakref.ref[torch.Tensor]
    contents: torch.Tensor

    def get(self) -> torch.Tensor:
        tensor = self.tensor()
        return self.contents if tensor is None else tensor


class _Contents:
    """What a container holds."""

    def __init__(self, container: Any) -> None:
        self.container, self.then = container, _each(Items(container).then, _without_graph)

    def put_back(self) -> None:
        fill(self.container, _each(self.then, lambda item: item.get() if type(item) is _OfGraph else item))


def _without_graph(item: Any) -> Any:
    of_graph = isinstance(item, torch.Tensor) and item.grad_fn is not None
    return _OfGraph(weakref.ref(item), item.detach()) if of_graph else item


def _each(container: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(container, dict):
        return {key: function(item) for key, item in container.items()}
    return type(container)(map(function, container))


class StateBefore:
    """What a forward began with that is no operand of its graph."""

    def __init__(self, unknown: UnknownState | None, generators: States | None = None) -> None:
        """``generators``: those that nodes draw from which PyTorch runs."""
        holders, slots = (unknown.holders, unknown.slots) if unknown is not None else ([], [])
        self.generators = generators
        self.kept: list[_Contents | _Length] = [_Contents(holder) for holder in holders]
        for holder in holders:
            for name, value in holder.items():
                if isinstance(value, CONTAINERS) and name not in OF_EVERY_MODULE:
                    self.kept.append(_Contents(value) if len(value) <= MOST_COPIED else _Length(value))
        self.tensors = [(slot, t.detach().clone()) for slot in slots if isinstance(t := slot.find(), torch.Tensor)]

    @contextmanager
    def there(self) -> Iterator[None]:
        """Inside, attributes are as they were. Raises StateError where a long container has other contents."""
        now = Snapshot([Items(each.container) for each in self.kept])
        with now.around():
            for each in self.kept:
                each.put_back()
            yield

    def put_back(self) -> None:
        """The rest, where tensors of the module are copies."""
        if self.generators is not None:
            self.generators.put_back()
        for slot, contents in self.tensors:
            held = slot.find()
            if isinstance(held, torch.Tensor) and held.shape == contents.shape:
                with torch.no_grad():
                    held.copy_(contents)
