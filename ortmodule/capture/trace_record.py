"""Holds one trace of a module: a TorchScript graph, and how its inputs and outputs meet Python."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ortmodule.capture import scalar_guards
from ortmodule.capture.numbers.tensor_facts import InputFacts
from ortmodule.capture.output_aliasing import Sighting
from ortmodule.capture.randomness.chance import Draw
from ortmodule.core import pytree
from ortmodule.core.names import CHECKPOINT_STEP
from ortmodule.core.objects.tensor_copies import cloned
from ortmodule.core.size_expr import is_number
from ortmodule.core.snapshot import Items, TensorMemory
from ortmodule.core.torch_private import TracedGraph
from ortmodule.guards.fields import FieldReads
from ortmodule.guards.inventory import Slot
from ortmodule.guards.isolation import Contents
from ortmodule.guards.reads.size_tables import SizeTable
from ortmodule.host.host_node import Node


@dataclass(frozen=True)
class Source:
    """Where a tensor of the result comes from: ("graph", output), ("input", number) or ("state", name).

    ("number", output): no tensor without a trace, but the Python number that this output holds.
    """

    kind: str
    key: Any
    attributes: tuple[tuple[str, Any], ...] = ()  #: names and constants that forward sets on it

    @property
    def is_plain(self) -> bool:
        """Is it an output of the graph as it is?"""
        return self.kind == "graph" and not self.attributes


@dataclass(frozen=True)
class Write:
    """A tensor that forward changes."""

    target: Source
    output: int | None  # of the graph; None: an operator of the graph writes it (BatchNormalization)
    replaces: bool  # a new object takes its place; otherwise the same one gets new contents
    data: bool = False  # the same object gets other memory: `x.data = ...`
    carries: bool = False  # what is written carries a gradient: autograd knows the write


@dataclass
class HeldBefore:
    """What the module held when PyTorch began to run an opaque submodule."""

    contents: dict[str, Contents]
    containers: list[Items]
    versions: dict[str, tuple[torch.Tensor, int]]
    #: With their versions and addresses, and copies of those that it may change.
    parameters: list[tuple[Slot, torch.Tensor, int, int, TensorMemory | None]]


@dataclass
class Trace:
    """A graph with the outputs: those of the result, writes, size reads (one vector), data reads (one vector)."""

    module: nn.Module = field(repr=False)  # as it was traced: flat tensors in and out
    graph: TracedGraph = field(repr=False)
    outputs: list[torch.Tensor] = field(repr=False)
    tensors: list[torch.Tensor] = field(repr=False)  # what it was traced on
    result: pytree.Structure
    sources: list[Source]  # of the result's tensors
    requires_grad: list[bool]  # of the graph outputs that belong to the result
    reaches: list[frozenset[Any]]  # of them: keys of the inputs and tensors of the module that get a gradient
    views: dict[int, Sighting] = field(repr=False)  # those of them that share memory with something
    writes: list[Write]
    sets: list[Slot]  # attributes that forward gives a value; `result` is a pair of its result and these values
    settled: list[tuple[Slot, Any]]  # items that forward sets, once, in containers
    attributes: dict[tuple[int, str], str]  # those that forward looks at, and where
    outside: dict[tuple[int, str], tuple[Any, str]]  # the same of what is no module
    fields: FieldReads = field(repr=False)  # the same of plain objects, and the code that ran
    size_reads: list[scalar_guards.Read]
    data_reads: list[scalar_guards.Read]
    draws: list[Draw]  # that a call makes, and forgets
    drawn_from: list[Any] = field(repr=False)  # generators of Python and NumPy
    prints: list[str]  # lines that print, or write to a file
    nodes: list[Node]  # that PyTorch runs, by their numbers
    seen: list[tuple]  # what their results were like: (number, operands, results)
    scripted: set[str]  # submodules that call scripted functions
    filled: bool  # forward puts something into containers of the caller's: `result` begins with the arguments
    own: dict[int, int]  # containers of the caller's in `result`: their numbers there, and among the arguments
    used_on: list[int]  # outputs that forward puts into the caller's containers or attributes, and goes on with
    altered: list[Any] = field(repr=False)  # containers, and objects with the names of attributes, that breaks change
    escaped: list[weakref.ref[torch.Tensor]] = field(repr=False)  # tensors that something has kept of breaks
    numbers: list[list[Any]]  # that it has taken out of data, and that no read compares
    facts: InputFacts | None  # of its inputs, where forward asks for any
    #: Places of the module whose tensors are the last of its inputs (`Inventory.resized`).
    resized: list[tuple[Any, Any]]

    def eager(self, forward: Callable, structure: pytree.Structure, tensors: Sequence[Any]) -> list[torch.Tensor]:
        """What ``forward`` gives in PyTorch for arguments of this structure, as :meth:`tensors_of` has it. The last of
        ``tensors`` are put into the module, which is isolated."""
        count = len(tensors) - len(self.resized)
        for (holder, key), tensor in zip(self.resized, tensors[count:], strict=True):
            holder[key] = tensor
        for table in {id(holder): holder for holder, _ in self.resized if isinstance(holder, SizeTable)}.values():
            table.put([t.shape for t in tensors[:count]])
        copies = [cloned(t) if t.requires_grad and t.is_leaf else t for t in tensors[:count]]
        arguments = structure.rebuild(copies)
        held = pytree.containers(arguments)
        return self.tensors_of(arguments, held, forward(*arguments[0], **arguments[1]))

    def tensors_of(self, arguments: Any, held: Sequence[Any], result: Any) -> list[torch.Tensor]:
        """The tensors of a call's result, in the order of ``sources``, numbers aside. ``arguments``: after the call;
        ``held``: their containers before."""
        value = result, [slot.find() for slot in self.sets]
        return pytree.flatten_filled((arguments, *value) if self.filled else value, held)[0]


def vector(reads: Sequence[torch.Tensor]) -> torch.Tensor:
    """What was read, in one tensor. Numbers are float64 in a graph, and would be rounded on any other way. A module on
    a GPU reads there, and sizes on the CPU; the graph has one device."""
    place = next((t.device for t in reads if t.device.type != "cpu"), reads[0].device)
    wide = [(t if is_number(t) else t.detach()).to(torch.float64) for t in reads]
    return torch.stack([t if t.device == place else t.to(place) for t in wide])


def path_in(scope: str, names: Iterable[str]) -> str:
    """`.../a.b.Class::model.layer.0/...` -> the path of the innermost submodule."""
    around, _, found = scope.rpartition("::")
    if found.startswith(CHECKPOINT_STEP):
        return path_in(around, names)
    found = found.partition("/")[0]
    return max((name for name in names if found == name or found.endswith(f".{name}")), key=len, default="")
