"""Defines extremes, order and clamping by other operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ortmodule.core.errors import Keep
from ortmodule.lowering.decompositions.table import CLAMP_SHARES, defines, shared, sloped


@defines("aten::max", recursive=True)
def _max(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor | tuple[Tensor, ...]:
    return _extreme(x, dim, keepdim, torch.argmax)


@defines("aten::min", recursive=True)
def _min(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor | tuple[Tensor, ...]:
    return _extreme(x, dim, keepdim, torch.argmin)


def _extreme(x: Tensor, dim: int | None, keepdim: bool, arg: Callable[..., Tensor]) -> Tensor | tuple[Tensor, ...]:
    """Over a dimension: the whole gradient goes to the element that the index names. Over all of them: it is shared by
    those that are equal, NaN among them."""
    if isinstance(dim, Tensor) or x.dim() == 0:
        raise Keep
    if dim is None:
        if not x.is_floating_point():
            raise Keep
        value = (x.detach().amax if arg is torch.argmax else x.detach().amin)()
        return _shared(x, value, torch.where(value.isnan(), x.isnan(), x == value))
    index = arg(x.byte() if x.dtype == torch.bool else x, dim, keepdim=True)
    return picked(x, index, dim, keepdim)


def _shared(x: Tensor, value: Tensor, taken: Tensor) -> Tensor:
    """``value``, whose gradient the elements that are ``taken`` share."""
    count = taken.float().sum()
    share = torch.where(taken, x, 0).sum()
    share = (share if x.dtype == torch.float64 else share.float()) / count
    return sloped(value, (share.to(x.dtype), torch.ones_like(value)))


def picked(x: Tensor, index: Tensor, dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
    """Values at an index that has kept the dimension, and the index."""
    values = x.gather(dim, index)
    return (values, index) if keepdim else (values.select(dim, 0), index.select(dim, 0))


@defines("aten::median")
def _median(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor | tuple[Tensor, ...]:
    if x.dim() == 0:
        raise Keep
    if dim is None:  # its gradient is shared by all that are equal
        value = _median(x.reshape(-1), 0)[0].detach()
        if not x.is_floating_point():
            return value
        return _shared(x, value, torch.where(value.isnan(), x.isnan(), x == value))
    index = x.argsort(dim).select(dim, (x.shape[dim] - 1) // 2).unsqueeze(dim)
    if x.is_floating_point():
        nan = x.isnan()
        index = torch.where(nan.any(dim, keepdim=True), nan.long().argmax(dim, keepdim=True), index)
    return picked(x, index, dim, keepdim)


@defines("aten::nanmedian")
def _nanmedian(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor | tuple[Tensor, ...]:
    if x.dim() == 0 or not x.is_floating_point():
        raise Keep
    if dim is None:
        value = _nanmedian(x.reshape(-1), 0)[0].detach()
        return _shared(x, value, torch.where(value.isnan(), x.isnan(), x == value))
    count = (~x.isnan()).sum(dim, keepdim=True)
    return picked(x, x.argsort(dim).gather(dim, ((count - 1) // 2).clamp(min=0)), dim, keepdim)


@defines("aten::kthvalue")
def _kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, ...]:
    if x.dim() == 0:
        raise Keep
    index = x.topk(k, dim, largest=False)[1].narrow(dim, k - 1, 1)
    return picked(x, index, dim, keepdim)


@defines("aten::sort", recursive=True)
def _sort(x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """The engine's order is stable."""
    if isinstance(arguments[0], (bool, type(None))) and len(arguments) == 3:
        _, dim, descending = arguments
        return torch.sort(x, dim, descending)
    raise Keep


@defines("aten::argsort")
def _argsort(x: Tensor, *arguments: Any) -> Tensor:
    dim, descending = arguments[-2:]
    return torch.sort(x, dim, descending)[1]


@defines("aten::clamp", recursive=True)
def _clamp(x: Tensor, low: float | None = None, high: float | None = None) -> Tensor:
    """By tensors: where x is at its bound the gradient is its own; a NaN gives none to either."""
    if not isinstance(low, Tensor) and not isinstance(high, Tensor):
        return _clamp_by_numbers(x, low, high)
    if CLAMP_SHARES and x.is_floating_point():  # integers have no gradient
        return _clamp_shared(x, low, high)
    bounds = [bound for bound in (low, high) if bound is not None]
    value, inside = x.detach(), None
    for bound, nearer in zip((low, high), (torch.maximum, torch.minimum), strict=True):
        if bound is not None:
            within = x >= bound if bound is low else x <= bound
            inside = within if inside is None else inside & within
            value = nearer(value, bound.detach())
    below = False if low is None else (x < low) & (low < high) if len(bounds) == 2 else x < low
    above = False if high is None else (x > high) | (high < low) if len(bounds) == 2 else x > high
    rest = value
    for taken, bound in ((above, high), (below, low)):
        value = value if bound is None else torch.where(taken, bound, value)
    if len(bounds) == 2 and rest.is_floating_point():  # what a NaN has part in is NaN, and its gradient a bound's
        value = value + torch.where(rest.isnan(), rest, -0.0)
    assert inside is not None, "there is a bound"
    return torch.where(inside, x, value)


def _clamp_by_numbers(x: Tensor, low: Any, high: Any) -> Tensor:
    """At a bound, and of a NaN, there is no gradient."""
    if not x.is_floating_point() or not CLAMP_SHARES:
        raise Keep
    value, inside = x.detach(), None
    for bound, is_low in ((low, True), (high, False)):
        if bound is not None:
            within = x > bound if is_low else x < bound
            inside = within if inside is None else inside & within
            value = torch.where(value < bound if is_low else value > bound, bound, value)
    if any(bound is not None and math.isnan(bound) for bound in (low, high)):
        value = torch.full_like(x, math.nan)
    assert inside is not None, "there is a bound"
    return torch.where(inside, x, value)


def _clamp_shared(x: Tensor, low: Any, high: Any) -> Tensor:
    """x and a bound that it is at have half of the gradient each. Of a NaN one bound and x have all of it, of two x."""
    if low is None or high is None:
        bound = low if high is None else high
        value = torch.where(x < bound if high is None else x > bound, bound, x)
        value = torch.where(x == bound, shared(x, bound), value)
        return torch.where(x.isnan() | bound.isnan(), x + bound, value)
    rest = torch.minimum(torch.maximum(x.detach(), low.detach()), high.detach())
    ordered, crossed = low < high, low > high
    value = torch.where((x < low) | (x > high), rest, x)
    value = torch.where((x < low) & (low <= high), low, value)
    above = torch.where(x.isnan(), x + high, high)
    value = torch.where((x > high) & (low <= high) | crossed, above, value)
    value = torch.where((x == low) & ordered, shared(x, low), value)
    value = torch.where((x == high) & ordered, shared(x, high), value)
    return value + torch.where(rest.isnan(), rest, -0.0) if rest.is_floating_point() else value


@defines("aten::clamp_min", recursive=True)
def _clamp_min(x: Tensor, low: float) -> Tensor:
    return _clamp(x, low)


@defines("aten::clamp_max", recursive=True)
def _clamp_max(x: Tensor, high: float) -> Tensor:
    return _clamp(x, None, high)


@defines("aten::histc")
def _histc(x: Tensor, bins: int = 100, low: float = 0, high: float = 0) -> Tensor:
    """How many elements fall into each bin; the last one includes its end, and what is outside counts nowhere."""
    if low == high:
        raise Keep
    x = x.reshape(-1)
    place = ((x - low) * (bins / (high - low))).floor().clamp(max=bins - 1)
    place = place.masked_fill((x < low) | (x > high), -1)
    return (place[:, None] == torch.arange(bins)).sum(0).to(x.dtype)
