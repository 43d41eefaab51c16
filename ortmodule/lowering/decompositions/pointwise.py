"""Defines pointwise operators and shapes by other operators."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ortmodule.core.errors import Keep, Leave
from ortmodule.lowering.decompositions.table import (
    DEFINITIONS,
    EXTREMES_OF_NAN,
    EXTREMES_SHARE,
    defines,
    dtype_of,
    shared,
    sloped,
)

_NARROW = (torch.float16, torch.bfloat16)


@defines("aten::floor", "aten::ceil", "aten::trunc", "aten::fix")
def _rounded(x: Tensor, *arguments: Any) -> Tensor:
    """Integers are whole."""
    if x.is_floating_point():
        raise Keep
    return x + 0


@defines("aten::any", recursive=True)
def _any(x: Tensor, *arguments: Any) -> Tensor:
    if x.dtype == torch.bool:
        raise Keep
    return (x != 0).any(*arguments)


@defines("aten::all", recursive=True)
def _all(x: Tensor, *arguments: Any) -> Tensor:
    if x.dtype == torch.bool:
        raise Keep
    return (x != 0).all(*arguments)


@defines("aten::_is_all_true")
def _is_all_true(x: Tensor) -> Tensor:
    return x.all()


@defines("aten::_is_any_true")
def _is_any_true(x: Tensor) -> Tensor:
    return x.any()


@defines("aten::copy")
def _copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    return source.to(x.dtype).expand_as(x)


@defines("aten::special_log_ndtr")
def _log_ndtr(x: Tensor) -> Tensor:
    """Far below 0 through erfcx, which does not vanish."""
    scaled = torch.special.erfcx(x * -math.sqrt(0.5))
    tail = torch.log(scaled / 2) - x * x / 2
    value = torch.where(x < -1.0, tail, torch.log1p(torch.erfc(x * math.sqrt(0.5)) / -2))
    return sloped(value, (x, math.sqrt(2 / math.pi) / scaled))


@defines("aten::special_entr")
def _entr(x: Tensor) -> Tensor:
    value = torch.where(x > 0, -x * x.log(), torch.where(x == 0, 0, torch.where(x.isnan(), x, -math.inf)))
    return sloped(value, (x, -1 - x.log()))


@defines("aten::logit", "aten::special_logit")
def _logit(x: Tensor, eps: float | None = None) -> Tensor:
    """Outside of what it is defined for the gradient is NaN; where it is clamped, zero."""
    x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
    slope = 1 / (x * (1 - x))
    if eps is None or eps < 0:
        return sloped((x / (1 - x)).log(), (x, torch.where((x < 0) | (x > 1), math.nan, slope)))
    inside = x.clamp(eps, 1 - eps)
    return sloped((inside / (1 - inside)).log(), (x, torch.where((x >= eps) & (x <= 1 - eps), slope, 0)))


@defines("aten::logaddexp")
def _logaddexp(a: Tensor, b: Tensor) -> Tensor:
    """Equal infinities stay: their difference is NaN."""
    same = (a == b) & a.isinf()
    distance = (a - b).masked_fill(same, 0).abs()
    value = torch.where(same, a, torch.maximum(a, b) + torch.log1p(torch.exp(-distance)))
    return sloped(value, (a, 1 / (1 + (b - a).exp())), (b, 1 / (1 + (a - b).exp())))


@defines("aten::logaddexp2")
def _logaddexp2(a: Tensor, b: Tensor) -> Tensor:
    two = math.log(2)
    return _logaddexp(a * two, b * two) / two


@defines("aten::xlogy")
def _xlogy(x: Tensor, y: Tensor) -> Tensor:
    y = y if isinstance(y, Tensor) else torch.full_like(x, y)
    return _times_log(x, y, y.log(), y, (x == 0) & (y <= 0))


def _times_log(x: Tensor, y: Tensor, log: Any, argument: Any, flat: Any) -> Tensor:
    """x log, which is 0 where x is, whatever y, if that is a number. ``flat``: where x has no gradient."""
    value = torch.where(y.isnan(), y, torch.where(x == 0, 0, x * log))
    return sloped(value, (x, log.masked_fill(flat, 0)), (y, x / argument))


@defines("aten::special_xlog1py")
def _xlog1py(x: Tensor, y: Tensor) -> Tensor:
    y = y if isinstance(y, Tensor) else torch.full_like(x, y)
    return _times_log(x, y, torch.log1p(y), y + 1, (x == 0) & (y <= -1))


@defines("aten::log2")
def _log2(x: Tensor) -> Tensor:
    return x.log() / math.log(2)


@defines("aten::log10")
def _log10(x: Tensor) -> Tensor:
    return x.log() / math.log(10)


@defines("aten::sinc")
def _sinc(x: Tensor) -> Tensor:
    """At zero it is one, with a gradient of zero."""
    x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
    if x.dtype in _NARROW:
        return _sinc(x.float()).to(x.dtype)
    angle, square = x * math.pi, x * x * math.pi
    slope = ((angle * angle.cos() - angle.sin()) / square).masked_fill(square == 0, 0)
    return sloped(torch.where(angle == 0, 1, angle.sin() / angle), (x, slope))


@defines("aten::round", recursive=True)
def _round(x: Tensor, decimals: int = 0) -> Tensor:
    """To decimals, of 16-bit numbers in float32."""
    if not x.is_floating_point():
        return x + 0
    if decimals == 0:
        raise Keep
    if x.dtype in _NARROW:
        return _round(x.float(), decimals).to(x.dtype)
    power = 10.0 ** abs(decimals)
    return (x * power).round() / power if decimals > 0 else (x / power).round() * power


@defines("aten::lerp")
def _lerp(x: Tensor, end: Tensor, weight: float) -> Tensor:
    """From the end that is nearer; of 16-bit numbers in float32."""
    if x.dtype in _NARROW:
        weight = weight.float() if isinstance(weight, Tensor) else weight
        return _lerp(x.float(), end.float(), weight).to(x.dtype)
    if not isinstance(weight, Tensor):
        value = x + weight * (end - x) if abs(weight) < 0.5 else end - (end - x) * (1 - weight)
        ones = torch.ones_like(value)
        return sloped(value, (x, ones * (1 - weight)), (end, ones * weight))
    value = torch.where(weight.abs() < 0.5, x + weight * (end - x), end - (end - x) * (1 - weight))
    ones = torch.ones_like(value)
    return sloped(value, (x, ones * (1 - weight)), (end, ones * weight), (weight, ones * (end - x)))


@defines("aten::celu")
def _celu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """The exporter computes it in float32."""
    if x.dtype != torch.float64:
        raise Keep
    below = x / alpha
    return sloped(torch.where(x > 0, x, alpha * torch.expm1(below)), (x, torch.where(x > 0, 1, below.exp())))


@defines("aten::float_power")
def _float_power(x: Tensor, y: Tensor) -> Tensor:
    x, y = (v.double() if isinstance(v, Tensor) else float(v) for v in (x, y))
    return torch.pow(x, y)


@defines("aten::nan_to_num")
def _nan_to_num(
    x: Tensor, nan: float | None = None, highest: float | None = None, lowest: float | None = None
) -> Tensor:
    if not x.is_floating_point():
        return x + 0
    limits = torch.finfo(x.dtype)
    x = torch.where(x.isnan(), 0.0 if nan is None else nan, x)
    x = torch.where(x == math.inf, limits.max if highest is None else highest, x)
    return torch.where(x == -math.inf, limits.min if lowest is None else lowest, x)


@defines("aten::prelu", recursive=True)
def _prelu(x: Tensor, weight: Tensor) -> Tensor:
    if weight.dim():
        raise Keep
    return F.prelu(x, weight.reshape(1))


@defines("aten::heaviside")
def _heaviside(x: Tensor, values: Tensor) -> Tensor:
    return torch.where(x == 0, values, (x > 0).to(x.dtype))


@defines("aten::softplus", recursive=True)
def _softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    if beta == 1 and threshold == 20:
        raise Keep
    return torch.where(x * beta > threshold, x, F.softplus(x.mul(beta)) / beta)


@defines("aten::threshold")
def _threshold(x: Tensor, threshold: float, value: float) -> Tensor:
    return torch.where(x <= threshold, value, x)


@defines("aten::softshrink")
def _softshrink(x: Tensor, lambd: float = 0.5) -> Tensor:
    return torch.where(x > lambd, x - lambd, torch.where(x < -lambd, x + lambd, x * 0))


@defines("aten::hardshrink")
def _hardshrink(x: Tensor, lambd: float = 0.5) -> Tensor:
    return torch.where((x > lambd) | (x < -lambd), x, torch.where(x.isnan(), x.detach(), 0))


@defines("aten::softmax", recursive=True)
def _softmax(x: Tensor, dim: int, dtype: int | None = None) -> Tensor:
    if dtype is None or x.dtype == dtype_of(dtype):
        raise Keep
    return x.to(dtype_of(dtype)).softmax(dim)


@defines("aten::log_softmax", recursive=True)
def _log_softmax(x: Tensor, dim: int, dtype: int | None = None) -> Tensor:
    if dtype is None or x.dtype == dtype_of(dtype):
        raise Keep
    return x.to(dtype_of(dtype)).log_softmax(dim)


@defines("aten::_safe_softmax")
def _safe_softmax(x: Tensor, dim: int, dtype: int | None = None) -> Tensor:
    x = x if dtype is None else x.to(dtype_of(dtype))
    nothing = (x == -math.inf).all(dim, keepdim=True)
    return x.masked_fill(nothing, 0).softmax(dim).masked_fill(nothing, 0)


@defines("aten::cumsum", recursive=True)
def _cumsum(x: Tensor, dim: int, dtype: int | None = None) -> Tensor:
    """Sums of smaller whole numbers, and of flags, are int64; ONNX's are of the operand's type."""
    if dtype is not None or x.dtype == torch.int64 or x.dtype.is_floating_point or x.dtype.is_complex:
        raise Keep
    return x.long().cumsum(dim)


@defines("aten::normal")
def _normal(
    mean: float | Tensor,
    std: float | Tensor,
    size: list[int] | None = None,
    generator: object = None,
    dtype: int | None = None,
    *layout: Any,
) -> Tensor:
    if isinstance(mean, Tensor) or isinstance(std, Tensor) or size is None:
        raise Keep
    return torch.randn(size, dtype=None if dtype is None else dtype_of(dtype)) * std + mean


@defines("aten::addcmul")
def _addcmul(x: Tensor, a: Tensor, b: Tensor, value: float = 1) -> Tensor:
    return x + (a if value == 1 else a * value) * b


@defines("aten::addcdiv")
def _addcdiv(x: Tensor, a: Tensor, b: Tensor, value: float = 1) -> Tensor:
    return x + (a if value == 1 else a * value) / b


@defines("aten::isclose")
def _isclose(a: Tensor, b: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Tensor:
    same = a == b
    if not a.is_floating_point():
        a, b = a.to(torch.get_default_dtype()), b.to(torch.get_default_dtype())
    elif equal_nan:
        same = same | (a.isnan() & b.isnan())
    return same | (((a - b).abs() <= atol + (rtol * b).abs()) & b.isfinite())


@defines("aten::sum", recursive=True)
def _sum_of_all(x: Tensor, dim: list[int] | None = None, keepdim: bool = False, dtype: int | None = None) -> Tensor:
    """No dimension is every dimension."""
    if dim != [] or keepdim:
        raise Keep
    return x.sum(dtype=None if dtype is None else dtype_of(dtype))


@defines("aten::permute", recursive=True)
def _permute(x: Tensor, dims: list[int]) -> Tensor:
    if all(d >= 0 for d in dims):
        raise Keep
    return x.permute([d % x.dim() for d in dims])


@defines("aten::movedim", "aten::moveaxis")
def _movedim(x: Tensor, source: int | list[int], destination: int | list[int]) -> Tensor:
    each, places = ([d] if isinstance(d, int) else d for d in (source, destination))
    placed = {to % x.dim(): d % x.dim() for d, to in zip(each, places, strict=True)}
    rest = iter(d for d in range(x.dim()) if d not in placed.values())
    return x.permute([placed[d] if d in placed else next(rest) for d in range(x.dim())])


@defines("aten::masked_select", recursive=True)
def _masked_select(x: Tensor, mask: Tensor) -> Tensor:
    if tuple(map(int, x.shape)) == tuple(map(int, mask.shape)):
        raise Keep
    return torch.masked_select(*torch.broadcast_tensors(x, mask))


@defines("aten::searchsorted")
def _searchsorted(
    sequence: Tensor, values: Tensor, narrow: bool = False, right: bool = False, side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if sorter is not None or not isinstance(values, Tensor):
        raise Leave("a sorter, or a number")
    if sequence.dim() > 1:
        sequence = sequence.unsqueeze(-2)
    values = values.unsqueeze(-1)
    before = sequence <= values if right or side == "right" else sequence < values
    if values.is_floating_point():  # NaN comes after everything
        before = before | values.isnan()
    return before.sum(-1).int() if narrow else before.sum(-1)


def _added(x: Tensor, product: Tensor, beta: float, alpha: float) -> Tensor:
    """Where beta is 0, x may hold anything: `torch.empty`, NaN."""
    product = product if alpha == 1 else alpha * product
    return product if beta == 0 and not x.requires_grad else beta * x + product


@defines("aten::addmm", "aten::baddbmm", grads=True)
def _product(x: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    if beta != 0 or x.requires_grad:
        raise Keep
    return _added(x, a @ b, beta, alpha)


@defines("aten::addmv", grads=True)
def _addmv(x: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    return _added(x, a @ b, beta, alpha)


@defines("aten::addbmm", grads=True)
def _addbmm(x: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    return _added(x, (a @ b).sum(0), beta, alpha)


@defines("aten::addr", grads=True)
def _addr(x: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    return _added(x, a.unsqueeze(1) * b, beta, alpha)


@defines("aten::linalg_vecdot")
def _vecdot(a: Tensor, b: Tensor, dim: int = -1) -> Tensor:
    return (a * b).sum(dim)


@defines("aten::vdot")
def _vdot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum()


def _extreme(a: Tensor, b: Tensor, first: Any) -> Tensor:
    """One that is no NaN; ``first``: where it is a."""
    value = torch.where(b.isnan() | first, a, b)
    if EXTREMES_SHARE and a.is_floating_point():
        if EXTREMES_OF_NAN:
            a, b = torch.broadcast_tensors(a, b)
            both = sloped(value, (a, torch.ones_like(value)), (b, torch.ones_like(value)))
            value = torch.where(a.isnan() | b.isnan(), both, value)
        value = torch.where(a == b, shared(a, b), value)
    return value


DEFINITIONS |= {
    "aten::fmax": lambda a, b: _extreme(a, b, a >= b),
    "aten::fmin": lambda a, b: _extreme(a, b, a <= b),
    "aten::hstack": lambda tensors: torch.cat(tensors, 1 if tensors[0].dim() > 1 else 0),
    "aten::nansum": lambda x, dim=None, keepdim=False, dtype=None: _sum(
        x.masked_fill(x.isnan(), 0), dim, keepdim, dtype
    ),
    "aten::bilinear": lambda a, b, w, bias=None: _plus(torch.einsum("...i,kij,...j->...k", a, w, b), bias),
    "aten::channel_shuffle": lambda x, groups: x.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2),
}


@defines("aten::copysign")
def _copysign(a: Tensor, b: Tensor | float) -> Tensor:
    if not isinstance(b, Tensor):
        b = torch.full_like(a, b) if a.is_floating_point() else torch.tensor(float(b))
    negative = torch.signbit(b)
    size = a.abs() if a.is_floating_point() else a.abs().to(torch.get_default_dtype())
    value = torch.where(negative, -size, size)
    return sloped(value, (a, (value / a).masked_fill(a == 0, 0))) if a.is_floating_point() else value


def _sum(x: Tensor, dim: list[int] | None, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    return x.sum(dtype=dtype) if dim is None or dim == [] else x.sum(dim, keepdim, dtype=dtype)


def _plus(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


@defines("aten::nanmean")
def _nanmean(x: Tensor, dim: list[int] | None = None, keepdim: bool = False, dtype: int | None = None) -> Tensor:
    x = x if dtype is None else x.to(dtype_of(dtype))
    number = ~x.isnan()
    numbers = sloped(torch.where(number, x, 0), (x, number.to(x.dtype)))
    return _sum(numbers, dim, keepdim, None) / _sum(number, dim, keepdim, None)
