"""Finds Python numbers among the arguments that change from call to call, and makes them operands of a graph.

A graph is for the values of the numbers that a call was given. Where a call comes again with other numbers (an annealed
factor, a step that is counted) those that differ become tensors of rank 0 (`capture/numbers/symbolic_numbers.py`), and
one graph is for all values; if there is no such graph, graphs are for values, as before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ortmodule.core import pytree
from ortmodule.runtime.compiled_graph import Call

MOST = 1 << 63  # an int64 holds no larger integers


@dataclass
class Changing:
    """Calls that differ in the values of numbers only."""

    values: dict[int, Any]  # of the first call: by position among the tokens
    changed: set[int] = field(default_factory=set)  # positions
    refused: bool = False  # there is no graph for all values

    def look(self, numbers: dict[int, Any]) -> None:
        """Notes which numbers differ from those of the first call."""
        if numbers != self.values:
            self.changed |= {i for i, value in numbers.items() if value != self.values.get(i)}
            if any(type(numbers.get(i)) is int and not -MOST <= numbers[i] < MOST for i in self.changed):
                self.refused = True


def note(changing: dict[tuple, Changing], arguments: pytree.Structure, rest: tuple) -> None:
    """Numbers among these arguments that are others the next time become operands. ``rest``: of the call's key."""
    if numbers := arguments.numbers():
        changing.setdefault((arguments.without_numbers(), rest), Changing(numbers))


def lifted(
    arguments: pytree.Structure, tensors: list[torch.Tensor], changing: Changing
) -> tuple[list[torch.Tensor], pytree.Structure]:
    """The tensors of a call with those that hold its changing numbers, and the structure around them."""
    structure, found = arguments.lifted(changing.changed, tensors)
    device = tensors[0].device if tensors else None
    return [
        each if isinstance(each, torch.Tensor)
        else torch.tensor(each, dtype=torch.float64 if type(each) is float else torch.int64, device=device)
        for each in found
    ], structure  # fmt: skip


def with_changing_numbers(call: Call) -> tuple[Changing, Call] | None:
    """The call with its changing numbers as tensors, where such a call came before with others."""
    if not (numbers := call.arguments.numbers()):
        return None
    changing = call.state.tree.caches.changing.get((call.arguments.without_numbers(), call.key[1:]))
    if changing is None or changing.refused:
        return None
    changing.look(numbers)
    if changing.refused or not changing.changed:
        return None
    inputs, arguments = lifted(call.arguments, call.inputs[: call.count], changing)
    return changing, Call(call.forward, call.which, call.state, arguments, inputs, call.given)
