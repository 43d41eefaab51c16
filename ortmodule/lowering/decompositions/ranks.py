"""Defines operators along a dimension for tensors that have none, and those that cut and join tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ortmodule.core.errors import Keep
from ortmodule.lowering.decompositions.table import DEFINITIONS, TAKES_ANY_INDEX, defines, from_start, traced_sizes


def _of_one(kind: str) -> None:
    """A tensor of rank 0 is one of a single element; otherwise what was defined before holds."""
    packet, before = getattr(torch.ops.aten, kind), DEFINITIONS.get(f"aten::{kind}")

    def define(x: Tensor, *arguments: Any) -> Tensor | tuple[Tensor, ...]:
        if x.dim() or any(isinstance(a, bool) for a in arguments[:1]):
            if before is None:
                raise Keep
            return before(x, *arguments)
        raised = [a.reshape(-1) if isinstance(a, Tensor) else a for a in arguments]
        results = (before or packet)(x.reshape(1), *raised)
        shape = [a.shape for a in arguments if isinstance(a, Tensor)][:1] if kind == "gather" else [()]
        if isinstance(results, tuple):
            return tuple(r.reshape(()) for r in results)
        return results.reshape(shape[0])

    defines(f"aten::{kind}", recursive=True)(define)


for _kind in ("gather", "index_select", "index_add", "index_copy", "scatter", "scatter_add"):
    _of_one(_kind)


def _index_of_one(kind: str) -> None:
    """Values and an index: of a tensor of rank 0 itself, and zero."""
    before = DEFINITIONS.get(f"aten::{kind}")

    def define(x: Tensor, *arguments: Any) -> Tensor | tuple[Tensor, ...]:
        if x.dim():
            if before is None:
                raise Keep
            return before(x, *arguments)
        if not arguments:
            return x * 1
        return x * 1, torch.zeros((), dtype=torch.int64)

    defines(f"aten::{kind}", recursive=True)(define)


for _kind in ("median", "nanmedian", "kthvalue", "mode", "cummax", "cummin"):
    _index_of_one(_kind)


@defines("aten::take_along_dim")
def _take_along_dim(x: Tensor, index: Tensor, dim: int | None = None) -> Tensor:
    if dim is None:
        return x.reshape(-1).gather(0, index.reshape(-1))
    if x.dim() != index.dim():
        raise Keep
    dim = dim % x.dim()
    index = index % x.shape[dim] if TAKES_ANY_INDEX else index
    one = torch.broadcast_tensors(x.detach().narrow(dim, 0, 1), index.narrow(dim, 0, 1))[0]

    def widened(t: Any) -> Tensor:
        return t.expand([t.shape[d] if d == dim else one.shape[d] for d in range(t.dim())])

    return widened(x).gather(dim, widened(index))


@defines("aten::index_reduce")
def _index_reduce(x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, include_self: bool = True) -> Tensor:
    if x.dim() == 0:
        parts = x.reshape(1), dim, index.reshape(-1), source.reshape(-1)
        return _index_reduce(*parts, reduce, include_self).reshape(())
    index = index.reshape([-1 if d == dim % x.dim() else 1 for d in range(x.dim())]).expand_as(source)
    return x.scatter_reduce(dim, index, source, reduce, include_self=include_self)


@defines("aten::put")
def _put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    flat, index = x.reshape(-1), index.reshape(-1)
    index = from_start(index, flat.shape[0])
    place = flat.scatter_add if accumulate else flat.scatter
    return place(0, index, source.reshape(-1)).reshape(x.shape)


@defines("aten::slice_scatter")
def _slice_scatter(
    x: Tensor, source: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    places = torch.arange(x.shape[dim])[start:end:step]
    return x.index_copy(dim, places, source)


@defines("aten::select_scatter")
def _select_scatter(x: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    size = x.shape[dim]
    places = torch.arange(size) - (index if index >= 0 else size + index)
    hit = (places == 0).reshape([-1 if d == dim % x.dim() else 1 for d in range(x.dim())])
    return torch.where(hit, source.unsqueeze(dim), x)


@defines("aten::diagonal_scatter")
def _diagonal_scatter(x: Tensor, source: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    dim1, dim2 = dim1 % x.dim(), dim2 % x.dim()
    order = [d for d in range(x.dim()) if d not in (dim1, dim2)] + [dim1, dim2]
    moved = x.permute(order)
    rows, columns = traced_sizes(moved)
    first = offset if offset >= 0 else -offset * columns
    count: Any = torch.minimum(rows + min(offset, 0), columns - max(offset, 0))
    places = torch.arange(count) * (columns + 1) + first
    flat = moved.flatten(-2).index_copy(-1, places, source)
    return flat.reshape(moved.shape).permute([order.index(d) for d in range(x.dim())])


@defines("aten::roll", recursive=True)
def _roll(x: Tensor, shifts: list[int], dims: Sequence[int] = ()) -> Tensor:
    if x.dim() == 0:
        return x * 1
    if dims:
        raise Keep
    return x.reshape(-1).roll(shifts, [0]).reshape(x.shape)


@defines("aten::diag_embed")
def _diag_embed(x: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    places = torch.arange(x.shape[-1])
    square = x.unsqueeze(-1).masked_fill(places[:, None] != places, 0)
    if offset:
        square = F.pad(square, (offset, 0, 0, offset) if offset > 0 else (0, -offset, -offset, 0))
    rank = square.dim()
    dims = [dim1 % rank, dim2 % rank]
    return square if dims == [rank - 2, rank - 1] else square.movedim([-2, -1], dims)


@defines("aten::linalg_diagonal")
def _linalg_diagonal(x: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    return x.diagonal(offset, dim1, dim2)


@defines("aten::tensor_split", sizes=True)
def _tensor_split(x: Tensor, places: int | list[int], dim: int = 0) -> tuple[Tensor, ...]:
    if isinstance(places, Tensor):
        raise Keep
    if isinstance(places, int):
        n: Any = x.shape[dim]  # in a trace a tensor: the parts follow it
        whole, more = n // places, n % places
        ends: list[Any] = [*(i * whole + _at_most(i, more) for i in range(1, places)), None]
    else:
        ends = [*places, None]
    before = (slice(None),) * (dim % x.dim())
    starts = [0, *ends[:-1]]
    return tuple(x[(*before, slice(a, b))] for a, b in zip(starts, ends, strict=True))


def _at_most(number: int, size: Any) -> Any:
    return size.clamp(max=number) if isinstance(size, Tensor) else min(number, size)


@defines("aten::linalg_matrix_power", "aten::matrix_power")
def _matrix_power(x: Tensor, n: int) -> Tensor:
    if n < 1:
        raise Keep
    result: Tensor | None = None
    while n:
        if n & 1:
            result = x if result is None else result @ x
        n >>= 1
        x = x @ x if n else x
    assert result is not None, "n has a bit"
    return result * 1


DEFINITIONS["aten::exp2"] = lambda x: torch.pow(2.0, x if x.is_floating_point() else x.to(torch.get_default_dtype()))
DEFINITIONS["aten::expand_copy"] = lambda x, size, implicit=False: x.expand(size)
DEFINITIONS["aten::unbind_copy"] = lambda x, dim=0: x.unbind(dim)
DEFINITIONS["aten::split_with_sizes_copy"] = lambda x, sizes, dim=0: x.split(sizes, dim)
