"""Operators of torch in terms of others, where the exporter translates them wrongly or in a way that does not train.

A definition takes the operator's arguments in the order of its schema and returns its result. It is traced
(`rewrites.py`) on tensors like the operator's operands, so it may look at ranks and types; a size that it takes as a
number becomes a constant, which the comparison of two traces finds.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

DEFINITIONS: dict[str, Callable] = {}


class Keep(Exception):
    """A definition declines: the operator stays."""


def _defines(*kinds: str, again: bool = False) -> Callable:
    """``again``: the definition uses the operator itself, in a form that it keeps."""

    def register(function):
        function.again = again
        DEFINITIONS.update(dict.fromkeys(kinds, function))
        return function

    return register


@_defines("aten::scaled_dot_product_attention")
def _attention(query, key, value, mask=None, dropout=0.0, is_causal=False, scale=None, enable_gqa=False):
    """A row with nothing to attend to gives zeros, as in PyTorch.

    The scores of what is masked become the lowest finite number and its weights an exact zero, so that no NaN appears
    in either direction.
    """
    if enable_gqa:
        times = int(query.shape[-3]) // int(key.shape[-3])
        key, value = _repeat_interleave(key, times, -3), _repeat_interleave(value, times, -3)
    scores = (query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)) @ key.transpose(-2, -1)
    blocked = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).triu(1) if is_causal else None
    if mask is not None:
        if mask.dtype != torch.bool:
            scores = scores + mask
        masked = ~mask if mask.dtype == torch.bool else mask == -math.inf
        blocked = masked if blocked is None else blocked | masked
    if blocked is None:
        weights = scores.softmax(-1)
    else:
        weights = scores.masked_fill(blocked, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(blocked, 0.0)
    return (F.dropout(weights, dropout) if dropout else weights) @ value


@_defines("aten::repeat_interleave")
def _repeat_interleave(x, repeats, dim=None, output_size=None):
    if dim is None:
        x, dim = x.reshape(-1), 0
    dim = dim % x.dim()
    if isinstance(repeats, torch.Tensor) and repeats.numel() > 1:
        return x.index_select(dim, torch.repeat_interleave(repeats))
    times = int(repeats)
    shape = [*x.shape[:dim], x.shape[dim] * times, *x.shape[dim + 1 :]]
    spread = x.unsqueeze(dim + 1).expand([-1] * (dim + 1) + [times] + [-1] * (x.dim() - dim - 1))
    return spread.reshape(shape)


@_defines("aten::cross_entropy_loss", again=True)
def _cross_entropy(scores, target, weight, reduction, ignore_index, label_smoothing):
    """Label smoothing and soft targets; plain class indices stay one operator."""
    soft = target.is_floating_point()
    if not soft and not label_smoothing:
        raise Keep
    axis = 1 if scores.dim() > 1 else 0
    classes = scores.shape[axis]
    log_p = scores.log_softmax(axis)
    if weight is not None:
        weighted = log_p * weight.reshape([-1 if d == axis else 1 for d in range(scores.dim())])
    else:
        weighted = log_p
    if soft:
        target = target * (1 - label_smoothing) + label_smoothing / classes
        each = -(weighted * target).sum(axis)
        return each if reduction == 0 else each.sum() if reduction == 2 else each.sum() / (scores.numel() / classes)
    kept = target != ignore_index
    nll = F.cross_entropy(scores, target, weight, ignore_index=ignore_index, reduction="none")
    spread = -weighted.sum(axis).masked_fill(~kept, 0.0)
    each = nll * (1 - label_smoothing) + spread * (label_smoothing / classes)
    if reduction != 1:
        return each if reduction == 0 else each.sum()
    share = kept.to(scores.dtype)
    if weight is not None:
        share = share * weight[target.masked_fill(~kept, 0)]
    return each.sum() / share.sum()


@_defines("aten::diff")
def _diff(x, n=1, dim=-1, prepend=None, append=None):
    """By ends that are counted from behind: no size becomes a number."""
    parts = [t for t in (prepend, x, append) if t is not None]
    x = torch.cat(parts, dim) if len(parts) > 1 else x
    before = (slice(None),) * (dim % x.dim())
    for _ in range(n):
        later, earlier = x[(*before, slice(1, None))], x[(*before, slice(None, -1))]
        x = later ^ earlier if x.dtype is torch.bool else later - earlier
    return x


@_defines("aten::multi_margin_loss")
def _multi_margin_loss(x, target, p=1, margin=1.0, weight=None, reduction=1):
    rows, labels = (x.reshape(1, -1), target.reshape(1)) if x.dim() < 2 else (x, target)
    distance = F.relu(margin - rows.gather(1, labels[:, None]) + rows)
    distance = distance if p == 1 else distance * distance
    if weight is not None:
        distance = distance * weight[labels][:, None]
    own = torch.arange(rows.shape[1]) == labels[:, None]
    each = distance.masked_fill(own, 0).sum(1) / rows.shape[1]
    if reduction == 0:
        return each.select(0, 0) if x.dim() < 2 and target.dim() == 0 else each
    return each.sum() if reduction == 2 else each.mean()


@_defines("aten::embedding_bag")
def _embedding_bag(
    weight, index, offsets, scale_by_frequency=False, mode=0, sparse=False, scales=None, whole=False, padding=None
):
    if mode == 2 or scale_by_frequency:
        raise NotImplementedError("the largest of a bag, or gradients scaled by frequency")
    offsets = offsets[:-1] if whole else offsets
    starts = torch.zeros(index.shape[0] + 1, dtype=torch.int64)
    starts = starts.scatter_add(0, offsets.long(), torch.ones_like(offsets, dtype=torch.int64))
    bags = starts.cumsum(0)[:-1] - 1
    rows = weight[index]
    rows = rows if scales is None else rows * scales[:, None]
    counted = torch.ones(index.shape[0], dtype=weight.dtype)
    if padding is not None:
        none = index == (padding if padding >= 0 else weight.shape[0] + padding)
        rows, counted = rows.masked_fill(none[:, None], 0), counted.masked_fill(none, 0)
    sums = torch.zeros(offsets.shape[0], weight.shape[1], dtype=weight.dtype)
    sums = _index_add(sums, 0, bags, rows)
    sizes = torch.zeros(offsets.shape[0], dtype=weight.dtype).scatter_add(0, bags, counted)
    if mode == 1:
        sums = sums / sizes.clamp(min=1)[:, None]
    return sums, bags, sizes.long(), sizes.long()


@_defines("aten::unfold")
def _unfold(x, dim, size, step):
    if x.dim() == 0:
        raise Keep
    starts = torch.arange(0, x.shape[dim] - size + 1, step)
    places = starts[:, None] + torch.arange(size)
    dim = dim % x.dim()
    shape = [*x.shape[:dim], *places.shape, *x.shape[dim + 1 :]]
    taken = x.index_select(dim, places.reshape(-1)).reshape(shape)
    return taken.movedim(dim + 1, -1)


@_defines("aten::index_add")
def _index_add(x, dim, index, source, alpha=1):
    if x.dim() == 0:
        raise Keep
    dim = dim % x.dim()
    index = index.reshape([-1 if d == dim else 1 for d in range(x.dim())]).expand_as(source)
    return x.scatter_add(dim, index, source * alpha)


@_defines("aten::take_along_dim")
def _take_along_dim(x, index, dim=None):
    if dim is None:
        return x.reshape(-1).gather(0, index.reshape(-1))
    if x.dim() != index.dim() or any(int(n) == 1 or int(m) == 1 for n, m in zip(x.shape, index.shape, strict=True)):
        raise Keep
    return x.gather(dim, index)


@_defines("aten::diag_embed")
def _diag_embed(x, offset=0, dim1=-2, dim2=-1):
    if offset or (dim1 % (x.dim() + 1), dim2 % (x.dim() + 1)) != (x.dim() - 1, x.dim()):
        raise Keep
    places = torch.arange(x.shape[-1])
    return x.unsqueeze(-1).masked_fill(places[:, None] != places, 0)


@_defines("aten::diagonal")
def _diagonal(x, offset=0, dim1=0, dim2=1):
    dim1, dim2 = dim1 % x.dim(), dim2 % x.dim()
    x = x.permute([d for d in range(x.dim()) if d not in (dim1, dim2)] + [dim1, dim2])
    rows, columns = x.shape[-2], x.shape[-1]
    first = offset if offset >= 0 else -offset * columns
    count = torch.minimum(rows + min(offset, 0), columns - max(offset, 0))
    return x.flatten(-2).index_select(-1, torch.arange(count) * (columns + 1) + first)


@_defines("aten::adaptive_avg_pool1d", "aten::adaptive_avg_pool2d", "aten::adaptive_avg_pool3d")
def _adaptive_avg_pool(x, sizes):
    """Means of slices along one dimension after the other; the mean of all where one is left."""
    for d, wanted in zip(range(-len(sizes), 0), sizes, strict=True):
        if wanted == 1:
            x = x.mean(d, keepdim=True)
        elif wanted is not None and wanted != int(x.shape[d]):
            n = int(x.shape[d])
            ends = [(i * n // wanted, -(-(i + 1) * n // wanted)) for i in range(wanted)]
            x = torch.cat([x.narrow(d, a, b - a).mean(d, keepdim=True) for a, b in ends], d)
    return x


@_defines("aten::adaptive_max_pool1d", "aten::adaptive_max_pool2d", "aten::adaptive_max_pool3d")
def _adaptive_max_pool(x, sizes):
    """Windows of one width: the last element of a shorter one is repeated, and the first of the largest is taken."""
    rank = len(sizes)
    if all(n == 1 for n in sizes):  # of any size
        values, index = _picked(x.flatten(-rank), x.flatten(-rank).argmax(-1, keepdim=True), -1, True)
        more = (..., *[None] * (rank - 1))
        return values[more], index[more]
    given = [int(n) for n in x.shape[-rank:]]
    places = torch.zeros([1] * (2 * rank), dtype=torch.int64)
    for d, (n, wanted) in enumerate(zip(given, sizes, strict=True)):
        wanted = n if wanted is None else wanted
        ends = [(i * n // wanted, -(-(i + 1) * n // wanted)) for i in range(wanted)]
        width = max(b - a for a, b in ends)
        along = torch.tensor([[min(a + k, b - 1) for k in range(width)] for a, b in ends])
        shape = [wanted if i == d else width if i == rank + d else 1 for i in range(2 * rank)]
        places = places * n + along.reshape(shape)
    windows = places.flatten(rank).flatten(0, rank - 1)
    count, width = windows.shape
    taken = x.flatten(-rank).index_select(-1, windows.reshape(-1)).unflatten(-1, (count, width))
    index = taken.argmax(-1, keepdim=True)
    values = taken.gather(-1, index).select(-1, 0)
    where = windows.expand_as(taken).gather(-1, index).select(-1, 0)
    wanted = places.shape[:rank]
    return values.unflatten(-1, wanted), where.unflatten(-1, wanted)


@_defines("aten::avg_pool1d", "aten::avg_pool2d", "aten::avg_pool3d", again=True)
def _avg_pool(x, kernel, stride, padding, ceil_mode, count_include_pad, divisor=None):
    """Sums of windows, by a divisor that is not their size."""
    if divisor is None:
        raise Keep
    if ceil_mode:
        raise NotImplementedError("windows that are cut, and a divisor")
    pool = F.avg_pool2d if x.dim() - len(kernel) < 3 and len(kernel) == 2 else F.avg_pool3d
    kernel = kernel * (2 if len(kernel) == 1 else 1)
    return pool(x, kernel, stride or None, padding, False, True) * (math.prod(kernel) / divisor)


@_defines("aten::col2im")
def _fold(x, size, kernel, dilation, padding, stride):
    (height, width), (down, right) = [n + 2 * p for n, p in zip(size, padding, strict=True)], stride
    tops = torch.arange(0, height - dilation[0] * (kernel[0] - 1), down)
    lefts = torch.arange(0, width - dilation[1] * (kernel[1] - 1), right)
    rows = (torch.arange(kernel[0]) * dilation[0])[:, None] + tops
    columns = (torch.arange(kernel[1]) * dilation[1])[:, None] + lefts
    places = (rows[:, None, :, None] * width + columns[None, :, None, :]).reshape(-1)
    parts = x.unflatten(-2, (-1, kernel[0] * kernel[1])).flatten(-2)
    image = torch.zeros_like(parts[..., :1]).expand([*parts.shape[:-1], height * width])
    image = _index_add(image, image.dim() - 1, places, parts).unflatten(-1, (height, width))
    return image.narrow(-2, padding[0], size[0]).narrow(-1, padding[1], size[1])


@_defines("aten::rms_norm")
def _rms_norm(x, shape, weight=None, eps=None):
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    axes = list(range(-len(shape), 0))
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    result = (wide * torch.rsqrt(wide.pow(2).mean(axes, keepdim=True) + eps)).to(x.dtype)
    return result if weight is None else result * weight


@_defines("aten::feature_dropout")
def _feature_dropout(x, p, train):
    if not train or p == 0:
        return x
    ones = torch.ones(x.shape[0], x.shape[1], dtype=x.dtype).reshape([*x.shape[:2], *([1] * (x.dim() - 2))])
    return x * F.dropout(ones, p)


# --- extremes and order -----------------------------------------------------------------------------------------------


@_defines("aten::max", again=True)
def _max(x, dim=None, keepdim=False):
    return _extreme(x, dim, keepdim, torch.argmax)


@_defines("aten::min", again=True)
def _min(x, dim=None, keepdim=False):
    return _extreme(x, dim, keepdim, torch.argmin)


def _extreme(x, dim, keepdim, arg):
    """Over a dimension: the whole gradient goes to the element that the index names."""
    if not isinstance(dim, int) or x.dim() == 0:
        raise Keep
    index = arg(x.byte() if x.dtype == torch.bool else x, dim, keepdim=True)
    return _picked(x, index, dim, keepdim)


def _picked(x, index, dim, keepdim):
    """Values at an index that has kept the dimension, and the index."""
    values = x.gather(dim, index)
    return (values, index) if keepdim else (values.select(dim, 0), index.select(dim, 0))


@_defines("aten::median")
def _median(x, dim=None, keepdim=False):
    if x.dim() == 0:
        raise Keep
    if dim is None:  # its gradient is shared by all that are equal
        value = _median(x.reshape(-1), 0)[0].detach()
        taken = (x == value) | (x.isnan() & value.isnan()) if x.is_floating_point() else x == value
        if not x.is_floating_point():
            return value
        return torch.where(taken, x, 0).sum() / taken.sum()
    index = x.argsort(dim).select(dim, (x.shape[dim] - 1) // 2).unsqueeze(dim)
    if x.is_floating_point():
        nan = x.isnan()
        index = torch.where(nan.any(dim, keepdim=True), nan.long().argmax(dim, keepdim=True), index)
    return _picked(x, index, dim, keepdim)


@_defines("aten::nanmedian")
def _nanmedian(x, dim=None, keepdim=False):
    if x.dim() == 0 or not x.is_floating_point():
        raise Keep
    if dim is None:
        value = _nanmedian(x.reshape(-1), 0)[0].detach()
        taken = (x == value) | (x.isnan() & value.isnan())
        return torch.where(taken, x, 0).sum() / taken.sum()
    count = (~x.isnan()).sum(dim, keepdim=True)
    return _picked(x, x.argsort(dim).gather(dim, ((count - 1) // 2).clamp(min=0)), dim, keepdim)


@_defines("aten::kthvalue")
def _kthvalue(x, k, dim=-1, keepdim=False):
    if x.dim() == 0:
        raise Keep
    index = x.topk(k, dim, largest=False)[1].narrow(dim, k - 1, 1)
    return _picked(x, index, dim, keepdim)


@_defines("aten::sort", again=True)
def _sort(x, *arguments):
    """The engine's order is stable."""
    if isinstance(arguments[0], (bool, type(None))) and len(arguments) == 3:
        _, dim, descending = arguments
        return torch.sort(x, dim, descending)
    raise Keep


@_defines("aten::argsort")
def _argsort(x, *arguments):
    dim, descending = arguments[-2:]
    return torch.sort(x, dim, descending)[1]


@_defines("aten::clamp", again=True)
def _clamp(x, low=None, high=None):
    """By tensors: where x is at its bound the gradient is its own."""
    if not isinstance(low, torch.Tensor) and not isinstance(high, torch.Tensor):
        raise Keep
    if low is not None:
        x = torch.where(_beyond(x < low, low), low, x)
    return x if high is None else torch.where(_beyond(x > high, high), high, x)


def _beyond(outside, bound):
    return outside | bound.isnan() if bound.is_floating_point() else outside


# --- pointwise --------------------------------------------------------------------------------------------------------


@_defines("aten::floor", "aten::ceil", "aten::trunc", "aten::fix", "aten::round")
def _rounded(x, *arguments):
    """Integers are whole."""
    if x.is_floating_point():
        raise Keep
    return x + 0


@_defines("aten::any", again=True)
def _any(x, *arguments):
    if x.dtype == torch.bool:
        raise Keep
    return (x != 0).any(*arguments)


@_defines("aten::all", again=True)
def _all(x, *arguments):
    if x.dtype == torch.bool:
        raise Keep
    return (x != 0).all(*arguments)


@_defines("aten::logaddexp")
def _logaddexp(a, b):
    """Equal infinities stay: their difference is NaN."""
    same = (a == b) & a.isinf()
    distance = (a - b).masked_fill(same, 0).abs()
    return torch.where(same, a, torch.maximum(a, b) + torch.log1p(torch.exp(-distance)))


@_defines("aten::logaddexp2")
def _logaddexp2(a, b):
    two = math.log(2)
    return _logaddexp(a * two, b * two) / two


@_defines("aten::xlogy")
def _xlogy(x, y):
    y = y if isinstance(y, torch.Tensor) else torch.full_like(x, y)
    none = (x == 0) & ((y <= 0) | (y == math.inf))
    return torch.where(none, 0, x * y.masked_fill(none, 1).log())


@_defines("aten::special_xlog1py")
def _xlog1py(x, y):
    y = y if isinstance(y, torch.Tensor) else torch.full_like(x, y)
    none = (x == 0) & ((y <= -1) | (y == math.inf))
    return torch.where(none, 0, x * torch.log1p(y.masked_fill(none, 0)))


@_defines("aten::log2")
def _log2(x):
    return x.log() / math.log(2)


@_defines("aten::log10")
def _log10(x):
    return x.log() / math.log(10)


@_defines("aten::float_power")
def _float_power(x, y):
    x, y = (v.double() if isinstance(v, torch.Tensor) else float(v) for v in (x, y))
    return torch.pow(x, y)


@_defines("aten::nan_to_num")
def _nan_to_num(x, nan=None, highest=None, lowest=None):
    if not x.is_floating_point():
        return x + 0
    limits = torch.finfo(x.dtype)
    x = torch.where(x.isnan(), 0.0 if nan is None else nan, x)
    x = torch.where(x == math.inf, limits.max if highest is None else highest, x)
    return torch.where(x == -math.inf, limits.min if lowest is None else lowest, x)


@_defines("aten::prelu", again=True)
def _prelu(x, weight):
    if weight.dim():
        raise Keep
    return F.prelu(x, weight.reshape(1))


@_defines("aten::heaviside")
def _heaviside(x, values):
    return torch.where(x == 0, values, (x > 0).to(x.dtype))


@_defines("aten::softplus", again=True)
def _softplus(x, beta=1, threshold=20):
    if beta == 1 and threshold == 20:
        raise Keep
    return torch.where(x * beta > threshold, x, F.softplus(x.mul(beta)) / beta)


@_defines("aten::threshold")
def _threshold(x, threshold, value):
    return torch.where(x <= threshold, value, x)


@_defines("aten::softshrink")
def _softshrink(x, lambd=0.5):
    return torch.where(x > lambd, x - lambd, torch.where(x < -lambd, x + lambd, x * 0))


@_defines("aten::hardshrink")
def _hardshrink(x, lambd=0.5):
    return torch.where((x >= -lambd) & (x <= lambd), 0, x)


@_defines("aten::softmax", again=True)
def _softmax(x, dim, dtype=None):
    if dtype is None or x.dtype == _type(dtype):
        raise Keep
    return x.to(_type(dtype)).softmax(dim)


@_defines("aten::log_softmax", again=True)
def _log_softmax(x, dim, dtype=None):
    if dtype is None or x.dtype == _type(dtype):
        raise Keep
    return x.to(_type(dtype)).log_softmax(dim)


@_defines("aten::_safe_softmax")
def _safe_softmax(x, dim, dtype=None):
    x = x if dtype is None else x.to(_type(dtype))
    nothing = (x == -math.inf).all(dim, keepdim=True)
    return x.masked_fill(nothing, 0).softmax(dim).masked_fill(nothing, 0)


#: Types as a graph has them: numbers.
_TYPES = {
    0: torch.uint8, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.int64, 5: torch.float16, 6: torch.float32,
    7: torch.float64, 11: torch.bool, 15: torch.bfloat16,
}  # fmt: skip


def _type(dtype):
    if isinstance(dtype, int) and dtype not in _TYPES:
        raise Keep
    return _TYPES[dtype] if isinstance(dtype, int) else dtype


@_defines("aten::cumsum", again=True)
def _cumsum(x, dim, dtype=None):
    if dtype is not None or x.dtype != torch.int32:
        raise Keep
    return x.long().cumsum(dim)


@_defines("aten::normal")
def _normal(mean, std, size=None, generator=None, dtype=None, *layout):
    if isinstance(mean, torch.Tensor) or isinstance(std, torch.Tensor):
        raise Keep
    return torch.randn(size, dtype=None if dtype is None else _type(dtype)) * std + mean


@_defines("aten::addcmul")
def _addcmul(x, a, b, value=1):
    return x + (a * b if value == 1 else a * b * value)


@_defines("aten::isclose")
def _isclose(a, b, rtol=1e-05, atol=1e-08, equal_nan=False):
    same = a == b
    if not a.is_floating_point():
        a, b = a.to(torch.get_default_dtype()), b.to(torch.get_default_dtype())
    elif equal_nan:
        same = same | (a.isnan() & b.isnan())
    return same | (((a - b).abs() <= atol + (rtol * b).abs()) & b.isfinite())


@_defines("aten::signbit")
def _signbit(x):
    return (x < 0) | ((x == 0) & (1 / x < 0)) if x.is_floating_point() else x < 0


@_defines("aten::sum", again=True)
def _sum_of_all(x, dim=None, keepdim=False, dtype=None):
    """No dimension is every dimension."""
    if dim != [] or keepdim:
        raise Keep
    return x.sum(dtype=None if dtype is None else _type(dtype))


@_defines("aten::permute", again=True)
def _permute(x, dims):
    if all(d >= 0 for d in dims):
        raise Keep
    return x.permute([d % x.dim() for d in dims])


@_defines("aten::movedim", "aten::moveaxis")
def _movedim(x, source, destination):
    source, destination = ([d] if isinstance(d, int) else d for d in (source, destination))
    placed = {to % x.dim(): d % x.dim() for d, to in zip(source, destination, strict=True)}
    rest = iter(d for d in range(x.dim()) if d not in placed.values())
    return x.permute([placed[d] if d in placed else next(rest) for d in range(x.dim())])


@_defines("aten::masked_select", again=True)
def _masked_select(x, mask):
    if tuple(map(int, x.shape)) == tuple(map(int, mask.shape)):
        raise Keep
    return torch.masked_select(*torch.broadcast_tensors(x, mask))


@_defines("aten::searchsorted")
def _searchsorted(sequence, values, narrow=False, right=False, side=None, sorter=None):
    if sorter is not None or not isinstance(values, torch.Tensor):
        raise NotImplementedError("a sorter, or a number")
    if sequence.dim() > 1:
        sequence = sequence.unsqueeze(-2)
    values = values.unsqueeze(-1)
    before = sequence <= values if right or side == "right" else sequence < values
    return before.sum(-1).int() if narrow else before.sum(-1)


@_defines("aten::nanmean")
def _nanmean(x, dim=None, keepdim=False, dtype=None):
    x = x if dtype is None else x.to(_type(dtype))
    nan = x.isnan()
    total, count = _sum(x.masked_fill(nan, 0), dim, keepdim, None), _sum(~nan, dim, keepdim, None)
    return total / count


@_defines("aten::addr")
def _addr(x, a, b, beta=1, alpha=1):
    return beta * x + alpha * (a.unsqueeze(1) * b)


@_defines("aten::linalg_vecdot")
def _vecdot(a, b, dim=-1):
    return (a * b).sum(dim)


@_defines("aten::vdot")
def _vdot(a, b):
    return (a * b).sum()


# --- indices that come twice ------------------------------------------------------------------------------------------


@_defines("aten::index_put", "aten::_index_put_impl", "aten::_unsafe_index_put", again=True)
def _index_put(x, indices, values, accumulate=False, unsafe=False):
    if not accumulate:
        raise Keep
    places = [d for d, i in enumerate(indices) if i is not None]
    if any(indices[d].dtype in (torch.bool, torch.uint8) for d in places):  # a mask names no element twice
        return x + torch.zeros_like(x).index_put(indices, values)
    index = torch.broadcast_tensors(*(indices[d] for d in places))
    rank, first = index[0].dim(), places[0]
    values = values.to(x.dtype).expand_as(x[tuple(slice(None) if i is None else i for i in indices)])
    if places == list(range(first, first + len(places))):
        values = values.movedim(list(range(first, first + rank)), list(range(rank)))
    rest = [d for d in range(x.dim()) if d not in places]
    order = places + rest
    moved = x.permute(order)
    flat = torch.zeros_like(index[0])
    for d, i in zip(places, index, strict=True):
        flat = flat * x.shape[d] + torch.where(i < 0, i + x.shape[d], i)
    kept = moved.shape[len(places) :]
    count = 1
    for d in places:
        count = count * x.shape[d]
    flat, values = flat.reshape(-1), values.reshape([-1, *kept])
    sums = _index_add(moved.reshape([count, *kept]), 0, flat, values)
    return sums.reshape(moved.shape).permute([order.index(d) for d in range(x.dim())])


@_defines("aten::index_fill")
def _index_fill(x, dim, index, value):
    if x.dim() == 0:
        return x * 0 + value
    size = x.shape[dim]
    hit = (
        torch.zeros(size, dtype=torch.int64).scatter(0, torch.where(index < 0, index + size, index).reshape(-1), 1) > 0
    )
    hit = hit.reshape([-1 if d == dim % x.dim() else 1 for d in range(x.dim())])
    return torch.where(hit, value, x)


@_defines("aten::fft_fftshift")
def _fftshift(x, dim=None):
    return _rotated(x, dim, lambda size: size // 2)


@_defines("aten::fft_ifftshift")
def _ifftshift(x, dim=None):
    return _rotated(x, dim, lambda size: (size + 1) // 2)


def _rotated(x, dim, by):
    for d in range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim:
        size = x.shape[d]
        x = x.index_select(d, (torch.arange(size) + size - by(size)) % size)
    return x


@_defines("aten::index_copy")
def _index_copy(x, dim, index, source):
    if x.dim() == 0:
        raise Keep
    shape = [-1 if d == dim % x.dim() else 1 for d in range(x.dim())]
    return x.scatter(dim, index.reshape(shape).expand_as(source), source)


@_defines("aten::scatter_reduce", again=True)
def _scatter_reduce(x, dim, index, source, reduce, include_self=True):
    """With the elements of x, or with what changes nothing in their place."""
    if x.dim() == 0 or (include_self and reduce != "mean"):
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


def _extreme_of_sources(x, dim, index, source, reduce):
    """Sources that are the result share its gradient, with x where that is equal, too, although it takes no part."""
    start = x.detach().scatter(dim, index, -math.inf if reduce == "amax" else math.inf)
    result = start.scatter_reduce(dim, index, source.detach(), reduce)
    taken = source == result.gather(dim, index)
    count = (x == result).to(x.dtype).scatter_add(dim, index, taken.to(x.dtype))
    each = torch.where(taken, source, 0) / count.gather(dim, index).clamp(min=1)
    shares = x.scatter(dim, index, 0).scatter_add(dim, index, each)
    return result + (shares - shares.detach())


def _limits(dtype):
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


# --- norms ------------------------------------------------------------------------------------------------------------


@_defines("aten::norm", again=True)
def _norm(x, p=None, dim=None, keepdim=False, dtype=None):
    p = 2.0 if p is None else p
    if not isinstance(p, (int, float)):
        raise Keep
    return _vector_norm(x, p, dim, keepdim, dtype)


@_defines("aten::linalg_vector_norm")
def _vector_norm(x, p=2, dim=None, keepdim=False, dtype=None):
    """Of a vector of zeros the gradient is zero; of equal ones it is shared for infinite p."""
    x = x if dtype is None else x.to(_type(dtype))
    if not x.is_floating_point():
        raise Keep
    dim = list(range(x.dim())) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    if x.dim() == 0:
        return x.abs() if p != 0 else (x != 0).to(x.dtype)
    size = x.abs()
    if p == math.inf:
        return size.amax(dim, keepdim)
    if p == -math.inf:
        return size.amin(dim, keepdim)
    if p == 0:
        return (x != 0).to(x.dtype).sum(dim, keepdim)
    if p == 1:
        return size.sum(dim, keepdim)
    if p == 2:
        return _root((x * x).sum(dim, keepdim))
    # Through zero neither the power nor its root has a slope: PyTorch takes none.
    zero = size == 0
    powers = size.masked_fill(zero, 1).pow(p).masked_fill(zero, 0 if p > 0 else math.inf)
    total = powers.sum(dim, keepdim)
    none = (total == 0) | (total == math.inf)
    return torch.where(none, (total ** (1 / p)).detach(), total.masked_fill(none, 1).pow(1 / p))


@_defines("aten::linalg_norm")
def _linalg_norm(x, order=None, dim=None, keepdim=False, dtype=None):
    dim = [dim] if isinstance(dim, int) else dim
    if order is None:
        return _vector_norm(x, 2, dim, keepdim, dtype)
    if len(dim or range(x.dim())) == 1:
        return _vector_norm(x, order, dim, keepdim, dtype)
    return _matrix_norm(x, order, dim or [-2, -1], keepdim, dtype)


@_defines("aten::linalg_matrix_norm")
def _matrix_norm(x, order="fro", dim=(-2, -1), keepdim=False, dtype=None):
    x = x if dtype is None else x.to(_type(dtype))
    if order == "fro":
        return _vector_norm(x, 2, list(dim), keepdim)
    if order not in (1, -1, math.inf, -math.inf):
        raise NotImplementedError(f"a matrix norm of order {order}")
    rows, columns = (d % x.dim() for d in dim)
    if abs(order) != 1:
        rows, columns = columns, rows
    sums = x.abs().sum(rows, keepdim=True)
    result = sums.amax(columns, keepdim=True) if order > 0 else sums.amin(columns, keepdim=True)
    return result if keepdim else result.select(max(rows, columns), 0).select(min(rows, columns), 0)


@_defines("aten::cdist")
def _cdist(a, b, p=2.0, mode=None):
    return _vector_norm(a.unsqueeze(-2) - b.unsqueeze(-3), p, [-1])


@_defines("aten::pairwise_distance")
def _pairwise_distance(a, b, p=2.0, eps=1e-6, keepdim=False):
    return _vector_norm(a - b + eps, p, [-1], keepdim)


@_defines("aten::cosine_similarity")
def _cosine_similarity(a, b, dim=1, eps=1e-8):
    """The gradient passes the bound of the norms as if it were not there."""
    if a.dim() == 0 or b.dim() == 0:
        raise NotImplementedError("tensors of rank 0")
    a, b = torch.broadcast_tensors(a, b)

    def unit(x):
        norm = _vector_norm(x, 2, [dim], True)
        return x / (norm + (norm.clamp(min=eps) - norm).detach())

    return (unit(a) * unit(b)).sum(dim)


@_defines("aten::var")
def _var(x, *arguments):
    return _moments(x, *arguments)[0]


@_defines("aten::var_mean")
def _var_mean(x, *arguments):
    return _moments(x, *arguments)


@_defines("aten::std")
def _std(x, *arguments):
    return _root(_moments(x, *arguments)[0])


@_defines("aten::std_mean")
def _std_mean(x, *arguments):
    variance, mean = _moments(x, *arguments)
    return _root(variance), mean


def _moments(x, dim=None, correction=1, keepdim=False):
    """Variance and mean, by the arguments of every overload: `dim` may be absent, the correction a bool or None."""
    if isinstance(dim, bool):
        dim, correction = None, dim
    dim = dim or list(range(x.dim()))
    if x.dim() == 0:
        raise Keep
    correction = 1 if correction is None else correction if isinstance(correction, float) else int(correction)
    mean = x.mean(dim, keepdim=True)
    squares = (x - mean).square().sum(dim, keepdim)
    count = 1
    for d in dim:
        count = count * x.shape[d]
    return squares / (count - correction), mean if keepdim else x.mean(dim)


def _root(x):
    """The square root, whose gradient at zero is zero."""
    none = x == 0
    return x.masked_fill(none, 1).sqrt().masked_fill(none, 0)


# --- normalisations ---------------------------------------------------------------------------------------------------


@_defines("aten::batch_norm")
def _batch_norm(x, weight, bias, mean, variance, training, momentum, eps, cudnn):
    """Without running statistics; with them it is one operator."""
    if mean is not None:
        raise Keep
    axes = [d for d in range(x.dim()) if d != 1]
    shape = [-1 if d == 1 else 1 for d in range(x.dim())]
    centred = x - x.mean(axes, keepdim=True)
    result = centred * torch.rsqrt((centred * centred).mean(axes, keepdim=True) + eps)
    result = result if weight is None else result * weight.reshape(shape)
    return result if bias is None else result + bias.reshape(shape)


DEFINITIONS |= {
    "aten::fmax": lambda a, b: torch.where(b.isnan() | (a >= b), a, b),
    "aten::fmin": lambda a, b: torch.where(b.isnan() | (a <= b), a, b),
    "aten::copysign": lambda a, b: torch.where((b < 0) | ((b == 0) & (1 / b < 0)), -a.abs(), a.abs()),
    "aten::addcdiv": lambda x, a, b, value=1: x + value * (a / b),
    "aten::addbmm": lambda x, a, b, beta=1, alpha=1: beta * x + alpha * (a @ b).sum(0),
    "aten::hstack": lambda tensors: torch.cat(tensors, 1 if tensors[0].dim() > 1 else 0),
    "aten::tile": lambda x, times: x.repeat([1] * (x.dim() - len(times)) + times),
    "aten::nansum": lambda x, dim=None, keepdim=False, dtype=None: _sum(
        x.masked_fill(x.isnan(), 0), dim, keepdim, dtype
    ),
    "aten::bilinear": lambda a, b, w, bias=None: _plus(torch.einsum("...i,kij,...j->...k", a, w, b), bias),
    "aten::channel_shuffle": lambda x, groups: x.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2),
}


def _sum(x, dim, keepdim, dtype):
    return x.sum(dtype=dtype) if dim is None or dim == [] else x.sum(dim, keepdim, dtype=dtype)


def _plus(x, bias):
    return x if bias is None else x + bias
