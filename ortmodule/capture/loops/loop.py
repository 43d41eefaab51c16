"""Captures a loop over a length once, for all lengths.

A trace unrolls `for t in range(x.shape[1])`, so each length has another graph. Here a module is traced at three short
lengths; where the graphs are the same steps again and again (`finder.py`), the graph of any other length is
written, without a trace or an export. What a short trace cannot show, such as `if t == 20:`, is looked for by running
the module at a long length (`self_check.py`), before graphs up to that length are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx
import torch

from ortmodule.capture.loops.finder import find
from ortmodule.capture.loops.template import Template
from ortmodule.capture.trace_comparison import RESULTS
from ortmodule.capture.trace_record import Trace
from ortmodule.core.errors import Unrepeatable

#: The lengths that a module is traced at. Of the first two one is a step longer.
LENGTHS = (5, 6, 9)

Dim = tuple[int, int]  # (tensor, dimension)


@dataclass
class Loop:
    """What graphs of other lengths are made of."""

    template: Template
    dims: frozenset[Dim]  #: they have one size, which is the length
    ranks: list[int]  #: of the graph's outputs
    cut: dict[Dim, int]  #: sizes of a small batch, of dimensions that may have any size

    def length(self, shapes: Sequence[Sequence[int]]) -> int | None:
        """The length of such inputs; None: their sizes are not one."""
        found = {shapes[i][d] for i, d in self.dims}
        return found.pop() if len(found) == 1 else None


def look(
    pair: Callable[[int], tuple[Trace, onnx.ModelProto]], dims: frozenset[Dim], cut: dict[Dim, int]
) -> tuple[Loop, Trace, onnx.ModelProto]:
    """A loop over ``dims``, with the trace and the graph of the shortest length. Raises Unrepeatable.

    ``pair``: traces at a length, with a second trace that agrees, and exports; raises Unrepeatable.
    """
    made = [(n, _uncut(trace), graph) for n, (trace, graph) in ((n, pair(n)) for n in LENGTHS)]
    (_, first, model), *others = made
    for _, other, _ in others:
        if reason := _unlike(first, other):
            raise Unrepeatable(reason)
    template = find([(n, graph, trace.size_reads) for n, trace, graph in made])
    return Loop(template, dims, [t.dim() for t in first.outputs], cut), first, model


def _uncut(trace: Trace) -> Trace:
    """``trace``, whose graph does not end where an attribute is set: one graph for all lengths is worth more."""
    if not trace.filled:
        trace.used_on = []
    return trace


def _unlike(first: Trace, other: Trace) -> str:
    """How what is around two graphs differs, or an empty string."""
    if first.nodes or other.nodes:
        return "PyTorch runs a part of it"
    if first.used_on or other.used_on:
        return "it is cut where forward puts tensors into the caller's containers"
    if any(write.output is None for write in (*first.writes, *other.writes)):
        return "an operator changes a buffer"
    if [slot.name for slot in first.sets] != [slot.name for slot in other.sets] or first.settled or other.settled:
        return "not the same attributes are set"
    if any(getattr(first, name) != getattr(other, name) for name in RESULTS):
        return "the results are not alike"
    if first.draws != other.draws or first.requires_grad != other.requires_grad:
        return "not the same results carry a gradient, or not the same numbers are drawn"
    reads = [[(r.place, r.value) for r in trace.data_reads] for trace in (first, other)]
    return "" if reads[0] == reads[1] else "not the same numbers are read from data"


def small(tensors: Sequence[torch.Tensor], loop: Loop, n: int) -> list[torch.Tensor]:
    """A small batch of length ``n``, made of the tensors of a call; what is longer than they are begins again."""
    found = []
    for i, tensor in enumerate(tensors):
        part = tensor.detach()
        for d, size in enumerate(tensor.shape):
            wanted = n if (i, d) in loop.dims else min(loop.cut.get((i, d), size), size)
            if wanted != size:
                part = part.index_select(d, torch.arange(wanted, device=part.device) % size)
        part = part.clone() if part.data_ptr() == tensor.data_ptr() else part
        found.append(part.requires_grad_(tensor.requires_grad))
    return found
