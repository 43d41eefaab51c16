"""Finds what forward changes by another way than its result: globals, the caller's containers, those in attributes.

A graph cannot repeat such changes. A submodule that makes them can be a break, which PyTorch runs between two pieces of
the graph: so it is found which one has made them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ortmodule.capture.trace_mode import TraceMode
from ortmodule.core import pytree
from ortmodule.core.errors import NotTraceable
from ortmodule.core.garbage import collect_garbage
from ortmodule.core.pytree import CONSTANTS
from ortmodule.core.snapshot import Items, Snapshot
from ortmodule.guards.holders import Holders, is_held
from ortmodule.host.opaque_regions import Regions


class ChangesAround(NotTraceable):
    """Forward changes what is around its module, or containers and objects that attributes hold."""


class CountsAttribute(NotTraceable):
    """Forward reads an attribute that is a number, and sets it to another one."""

    def __init__(self, reason: str, path: str, key: str) -> None:
        super().__init__(reason)
        self.path, self.key = path, key


class SideEffects:
    """What may be changed, as it is when forward begins."""

    def __init__(
        self, around: Snapshot, kept: list[Items], arguments: Any, structure: pytree.Structure,
        tensors: Sequence[torch.Tensor], regions: Regions,
    ) -> None:  # fmt: skip
        """``around``: what is around the module; ``kept``: containers in attributes. ``arguments``: the module's, of
        this ``structure`` around ``tensors``. ``regions``: learns which containers are the caller's."""
        self.around, self.kept, self.regions = around, kept, regions
        regions.arguments, regions.filled = arguments, (list(tensors), structure)
        regions.containers = {id(c): path for path, c in pytree.containers_in(arguments)}

    def check(self) -> None:
        """Raises NotTraceable when something around the module has changed."""
        if name := self.around.changed():
            raise ChangesAround(f"forward changes {name}, which is around the module")

    def check_arguments(self) -> None:
        """Raises NotTraceable when anything but breaks has changed the caller's containers."""
        known, then = self.regions.filled
        inside, now = pytree.flatten(self.regions.arguments)
        if now != then or any(a is not b for a, b in zip(inside, known, strict=True)):
            args, kwargs = self.regions.arguments
            given = [each for each in (*args, *kwargs.values()) if not isinstance(each, (torch.Tensor, *CONSTANTS))]
            names = ", ".join(sorted({type(each).__name__ for each in given}))
            raise NotTraceable(f"forward puts something else into a container that it was given ({names})")

    def look(self, closely: bool) -> None:
        """A submodule has been traced: raises NotTraceable for what it has changed. ``closely``: at everything."""
        if closely:
            self.check()
            for kept in self.kept:
                if kept.changed() and not all(isinstance(item, CONSTANTS) for item in kept.items()):
                    raise ChangesAround("forward changes a container that an attribute holds")
        if self.regions.containers:
            self.check_arguments()


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
    if not alive():
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
