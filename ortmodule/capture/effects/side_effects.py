"""Finds what forward changes by another way than its result: globals, the caller's containers, those in attributes.

A graph cannot repeat such changes. A submodule that makes them can be a break, which PyTorch runs between two pieces of
the graph: so it is found which one has made them.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ortmodule.capture.trace_mode import TraceMode
from ortmodule.core import pytree
from ortmodule.core.errors import ChangesAround, RefusedArgument
from ortmodule.core.names import USED_ON
from ortmodule.core.objects.garbage import collect_garbage
from ortmodule.core.pytree import CONSTANTS
from ortmodule.core.snapshot import Items, Snapshot
from ortmodule.core.structures import tokens as pytree_tokens
from ortmodule.guards.writes.holders import Holders, is_held, referred_to
from ortmodule.host.host_node import left_empty, nodes_behind
from ortmodule.host.opaque_regions import Regions


class SideEffects:
    """What may be changed, as it is when forward begins."""

    def __init__(
        self, around: Snapshot, kept: list[Items], arguments: Any, structure: pytree.Structure,
        tensors: Sequence[torch.Tensor], regions: Regions,
    ) -> None:  # fmt: skip
        """``around``: what is around the module; ``kept``: containers in attributes. ``arguments``: the module's, of
        this ``structure`` around ``tensors``. ``regions``: learns which containers are the caller's."""
        self.around, self.kept, self.regions = around, kept, regions
        regions.arguments, regions.inputs, regions.filled = arguments, list(tensors), (list(tensors), structure)
        if pytree_tokens.HELD in structure.tokens:
            regions.filled = pytree.flatten(arguments)
        regions.generators = pytree.generators(arguments)
        #: The containers among the arguments, by their numbers.
        self.held = pytree.containers(arguments)
        regions.containers = {id(c): number for number, c in enumerate(self.held)}

    def check(self) -> None:
        """Raises NotTraceable when something around the module has changed."""
        if name := self.around.changed():
            raise ChangesAround(f"forward changes {name}, which is around the module")

    def filled(self) -> Any:
        """The arguments, where forward has put something else into containers of the caller's that breaks did not put
        there, else None. Raises RefusedArgument for what cannot be put into the caller's own."""
        if empty := left_empty(self.regions.arguments):
            raise RefusedArgument(f"an argument holds {empty}")
        if not self.regions.changed():
            return None
        return self.regions.arguments

    def used_on(self, result: Any, filled: bool, attributes: Sequence[Any]) -> set[int]:
        """The ids of tensors that forward has put into a list or a dictionary of the caller's, if it is ``filled``,
        or into ``attributes``, and goes on with: the caller may ask for gradients of ``result`` with respect to them.
        Raises ChangesAround where there must be none in the caller's."""
        known = {id(t) for t in self.regions.inputs}
        given = {id(t): t for t in (_in_plain(self.regions.arguments) if filled else ()) if t.requires_grad}
        kept = list(_in_plain(list(attributes)))
        own = {id(t): t for t in kept if t.requires_grad} if self.regions.opaque.cuts else {}
        put = {key: t for key, t in {**given, **own}.items() if key not in known and t.grad_fn is not None}
        if not put:
            return set()
        tensors, _, _ = pytree.flatten_filled((self.regions.arguments, result, kept), self.held)
        others = [(t, nodes_behind([t])) for t in {id(t): t for t in tensors}.values() if t.requires_grad]
        found = {
            key for key, tensor in put.items()
            if any(each is not tensor and tensor.grad_fn in behind for each, behind in others)
        }  # fmt: skip
        if found and not self.regions.opaque.cuts:
            raise ChangesAround(USED_ON)
        return found

    def look(self) -> None:
        """A submodule has been traced: raises NotTraceable for what it has changed."""
        self.check()
        strict = not self.regions.opaque.cuts and torch.is_grad_enabled()
        if strict and any(t.requires_grad for t in _in_plain(self.regions.arguments)) and self.regions.changed():
            raise ChangesAround(USED_ON)
        for kept in self.kept:
            if kept.changed() and not all(isinstance(item, CONSTANTS) for item in kept.items()):
                raise ChangesAround("forward changes a container that an attribute holds")


def _in_plain(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples and dictionaries, and no numbers of a trace, which say what they are."""
    if isinstance(value, torch.Tensor):
        if issubclass(value.__class__, torch.Tensor):
            yield value
    elif isinstance(value, dict):
        yield from _in_plain(tuple(value.values()))
    elif isinstance(value, (list, tuple, deque)):
        for each in value:
            yield from _in_plain(each)


@dataclass
class Hidden:
    """Tensors of a trace that something has kept. ``of_call``: they hang on the call's values or sizes."""

    text: str
    of_call: bool
    places: list[Any]

    def is_found(self) -> bool:
        """Has another trace changed the same places?"""
        return not self.of_call or any(place.changes for place in self.places)


def hidden(holders: Holders, mode: TraceMode, others: Iterable[weakref.ref[torch.Tensor]]) -> Hidden | None:
    """What something has kept of a trace that is over, which was looked at in ``mode``. ``others``: more tensors."""

    def alive() -> list[torch.Tensor]:
        return [*mode.alive(), *(t for t in (each() for each in others) if t is not None)]

    mode.let_go()
    if not referred_to(alive()):
        return None
    collect_garbage(1)  # most circles of references are young
    left = alive()
    if not is_held(left):  # but by frames, or what is autograd's
        return None
    del left
    collect_garbage()  # a third of a second
    held = holders.learn(alive())
    if not held.tensors:
        return None
    sizes = list(held.tensors[0].shape)
    text = (
        f"something ({held.word}) keeps a tensor of shape {sizes} that forward computes, where capture cannot find it"
    )
    return Hidden(text, not all(map(mode.is_constant, held.tensors)), held.places)
