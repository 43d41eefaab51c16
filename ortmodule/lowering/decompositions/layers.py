"""Defines attention, losses, pools and other layers by other operators."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ortmodule.core.errors import Keep, Leave
from ortmodule.lowering.decompositions.order import picked
from ortmodule.lowering.decompositions.table import defines, traced_sizes


@defines("aten::scaled_dot_product_attention")
def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, dropout: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """A row with nothing to attend to gives zeros, and 16-bit scores and weights are float32, as in PyTorch.

    The scores of what is masked become the lowest finite number and its weights an exact zero, so that no NaN appears
    in either direction.
    """
    if enable_gqa:
        times = int(query.shape[-3]) // int(key.shape[-3])
        key, value = _repeat_interleave(key, times, -3), _repeat_interleave(value, times, -3)
    scores = (query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)) @ key.transpose(-2, -1)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
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
    return (F.dropout(weights, dropout) if dropout else weights).to(value.dtype) @ value


_OF_REPEATS_ALONE: Any = object()


@defines("aten::repeat_interleave")
def _repeat_interleave(
    x: Tensor, repeats: Any, dim: int | None = _OF_REPEATS_ALONE, output_size: int | None = None
) -> Tensor:
    if dim is _OF_REPEATS_ALONE:
        return _numbers_repeated(x, repeats)
    if dim is None:
        x, dim = x.reshape(-1), 0
    dim = dim % x.dim()
    if isinstance(repeats, Tensor) and repeats.numel() > 1:
        if output_size is not None:
            return x.index_select(dim, torch.repeat_interleave(repeats, output_size=output_size))
        return x.index_select(dim, _numbers_repeated(repeats, None))
    # A number that is computed from sizes is a tensor in the trace, and stays one.
    times: Any = repeats.reshape(()) if isinstance(repeats, Tensor) else repeats
    shape = [*x.shape[:dim], x.shape[dim] * times, *x.shape[dim + 1 :]]
    spread = x.unsqueeze(dim + 1).expand([-1] * (dim + 1) + [times] + [-1] * (x.dim() - dim - 1))
    return spread.reshape(shape)


def _numbers_repeated(repeats: Any, output_size: Any) -> Tensor:
    """0, 1, ..., each as often as ``repeats`` says: for each place the number of those that end before it."""
    if output_size is not None or repeats.dim() != 1:
        raise Leave("a size of the result that is known before")
    refused = torch.arange(1).index_select(0, repeats.clamp(max=0))  # what is negative
    ends = (repeats + refused).cumsum(0)
    total: Any = ends[-1] if ends.numel() else torch.zeros((), dtype=torch.int64)
    ended = torch.zeros(total + 1, dtype=torch.int64).index_add(0, ends, torch.ones_like(ends))
    return ended.cumsum(0)[:-1].to(repeats.dtype)


@defines("aten::cross_entropy_loss")
def _cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int, label_smoothing: float,
) -> Tensor:  # fmt: skip
    """Soft targets; class indices stay one operator. What is counted need not fit 16 bits."""
    if not target.is_floating_point():
        raise Keep
    axis = 1 if logits.dim() > 1 else 0
    classes = torch.as_tensor(logits.shape[axis]).to(torch.promote_types(logits.dtype, torch.float32))
    log_p = logits.log_softmax(axis)
    if weight is not None:
        weighted = log_p * weight.reshape([-1 if d == axis else 1 for d in range(logits.dim())])
    else:
        weighted = log_p
    target = target * (1 - label_smoothing) + label_smoothing / classes
    each = -(weighted * target).sum(axis)
    if reduction != 1:
        return each if reduction == 0 else each.sum()
    return (each.sum() / (logits.numel() / classes)).to(each.dtype)


@defines("aten::binary_cross_entropy")
def _binary_cross_entropy(x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1) -> Tensor:
    """Logarithms are at least -100, and the slope is what PyTorch says it is where x is 0 or 1."""
    p = x.detach()
    each = (target - 1) * torch.log1p(-p).clamp(min=-100) - target * p.log().clamp(min=-100)
    slope = ((p - target) / ((1 - p) * p).clamp(min=1e-12)).detach()
    each = each + (x - p) * slope
    return _reduced(each if weight is None else each * weight, reduction)


@defines("aten::binary_cross_entropy_with_logits")
def _binary_cross_entropy_with_logits(
    x: Tensor, target: Tensor, weight: Tensor | None = None, pos_weight: Tensor | None = None, reduction: int = 1,
) -> Tensor:  # fmt: skip
    each = (1 - target) * x
    softplus = F.softplus(-x)
    each = each + (softplus if pos_weight is None else ((pos_weight - 1) * target + 1) * softplus)
    return _reduced(each if weight is None else each * weight, reduction)


def _reduced(each: Tensor, reduction: int) -> Tensor:
    return each if reduction == 0 else each.sum() if reduction == 2 else each.mean()


@defines("aten::smooth_l1_loss", recursive=True)
def _smooth_l1_loss(x: Tensor, target: Tensor, reduction: int = 1, beta: float = 1.0) -> Tensor:
    if beta != 0:
        raise Keep
    return _reduced((x - target).abs(), reduction)


@defines("aten::kl_div")
def _kl_div(x: Tensor, target: Tensor, reduction: int = 1, log_target: bool = False) -> Tensor:
    each = target.exp() * (target - x) if log_target else torch.xlogy(target, target) - target * x
    return _reduced(each, reduction)


@defines("aten::log_sigmoid", "aten::log_sigmoid_forward")
def _log_sigmoid(x: Tensor) -> Tensor:
    return 0.0 - F.softplus(-x)  # of infinity: 0, not -0


@defines("aten::diff")
def _diff(x: Tensor, n: int = 1, dim: int = -1, prepend: Tensor | None = None, append: Tensor | None = None) -> Tensor:
    """By ends that are counted from behind: no size becomes a number."""
    parts = [t for t in (prepend, x, append) if t is not None]
    x = torch.cat(parts, dim) if len(parts) > 1 else x
    before = (slice(None),) * (dim % x.dim())
    for _ in range(n):
        later, earlier = x[(*before, slice(1, None))], x[(*before, slice(None, -1))]
        x = later ^ earlier if x.dtype is torch.bool else later - earlier
    return x


@defines("aten::multi_margin_loss")
def _multi_margin_loss(
    x: Tensor, target: Tensor, p: float = 1, margin: float = 1.0, weight: Tensor | None = None, reduction: int = 1,
) -> Tensor:  # fmt: skip
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


@defines("aten::embedding_bag")
def _embedding_bag(
    weight: Tensor, index: Tensor, offsets: Tensor, scale_by_frequency: bool = False, mode: int = 0,
    sparse: bool = False, scales: Tensor | None = None, whole: bool = False, padding: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    if mode == 2 or scale_by_frequency or whole:
        # where the last offset is not the end of all, PyTorch's kernels differ by type and mode in what the last bag is
        raise Leave("the largest of a bag, gradients scaled by frequency, or the end of the last bag")
    starts = torch.zeros(index.shape[0] + 1, dtype=torch.int64)
    starts = starts.scatter_add(0, offsets.long(), torch.ones_like(offsets, dtype=torch.int64))
    bags = starts.cumsum(0)[:-1] - 1
    rows = weight.index_select(0, index)
    rows = rows if scales is None else rows * scales[:, None]
    counted = torch.ones(index.shape[0], dtype=weight.dtype)
    if padding is not None:
        none = index == (padding if padding >= 0 else weight.shape[0] + padding)
        rows, counted = rows.masked_fill(none[:, None], 0), counted.masked_fill(none, 0)
    sums = torch.zeros(offsets.shape[0], weight.shape[1], dtype=weight.dtype)
    sums = index_add(sums, 0, bags, rows)
    sizes = torch.zeros(offsets.shape[0], dtype=weight.dtype).scatter_add(0, bags, counted)
    if mode == 1:
        sums = sums / sizes.clamp(min=1)[:, None]
    return sums, bags, sizes.long(), sizes.long()


@defines("aten::unfold")
def _unfold(x: Tensor, dim: int, size: int, step: int) -> Tensor:
    if x.dim() == 0:
        raise Keep
    starts = torch.arange(0, x.shape[dim] - size + 1, step)
    places = starts[:, None] + torch.arange(size)
    dim = dim % x.dim()
    shape = [*x.shape[:dim], *places.shape, *x.shape[dim + 1 :]]
    taken = x.index_select(dim, places.reshape(-1)).reshape(shape)
    return taken.movedim(dim + 1, -1)


@defines("aten::index_add")
def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, alpha: float = 1) -> Tensor:
    if x.dim() == 0:
        raise Keep
    dim = dim % x.dim()
    index = index.reshape([-1 if d == dim else 1 for d in range(x.dim())]).expand_as(source)
    return x.scatter_add(dim, index, source * alpha)


@defines("aten::diagonal")
def _diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    dim1, dim2 = dim1 % x.dim(), dim2 % x.dim()
    x = x.permute([d for d in range(x.dim()) if d not in (dim1, dim2)] + [dim1, dim2])
    rows, columns = traced_sizes(x)
    first = offset if offset >= 0 else -offset * columns
    count: Any = torch.minimum(rows + min(offset, 0), columns - max(offset, 0))
    return x.flatten(-2).index_select(-1, torch.arange(count) * (columns + 1) + first)


@defines("aten::adaptive_avg_pool1d", "aten::adaptive_avg_pool2d", "aten::adaptive_avg_pool3d", sizes=True)
def _adaptive_avg_pool(x: Tensor, sizes: list[int]) -> Tensor:
    """Means of slices along one dimension after the other; the mean of all where one is left."""
    for d, wanted in zip(range(-len(sizes), 0), sizes, strict=True):
        if wanted == 1:
            x = x.mean(d, keepdim=True)
        elif wanted is not None and wanted != int(x.shape[d]):
            n = int(x.shape[d])
            ends = [(i * n // wanted, -(-(i + 1) * n // wanted)) for i in range(wanted)]
            x = torch.cat([x.narrow(d, a, b - a).mean(d, keepdim=True) for a, b in ends], d)
    return x


@defines("aten::adaptive_max_pool1d", "aten::adaptive_max_pool2d", "aten::adaptive_max_pool3d", sizes=True)
def _adaptive_max_pool(x: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """Windows of one width: the last element of a shorter one is repeated, and the first of the largest is taken. Where
    the sizes are multiples of those wanted, it is an ordinary pool."""
    rank = len(sizes)
    if all(n == 1 for n in sizes):  # of any size
        values, index = picked(x.flatten(-rank), _last_nan_or_largest(x.flatten(-rank)), -1, True)
        more = (..., *[None] * (rank - 1))
        return values[more], index[more]
    given = [int(n) for n in x.shape[-rank:]]
    if x.dim() == rank + 2 and all(not wanted or n % wanted == 0 for n, wanted in zip(given, sizes, strict=True)):
        pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[rank - 1]
        return pool(x, [n // (wanted or n) for n, wanted in zip(given, sizes, strict=True)], return_indices=True)
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
    index = _last_nan_or_largest(taken)
    values = taken.gather(-1, index).select(-1, 0)
    where = windows.expand_as(taken).gather(-1, index).select(-1, 0)
    wanted_sizes = places.shape[:rank]
    return values.unflatten(-1, wanted_sizes), where.unflatten(-1, wanted_sizes)


def _last_nan_or_largest(x: Tensor) -> Tensor:
    """Where PyTorch's loop over a window ends."""
    if not x.is_floating_point():
        return x.argmax(-1, keepdim=True)
    nan = torch.where(x.isnan(), torch.arange(x.shape[-1]), -1).amax(-1, keepdim=True)
    return torch.where(nan < 0, x.argmax(-1, keepdim=True), nan)


@defines("aten::avg_pool1d", "aten::avg_pool2d", "aten::avg_pool3d", recursive=True)
def _avg_pool(
    x: Tensor, kernel: list[int], stride: list[int], padding: list[int], ceil_mode: bool, count_include_pad: bool,
    divisor: Any = None,
) -> Tensor:  # fmt: skip
    """Sums of windows, by a divisor that is not their size; without a batch."""
    if x.dim() == 2:
        return F.avg_pool1d(x.unsqueeze(0), kernel, stride, padding, ceil_mode, count_include_pad).squeeze(0)
    if divisor is None:
        raise Keep
    rank = x.dim() - (1 if x.dim() == 3 and len(kernel) != 1 or x.dim() == 4 and len(kernel) == 3 else 2)
    kernel, padding = (v * rank if len(v) == 1 else v for v in (kernel, padding))
    stride = stride * rank if len(stride) == 1 else stride or kernel
    if ceil_mode:  # zeros make the windows at the end whole
        sides: list[int] = []
        for n, k, s, p in zip(map(int, x.shape[-rank:]), kernel, stride, padding, strict=True):
            count = -(-(n + 2 * p - k) // s) + 1
            count -= (count - 1) * s >= n + p
            sides = [p, max(0, (count - 1) * s + k - n - p), *sides]
        x, padding = F.pad(x, sides), [0] * rank
    pool = F.avg_pool2d if rank == 2 else F.avg_pool3d
    return pool(x, kernel, stride, padding, False, True) * (math.prod(kernel) / divisor)


@defines("aten::col2im")
def _fold(
    x: Tensor, size: list[int], kernel: list[int], dilation: list[int], padding: list[int], stride: list[int],
) -> Tensor:  # fmt: skip
    (height, width), (down, right) = [n + 2 * p for n, p in zip(size, padding, strict=True)], stride
    tops = torch.arange(0, height - dilation[0] * (kernel[0] - 1), down)
    lefts = torch.arange(0, width - dilation[1] * (kernel[1] - 1), right)
    rows = (torch.arange(kernel[0]) * dilation[0])[:, None] + tops
    columns = (torch.arange(kernel[1]) * dilation[1])[:, None] + lefts
    places = (rows[:, None, :, None] * width + columns[None, :, None, :]).reshape(-1)
    parts = x.unflatten(-2, (-1, kernel[0] * kernel[1])).flatten(-2)
    image = torch.zeros_like(parts[..., :1]).expand([*parts.shape[:-1], height * width])
    image = index_add(image, image.dim() - 1, places, parts).unflatten(-1, (height, width))
    return image.narrow(-2, padding[0], size[0]).narrow(-1, padding[1], size[1])


@defines("aten::one_hot", recursive=True)
def _one_hot(x: Tensor, classes: int = -1) -> None:
    if classes < 0:
        raise Leave("as many classes as there are in the data")
    raise Keep


@defines("aten::rms_norm", sizes=True)
def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Of the type of x, whatever the weight's is; a weight of that type goes into one operator of the engine."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    axes = list(range(-len(shape), 0))
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    result = wide * torch.rsqrt(wide.pow(2).mean(axes, keepdim=True) + eps)
    if weight is None or weight.dtype == x.dtype:
        return result.to(x.dtype) if weight is None else result.to(x.dtype) * weight
    return (result * weight).to(x.dtype)


@defines("aten::feature_dropout")
def _feature_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0:
        return x
    ones = torch.ones(x.shape[0], x.shape[1], dtype=x.dtype).reshape([*x.shape[:2], *([1] * (x.dim() - 2))])
    return x * F.dropout(ones, p)
