"""ONNX for operators that the TorchScript exporter translates wrongly, or not at all.

:func:`installed` puts them in place for the duration of one export; the exporter's own tables stay untouched. Two
operators of the engine's own domain say what ONNX cannot: ``Embedding`` (no gradient for the padding row) and
``StopGradient`` (the value goes on, its gradient does not: `detach()`, `torch.no_grad()`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.onnx import errors, symbolic_helper
from torch.onnx._internal.torchscript_exporter import _type_utils, jit_utils, utils

DOMAIN = "ortmodule"

_SYMBOLICS: dict[str, Callable] = {}


@contextmanager
def installed() -> Iterator[None]:
    """Inside, exports use the translations of this file."""
    original = utils._run_symbolic_function

    def run(graph, block, node, inputs, env, values_in_env, new_nodes, *rest):
        own = _SYMBOLICS.get(node.kind().rstrip("_") if node.kind().startswith("aten::") else node.kind())
        opset = utils.GLOBALS.export_onnx_opset_version
        parts = {"params_dict": utils._params_dict, "env": env, "values_in_env": values_in_env, "new_nodes": new_nodes}
        g = jit_utils.GraphContext(graph=graph, block=block, opset=opset, original_node=node, **parts)
        result = NotImplemented if own is None else own(g, *inputs)
        if result is NotImplemented:
            result = original(graph, block, node, inputs, env, values_in_env, new_nodes, *rest)
        return result

    utils._run_symbolic_function = run
    try:
        yield
    finally:
        utils._run_symbolic_function = original


def _tensor_type(value: torch._C.Value) -> torch._C.TensorType | None:
    kind = value.type()
    return kind if isinstance(kind, torch._C.TensorType) else None


def _is_float(value: torch._C.Value) -> bool:
    kind = _tensor_type(value)
    return kind is not None and kind.dtype() is not None and kind.dtype().is_floating_point


def _like(value: torch._C.Value, made: torch._C.Value) -> torch._C.Value:
    """`made` with the type of `value`: the exporter knows nothing about operators of other domains.

    Never with the type of a traced value: its sizes are those of the trace, and would become constants.
    """
    made.setType(value.type())
    return made


def _symbolic(*kinds: str, args: str = "") -> Callable:
    """Registers the translation of these operators; `args` are the letters of `symbolic_helper.parse_args`."""

    def register(function):
        parsed = symbolic_helper.parse_args(*args.split())(function) if args else function
        _SYMBOLICS.update(dict.fromkeys(kinds, parsed))
        return function

    return register


def _constant(g: jit_utils.GraphContext, value: Any, dtype: torch.dtype | None = None) -> torch._C.Value:
    return g.op("Constant", value_t=torch.tensor(value, dtype=dtype))


def _dtype(value: torch._C.Value) -> torch.dtype:
    return _type_utils.JitScalarType.from_value(value).dtype()


def _none(value: Any) -> bool:
    return value is None or symbolic_helper._is_none(value)


def _rank(value: torch._C.Value) -> int:
    rank = symbolic_helper._get_tensor_rank(value)
    if rank is None:
        raise errors.SymbolicValueError("the rank is not known", value)
    return rank


def _sizes(g: jit_utils.GraphContext, value: torch._C.Value, first: int, last: int) -> torch._C.Value:
    """Sizes [first, last) as an int64 vector that follows the shape at run time."""
    shape = g.op("Shape", value)
    return g.op("Slice", shape, _constant(g, [first]), _constant(g, [last]), _constant(g, [0]))


# --- gradients that stop --------------------------------------------------------------------------------------------------


@_symbolic("aten::detach")
def _detach(g, x):
    if not _is_float(x) or not torch.is_grad_enabled():
        return x
    return _like(x, g.op(f"{DOMAIN}::StopGradient", x))


# --- embedding ----------------------------------------------------------------------------------------------------------


@_symbolic("aten::embedding", args="v v i b v")
def _embedding(g, weight, indices, padding_idx, scale_grad_by_freq, sparse):
    if scale_grad_by_freq and torch.is_grad_enabled():
        raise errors.SymbolicValueError("embedding with scale_grad_by_freq", weight)
    gathered = g.op("Gather", weight, indices)
    if padding_idx < 0 or not torch.is_grad_enabled():
        return gathered
    return _like(gathered, g.op(f"{DOMAIN}::Embedding", weight, indices, padding_idx_i=padding_idx))


# --- attention ----------------------------------------------------------------------------------------------------------


@_symbolic("aten::scaled_dot_product_attention", args="v v v v f b v b")
def _attention(g, query, key, value, mask=None, dropout=0.0, is_causal=False, scale=None, enable_gqa=False):
    """softmax(q k' * scale + mask) v, dropped. A row with nothing to attend to gives zeros, as PyTorch's does.

    The masked scores get the lowest finite number and the masked weights an exact zero, so that no NaN appears in
    either direction.
    """
    dtype, rank = _dtype(query), _rank(query)
    if _none(scale):
        features = symbolic_helper._get_tensor_dim_size(query, -1)
        if features is None:
            return NotImplemented
        factor = _constant(g, 1 / math.sqrt(features), dtype)
    else:
        factor = g.op("Cast", scale, to_i=_type_utils.JitScalarType.from_dtype(dtype).onnx_type())
    if enable_gqa:
        key, value = (_repeat_heads(g, query, x, rank) for x in (key, value))
    swapped = [*range(rank - 2), rank - 1, rank - 2]
    scores = g.op("MatMul", g.op("Mul", query, factor), g.op("Transpose", key, perm_i=swapped))
    allowed = None
    if is_causal:
        lengths = g.op("Concat", _sizes(g, query, -2, -1), _sizes(g, key, -2, -1), axis_i=0)
        ones = g.op("ConstantOfShape", lengths, value_t=torch.tensor([1], dtype=torch.int32))
        allowed = g.op("Cast", g.op("Trilu", ones, upper_i=0), to_i=_type_utils.JitScalarType.BOOL.onnx_type())
    if not _none(mask):
        if _dtype(mask) is torch.bool:
            allowed = mask if allowed is None else g.op("And", allowed, mask)
        else:
            scores = g.op("Add", scores, mask)
            finite = g.op("Greater", mask, _constant(g, -math.inf, _dtype(mask)))
            allowed = finite if allowed is None else g.op("And", allowed, finite)
    if allowed is None:
        weights = g.op("Softmax", scores, axis_i=-1)
    else:
        scores = g.op("Where", allowed, scores, _constant(g, torch.finfo(dtype).min, dtype))
        weights = g.op("Where", allowed, g.op("Softmax", scores, axis_i=-1), _constant(g, 0.0, dtype))
    if dropout:
        weights, _ = g.op("Dropout", weights, _constant(g, dropout), _constant(g, True), outputs=2)
    return g.op("MatMul", weights, value)


def _repeat_heads(g, query, x, rank):
    """Each head of keys or values as often as there are query heads to it."""
    heads, groups = (symbolic_helper._get_tensor_dim_size(v, -3) for v in (query, x))
    if heads is None or groups is None or rank < 3 or heads % groups:
        raise errors.SymbolicValueError("grouped attention without fixed numbers of heads", x)
    return _repeat_interleave_by(g, x, heads // groups, rank - 3)


# --- repeating ----------------------------------------------------------------------------------------------------------


def _repeat_interleave_by(g, x, times: int, axis: int):
    """Every slice along `axis`, `times` times in a row."""
    rank = _rank(x)
    if times == 1:
        return x
    apart = g.op("Unsqueeze", x, _constant(g, [axis + 1]))
    to = [1] * (rank + 1)
    to[axis + 1] = times
    spread = g.op("Expand", apart, _constant(g, to))
    before, after = _sizes(g, x, 0, axis), _sizes(g, x, axis + 1, rank)
    merged = g.op("Mul", _sizes(g, x, axis, axis + 1), _constant(g, [times]))
    return _like_rank(g.op("Reshape", spread, g.op("Concat", before, merged, after, axis_i=0)), rank, x)


def _like_rank(made, rank: int, x):
    """The Reshape's operand is no constant, so the exporter does not see its rank."""
    made.setType(_tensor_type(x).with_sizes([None] * rank) if _tensor_type(x) is not None else x.type())
    return made


@_symbolic("aten::repeat_interleave")
def _repeat_interleave(g, x, repeats, dim=None, output_size=None):
    times = symbolic_helper._maybe_get_const(repeats, "i")
    if isinstance(times, torch.Tensor):
        times = int(times) if times.numel() == 1 else None
    if not isinstance(times, int):
        return NotImplemented
    if _none(dim):
        x, axis = g.op("Reshape", x, _constant(g, [-1])), 0
    else:
        axis = symbolic_helper._get_const(dim, "i", "dim") % _rank(x)
    return _repeat_interleave_by(g, x, times, axis)


# --- losses -------------------------------------------------------------------------------------------------------------

_REDUCTIONS = ("none", "mean", "sum")


@_symbolic("aten::cross_entropy_loss", args="v v v i i f")
def _cross_entropy(g, scores, target, weight, reduction, ignore_index, label_smoothing):
    """With class indices SoftmaxCrossEntropyLoss; label smoothing and soft targets spelt out."""
    weighted = () if _none(weight) else (weight,)
    name = _REDUCTIONS[reduction]
    indices = not _is_float(target)
    if indices and not label_smoothing:
        attributes = {"reduction_s": name, "ignore_index_i": ignore_index}
        return g.op("SoftmaxCrossEntropyLoss", scores, target, *weighted, **attributes)
    dtype, classes = _dtype(scores), symbolic_helper._get_tensor_dim_size(scores, 1 if _rank(scores) > 1 else 0)
    if classes is None:
        return NotImplemented
    class_axis = 1 if _rank(scores) > 1 else 0
    log_p = g.op("LogSoftmax", scores, axis_i=class_axis)
    if weighted:
        shape = [1] * _rank(scores)
        shape[class_axis] = classes
        weight = g.op("Reshape", weight, _constant(g, shape))
        log_p_weighted = g.op("Mul", log_p, weight)
    else:
        log_p_weighted = log_p
    axes = _constant(g, [class_axis])
    if not indices:
        if label_smoothing:
            target = g.op("Mul", target, _constant(g, 1 - label_smoothing, dtype))
            target = g.op("Add", target, _constant(g, label_smoothing / classes, dtype))
        product = g.op("Neg", g.op("Mul", log_p_weighted, target))
        if name == "none":
            return g.op("ReduceSum", product, axes, keepdims_i=0)
        total = g.op("ReduceSum", product, keepdims_i=0)
        if name == "sum":
            return total
        places = g.op("Div", g.op("Size", scores), _constant(g, classes))
        return g.op("Div", total, g.op("Cast", places, to_i=_type_utils.JitScalarType.from_dtype(dtype).onnx_type()))
    # (1 - e) * nll + e / classes * (sum over the classes of -log p), both over the places that are not ignored.
    attributes = {"reduction_s": "none", "ignore_index_i": ignore_index}
    nll = g.op("SoftmaxCrossEntropyLoss", scores, target, *weighted, **attributes)
    ignored = g.op("Equal", target, _constant(g, ignore_index))
    spread = g.op("Neg", g.op("ReduceSum", log_p_weighted, axes, keepdims_i=0))
    spread = g.op("Where", ignored, _constant(g, 0.0, dtype), spread)
    each = g.op(
        "Add",
        g.op("Mul", nll, _constant(g, 1 - label_smoothing, dtype)),
        g.op("Mul", spread, _constant(g, label_smoothing / classes, dtype)),
    )
    if name == "none":
        return each
    total = g.op("ReduceSum", each, keepdims_i=0)
    if name == "sum":
        return total
    counted = _constant(g, 1.0, dtype)
    if weighted:
        safe = g.op("Where", ignored, _constant(g, 0), target)
        counted = g.op("Gather", weighted[0], safe, axis_i=0)
    share = g.op("Where", ignored, _constant(g, 0.0, dtype), counted)
    return g.op("Div", total, g.op("ReduceSum", share, keepdims_i=0))


# --- dropout of whole channels --------------------------------------------------------------------------------------------


@_symbolic("aten::feature_dropout", args="v f b")
def _feature_dropout(g, x, p, train):
    if not train or p == 0:
        return x
    ones = g.op("ConstantOfShape", _sizes(g, x, 0, 2), value_t=torch.tensor([1.0], dtype=_dtype(x)))
    mask, _ = g.op("Dropout", ones, _constant(g, p), _constant(g, True), outputs=2)
    return g.op("Mul", x, g.op("Unsqueeze", mask, _constant(g, list(range(2, _rank(x))))))
