"""Operators of a trace, replaced by others that the exporter can say in ONNX.

Two sources: this file's own definitions, in terms of torch, for operators that the exporter translates wrongly or in a
way that does not train; and torch's own decompositions for whatever the exporter does not know. A definition is traced
on tensors like the operator's operands, and the result put in the operator's place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._decomp
import torch.nn.functional as F
from torch import nn

from ortmodule import export

MOST_ROUNDS = 4  # definitions that use operators which need a definition

_DEFINITIONS: dict[str, Callable] = {}


class _Keep(Exception):
    """A definition declines: the operator stays."""


def rewrite(graph: torch._C.Graph, opset: int) -> None:
    """Replaces what has to be replaced in a TorchScript trace, in place. Draws random numbers."""
    traced: dict[Any, torch._C.Graph | None] = {}
    replaced: dict[str, bool] = {}  # kinds of operators
    for _ in range(MOST_ROUNDS):
        changed = False
        for node in list(graph.nodes()):
            kind = node.kind()
            if kind not in replaced:
                replaced[kind] = kind in _DEFINITIONS or (kind.startswith("aten::") and not export.knows(kind, opset))
            changed = (replaced[kind] and _rewrite_node(graph, node, traced)) or changed
        if not changed:
            break
    torch._C._jit_pass_dce(graph)


def _rewrite_node(graph: torch._C.Graph, node: torch._C.Node, traced: dict) -> bool:
    tensors: list[torch._C.Value] = []
    try:
        arguments = [_argument(value, tensors) for value in node.inputs()]
        types = tuple((str(v.type().scalarType()), tuple(v.type().sizes())) for v in tensors)
        key = node.schema(), types, _text(arguments)
    except (_Keep, RuntimeError):  # conversions of numbers have no schema
        return False
    if key not in traced:
        traced[key] = _traced(node, arguments, tensors)
    definition = traced[key]
    if definition is None:
        return False
    with graph.insert_point_guard(node):
        results = graph.insertGraph(definition, tensors)
    inserted = node.prev()
    for _ in definition.nodes():
        inserted.copyMetadata(node)
        inserted = inserted.prev()
    for old, new in zip(node.outputs(), results, strict=True):
        old.replaceAllUsesWith(new)
    node.destroy()
    return True


class _Place(int):
    """Stands for an operand that is a tensor."""

    def __repr__(self) -> str:
        return f"tensor {int(self)}"


def _argument(value: torch._C.Value, tensors: list[torch._C.Value]) -> Any:
    if value.node().kind() == "prim::Constant":
        return value.toIValue()
    if isinstance(value.type(), torch._C.TensorType):
        if value.type().sizes() is None or value.type().dtype() is None:
            raise _Keep
        tensors.append(value)
        return _Place(len(tensors) - 1)
    if value.node().kind() == "prim::ListConstruct":
        return [_argument(item, tensors) for item in value.node().inputs()]
    raise _Keep


def _text(arguments: Any) -> Any:
    """`arguments` as something hashable that is equal for equal ones."""
    if isinstance(arguments, list):
        return tuple(map(_text, arguments))
    if isinstance(arguments, torch.Tensor):
        return str(arguments.dtype), tuple(arguments.shape), tuple(arguments.reshape(-1).tolist())
    return repr(arguments)


def _traced(node: torch._C.Node, arguments: list, tensors: Sequence[torch._C.Value]) -> torch._C.Graph | None:
    """The definition as a graph of `tensors`, or None if there is none."""
    function = _DEFINITIONS.get(node.kind()) or _decomposition(node)
    if function is None:
        return None
    examples = [torch.ones(v.type().sizes(), dtype=v.type().dtype()) for v in tensors]
    module = _Definition(function, arguments)
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), export.tracing(module):
            graph, _ = torch.jit._get_trace_graph(module, tuple(examples), strict=False)
    except Exception:
        return None
    torch._C._jit_pass_inline(graph)
    torch._C._jit_pass_lower_all_tuples(graph)
    torch._C._jit_pass_dce(graph)
    outputs = list(graph.outputs())
    if len(outputs) != node.outputsSize() or node.kind() in {n.kind() for n in graph.nodes()} - {
        "aten::cross_entropy_loss"
    }:
        return None
    return graph


class _Definition(nn.Module):
    def __init__(self, function: Callable, arguments: list) -> None:
        super().__init__()
        self.function, self.arguments = function, arguments

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(*_filled(self.arguments, tensors))


def _filled(arguments: list, tensors: Sequence[torch.Tensor]) -> list:
    return [
        tensors[a] if isinstance(a, _Place) else _filled(a, tensors) if isinstance(a, list) else a for a in arguments
    ]


def _decomposition(node: torch._C.Node) -> Callable | None:
    schema = torch._C.parse_schema(node.schema())
    packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"), None)
    operator = getattr(packet, schema.overload_name or "default", None)
    if operator is None or operator._schema.is_mutable or not torch._C._dispatch_has_kernel(operator.name()):
        return None
    if operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return operator.decompose
    return torch._decomp.decomposition_table.get(operator)


# --- definitions ------------------------------------------------------------------------------------------------------


def _defines(*kinds: str) -> Callable:
    def register(function):
        _DEFINITIONS.update(dict.fromkeys(kinds, function))
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


@_defines("aten::cross_entropy_loss")
def _cross_entropy(scores, target, weight, reduction, ignore_index, label_smoothing):
    """Label smoothing and soft targets; plain class indices stay one operator."""
    soft = target.is_floating_point()
    if not soft and not label_smoothing:
        raise _Keep
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


@_defines("aten::squeeze")
def _squeeze(x, dim=None):
    """The exporter leaves the decision to an If. Here it is made; what it rests on is compared for every new shape."""
    dims = range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    for d in sorted((d % x.dim() for d in dims), reverse=True) if x.dim() else ():
        if int(x.shape[d]) == 1:
            x = x.select(d, 0)
    return x


@_defines("aten::unfold")
def _unfold(x, dim, size, step):
    if x.dim() == 0:
        raise _Keep
    starts = torch.arange(0, x.shape[dim] - size + 1, step)
    places = starts[:, None] + torch.arange(size)
    dim = dim % x.dim()
    shape = [*x.shape[:dim], *places.shape, *x.shape[dim + 1 :]]
    taken = x.index_select(dim, places.reshape(-1)).reshape(shape)
    return taken.movedim(dim + 1, -1)


@_defines("aten::index_add")
def _index_add(x, dim, index, source, alpha=1):
    if x.dim() == 0:
        raise _Keep
    dim = dim % x.dim()
    index = index.reshape([-1 if d == dim else 1 for d in range(x.dim())]).expand_as(source)
    return x.scatter_add(dim, index, source * alpha)


@_defines("aten::take_along_dim")
def _take_along_dim(x, index, dim=None):
    if dim is None:
        return x.reshape(-1).gather(0, index.reshape(-1))
    if x.dim() != index.dim() or any(int(n) == 1 or int(m) == 1 for n, m in zip(x.shape, index.shape, strict=True)):
        raise _Keep
    return x.gather(dim, index)


@_defines("aten::diag_embed")
def _diag_embed(x, offset=0, dim1=-2, dim2=-1):
    if offset or (dim1 % (x.dim() + 1), dim2 % (x.dim() + 1)) != (x.dim() - 1, x.dim()):
        raise _Keep
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


@_defines("aten::batch_norm")
def _batch_norm(x, weight, bias, mean, variance, training, momentum, eps, cudnn):
    """Without running statistics; with them it is one operator."""
    if mean is not None:
        raise _Keep
    axes = [d for d in range(x.dim()) if d != 1]
    shape = [-1 if d == 1 else 1 for d in range(x.dim())]
    centred = x - x.mean(axes, keepdim=True)
    result = centred * torch.rsqrt((centred * centred).mean(axes, keepdim=True) + eps)
    result = result if weight is None else result * weight.reshape(shape)
    return result if bias is None else result + bias.reshape(shape)


@_defines("aten::expm1")
def _expm1(x):
    return torch.where(x.abs() < 0.02, x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4))), x.exp() - 1)


_DEFINITIONS |= {
    "aten::erfc": lambda x: 1 - x.erf(),
    "aten::trunc": lambda x: torch.where(x < 0, x.ceil(), x.floor()),
    "aten::logaddexp": lambda a, b: torch.maximum(a, b) + torch.log1p(torch.exp(-(a - b).abs())),
    "aten::fmax": lambda a, b: torch.where(b.isnan() | (a >= b), a, b),
    "aten::fmin": lambda a, b: torch.where(b.isnan() | (a <= b), a, b),
    "aten::copysign": lambda a, b: torch.where((b < 0) | ((b == 0) & (1 / b < 0)), -a.abs(), a.abs()),
    "aten::addcdiv": lambda x, a, b, value=1: x + value * (a / b),
    "aten::addbmm": lambda x, a, b, beta=1, alpha=1: beta * x + alpha * (a @ b).sum(0),
    "aten::hypot": lambda a, b: (a * a + b * b).sqrt(),
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
