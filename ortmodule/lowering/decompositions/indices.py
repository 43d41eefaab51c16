"""Defines operators whose indices may come twice."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ortmodule.core.errors import Keep, Leave
from ortmodule.lowering.decompositions.layers import index_add
from ortmodule.lowering.decompositions.table import defines, dtype_of, from_start


@defines("aten::index", recursive=True)
def _index(x: Tensor, indices: list[Tensor | None]) -> Tensor:
    """By several tensors: by one, the number of an element among all that they choose from."""
    if sum(i is not None for i in indices) < 2:
        raise Keep
    numbers: list[Tensor | None] = []  # as many tensors of integers as dimensions
    for i in indices:
        if i is not None and i.dtype in (torch.bool, torch.uint8):
            numbers += torch.nonzero(i, as_tuple=True)
        else:
            numbers.append(i if i is None else from_start(i, x.shape[len(numbers)]))
    places = [d for d, i in enumerate(numbers) if i is not None]
    index = torch.broadcast_tensors(*(numbers[d] for d in places))
    flat = torch.zeros_like(index[0])
    count = 1
    for d, i in zip(places, index, strict=True):
        flat = flat * x.shape[d] + i
        count = count * x.shape[d]
    rest = [d for d in range(x.dim()) if d not in places]
    moved = x.permute(places + rest)
    taken = moved.reshape([count, *moved.shape[len(places) :]])[flat]
    rank, first = flat.dim(), places[0]
    if places != list(range(first, first + len(places))):
        return taken
    return taken.movedim(list(range(rank)), list(range(first, first + rank))) if first and rank else taken


@defines("aten::index_put", "aten::_index_put_impl", "aten::_unsafe_index_put", recursive=True)
def _index_put(
    x: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False, unsafe: bool = False,
) -> Tensor:  # fmt: skip
    if not accumulate:
        return _assigned(x, indices, values)
    places = [d for d, i in enumerate(indices) if i is not None]
    given = [i for i in indices if i is not None]
    if any(i.dtype in (torch.bool, torch.uint8) for i in given):  # a mask names no element twice
        return x + torch.zeros_like(x).index_put(indices, values)
    index = torch.broadcast_tensors(*(from_start(i, x.shape[d]) for d, i in zip(places, given, strict=True)))
    rank, first = index[0].dim(), places[0]
    values = values.to(x.dtype).expand_as(x[tuple(slice(None) if i is None else i for i in indices)])
    if places == list(range(first, first + len(places))):
        values = values.movedim(list(range(first, first + rank)), list(range(rank)))
    rest = [d for d in range(x.dim()) if d not in places]
    order = places + rest
    moved = x.permute(order)
    flat = torch.zeros_like(index[0])
    for d, i in zip(places, index, strict=True):
        flat = flat * x.shape[d] + i
    kept = moved.shape[len(places) :]
    count = 1
    for d in places:
        count = count * x.shape[d]
    flat, values = flat.reshape(-1), values.reshape([-1, *kept])
    sums = index_add(moved.reshape([count, *kept]), 0, flat, values)
    return sums.reshape(moved.shape).permute([order.index(d) for d in range(x.dim())])


def _assigned(x: Tensor, indices: list[Any], values: Tensor) -> Tensor:
    """Values that are broadcast; dimensions that are left out, which come last."""
    masks = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)
    places = [d for d, i in enumerate(indices) if i is not None]
    first = places == list(range(len(places)))
    if masks and len(places) == 1 and values.dim() <= x.dim() - places[0] - indices[places[0]].dim():
        chosen = indices[places[0]].bool()  # the same values for whatever it chooses
        chosen = chosen.reshape([*chosen.shape] + [1] * (x.dim() - places[0] - chosen.dim()))
        return torch.where(chosen, values.to(x.dtype), x)
    if masks and not first:
        raise Leave("of a mask behind a dimension that is left out")
    if masks:
        raise Keep
    replaced = x[tuple(slice(None) if i is None else i for i in indices)]
    if first and values.shape == replaced.shape:
        raise Keep
    values = values.expand_as(replaced)
    if first:
        return x.index_put(indices, values)
    index = torch.broadcast_tensors(*(indices[d] for d in places))
    rank, beginning = index[0].dim(), places[0]
    if places == list(range(beginning, beginning + len(places))):
        values = values.movedim(list(range(beginning, beginning + rank)), list(range(rank)))
    order = places + [d for d in range(x.dim()) if d not in places]
    return x.permute(order).index_put(index, values).permute([order.index(d) for d in range(x.dim())])


@defines("aten::tril_indices")
def _tril_indices(
    rows: int, columns: int, offset: int = 0, dtype: int | None = 4, layout: int | None = None, device: object = None,
    pinned: bool | None = None,
) -> Tensor:  # fmt: skip
    return _places(rows, columns, lambda i, j: j - i <= offset, dtype)


@defines("aten::triu_indices")
def _triu_indices(
    rows: int, columns: int, offset: int = 0, dtype: int | None = 4, layout: int | None = None, device: object = None,
    pinned: bool | None = None,
) -> Tensor:  # fmt: skip
    return _places(rows, columns, lambda i, j: j - i >= offset, dtype)


def _places(rows: int, columns: int, wanted: Callable[[int, int], bool], dtype: int | None) -> Tensor:
    """A constant: the numbers of rows and columns are numbers here."""
    found = [(i, j) for i in range(rows) for j in range(columns) if wanted(i, j)]
    return torch.tensor(found, dtype=dtype_of(dtype)).reshape(-1, 2).T.contiguous()


@defines("aten::index_fill")
def _index_fill(x: Tensor, dim: int, index: Tensor, value: Tensor) -> Tensor:
    if x.dim() == 0:
        return x * 0 + value
    size = x.shape[dim]
    hit = torch.zeros(size, dtype=torch.int64).scatter(0, from_start(index, size).reshape(-1), 1) > 0
    hit = hit.reshape([-1 if d == dim % x.dim() else 1 for d in range(x.dim())])
    return torch.where(hit, value, x)


@defines("aten::fft_fftshift")
def _fftshift(x: Tensor, dim: list[int] | None = None) -> Tensor:
    return _rotated(x, dim, lambda size: size // 2)


@defines("aten::fft_ifftshift")
def _ifftshift(x: Tensor, dim: list[int] | None = None) -> Tensor:
    return _rotated(x, dim, lambda size: (size + 1) // 2)


def _rotated(x: Tensor, dim: list[int] | None, by: Callable) -> Tensor:
    for d in range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim:
        size = x.shape[d]
        x = x.index_select(d, (torch.arange(size) + size - by(size)) % size)
    return x


@defines("aten::index_copy")
def _index_copy(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    if x.dim() == 0:
        raise Keep
    shape = [-1 if d == dim % x.dim() else 1 for d in range(x.dim())]
    return x.scatter(dim, index.reshape(shape).expand_as(source), source)


@defines("aten::scatter_reduce", recursive=True)
def _scatter_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, include_self: bool = True
) -> Tensor:
    """With the elements of x, or with what changes nothing in their place."""
    if x.dim() == 0:
        parts = x.reshape(1), dim, index.reshape(-1), source.reshape(-1)
        return torch.scatter_reduce(*parts, reduce, include_self=include_self).reshape(())
    if include_self and reduce != "mean":
        raise Keep
    if reduce == "mean":
        ones = torch.ones_like(source)
        count = (torch.ones_like(x) if include_self else torch.zeros_like(x)).scatter_add(dim, index, ones)
        start = x if include_self else x.scatter(dim, index, 0)
        total = start.scatter_add(dim, index, source)
        count = count.clamp(min=1)
        return total / count if x.is_floating_point() else torch.div(total, count, rounding_mode="floor")
    lowest, highest = (-math.inf, math.inf) if x.is_floating_point() else _limits(x.dtype)
    if reduce in ("amax", "amin") and x.is_floating_point():
        return _extreme_of_sources(x, dim, index, source, reduce)
    neutral = {"sum": 0, "prod": 1, "amax": lowest, "amin": highest}[reduce]
    return x.scatter(dim, index, neutral).scatter_reduce(dim, index, source, reduce)


def _extreme_of_sources(x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: Any) -> Tensor:
    """Sources that are the result share its gradient, with x where that is equal, too, although it takes no part."""
    start = x.detach().scatter(dim, index, -math.inf if reduce == "amax" else math.inf)
    result = start.scatter_reduce(dim, index, source.detach(), reduce)
    taken = source == result.gather(dim, index)
    count = (x == result).to(x.dtype).scatter_add(dim, index, taken.to(x.dtype))
    each = torch.where(taken, source, 0) / count.gather(dim, index).clamp(min=1)
    shares = x.scatter(dim, index, 0).scatter_add(dim, index, each)
    return result + (shares - shares.detach())


def _limits(dtype: torch.dtype) -> tuple[int, int]:
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max
