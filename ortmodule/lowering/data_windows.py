"""Finds slices of a trace that begin where data says, with lengths that it does not decide.

`queue[p : p + k.shape[0]]`: a plan has fixed sizes and views, so a slice like that would take a plan for every p. As
rows that are counted from p on (`index_select`, `index_copy`) it takes one. They refuse what lies outside of the
tensor, also where a slice would be shorter or count from the end; PyTorch then runs the call.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ortmodule.core.torch_private import TensorType, TracedNode, TracedValue

#: They give the number they are given.
_SAME = {"aten::to", "aten::detach", "aten::clone", "aten::Int", "aten::alias", "aten::ScalarImplicit"}


class Window(NamedTuple):
    """``start``: a tensor of rank 0; ``length``: a number, or a tensor of rank 0."""

    start: TracedValue
    length: TracedValue


def window_of(node: TracedNode) -> Window | None:
    """Of an `aten::slice`, if it is one."""
    _, _, start, end, step = node.inputs()
    if step.node().kind() != "prim::Constant" or step.toIValue() != 1 or start.node().kind() != "aten::Int":
        return None
    first, last = _number(start), _number(end)
    if last.node().kind() != "aten::add" or last.node().inputsAt(2).toIValue() != 1:
        return None
    terms = list(last.node().inputs())[:2]
    for term, other in (terms, reversed(terms)):
        if _number(term).unique() == first.unique() and not _follows(other, first):
            return Window(start.node().inputsAt(0), other)
    return None


def _number(value: TracedValue) -> TracedValue:
    """What is computed, below changes of its type."""
    while value.node().kind() in _SAME:
        value = value.node().inputsAt(0)
    return value


def _follows(value: TracedValue, other: TracedValue) -> bool:
    """Is one computed from the other?"""
    met, asked = set(), [value]
    while asked:
        each = asked.pop()
        if each.unique() == other.unique():
            return True
        if each.unique() not in met:
            met.add(each.unique())
            asked += each.node().inputs()
    return False


def type_of_rows(count: int, device: torch.device | None) -> TensorType:
    """Of the numbers of so many rows."""
    return TensorType.create_from_tensor(torch.empty(count, dtype=torch.int64, device=device))
