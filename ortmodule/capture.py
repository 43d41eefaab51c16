"""A graph that is known to hold for other sizes than it was traced at.

A trace records what happened for one set of inputs. Two traces are made, on small parts of the caller's batch, with
different values and different sizes, and the graphs are compared. Equal graphs hold for any size of the dimensions
that differed. Where they are not equal, or the second trace fails, fewer dimensions are varied; the ones that stay
as they were are *pinned*: the graph serves only calls with these sizes there.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import onnx
import torch
from torch import nn

from ortmodule import io
from ortmodule.export import ExportError, Trace, trace
from ortmodule.reads import NotTraceable, Read
from ortmodule.state import Tree

Dim = tuple[int, int]  # (tensor, dimension)
SMALL = 16  # lengths are cut to this for tracing
MOST_WHOLE_PROBES = 3  # second traces that went through and did not agree


class CaptureError(Exception):
    """The module cannot be captured; the sentence says why."""


@dataclass
class Capture:
    """A trace, and the sizes it depends on."""

    trace: Trace
    pinned: dict[Dim, int]
    seconds: float
    traces: int = 0


@dataclass
class _Sizes:
    """Sizes to trace at, and where each row begins: other values for another trace."""

    lengths: dict[Dim, int]
    shift: bool = False
    varied: frozenset[Dim] = field(default=frozenset())

    def cut(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [self._cut_one(i, t) for i, t in enumerate(tensors)]

    def _cut_one(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        part = tensor.detach()
        for d, size in enumerate(tensor.shape):
            length = self.lengths[index, d]
            first = size - length if self.shift and length < size else 1 if self.shift and (index, d) in self.varied else 0
            if (length, first) != (size, 0):
                part = part.index_select(d, (torch.arange(length) + first) % size)
        if self.shift and not self.varied and part.is_floating_point() and part.dim():
            part = part.roll(1, -1)
        part = part.clone() if part is tensor or part.data_ptr() == tensor.data_ptr() else part
        return part.requires_grad_(tensor.requires_grad)


def capture(
    forward: Callable, module: nn.Module, tree: Tree, arguments: io.Structure, tensors: Sequence[torch.Tensor], opset: int,
    whole: bool = False,
) -> Capture:  # fmt: skip
    """Captures ``forward`` for calls like this one.

    ``whole``: trace at the very sizes of ``tensors``: a graph from smaller parts did not fit them.
    Raises CaptureError.
    """
    start, dims = time.perf_counter(), _Dims(tensors)
    made = 0

    def at(sizes: _Sizes) -> Trace:
        nonlocal made
        made += 1
        return trace(forward, module, tree, arguments, sizes.cut(tensors), opset)

    first, sizes = _first(at, dims, whole)
    disagreements = 0
    reason = ""
    for varied in dims.attempts(sizes):
        pinned = {dim: size for dim, size in dims.given.items() if dim not in varied}
        if any(sizes.lengths[dim] != size for dim, size in pinned.items()):
            try:
                first, sizes = _retraced(at, sizes, pinned)
            except (NotTraceable, ExportError) as error:
                reason = str(error)
                continue
        if disagreements == MOST_WHOLE_PROBES and varied:
            continue
        try:
            second = at(dims.probe(sizes, varied))
        except (NotTraceable, ExportError) as error:
            reason = str(error)
            continue
        reason = difference(first, second)
        if not reason:
            return Capture(first, pinned, time.perf_counter() - start, made)
        disagreements += 1
    raise CaptureError(f"traces on two parts of one batch do not agree: {reason}")


def _first(at: Callable[[_Sizes], Trace], dims: _Dims, whole: bool) -> tuple[Trace, _Sizes]:
    """On a small part of the batch; on the batch itself when that fails."""
    tried = [dims.whole()] if whole else [dims.small(), dims.small(lengths=False), dims.whole()]
    for i, sizes in enumerate(tried):
        if sizes.lengths in [t.lengths for t in tried[:i]]:
            continue
        try:
            return at(sizes), sizes
        except (NotTraceable, ExportError) as error:
            reason = str(error)
    raise CaptureError(reason)


def _retraced(at: Callable[[_Sizes], Trace], sizes: _Sizes, pinned: dict[Dim, int]) -> tuple[Trace, _Sizes]:
    sizes = _Sizes(sizes.lengths | pinned)
    return at(sizes), sizes


# --- which sizes --------------------------------------------------------------------------------------------------------

BATCH, LENGTH, SPACE, FEATURE = range(4)  # what a dimension probably is: only the order of attempts rests on it


class _Dims:
    """The dimensions of the inputs, in groups that have one size and so probably vary together."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.given: dict[Dim, int] = {(i, d): n for i, t in enumerate(tensors) for d, n in enumerate(t.shape)}
        firsts = Counter(t.shape[0] for t in tensors if t.dim())
        self.batch = firsts.most_common(1)[0][0] if firsts else 0
        self.kind = {(i, d): self._kind(tensors[i], d) for i, d in self.given}

    def _kind(self, tensor: torch.Tensor, d: int) -> int:
        if d == 0:
            return BATCH if tensor.shape[0] == self.batch else LENGTH
        if not tensor.is_floating_point():
            return LENGTH
        if tensor.dim() >= 4:
            return FEATURE if d == 1 else SPACE
        return LENGTH if (tensor.dim(), d) == (3, 1) else FEATURE

    def small(self, lengths: bool = True) -> _Sizes:
        """A batch of two; lengths of at most SMALL."""
        new = {}
        kinds = {size: min(self.kind[d] for d, s in self.given.items() if s == size) for size in self.given.values()}
        for dim, size in self.given.items():
            if kinds[size] == BATCH:
                new[dim] = 2
            else:
                new[dim] = min(size, SMALL) if lengths and kinds[size] == LENGTH else size
        return _Sizes(new)

    def whole(self) -> _Sizes:
        """As given, but a batch of one is doubled: sizes of one are never traced."""
        return _Sizes({d: 2 if self.kind[d] == BATCH and size == 1 else size for d, size in self.given.items()})

    def attempts(self, sizes: _Sizes) -> Iterator[frozenset[Dim]]:
        """Sets of dimensions to vary, the largest first; last the empty one."""
        variable = [dim for dim, size in sizes.lengths.items() if size > 1]
        groups: dict[int, list[Dim]] = {}
        for dim in variable:
            groups.setdefault(sizes.lengths[dim], []).append(dim)
        done = []
        for most in (FEATURE, SPACE, LENGTH, BATCH):
            # Together by size first: a square mask has two equal dimensions of different kinds.
            together = [d for group in groups.values() for d in group if min(self.kind[x] for x in group) <= most]
            apart = [d for d in variable if self.kind[d] <= most]
            for varied in (frozenset(together), frozenset(apart)):
                if varied and varied not in done:
                    done.append(varied)
                    yield varied
        yield frozenset()

    def probe(self, sizes: _Sizes, varied: frozenset[Dim]) -> _Sizes:
        """Other sizes for the dimensions that vary, other values for all."""
        new = dict(sizes.lengths)
        for dim in varied:
            new[dim] = _other(sizes.lengths[dim], self.kind[dim])
        return _Sizes(new, shift=True, varied=varied)


def _other(size: int, kind: int) -> int:
    """A different size of at least two: a little smaller, since positions may be limited, where that is possible."""
    if kind == BATCH or size < 4:
        return size + 1
    if kind == SPACE and size < 64:
        return size + size // 2
    return max(2, size * 3 // 4)


# --- comparing ----------------------------------------------------------------------------------------------------------


def difference(first: Trace, second: Trace) -> str:
    """Where two traces disagree, or an empty string."""
    for a, b in ((first.size_reads, second.size_reads), (first.data_reads, second.data_reads)):
        for one, other in zip(a, b, strict=False):
            if one.place != other.place or not _same_value(one, other):
                return f"{one.place} takes another way"
        if len(a) != len(b):
            return f"{max(a, b, key=len)[min(len(a), len(b))].place} is reached by one of them only"
    if first.result != second.result or first.sources != second.sources or first.writes != second.writes:
        return "the results are not alike"
    if first.requires_grad != second.requires_grad:
        return "not the same results carry a gradient"
    nodes, others = canonical(first.model), canonical(second.model)
    for (name, one), (_, other) in zip(nodes, others, strict=False):
        if one != other:
            return f"the node {name} ({one[0]}) is not the same"
    return "" if len(nodes) == len(others) else "one has more nodes"


def _same_value(a: Read, b: Read) -> bool:
    return a.value == b.value or (a.value != a.value and b.value != b.value)


def canonical(model: onnx.ModelProto) -> list[tuple[str, tuple]]:
    """Each node as (name, what it computes from which values); values are numbered, so that names do not matter."""
    numbers = {"": -1}
    nodes = []

    def number(name):
        return numbers.setdefault(name, len(numbers))

    # Inputs keep their names: torch drops the unused ones.
    for value in model.graph.input:
        numbers[value.name] = value.name
    for node in model.graph.node:
        attributes = tuple(sorted(a.SerializeToString(deterministic=True) for a in node.attribute))
        inputs = tuple(number(name) for name in node.input)
        nodes.append((node.name, (node.op_type, node.domain, inputs, attributes, tuple(map(number, node.output)))))
    nodes.append(("", ("outputs", tuple(number(value.name) for value in model.graph.output))))
    return nodes
