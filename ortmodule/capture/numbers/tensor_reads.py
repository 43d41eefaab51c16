"""Notes which attributes forward reads that users have put on tensors (`x.scale`, `hasattr(weight, "mask")`).

Tensors of a trace are copies, which have the attributes of the caller's. Of the module's tensors a graph compares what
was read from call to call, as it does of other objects (`guards/reads/tensor_attributes.py`); of arguments the graph
serves calls in which they have the same (`tensor_facts.py`). What sets an attribute of a tensor that forward was given
is PyTorch's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from ortmodule.capture.numbers.symbolic_numbers import is_one
from ortmodule.capture.scalar_guards import active, user_line
from ortmodule.core.errors import NotTraceable
from ortmodule.core.names import ONLY_CALLER, PACKAGE
from ortmodule.core.objects.interception import Replacement, replaced
from ortmodule.core.objects.tensor_copies import OPERAND, attributes_of
from ortmodule.guards.inventory import Inventory, Slot
from ortmodule.guards.reads.tensor_attributes import TensorAttributes

#: What a tensor has of its class; `__dict__` is where users' attributes are.
_OF_CLASS = frozenset(dir(torch.Tensor)) - {"__dict__"}
#: Attributes by which torch itself tells parameters and buffers from other tensors.
_KINDS = {"_is_param", "_is_buffer"}

#: By the numbers of inputs, and names: where forward reads them.
InputReads = dict[tuple[int, str], str]


@dataclass
class TensorReads:
    """The attributes of tensors that one trace has read. ``given``: inputs by their numbers, and places of the module
    that hold tensors, by the ids of the tensors."""

    given: Mapping[int, int | Slot]
    is_made: Callable[[torch.Tensor], bool]  # does the trace compute it?
    of_inputs: InputReads = field(default_factory=dict)
    others: dict[tuple[int, str], tuple[Any, str]] = field(default_factory=dict)  # as `Attributes.add_outside` takes it
    _around: dict[int, TensorAttributes] = field(default_factory=dict)  # tensors from elsewhere

    def watched(self) -> AbstractContextManager[None]:
        """Inside, reads are noted. A write raises NotTraceable."""
        return replaced(
            [
                Replacement.around(torch.Tensor, "__getattribute__", self._reading),
                Replacement.around(torch.Tensor, "__setattr__", self._writing),
                Replacement.around(torch.Tensor, "__delattr__", self._writing),
            ]
        )

    def _reading(self, original: Callable) -> Callable:
        def read(tensor: torch.Tensor, name: str) -> Any:
            if name not in _OF_CLASS and _asks(name, sys._getframe(1).f_code.co_filename):
                if active() is not None:
                    self._note(tensor, name)
                elif name not in _KINDS and OPERAND in attributes_of(tensor):
                    self._note_operand(attributes_of(tensor)[OPERAND](), name)
            return original(tensor, name)

        return read

    def _note_operand(self, tensor: torch.Tensor | None, name: str) -> None:
        """What PyTorch runs inside the graph, on copies, asks for an attribute of ``tensor``: the copies have none, so
        the graph serves calls in which ``tensor`` has none."""
        if name == "__dict__" or tensor is None or name in attributes_of(tensor):
            raise NotTraceable(f"{user_line()} reads the attribute {name} of a tensor, {ONLY_CALLER}")
        self._note(tensor, name)

    def _writing(self, original: Callable) -> Callable:
        def write(tensor: torch.Tensor, name: str, *value: Any) -> None:
            if name in _OF_CLASS or not _asks(name, sys._getframe(1).f_code.co_filename):
                return original(tensor, name, *value)
            if self._is_given(tensor) if active() is not None else OPERAND in attributes_of(tensor):
                what = "sets" if value else "deletes"
                raise NotTraceable(
                    f"{user_line()} {what} the attribute {name} of a tensor that forward was given, {ONLY_CALLER}"
                )
            return original(tensor, name, *value)

        return write

    def _is_given(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self.given or not (is_one(tensor) or self.is_made(tensor))

    def _note(self, tensor: torch.Tensor, name: str) -> None:
        if not self._is_given(tensor):
            return
        if name == "__dict__":
            raise NotTraceable(f"{user_line()} reads all attributes of a tensor, {ONLY_CALLER}")
        given = self.given.get(id(tensor))
        if isinstance(given, int):
            if isinstance(attributes_of(tensor).get(name), torch.Tensor):
                raise NotTraceable(f"{user_line()} reads the attribute {name} of an argument, a tensor, {ONLY_CALLER}")
            self.of_inputs.setdefault((given, name), user_line())
            return
        owner = given.on_tensor if given is not None else self._around.get(id(tensor))
        if owner is None:
            owner = self._around[id(tensor)] = TensorAttributes("a tensor", lambda: tensor)
        self.others.setdefault((id(owner), name), (owner, user_line()))


def given_to(tree: Inventory, inputs: Sequence[torch.Tensor]) -> dict[int, int | Slot]:
    """What forward does not compute: its inputs, by their numbers, and the module's tensors, by the ids of both."""
    slots = [slot for slot in tree.slots.values() if slot not in tree.counters]
    return {id(slot.get()): slot for slot in slots} | {id(t): i for i, t in enumerate(inputs)}


#: Types of what a graph sets on its results.
_MARKS = (type(None), bool, int, float, complex, str, bytes)


def set_by_forward(tensor: torch.Tensor) -> tuple[tuple[str, Any], ...]:
    """The attributes of a result of the trace, with their values. Raises NotTraceable for one that is no constant."""
    found = {name: value for name, value in attributes_of(tensor).items() if not name.startswith("_ortmodule")}
    for name, value in found.items():
        if type(value) not in _MARKS:
            raise NotTraceable(f"forward sets the attribute {name} of its result to what is no constant")
    return tuple(found.items())


def _asks(name: str, file: str) -> bool:
    """May code of this file decide something by this attribute?"""
    return not file.startswith(PACKAGE) and (name in _KINDS or not file.startswith(torch.__path__[0]))
