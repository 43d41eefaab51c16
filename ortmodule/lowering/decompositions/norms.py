"""Defines norms, distances and normalisations by other operators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ortmodule.core.errors import Keep, Leave
from ortmodule.lowering.decompositions.table import defines, dtype_of, sloped


@defines("aten::norm", recursive=True)
def _norm(
    x: Tensor, p: float | None = None, dim: list[int] | None = None, keepdim: bool = False, dtype: int | None = None,
) -> Tensor:  # fmt: skip
    p = 2.0 if p is None else p
    if not isinstance(p, (int, float)):
        raise Keep
    return vector_norm(x, p, dim, keepdim, dtype)


@defines("aten::linalg_vector_norm")
def vector_norm(
    x: Tensor, p: float = 2, dim: list[int] | None = None, keepdim: bool = False, dtype: int | None = None
) -> Tensor:
    """Of a vector of zeros the gradient is zero; of equal ones it is shared for infinite p. Powers of 16-bit numbers
    are added up in float32, where they do not overflow."""
    x = x if dtype is None else x.to(dtype_of(dtype))
    if not x.is_floating_point():
        raise Keep
    if x.dtype in (torch.float16, torch.bfloat16) and p not in (0, math.inf, -math.inf):
        return vector_norm(x.float(), p, dim, keepdim).to(x.dtype)
    dim = list(range(x.dim())) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    if x.dim() == 0:
        return x.abs() if p != 0 else (x != 0).to(x.dtype)
    size = x.abs()
    if abs(p) == math.inf:
        value = size.amax(dim, True) if p > 0 else size.amin(dim, True)
        taken = (size == value) | (size.isnan() & value.isnan())
        return _reduced(value, x, torch.where(taken, x.sign() / taken.sum(dim, True), x.sign() * 0), dim, keepdim)
    if p == 0:
        return (x != 0).to(x.dtype).sum(dim, keepdim)
    if p == 1:
        return size.sum(dim, keepdim)
    if p == 2:
        return _root((x * x).sum(dim, keepdim))
    value = size.pow(p).sum(dim, True).pow(1 / p)
    if p < 1:
        slope = (x.sign() * size.pow(p - 1)).masked_fill(x == 0, 0) * value.pow(1 - p)
    elif p < 2:
        slope = x.sign() * size.pow(p - 1) * (1 / value.pow(p - 1)).masked_fill(value == 0, 0)
    else:
        slope = x * size.pow(p - 2) * (1 / value.pow(p - 1)).masked_fill(value == 0, 0)
    return _reduced(value, x, slope, dim, keepdim)


def _reduced(value: Tensor, x: Tensor, slope: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """A value over dimensions that it has kept, with dx = dy * slope."""
    nothing = sloped(torch.zeros_like(x), (x, slope))
    value = value.detach() + nothing.sum(dim, True)
    return value if keepdim else value.sum(dim)


@defines("aten::linalg_norm")
def _linalg_norm(
    x: Tensor, order: float | None = None, dim: list[int] | None = None, keepdim: bool = False,
    dtype: int | None = None,
) -> Tensor:  # fmt: skip
    dim = [dim] if isinstance(dim, int) else dim
    if order is None:
        return vector_norm(x, 2, dim, keepdim, dtype)
    if len(dim or range(x.dim())) == 1:
        return vector_norm(x, order, dim, keepdim, dtype)
    return _matrix_norm(x, order, dim or [-2, -1], keepdim, dtype)


@defines("aten::linalg_matrix_norm")
def _matrix_norm(
    x: Tensor, order: float | str = "fro", dim: Sequence[int] = (-2, -1), keepdim: bool = False,
    dtype: int | None = None,
) -> Tensor:  # fmt: skip
    x = x if dtype is None else x.to(dtype_of(dtype))
    if order == "fro":
        return vector_norm(x, 2, list(dim), keepdim)
    if isinstance(order, str) or order not in (1, -1, math.inf, -math.inf):
        raise Leave(f"a matrix norm of order {order}")
    rows, columns = (d % x.dim() for d in dim)
    if abs(order) != 1:
        rows, columns = columns, rows
    sums = x.abs().sum(rows, keepdim=True)
    result = sums.amax(columns, keepdim=True) if order > 0 else sums.amin(columns, keepdim=True)
    return result if keepdim else result.select(max(rows, columns), 0).select(min(rows, columns), 0)


@defines("aten::linalg_cond")
def _condition(x: Tensor, order: float | None = None) -> None:
    raise Leave("a condition number")


@defines("aten::cdist")
def _cdist(a: Tensor, b: Tensor, p: float = 2.0, mode: int | None = None) -> Tensor:
    return vector_norm(a.unsqueeze(-2) - b.unsqueeze(-3), p, [-1])


@defines("aten::pairwise_distance")
def _pairwise_distance(a: Tensor, b: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Tensor:
    return vector_norm(a - b + eps, p, [-1], keepdim)


@defines("aten::cosine_similarity")
def _cosine_similarity(a: Tensor, b: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """The gradient passes the bound of the norms as if it were not there."""
    a, b = torch.broadcast_tensors(a, b)
    if a.dim() == 0:
        return _cosine_similarity(a.reshape(1), b.reshape(1), 0, eps)

    def unit(x: Tensor) -> Tensor:
        norm = vector_norm(x, 2, [dim], True)
        return x / sloped(norm.clamp(min=eps), (norm, torch.ones_like(norm)))

    return (unit(a) * unit(b)).sum(dim)


@defines("aten::renorm")
def _renorm(x: Tensor, p: float, dim: int, most: float) -> Tensor:
    """What is not longer than allowed stays, and so does its gradient."""
    dims = [d for d in range(x.dim()) if d != dim % x.dim()]
    long = vector_norm(x.detach(), p, dims, True) > most
    some = torch.where(long, x, 1)
    return torch.where(long, some * (most / (vector_norm(some, p, dims, True) + 1e-7)), x)


@defines("aten::embedding_renorm")
def _embedding_renorm(weight: Tensor, index: Tensor, most: float, p: float = 2) -> Tensor:
    """Rows that are looked up and longer than allowed are shortened in place: each to the same, however often."""
    index = index.reshape(-1)
    rows = weight.index_select(0, index)
    length = vector_norm(rows, p, [1], True)
    return weight.index_copy(0, index, torch.where(length > most, rows * (most / (length + 1e-7)), rows))


@defines("aten::var")
def _var(x: Tensor, *arguments: Any) -> Tensor:
    return _moments(_wide(x), *arguments)[0].to(x.dtype)


@defines("aten::var_mean")
def _var_mean(x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    variance, mean = _moments(_wide(x), *arguments)
    return variance.to(x.dtype), mean.to(x.dtype)


@defines("aten::std")
def _std(x: Tensor, *arguments: Any) -> Tensor:
    return _root(_moments(_wide(x), *arguments)[0]).to(x.dtype)


@defines("aten::std_mean")
def _std_mean(x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    variance, mean = _moments(_wide(x), *arguments)
    return _root(variance).to(x.dtype), mean.to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    """Neither squares nor how many there are fit 16 bits: PyTorch adds them up in wider types, too."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _moments(x: Tensor, dim: Any = None, correction: Any = 1, keepdim: bool = False) -> tuple[Tensor, ...]:
    """Variance and mean, by the arguments of every overload: `dim` may be absent, the correction a bool or None."""
    if isinstance(dim, bool):
        dim, correction = None, dim
    if x.dim() == 0:
        return _moments(x.reshape(1), [0], correction)
    dim = dim or list(range(x.dim()))
    correction = 1 if correction is None else correction if isinstance(correction, float) else int(correction)
    mean = x.detach().mean(dim, keepdim=True)  # moving it changes nothing
    squares = (x - mean).square().sum(dim, keepdim)
    count = 1
    for d in dim:
        count = count * x.shape[d]
    divisor = torch.as_tensor(count).to(x.dtype) - correction
    variance = squares / divisor.clamp(min=0)
    if correction > 1:  # beyond the elements PyTorch's derivative divides by a negative number
        variance = sloped(variance.detach(), (squares, 1 / divisor))
    return variance, x.mean(dim, keepdim=keepdim)


def _root(x: Tensor) -> Tensor:
    """The square root, whose gradient at zero is zero."""
    none = x == 0
    return x.masked_fill(none, 1).sqrt().masked_fill(none, 0)


# --- normalisations ---------------------------------------------------------------------------------------------------


@defines("aten::batch_norm", recursive=True)
def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, variance: Tensor | None,
    training: bool, momentum: float, eps: float, cudnn: bool,
) -> Tensor:  # fmt: skip
    """Without running statistics it moves temporary ones, which are not returned."""
    if mean is not None:
        raise Keep
    like = x if weight is None else weight
    zeros, ones = (make(x.shape[1], dtype=like.dtype) for make in (torch.zeros, torch.ones))
    return F.batch_norm(x, zeros, ones, weight, bias, True, momentum, eps)


@defines("aten::instance_norm", recursive=True)
def _instance_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, variance: Tensor | None, own: bool,
    momentum: float, eps: float, cudnn: bool,
) -> Tensor:  # fmt: skip
    """By running statistics it is a batch's."""
    if own:
        raise Keep
    return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)


@defines("aten::logdet")
def _logdet(x: Tensor) -> Tensor:
    sign, size = torch.linalg.slogdet(x)
    return torch.where(sign < 0, math.nan, size)
