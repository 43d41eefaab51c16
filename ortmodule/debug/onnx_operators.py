"""Says what each ONNX operator computes, with functions of PyTorch: the table of the ONNX interpreter.

An entry is a function of (attributes, number of outputs, *operands). Autograd goes through it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ortmodule import _core
from ortmodule.core.dtypes import TORCH_TYPES
from ortmodule.core.errors import Unknown
from ortmodule.core.onnx_utils import constant_of, tensor

Tensor = torch.Tensor


Attributes = dict[str, Any]  # of a node
Results = tuple[Tensor, ...]
#: By domain and name.
TABLE: dict[tuple[str, str], Callable] = {}


def _operator(*names: str, domain: str = "") -> Callable:
    def register(function: Callable) -> Callable:
        TABLE.update({(domain, name): function for name in names})
        return function

    return register


def _plain(**functions: Callable) -> None:
    """Operators without attributes."""
    for name, function in functions.items():
        TABLE["", name] = lambda a, n, *x, function=function: function(*x)


def _fold(function: Callable) -> Callable:
    def apply(first: Tensor, *rest: Tensor) -> Tensor:
        for x in rest:
            first = function(first, x)
        return first

    return apply


def _div(a: Tensor, b: Tensor) -> Tensor:
    return a / b if a.is_floating_point() else _divided(partial(torch.div, rounding_mode="trunc"), a, b, a)


def _divided(divide: Callable, a: Tensor, b: Tensor, overflown: Tensor | int) -> Tensor:
    """``divide(a, b)``; ``overflown`` for the least integer by -1, where the CPU would end the process."""
    if a.is_floating_point() or b.is_floating_point() or not b.dtype.is_signed:
        return divide(a, b)
    overflows = (b == -1) & (a == torch.iinfo(a.dtype).min)
    return torch.where(overflows, overflown, divide(torch.where(overflows, 0, a), b))


def _ints(x: Tensor) -> list[int]:
    return [int(v) for v in x.tolist()]


def _ints_or_none(x: Tensor | None) -> list[int] | None:
    return None if x is None else _ints(x)


def _clip(x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    x = x if low is None else torch.maximum(x, low)
    return x if high is None else torch.minimum(x, high)


def _squeeze(x: Tensor, axes: list[int] | None) -> Tensor:
    return x.squeeze() if axes is None else x.squeeze(tuple(axes))


def _unsqueeze(x: Tensor, axes: list[int]) -> Tensor:
    rank = x.dim() + len(axes)
    for d in sorted(d % rank for d in axes):
        x = x.unsqueeze(d)
    return x


def _slice(x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor | None = None, steps: Tensor | None = None) -> Tensor:
    count = starts.numel()
    along, strides = _ints_or_none(axes) or range(count), _ints_or_none(steps) or [1] * count
    for start, end, axis, step in zip(_ints(starts), _ints(ends), along, strides, strict=True):
        places = range(x.shape[axis])[start:end:step] if step > 0 else _backwards(x.shape[axis], start, end, step)
        x = x.index_select(axis, torch.tensor(list(places), dtype=torch.int64))
    return x


def _backwards(size: int, start: int, end: int, step: int) -> range:
    return range(size)[slice(start, None if end < -size else end, step)]


def _gather_nd(x: Tensor, index: Tensor) -> Tensor:
    return x[tuple(index.unbind(-1))]


def _where(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(condition, a, b)


def _prelu(x: Tensor, slope: Tensor) -> Tensor:
    return torch.where(x < 0, x * slope, x)


def _pow(x: Tensor, e: Tensor) -> Tensor:
    """A number as exponent is what PyTorch takes for a number: 0.5 is a square root."""
    if e.dim() == 0 and not e.requires_grad:
        return x.pow(e.item()).to(x.dtype)
    return x.pow(e.to(x.dtype) if x.is_floating_point() else e).to(x.dtype)


def _range(start: Tensor, end: Tensor, step: Tensor) -> Tensor:
    count = max(0, math.ceil((end.item() - start.item()) / step.item()))
    return start + step * torch.arange(count, dtype=start.dtype)


_plain(
    Abs=torch.abs, Acos=torch.acos, Acosh=torch.acosh, Add=torch.add, And=torch.logical_and, Asin=torch.asin,
    Asinh=torch.asinh, Atan=torch.atan, Atanh=torch.atanh, Ceil=torch.ceil, Clip=_clip, Cos=torch.cos, Cosh=torch.cosh,
    Div=_div, Equal=torch.eq, Erf=torch.erf, Exp=torch.exp, Floor=torch.floor, Greater=torch.gt,
    GreaterOrEqual=torch.ge, Identity=lambda x: x, IsNaN=torch.isnan, Less=torch.lt,
    LessOrEqual=torch.le, Log=torch.log, MatMul=torch.matmul, Max=_fold(torch.maximum), Min=_fold(torch.minimum),
    Mul=torch.mul, Neg=torch.neg, Not=torch.logical_not, Or=torch.logical_or, PRelu=_prelu, Reciprocal=torch.reciprocal,
    Relu=torch.relu, Round=torch.round, Sigmoid=torch.sigmoid, Sign=torch.sign, Sin=torch.sin, Sinh=torch.sinh,
    Softplus=F.softplus, Softsign=F.softsign, Sqrt=torch.sqrt, Sub=torch.sub, Sum=_fold(torch.add), Tan=torch.tan,
    Tanh=torch.tanh, Where=_where, Xor=torch.logical_xor, HardSwish=F.hardswish, Mish=F.mish,
    Expand=lambda x, shape: x.expand(torch.broadcast_shapes(x.shape, _ints(shape))),
    Pow=_pow, Range=_range,
    Size=lambda x: torch.tensor(x.numel()),
    Slice=_slice, Squeeze=lambda x, axes=None: _squeeze(x, _ints_or_none(axes)),
    Tile=lambda x, times: x.repeat(_ints(times)), Unsqueeze=lambda x, axes: _unsqueeze(x, _ints(axes)),
    NonZero=lambda x: x.nonzero().T.contiguous(), BitwiseAnd=torch.bitwise_and, BitwiseOr=torch.bitwise_or,
    BitwiseXor=torch.bitwise_xor, BitwiseNot=torch.bitwise_not,
)  # fmt: skip


@_operator("Reshape")
def _reshape(a: Attributes, n: int, x: Tensor, shape: Tensor) -> Tensor:
    keeps = not a.get("allowzero", 0)
    return x.reshape(tuple(x.shape[i] if d == 0 and keeps else d for i, d in enumerate(_ints(shape))))


@_operator("Constant")
def _constant(a: Attributes, n: int) -> Tensor:
    value = constant_of(a)
    if value is None:
        raise Unknown("no value")
    return value


@_operator("ConstantOfShape")
def _constant_of_shape(a: Attributes, n: int, shape: Tensor) -> Tensor:
    value = tensor(a["value"]) if "value" in a else torch.zeros(1)
    return value.reshape(()).expand(_ints(shape)).clone()


@_operator("Shape")
def _shape(a: Attributes, n: int, x: Tensor) -> Tensor:
    return torch.tensor(x.shape[a.get("start", 0) : a.get("end", x.dim())], dtype=torch.int64)


@_operator("Cast")
def _cast(a: Attributes, n: int, x: Tensor) -> Tensor:
    return x.to(TORCH_TYPES[a["to"]])


@_operator("Transpose")
def _transpose(a: Attributes, n: int, x: Tensor) -> Tensor:
    return x.permute(a.get("perm", list(range(x.dim()))[::-1]))


@_operator("IsInf")
def _is_inf(a: Attributes, n: int, x: Tensor) -> Tensor:
    return (x == math.inf) & bool(a.get("detect_positive", 1)) | (x == -math.inf) & bool(a.get("detect_negative", 1))


@_operator("Concat")
def _concat(a: Attributes, n: int, *x: Tensor) -> Tensor:
    return torch.cat(x, a["axis"])


@_operator("Split")
def _split(a: Attributes, n: int, x: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, ...]:
    axis = a.get("axis", 0)
    if sizes is not None:
        return x.split(_ints(sizes), axis)
    return x.split(-(-x.shape[axis] // n), axis)


@_operator("Flatten")
def _flatten(a: Attributes, n: int, x: Tensor) -> Tensor:
    axis = a.get("axis", 1)
    return x.reshape(math.prod(x.shape[:axis]), -1)


def _from_start(a: Attributes, index: Tensor, size: int) -> Tensor:
    return torch.where(index < 0, index + size, index) if a.get("from_end", 1) else index


@_operator("Gather")
def _gather(a: Attributes, n: int, x: Tensor, index: Tensor) -> Tensor:
    axis = a.get("axis", 0) % x.dim()
    index = _from_start(a, index, x.shape[axis])
    taken = x.index_select(axis, index.reshape(-1))
    return taken.reshape((*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]))


@_operator("GatherElements")
def _gather_elements(a: Attributes, n: int, x: Tensor, index: Tensor) -> Tensor:
    axis = a.get("axis", 0)
    return x.gather(axis, _from_start(a, index, x.shape[axis]))


@_operator("GatherND")
def _gather_nd_of(a: Attributes, n: int, x: Tensor, index: Tensor) -> Tensor:
    if a.get("batch_dims", 0):
        raise Unknown("batch_dims")
    return _gather_nd(x, index)


@_operator("ScatterND")
def _scatter_nd(a: Attributes, n: int, x: Tensor, index: Tensor, update: Tensor) -> Tensor:
    how = a.get("reduction", "none")
    if how not in ("none", "add"):
        raise Unknown(how)
    return x.index_put(tuple(index.unbind(-1)), update, accumulate=how == "add")


@_operator("ScatterElements")
def _scatter_elements(a: Attributes, n: int, x: Tensor, index: Tensor, update: Tensor) -> Tensor:
    how, axis = a.get("reduction", "none"), a.get("axis", 0)
    index = _from_start(a, index, x.shape[axis])
    if how == "none":
        return x.scatter(axis, index, update)
    return x.scatter_reduce(axis, index, update, {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}[how])


@_operator("EyeLike")
def _eye_like(a: Attributes, n: int, x: Tensor) -> Tensor:
    rows, columns = torch.arange(x.shape[0]), torch.arange(x.shape[1])
    return (rows[:, None] + a.get("k", 0) == columns).to(TORCH_TYPES[a["dtype"]] if "dtype" in a else x.dtype)


@_operator("Trilu")
def _trilu(a: Attributes, n: int, x: Tensor, k: Tensor | None = None) -> Tensor:
    return (torch.triu if a.get("upper", 1) else torch.tril)(x, 0 if k is None else int(k))


@_operator("CumSum")
def _cumsum(a: Attributes, n: int, x: Tensor, axis: Tensor) -> Tensor:
    dim = int(axis)
    if a.get("reverse"):
        x = x.flip(dim)
    total = x.cumsum(dim).to(x.dtype)
    total = total - x if a.get("exclusive") else total
    return total.flip(dim) if a.get("reverse") else total


@_operator("Einsum")
def _einsum(a: Attributes, n: int, *x: Tensor) -> Tensor:
    return torch.einsum(a["equation"], *x)


@_operator("Mod")
def _mod(a: Attributes, n: int, x: Tensor, y: Tensor) -> Tensor:
    return _divided(torch.fmod if a.get("fmod") else torch.remainder, x, y, 0)


@_operator("Gemm")
def _gemm(a: Attributes, n: int, x: Tensor, y: Tensor, c: Tensor | None = None) -> Tensor:
    x, y = x.T if a.get("transA") else x, y.T if a.get("transB") else y
    product = a.get("alpha", 1.0) * (x @ y)
    return product if c is None else product + a.get("beta", 1.0) * c


TABLE["", "Softmax"] = lambda a, n, x: F.softmax(x, a.get("axis", -1))
TABLE["", "LogSoftmax"] = lambda a, n, x: F.log_softmax(x, a.get("axis", -1))
_SELU = 1.6732632423543772, 1.0507009873554805
TABLE["", "CastLike"] = lambda a, n, x, like: x.to(like.dtype)
TABLE["", "Mean"] = lambda a, n, *x: _fold(torch.add)(*x) / len(x)
TABLE["", "Swish"] = lambda a, n, x: x * (a.get("alpha", 1.0) * x).sigmoid()
TABLE["", "LeakyRelu"] = lambda a, n, x: F.leaky_relu(x, a.get("alpha", 0.01))
TABLE["", "Elu"] = lambda a, n, x: F.elu(x, a.get("alpha", 1.0))
TABLE["", "Celu"] = lambda a, n, x: F.celu(x, a.get("alpha", 1.0))
TABLE["", "Selu"] = lambda a, n, x: torch.ops.aten.elu(x, a.get("alpha", _SELU[0]), a.get("gamma", _SELU[1]))
TABLE["", "ThresholdedRelu"] = lambda a, n, x: torch.where(x <= a.get("alpha", 1.0), 0, x)
TABLE["", "HardSigmoid"] = lambda a, n, x: (x * a.get("alpha", 0.2) + a.get("beta", 0.5)).clamp(0, 1)
TABLE["", "Gelu"] = lambda a, n, x: F.gelu(x, approximate=a.get("approximate", "none"))


@_operator("LpNormalization")
def _lp_normalization(a: Attributes, n: int, x: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(x, a.get("p", 2), a.get("axis", -1), keepdim=True)
    return x / torch.where(norm == 0, 1, norm)


@_operator("DepthToSpace")
def _depth_to_space(a: Attributes, n: int, x: Tensor) -> Tensor:
    (batch, depth, height, width), b = x.shape, a["blocksize"]
    if a.get("mode", "DCR") == "DCR":
        x = x.reshape(batch, b, b, depth // b**2, height, width).permute(0, 3, 4, 1, 5, 2)
    else:
        x = x.reshape(batch, depth // b**2, b, b, height, width).permute(0, 1, 4, 2, 5, 3)
    return x.reshape(batch, depth // b**2, height * b, width * b)


@_operator("SpaceToDepth")
def _space_to_depth(a: Attributes, n: int, x: Tensor) -> Tensor:
    (batch, depth, height, width), b = x.shape, a["blocksize"]
    x = x.reshape(batch, depth, height // b, b, width // b, b).permute(0, 3, 5, 1, 2, 4)
    return x.reshape(batch, depth * b * b, height // b, width // b)


@_operator("OneHot")
def _one_hot(a: Attributes, n: int, indices: Tensor, depth: Tensor, values: Tensor) -> Tensor:
    count, axis = int(depth), a.get("axis", -1)
    indices = torch.where(indices < 0, indices + count, indices)
    inner = -1 - axis if axis < 0 else indices.dim() - axis
    hot = indices.unsqueeze(axis) == torch.arange(count).reshape(-1, *[1] * inner)
    return torch.where(hot, values[1], values[0])


@_operator("Compress")
def _compress(a: Attributes, n: int, x: Tensor, condition: Tensor) -> Tensor:
    x, axis = (x, a["axis"]) if "axis" in a else (x.flatten(), 0)
    return x.index_select(axis, condition.nonzero()[:, 0])


# --- reductions -------------------------------------------------------------------------------------------------------


def _reduction(name: str, function: Callable) -> None:
    def reduce(a: Attributes, n: int, x: Tensor, axes: Tensor | None = None) -> Tensor:
        dims = a.get("axes") if axes is None else _ints(axes)
        if not dims and a.get("noop_with_empty_axes"):  # nothing is summed, but ReduceLogSum takes its logarithm
            return function(x[..., None], [-1], False)
        return function(x, list(dims) if dims else list(range(x.dim())), bool(a.get("keepdims", 1))).to(x.dtype)

    TABLE["", name] = reduce


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for d in sorted((d % x.dim() for d in axes), reverse=True):
        x = x.prod(d, keepdim=keep)
    return x


_reduction("ReduceSum", lambda x, axes, keep: x.sum(axes, keep))
_reduction("ReduceMean", lambda x, axes, keep: x.mean(axes, keep))
_reduction("ReduceMax", lambda x, axes, keep: x.amax(axes, keep))
_reduction("ReduceMin", lambda x, axes, keep: x.amin(axes, keep))
_reduction("ReduceProd", _product)
_reduction("ReduceL1", lambda x, axes, keep: x.abs().sum(axes, keep))
_reduction("ReduceL2", lambda x, axes, keep: torch.linalg.vector_norm(x, 2, axes, keep))
_reduction("ReduceSumSquare", lambda x, axes, keep: (x * x).sum(axes, keep))
_reduction("ReduceLogSumExp", lambda x, axes, keep: x.logsumexp(axes, keep))
_reduction("ReduceLogSum", lambda x, axes, keep: x.sum(axes, keep).log())


def _extreme(function: Callable) -> Callable:
    def find(a: Attributes, n: int, x: Tensor) -> Tensor:
        if a.get("select_last_index"):
            raise Unknown("select_last_index")
        return function(x, a.get("axis", 0), bool(a.get("keepdims", 1)))

    return find


TABLE["", "ArgMax"], TABLE["", "ArgMin"] = _extreme(torch.argmax), _extreme(torch.argmin)


@_operator("TopK")
def _topk(a: Attributes, n: int, x: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    axis = a.get("axis", -1)  # of elements that are the same the first comes first, as ONNX and Tensor.sort have it
    in_order = x.sort(dim=axis, descending=bool(a.get("largest", 1)), stable=True)
    return tuple(t.narrow(axis, 0, int(k)) if t.dim() else t for t in in_order)


# --- normalisations, losses -------------------------------------------------------------------------------------------


@_operator("LayerNormalization")
def _layer_norm(a: Attributes, n: int, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    if n > 1:
        raise Unknown("mean and deviation")
    shape, epsilon = x.shape[a.get("axis", -1) % x.dim() :], a.get("epsilon", 1e-5)
    if scale.shape == shape and scale.dtype == x.dtype:
        return F.layer_norm(x, shape, scale, bias, epsilon)
    y = F.layer_norm(x.to(torch.promote_types(x.dtype, scale.dtype)), shape, eps=epsilon) * scale
    return (y if bias is None else y + bias).to(x.dtype)


@_operator("RMSNormalization")
def _rms_norm(a: Attributes, n: int, x: Tensor, scale: Tensor) -> Tensor:
    return (
        F.rms_norm(x, x.shape[a.get("axis", -1) % x.dim() :], None, a.get("epsilon", 1e-5)).mul(scale).to(scale.dtype)
    )


@_operator("InstanceNormalization")
def _instance_norm(a: Attributes, n: int, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return F.instance_norm(x, None, None, scale, bias, True, 0.0, a.get("epsilon", 1e-5))


@_operator("GroupNorm", domain="ortmodule")
def _group_norm(a: Attributes, n: int, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, a["groups"], scale, bias, a["epsilon"])


@_operator("BatchNormalization")
def _batch_norm(
    a: Attributes, n: int, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor
) -> tuple[Tensor, ...]:
    training, momentum = bool(a.get("training_mode")), 1 - a.get("momentum", 0.9)
    mean, variance = mean.clone(), variance.clone()
    y = F.batch_norm(x, mean, variance, scale, bias, training, momentum, a.get("epsilon", 1e-5))
    return y, mean, variance


@_operator("SoftmaxCrossEntropyLoss")
def _cross_entropy(
    a: Attributes, n: int, x: Tensor, labels: Tensor, weight: Tensor | None = None
) -> tuple[Tensor, ...]:
    how = {"reduction": a.get("reduction", "mean"), "ignore_index": a.get("ignore_index", -100)}
    labels = labels if labels.is_floating_point() else labels.long()
    return F.cross_entropy(x, labels, weight, **how), F.log_softmax(x, min(1, x.dim() - 1))


@_operator("SmoothedCrossEntropy", domain="ortmodule")
def _smoothed_cross_entropy(a: Attributes, n: int, x: Tensor, labels: Tensor, weight: Tensor | None = None) -> Tensor:
    how = {"reduction": a.get("reduction", "mean"), "ignore_index": a.get("ignore_index", -100)}
    return F.cross_entropy(x, labels.long(), weight, label_smoothing=a.get("smoothing", 0.0), **how)


@_operator("NegativeLogLikelihoodLoss")
def _nll(a: Attributes, n: int, x: Tensor, labels: Tensor, weight: Tensor | None = None) -> Tensor:
    how = {"reduction": a.get("reduction", "mean"), "ignore_index": a.get("ignore_index", -100)}
    return F.nll_loss(x, labels.long(), weight, **how)


# --- images -----------------------------------------------------------------------------------------------------------


def _padded(a: dict, x: Tensor, value: float) -> Tensor:
    """`x` with the operator's padding around it: PyTorch's is the same on both sides."""
    if a.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise Unknown(a["auto_pad"])
    pads, rank = a.get("pads", [0] * 2 * (x.dim() - 2)), x.dim() - 2
    around = [pads[side * rank + d] for d in reversed(range(rank)) for side in (0, 1)]
    return F.pad(x, around, value=value) if any(around) else x


@_operator("Conv")
def _conv(a: Attributes, n: int, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rank = x.dim() - 2
    function, pads = (F.conv1d, F.conv2d, F.conv3d)[rank - 1], a.get("pads", [0] * 2 * rank)
    if a.get("auto_pad", "NOTSET") == "NOTSET" and pads[:rank] == pads[rank:]:
        padding = pads[:rank]  # in the kernel: an infinite weight is multiplied by no zero there
    else:
        x, padding = _padded(a, x, 0.0), [0] * rank
    return function(x, weight, bias, a.get("strides", 1), padding, a.get("dilations", 1), a.get("group", 1))


@_operator("ConvTranspose")
def _conv_transpose(a: Attributes, n: int, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rank = x.dim() - 2
    pads = a.get("pads", [0] * 2 * rank)
    if a.get("auto_pad", "NOTSET") != "NOTSET" or "output_shape" in a or pads[:rank] != pads[rank:]:
        raise Unknown("padding that is not the same on both sides")
    function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[rank - 1]
    extra, groups, dilations = a.get("output_padding", 0), a.get("group", 1), a.get("dilations", 1)
    return function(x, weight, bias, a.get("strides", 1), pads[:rank], extra, groups, dilations)


@_operator("MaxPool")
def _max_pool(a: Attributes, n: int, x: Tensor) -> Tensor:
    if n > 1 or a.get("ceil_mode"):
        raise Unknown("indices or ceil_mode")
    function = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[x.dim() - 3]
    return function(_padded(a, x, -math.inf), a["kernel_shape"], a.get("strides", 1), 0, a.get("dilations", 1))


@_operator("AveragePool")
def _average_pool(a: Attributes, n: int, x: Tensor) -> Tensor:
    if a.get("ceil_mode") or (any(a.get("pads", [])) and not a.get("count_include_pad")) or "dilations" in a:
        raise Unknown("padding that does not count, or dilations")
    function = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[x.dim() - 3]
    return function(_padded(a, x, 0.0), a["kernel_shape"], a.get("strides", 1))


TABLE["", "GlobalAveragePool"] = lambda a, n, x: x.mean(list(range(2, x.dim())), keepdim=True)
TABLE["", "GlobalLpPool"] = lambda a, n, x: torch.linalg.vector_norm(
    x, a.get("p", 2), list(range(2, x.dim())), keepdim=True
)
TABLE["", "GlobalMaxPool"] = lambda a, n, x: x.amax(list(range(2, x.dim())), keepdim=True)


@_operator("Pad")
def _pad(
    a: Attributes, n: int, x: Tensor, pads: Tensor, value: Tensor | None = None, axes: Tensor | None = None
) -> Tensor:
    sizes, dims = _ints(pads), _ints_or_none(axes) or list(range(x.dim()))
    around = [0] * 2 * x.dim()
    for i, d in enumerate(dims):
        for side in (0, 1):
            around[2 * (x.dim() - 1 - d % x.dim()) + side] = sizes[side * len(dims) + i]
    mode = a.get("mode", "constant")
    if mode == "constant":
        return F.pad(x, around, value=0 if value is None else value.item())
    if any(around[2 * (x.dim() - 2) :]):
        raise Unknown(f"{mode} padding of the batch")
    return F.pad(x, around[: 2 * (x.dim() - 2)], {"edge": "replicate", "reflect": "reflect", "wrap": "circular"}[mode])


# --- operators of the engine's own domain -----------------------------------------------------------------------------


@_operator("Embedding", domain="ortmodule")
def _embedding(a: Attributes, n: int, weight: Tensor, indices: Tensor) -> Tensor:
    return F.embedding(indices, weight, a.get("padding_idx"))


@_operator("StopGradient", domain="ortmodule")
def _stop_gradient(a: Attributes, n: int, x: Tensor) -> Tensor:
    return x.detach()


class _Sloped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, x: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        ctx.size = x.shape
        return value.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return dy, (dy * ctx.saved_tensors[0]).sum_to_size(ctx.size), None


@_operator("Sloped", domain="ortmodule")
def _sloped(a: Attributes, n: int, value: Tensor, x: Tensor, slope: Tensor) -> Tensor:
    return _Sloped.apply(value, x, slope)


@_operator("GroupedMatMul", domain="ortmodule")
def _grouped(a: Attributes, n: int, rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    parts, begin = [], 0
    for end, matrix in zip(ends.tolist(), matrices, strict=True):
        parts.append(rows[begin:end] @ matrix)
        begin = max(begin, end)
    return torch.cat([*parts, rows.new_zeros(max(0, len(rows) - begin), matrices.shape[2])])


def _own(**functions: Callable) -> None:
    for name, function in functions.items():
        TABLE["ortmodule", name] = lambda a, n, *x, function=function: function(a, *x)


def _of_torch(name: str) -> Callable:
    return lambda a, *x: getattr(torch, name)(*x)


_own(**{name: _of_torch(function) for name, function, _ in _core.pointwise_operators() if hasattr(torch, function)})
_own(
    Huber=lambda a, x, y: F.huber_loss(x, y, "none", a.get("delta", 1.0)) / a.get("over", 1.0),
    FloorDiv=lambda a, x, y: _divided(torch.floor_divide, x, y, x),
    Remainder=lambda a, x, y: _divided(torch.remainder, x, y, 0),
    HardTanh=lambda a, x: F.hardtanh(x, a["min"], a["max"]), NotOne=lambda a, x: x,
    CumProd=lambda a, x: x.cumprod(a["axis"]), LogCumSumExp=lambda a, x: x.logcumsumexp(a["axis"]),
    CumArgMax=lambda a, x: x.cummax(a["axis"])[1], CumArgMin=lambda a, x: x.cummin(a["axis"])[1],
    SignBit=lambda a, x: x.signbit(),
    ShiftLeft=lambda a, x, y: x << y, ShiftRight=lambda a, x, y: x >> y,
)  # fmt: skip
