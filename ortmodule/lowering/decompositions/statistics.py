"""Defines quantiles, integrals by trapezoids, covariances, losses over several labels."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ortmodule.core.errors import Keep
from ortmodule.lowering.decompositions.norms import vector_norm
from ortmodule.lowering.decompositions.table import defines


@defines("aten::quantile")
def _quantile(
    x: Tensor, q: Tensor, dim: int | None = None, keepdim: bool = False, interpolation: str = "linear"
) -> Tensor:
    """Of a row with a NaN it is NaN."""

    def positions(rows: Any, q: Any) -> Tensor:
        last = rows.shape[-1] - 1
        return torch.where(rows.isnan().any(-1, keepdim=True), last, q * last)

    return _quantiles(x, q, dim, keepdim, interpolation, positions)


@defines("aten::nanquantile")
def _nanquantile(
    x: Tensor, q: Tensor, dim: int | None = None, keepdim: bool = False, interpolation: str = "linear"
) -> Tensor:
    def positions(rows: Any, q: Any) -> Tensor:
        return q * ((~rows.isnan()).sum(-1, keepdim=True) - 1).clamp(min=0)

    return _quantiles(x, q, dim, keepdim, interpolation, positions)


def _quantiles(x: Tensor, q: Any, dim: int | None, keepdim: bool, interpolation: Any, positions: Any) -> Tensor:
    """``positions(rows, q)``: places between the sorted elements of a row, NaN at its end."""
    if x.dim() == 0:
        return _quantiles(x.reshape(1), q, 0, False, interpolation, positions)
    several = isinstance(q, Tensor) and q.dim() > 0
    q = q.reshape(-1) if isinstance(q, Tensor) else torch.tensor([q], dtype=x.dtype)
    rank, flat = x.dim(), dim is None
    rows = (x.reshape(-1) if dim is None else x.movedim(dim, -1)).sort(-1)[0]
    at = positions(rows.detach(), q).to(x.dtype)
    at = at.expand([*rows.shape[:-1], q.shape[0]]) if rows.dim() > 1 else at
    at = {"lower": torch.floor, "higher": torch.ceil, "nearest": torch.round}.get(interpolation, lambda p: p)(at)
    below = at.floor()
    result = rows.gather(-1, below.long())
    if interpolation in ("linear", "midpoint"):
        above = rows.gather(-1, at.ceil().long())
        result = result + (above - result) * (0.5 if interpolation == "midpoint" else at - below)
    if keepdim:
        result = result.reshape([1] * (rank - 1) + [-1]) if flat else result
        result = result.unsqueeze(-2).movedim(-2, -2 if dim is None else dim % rank)
        return result.movedim(-1, 0) if several else result.select(-1, 0)
    return result.movedim(-1, 0) if several else result.select(-1, 0)


def _steps(x: Tensor, rank: int, dim: int) -> Tensor:
    """Differences of the places `x`, to go with values of this rank."""
    if x.dim() == 1:
        x = x.reshape([-1 if d == dim % rank else 1 for d in range(rank)])
    elif x.dim() < rank:
        x = x.reshape([1] * (rank - x.dim()) + list(x.shape))
    return _after(x, dim % rank) - _before(x, dim % rank)


def _after(x: Tensor, dim: int) -> Tensor:
    return x[(slice(None),) * dim + (slice(1, None),)]


def _before(x: Tensor, dim: int) -> Tensor:
    return x[(slice(None),) * dim + (slice(None, -1),)]


def _areas(y: Tensor, *arguments: Any) -> tuple[Tensor, int]:
    """Twice the areas of the trapezoids, by the arguments of every overload."""
    x, dim = arguments if len(arguments) == 2 else (1, *arguments) if arguments else (1, -1)
    if y.dim() == 0 or int(y.shape[dim]) == 0:
        raise Keep
    sums = _after(y, dim % y.dim()) + _before(y, dim % y.dim())
    return sums * (_steps(x, y.dim(), dim) if isinstance(x, Tensor) else x), dim


@defines("aten::trapezoid", "aten::trapz")
def _trapezoid(y: Tensor, *arguments: Any) -> Tensor:
    areas, dim = _areas(y, *arguments)
    return areas.sum(dim) / 2


@defines("aten::cumulative_trapezoid")
def _cumulative_trapezoid(y: Tensor, *arguments: Any) -> Tensor:
    areas, dim = _areas(y, *arguments)
    return areas.cumsum(dim) / 2


@defines("aten::cov")
def _cov(x: Tensor, correction: int = 1, frequencies: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
    if not x.is_floating_point():
        raise Keep
    rows = x.reshape(1, -1) if x.dim() < 2 else x
    weight = frequencies if weights is None else weights if frequencies is None else weights * frequencies
    if weight is None:
        total = (rows[0].detach() * 0 + 1).sum()
        centred = rows - rows.mean(1, keepdim=True)
        weighted, count = centred, total - correction
    else:
        total = weight.sum()
        centred = rows - (rows * weight).sum(1, keepdim=True) / total
        lost = correction if weights is None else correction * (weight * weights).sum() / total
        weighted, count = centred * weight, total - lost
    result = weighted @ centred.t() / count.clamp(min=0)
    return result.reshape(()) if x.dim() < 2 else result.squeeze()


@defines("aten::_pdist_forward")
def _pdist(x: Tensor, p: float = 2.0) -> Tensor:
    first, second = zip(*itertools.combinations(range(int(x.shape[0])), 2), strict=True)
    return vector_norm(x.index_select(0, torch.tensor(first)) - x.index_select(0, torch.tensor(second)), p, [-1])


@defines("aten::combinations")
def _combinations(x: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    chosen = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    places = list(chosen(range(int(x.shape[0])), r))
    if not places or not r:
        raise Keep
    return x.index_select(0, torch.tensor(places).reshape(-1)).reshape(len(places), r)


@defines("aten::multilabel_margin_loss_forward")
def _multilabel_margin_loss(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, ...]:
    """Labels count up to the first that is negative."""
    rows, labels = (x.reshape(1, -1), target.reshape(1, -1)) if x.dim() < 2 else (x, target)
    count = rows.shape[1]
    labels = torch.arange(-1, count).index_select(0, labels.reshape(-1) + 1).reshape(labels.shape)  # or refused
    counts = (labels >= 0).to(x.dtype).cumprod(1)
    labels = torch.where(counts > 0, labels, 0)
    named = (torch.zeros_like(rows).scatter_add(1, labels, counts) > 0).to(x.dtype)
    distance = F.relu(1 - rows.gather(1, labels)[:, :, None] + rows[:, None, :])
    each = (distance * counts[:, :, None] * (1 - named)[:, None, :]).sum(2).sum(1) / rows.shape[1]
    named = named.reshape(target.shape)
    if reduction == 0:
        return (each if x.dim() == 2 else each.reshape(())), named
    return (each.sum() if reduction == 2 else each.mean()), named
