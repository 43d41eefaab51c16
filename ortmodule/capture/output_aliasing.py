"""Finds results that share memory with another result, an input, or a tensor of the module.

What the engine computes has memory of its own. But a caller of PyTorch's module who edits one of two results that are
views of one tensor sees it in the other, and gradients of both go through that tensor. So where the tensors of both
traces lie alike, the result is made as a view of its base again; where no rule is seen, PyTorch has to run the module.
Two traces are not a proof: at new sizes, what the view shows is compared with what the engine computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ortmodule.core.errors import Unclear
from ortmodule.core.torch_private import TracedGraph, TracedValue


@dataclass(frozen=True)
class Layout:
    """Where a tensor's elements are in its memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: torch.Tensor) -> Layout:
        return Layout(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def elements(self) -> torch.Tensor:
        found = torch.tensor([self.offset])
        for size, step in zip(self.shape, self.stride, strict=True):
            found = (found[:, None] + torch.arange(size) * step).flatten()
        return found

    def is_contiguous(self) -> bool:
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and step != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True)
class Sighting:
    """One result in one trace that shares memory with ``base``, a trace's source of another tensor."""

    base: tuple[str, object]  # kind and key of a Source
    detached: bool  # carries no gradient, and its base does
    view: Layout
    of: Layout

    def overlaps(self) -> bool:
        """Do they share an element? Parts of one tensor may lie beside each other."""
        return bool(torch.isin(self.view.elements(), self.of.elements()).any())

    def flat(self) -> Sighting | None:
        """The same with a base of one dimension."""
        if not self.of.is_contiguous():
            return None
        return Sighting(self.base, self.detached, self.view, Layout((math.prod(self.of.shape),), (1,), self.of.offset))


ONE = (0, 0)  # a dimension of one element, whatever its stride
UNKNOWN = (-1, 0)


@dataclass(frozen=True)
class View:
    """How to make a result from its base."""

    base: tuple[str, object]
    detached: bool
    #: None: all elements in their order. Otherwise for each dimension that of the base it goes along, and its step, or
    #: None if it repeats an element.
    dims: tuple[tuple[int, int] | None, ...] | None = None
    #: The first index in each dimension of the base, from its begin or (negative) from its end.
    first: tuple[int, ...] = ()
    flat: bool = False  # the base counts as of one dimension; it has to be contiguous

    def fits(self, base: Sequence[int], shape: Sequence[int]) -> bool:
        """Has a base of this shape all the elements of a view of that one?"""
        if self.dims is None:
            return math.prod(base) == math.prod(shape)
        base = (math.prod(base),) if self.flat else base
        ends = self._first(base)
        for dim, size in zip(self.dims, shape, strict=True):
            if dim == ONE:
                if size != 1:
                    return False
            elif dim is not None:
                ends[dim[0]] += (size - 1) * dim[1]
        return 0 in shape or all(end < size for end, size in zip(ends, base, strict=True))

    def make(self, base: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """The view of this shape, which fits."""
        base = base.detach() if self.detached else base
        if self.dims is None:
            return base.view(shape)
        base = base.view(-1) if self.flat else base
        steps = base.stride()
        stride = [0 if dim is None or dim == ONE else dim[1] * steps[dim[0]] for dim in self.dims]
        offset = sum(start * step for start, step in zip(self._first(base.shape), steps, strict=True))
        return base.as_strided(shape, stride, base.storage_offset() + offset)

    def _first(self, base: Sequence[int]) -> list[int]:
        return [start % size if size else 0 for start, size in zip(self.first, base, strict=True)]


def sightings(
    results: Sequence[torch.Tensor], others: Sequence[tuple[tuple[str, object], torch.Tensor]]
) -> dict[int, Sighting]:
    """By number, the ``results`` that share memory with one of the ``others`` or among themselves."""
    held: dict[int, list[tuple[tuple[str, object], torch.Tensor]]] = {}
    for source, tensor in others:
        if _has_memory(tensor):
            held.setdefault(_memory(tensor), []).append((source, tensor))
    mine: dict[int, list[int]] = {}
    for i, tensor in enumerate(results):
        if _has_memory(tensor):
            mine.setdefault(_memory(tensor), []).append(i)
    found = {}
    for memory, numbers in mine.items():
        bases = list(held.get(memory, ()))
        if not bases:
            if len(numbers) == 1:
                continue
            # The one that the others are parts of; gradients of all go through it.
            best = max(numbers, key=lambda i: (results[i].requires_grad, results[i].numel(), -i))
            bases = [(("graph", best), results[best])]
        for i in numbers:
            for source, base in bases:
                if base is not results[i] and base.dtype == results[i].dtype:
                    if results[i].requires_grad and not base.requires_grad:
                        continue
                    detached = base.requires_grad and not results[i].requires_grad
                    found[i] = Sighting(source, detached, Layout.of(results[i]), Layout.of(base))
                    break
    return found


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() > 0


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def agreed(one: dict[int, Sighting], other: dict[int, Sighting], written: Sequence[tuple] = ()) -> dict[int, View]:
    """The results that are the same view of the same base in two traces, by number.

    ``written``: bases that forward changes. Only all of such a one can be a view, since nothing can be compared.
    Raises Unclear for results that share elements with something in both traces, and it is not seen how.
    """
    found = {}
    for i in one.keys() & other.keys():
        a, b = one[i], other[i]
        rule = None
        if (a.base, a.detached, len(a.view.shape)) == (b.base, b.detached, len(b.view.shape)):
            rule = _both_alike(a, b) or _both_whole(a, b)
            if rule is None and a.base not in written:
                rule = _both_strided(a, b) or _both_strided(a.flat(), b.flat(), flat=True)
        if rule is not None:
            found[i] = rule
        elif a.overlaps() and b.overlaps():
            raise Unclear(f"tensor {i} of the result shares memory with another in a way not known at other sizes")
    return found


def _both_alike(a: Sighting, b: Sighting) -> View | None:
    """All of a tensor as it lies there, which may be in any order at run time."""
    if a.view != a.of or b.view != b.of:
        return None
    rank = len(a.view.shape)
    return View(a.base, a.detached, tuple((d, 1) for d in range(rank)), (0,) * rank)


#: Operators of a trace whose results lie in the memory of their first operand, at places that numbers name.
_PLACED = {
    f"aten::{name}"
    for name in "select slice narrow diagonal unfold as_strided split chunk".split()  # noqa: SIM905
}
#: Those that need no numbers but sizes.
_SHAPED = {
    f"aten::{name}"
    for name in (  # noqa: SIM905
        "view reshape flatten unflatten squeeze unsqueeze expand expand_as view_as transpose t permute movedim detach "
        "alias contiguous to unbind"
    ).split()
} | {"prim::ListUnpack"}


def check_places(graph: TracedGraph, numbers: Sequence[int]) -> None:
    """Raises Unclear if data, not sizes, decides where one of these outputs of a trace lies in another tensor."""
    outputs = list(graph.outputs())
    for i in numbers:
        node = outputs[i].node()
        while node.kind() in _PLACED | _SHAPED:
            operands = list(node.inputs())
            if node.kind() in _PLACED and any(map(_is_data, operands[1:])):
                raise Unclear(f"data decides where tensor {i} of the result lies in the memory of another")
            node = operands[0].node()


def _is_data(value: TracedValue) -> bool:
    """Is a number of a trace computed from something else than sizes?"""
    node = value.node()
    if node.kind() in ("prim::Constant", "aten::size", "aten::numel"):
        return False
    operands = list(node.inputs())
    return not operands or any(map(_is_data, operands))


def _both_whole(a: Sighting, b: Sighting) -> View | None:
    for seen in (a, b):
        if seen.view.offset != seen.of.offset or math.prod(seen.view.shape) != math.prod(seen.of.shape):
            return None
        if not (seen.view.is_contiguous() and seen.of.is_contiguous()):
            return None
    return View(a.base, a.detached, flat=True)


def _both_strided(a: Sighting | None, b: Sighting | None, flat: bool = False) -> View | None:
    if a is None or b is None or (one := _strided(a)) is None or (other := _strided(b)) is None:
        return None
    (dims, first), (others, second) = one, other
    agree = [_dim(*each) for each in zip(dims, a.view.shape, others, b.view.shape, strict=True)]
    found = [_start(x, y, n, m) for x, y, n, m in zip(first, second, a.of.shape, b.of.shape, strict=True)]
    starts = [start for start in found if start is not None]
    if UNKNOWN in agree or len(starts) < len(found):
        return None
    return View(a.base, a.detached, tuple(agree), tuple(starts), flat)


def _strided(seen: Sighting) -> tuple[list[tuple[int, int] | None], list[int]] | None:
    """(dimensions of the base and steps, first indices), if every dimension of the view goes along one of the base."""
    view, of = seen.view, seen.of
    order = sorted((d for d in range(len(of.shape)) if of.shape[d] > 1), key=lambda d: -of.stride[d])
    left, first = view.offset - of.offset, [0] * len(of.shape)
    if left < 0 or any(of.stride[d] <= 0 for d in order):
        return None
    for d in order:
        first[d], left = divmod(left, of.stride[d])
    if left or any(start >= size for start, size in zip(first, of.shape, strict=True)):
        return None
    dims: list[tuple[int, int] | None] = []
    for size, step in zip(view.shape, view.stride, strict=True):
        along = next((d for d in order if step and step % of.stride[d] == 0), None)
        last = 0 if along is None else first[along] + (size - 1) * (step // of.stride[along])
        if along is not None and last < of.shape[along]:
            dims.append((along, step // of.stride[along]))
        elif size == 1 or step == 0:
            dims.append(ONE if step else None)
        else:
            return None
    return dims, first


def _dim(a: tuple | None, n: int, b: tuple | None, m: int) -> tuple[int, int] | None:
    """What a dimension goes along, given that and its size in two traces. The stride of one element may be anything."""
    if a == b:
        return a
    if n == m == 1:
        return ONE
    firm = b if n == 1 else a
    # Seen once: any step but 1 could depend on a size.
    return firm if 1 in (n, m) and firm is not None and firm[1] == 1 else UNKNOWN


def _start(x: int, y: int, n: int, m: int) -> int | None:
    """A first index, given those in two traces and the sizes of the dimension there; from the end if it is negative."""
    if x == y:
        return x
    return x - n if x - n == y - m else None
