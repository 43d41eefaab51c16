"""Translates to ONNX the operators that the TorchScript exporter does not know and no decomposition covers.

:func:`installed` puts them in place for the duration of one export; the exporter's own tables stay untouched. Two
operators of the engine's own domain say what ONNX cannot: ``Embedding`` (no gradient for the padding row) and
``StopGradient`` (the value goes on, its gradient does not: `detach()`, `torch.no_grad()`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch.onnx import errors, symbolic_helper

from ortmodule import _core
from ortmodule.core.dtypes import ONNX_TYPES
from ortmodule.core.names import DOMAIN
from ortmodule.core.torch_private import (
    EXPORTER_GLOBALS,
    GraphContext,
    TensorType,
    TracedGraph,
    TracedNode,
    TracedValue,
    exporter_parameters,
    get_const,
    get_tensor_sizes,
    is_none,
    maybe_get_const,
    run_symbolic_function,
    translating,
    unpack_list,
)
from ortmodule.lowering.traced_tensors import of_any_size, rank_of

if TYPE_CHECKING:
    from ortmodule.core.traced_types import JitType, TracedBlock

_SYMBOLICS: dict[str, Callable] = {}


class _Record(threading.local):
    """Of the latest export in this thread."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.failed = ""  # the operator of the trace whose translation raised
        self.made: dict[str, set[str]] = {}  # ONNX operators: the kinds that they are translations of
        self.inner: dict[str, set[str]] = {}  # ... the kinds in whose translation they are
        self.packings: dict[int, Any] = {}  # by the batch sizes, a value (packed_sequence.py)
        self.padded: dict[int, TracedValue] = {}  # by packed rows, a value: these in their places


record = _Record()


@contextmanager
def installed() -> Iterator[None]:
    """Inside, exports use the translations of this file."""

    def run(
        graph: TracedGraph, block: TracedBlock, node: TracedNode, inputs: Sequence[TracedValue], env: Any,
        values_in_env: Any, new_nodes: list[TracedNode], *rest: Any,
    ) -> Any:  # fmt: skip
        own = _SYMBOLICS.get(_plain(node.kind()))
        opset = EXPORTER_GLOBALS.export_onnx_opset_version
        g = GraphContext(
            graph=graph, block=block, opset=opset, original_node=node, params_dict=exporter_parameters(), env=env,
            values_in_env=values_in_env, new_nodes=new_nodes,
        )  # fmt: skip
        record.failed = node.kind()
        known = len(new_nodes)
        result = NotImplemented if own is None else own(g, *inputs)
        if result is NotImplemented:
            result = run_symbolic_function(graph, block, node, inputs, env, values_in_env, new_nodes, *rest)
        record.failed = ""
        if _plain(node.kind()) in _COUNTS_FROM_ZERO:
            _refuse_negative_indices(new_nodes[known:])
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, TracedValue):
                record.made.setdefault(_onnx(value.node()), set()).add(node.kind())
        for made in new_nodes[known:]:
            record.inner.setdefault(_onnx(made), set()).add(node.kind())
        return result

    record.clear()
    with translating(run):
        yield


#: Operators of PyTorch that refuse a negative index. In ONNX, as in x[i], it counts from the end.
_COUNTS_FROM_ZERO = {
    f"aten::{name}"
    for name in ("embedding", "index_select", "gather", "scatter", "scatter_add", "scatter_reduce", "one_hot")
}


def _refuse_negative_indices(made: list[TracedNode]) -> None:
    """Says so in the nodes that take indices which are no constants."""
    for node in made:
        kind, given = _onnx(node), node.inputsAt(1).node().kind() if node.inputsSize() > 1 else ""
        if kind in ("GatherElements", "ScatterElements") or (kind == "Gather" and given != "onnx::Constant"):
            node.i_("from_end", 0)


def _onnx(node: TracedNode) -> str:
    return node.kind().rpartition("::")[2]


def knows(kind: str) -> bool:
    """Is this operator translated here?"""
    return _plain(kind) in _SYMBOLICS


def _plain(kind: str) -> str:
    """An operator that changes its operand is the same one; by now nothing looks at the operand any more."""
    return kind if kind.endswith("__") else kind.removesuffix("_")


def tensor_type(value: TracedValue) -> TensorType | None:
    kind = value.type()
    return kind if isinstance(kind, TensorType) else None


def _is_float(value: TracedValue) -> bool:
    kind = tensor_type(value)
    dtype = None if kind is None else kind.dtype()
    return dtype is not None and dtype.is_floating_point


def _like(value: TracedValue, made: TracedValue) -> TracedValue:
    """`made` with the type of `value`: the exporter knows nothing about operators of other domains.

    Never with the type of a traced value: its sizes are those of the trace, and would become constants.
    """
    made.setType(value.type())
    return made


def symbolic(*kinds: str, args: str = "") -> Callable:
    """Registers the translation of these operators; `args` are the letters of `symbolic_helper.parse_args`."""

    def register(function: Callable) -> Callable:
        parse: Any = symbolic_helper.parse_args  # whose letters are literals to the type checker
        _SYMBOLICS.update(dict.fromkeys(kinds, parse(*args.split())(function) if args else function))
        return function

    return register


def refused(text: str, value: TracedValue) -> errors.SymbolicValueError:
    """The exporter's error for a form of an operator that ONNX cannot say."""
    return errors.SymbolicValueError(text, value)  # type: ignore[arg-type]  # torch's stub has another class


# --- gradients that stop ----------------------------------------------------------------------------------------------


@symbolic("aten::detach")
def _detach(g: GraphContext, x: TracedValue) -> TracedValue:
    if not _is_float(x) or not torch.is_grad_enabled():
        return x
    return _like(x, g.op(f"{DOMAIN}::StopGradient", x))


@symbolic("ortmodule::sloped")
def _sloped(g: GraphContext, value: TracedValue, x: TracedValue, slope: TracedValue) -> TracedValue:
    return _own(g, "Sloped", value, x, slope) if torch.is_grad_enabled() else value


# --- nodes that PyTorch runs ------------------------------------------------------------------------------------------


@symbolic("ortmodule::call")
def _call(g: GraphContext, operands: TracedValue, number: TracedValue, given: TracedValue) -> TracedValue:
    traced = next(iter(next(g.original_node.outputs()).uses())).user
    numbers = [get_const(value, "i", "number") for value in (number, given)]
    made = g.op(
        f"{DOMAIN}::PythonOp", *unpack_list(operands), number_i=numbers[0], given_i=numbers[1],
        outputs=traced.outputsSize(),
    )  # fmt: skip
    made = made if isinstance(made, (tuple, list)) else [made]
    for result, output in zip(made, traced.outputs(), strict=True):
        result.setType(of_any_size(output.type()))
    return g.op("prim::ListConstruct", *made)


# --- embedding --------------------------------------------------------------------------------------------------------


@symbolic("aten::embedding", args="v v i b v")
def _embedding(
    g: GraphContext, weight: TracedValue, indices: TracedValue, padding_idx: int, scale_grad_by_freq: bool,
    sparse: TracedValue,
) -> TracedValue:  # fmt: skip
    if scale_grad_by_freq and torch.is_grad_enabled():
        raise refused("embedding with scale_grad_by_freq", weight)
    gathered = g.op("Gather", weight, indices)
    if padding_idx < 0 or not torch.is_grad_enabled():
        return gathered
    return _like(gathered, g.op(f"{DOMAIN}::Embedding", weight, indices, padding_idx_i=padding_idx))


@symbolic("aten::one_hot")
def _one_hot(g: GraphContext, x: TracedValue, classes: TracedValue) -> TracedValue:
    """A class out of range is refused where it is looked up among all classes."""
    zero, one = (g.op("Constant", value_t=torch.tensor(n)) for n in (0, 1))
    scalar = g.op("Constant", value_t=torch.zeros(0, dtype=torch.int64))
    classes = g.op("Reshape", g.op("Cast", classes, to_i=ONNX_TYPES[torch.int64]), scalar)
    known = g.op("Gather", g.op("Range", zero, classes, one), x)
    return g.op("OneHot", known, classes, g.op("Constant", value_t=torch.tensor([0, 1])), axis_i=-1)


@symbolic("aten::layer_norm")
def _layer_norm(
    g: GraphContext, x: TracedValue, shape: TracedValue, weight: TracedValue, bias: TracedValue, eps: TracedValue,
    cudnn: TracedValue,
) -> TracedValue:  # fmt: skip
    """Over dimensions whose sizes are computed: what counts is how many they are."""
    if isinstance(maybe_get_const(shape, "is"), (list, tuple)):
        return NotImplemented
    first = -len(unpack_list(shape))
    if is_none(weight):
        one = torch.ones(1, dtype=_result(g).dtype())
        weight = g.op("ConstantOfShape", g.op("Shape", x, start_i=first), value_t=one)
    rest = [] if is_none(bias) else [bias]
    eps = get_const(eps, "f", "eps")
    return g.op("LayerNormalization", x, weight, *rest, axis_i=first, epsilon_f=eps)


@symbolic("aten::group_norm", args="v i v v f b")
def _group_norm(
    g: GraphContext, x: TracedValue, groups: int, weight: TracedValue, bias: TracedValue, eps: float, cudnn: bool
) -> TracedValue:
    channels = g.op("Shape", x, start_i=1, end_i=2)
    operands = []
    for number, given in ((1.0, weight), (0.0, bias)):
        fill = torch.full((1,), number, dtype=_result(g).dtype())
        operands.append(g.op("ConstantOfShape", channels, value_t=fill) if is_none(given) else given)
    return _own(g, "GroupNorm", x, *operands, groups_i=groups, epsilon_f=eps)


@symbolic("aten::_convolution", "aten::convolution")
def _convolution(
    g: GraphContext, x: TracedValue, weight: TracedValue, bias: TracedValue, stride: TracedValue, padding: TracedValue,
    dilation: TracedValue, transposed: TracedValue, output_padding: TracedValue, groups: TracedValue, *_: TracedValue,
) -> TracedValue:  # fmt: skip
    """By a weight whose sizes are computed."""
    sizes = get_tensor_sizes(weight)
    if sizes is None or None not in sizes[2:]:
        return NotImplemented
    lists = [maybe_get_const(v, "is") for v in (stride, padding, dilation, output_padding)]
    numbers = [maybe_get_const(v, "i") for v in (transposed, groups)]
    if not all(isinstance(v, (list, tuple)) for v in lists) or any(isinstance(v, TracedValue) for v in numbers):
        return NotImplemented
    rank = len(sizes) - 2
    strides, pads, dilations, more = [list(v) * rank if len(v) == 1 else list(v) for v in lists]
    options = {"strides_i": strides, "pads_i": pads * 2, "dilations_i": dilations, "group_i": numbers[1]}
    if numbers[0] and any(more):
        options["output_padding_i"] = more
    rest = [] if is_none(bias) else [bias]
    return g.op("ConvTranspose" if numbers[0] else "Conv", x, weight, *rest, **options)


# --- losses -----------------------------------------------------------------------------------------------------------


@symbolic("aten::cross_entropy_loss", args="v v v i i f")
def _cross_entropy(
    g: GraphContext, logits: TracedValue, labels: TracedValue, weight: TracedValue, reduction: int, ignore_index: int,
    label_smoothing: float,
) -> TracedValue:  # fmt: skip
    """With smoothing; without it the exporter's own."""
    if not label_smoothing:
        return NotImplemented
    operands = [logits, labels] if is_none(weight) else [logits, labels, weight]
    how: dict[str, Any] = {"reduction_s": ("none", "mean", "sum")[reduction], "ignore_index_i": ignore_index}
    return _own(g, "SmoothedCrossEntropy", *operands, smoothing_f=label_smoothing, **how)


@symbolic("aten::huber_loss", args="v v i f")
def _huber_loss(g: GraphContext, x: TracedValue, y: TracedValue, reduction: int = 1, delta: float = 1.0) -> TracedValue:
    return _distances(g, x, y, reduction, delta_f=delta)


@symbolic("aten::smooth_l1_loss", args="v v i f")
def _smooth_l1_loss(
    g: GraphContext, x: TracedValue, y: TracedValue, reduction: int = 1, beta: float = 1.0
) -> TracedValue:
    return _distances(g, x, y, reduction, delta_f=beta, over_f=beta)


def _distances(g: GraphContext, x: TracedValue, target: TracedValue, reduction: int, **attributes: Any) -> TracedValue:
    """Huber's loss. A float64 ``delta`` that an attribute, which is float32, would not give back is a factor beside the
    loss of operands divided by it."""
    x, target = _alike(g, x, target)
    delta, factor = attributes["delta_f"], None
    if x.type().dtype() == torch.float64 and float(str(numpy.float32(delta))) != delta:
        over, factor = (
            g.op("Constant", value_t=torch.tensor(number, dtype=torch.float64))
            for number in (delta, delta if "over_f" in attributes else delta * delta)
        )
        x, target = g.op("Div", x, over), g.op("Div", target, over)
        attributes = {"delta_f": 1.0}
    each = g.op(f"{DOMAIN}::Huber", x, target, **attributes)
    shape = max(rank_of(value) for value in list(g.original_node.inputs())[:2])
    each.setType(_result(g).with_sizes([None] * shape))
    if reduction != 0:
        each = g.op("ReduceMean" if reduction == 1 else "ReduceSum", each, keepdims_i=0)
    return each if factor is None else g.op("Mul", each, factor)


# --- plain functions --------------------------------------------------------------------------------------------------


def _own(g: GraphContext, name: str, *inputs: TracedValue, output: int = 0, **attributes: Any) -> TracedValue:
    """A node of our domain, with the type and the rank that the traced operator's result has."""
    made = g.op(f"{DOMAIN}::{name}", *inputs, **attributes)
    kind = list(g.original_node.outputs())[output].type()
    if isinstance(kind, TensorType) and kind.dim() is not None:
        made.setType(of_any_size(kind))
    return made


for _name in ("Sinh", "Cosh", "Asinh", "Acosh", "Atanh"):
    _SYMBOLICS[f"aten::{_name.lower()}"] = lambda g, x, name=_name: g.op(name, x)
for _name, _function, _ in _core.pointwise_operators():
    _SYMBOLICS[f"aten::{_function}"] = lambda g, *operands, name=_name: _own(g, name, *operands)
_SYMBOLICS["aten::fix"] = _SYMBOLICS["aten::trunc"]


def typed_as_result(g: GraphContext, made: TracedValue) -> TracedValue:
    """``made`` with the type and rank of the operator's result in the trace."""
    kind = _result(g)
    made.setType(kind.with_sizes([None] * (kind.dim() or 0)))
    return made


def result_type(g: GraphContext) -> torch.dtype:
    """The element type of the operator's first result in the trace."""
    dtype = _result(g).dtype()
    assert dtype is not None, "of a tensor"
    return dtype


def _dtype(value: TracedValue) -> torch.dtype | None:
    kind = tensor_type(value)
    return None if kind is None else kind.dtype()


def _result(g: GraphContext) -> JitType:
    """The type of the operator's first result in the trace."""
    return next(g.original_node.outputs()).type()


def _alike(g: GraphContext, *values: TracedValue) -> list[TracedValue]:
    """Operands as the result's type; numbers and tensors alike."""
    dtype = result_type(g)
    to = ONNX_TYPES[dtype]
    return [value if _dtype(value) == dtype else g.op("Cast", value, to_i=to) for value in values]


@symbolic("aten::floor_divide")
def _floor_divide(g: GraphContext, x: TracedValue, y: TracedValue) -> TracedValue:
    return _own(g, "FloorDiv", *_alike(g, x, y))


@symbolic("aten::remainder", "aten::__mod__")
def _remainder(g: GraphContext, x: TracedValue, y: TracedValue) -> TracedValue:
    return _own(g, "Remainder", *_alike(g, x, y))


@symbolic("aten::fmod")
def _fmod(g: GraphContext, x: TracedValue, y: TracedValue) -> TracedValue:
    return g.op("Mod", *_alike(g, x, y), fmod_i=1)


@symbolic("aten::div", "aten::divide")
def _div(g: GraphContext, x: TracedValue, y: TracedValue, rounding: TracedValue | None = None) -> TracedValue:
    mode = None if rounding is None else maybe_get_const(rounding, "s")
    if mode == "floor":
        return _own(g, "FloorDiv", *_alike(g, x, y))
    if mode == "trunc" and result_type(g).is_floating_point:
        quotient = g.op("Div", *_alike(g, x, y))
        return _own(g, "Trunc", _like(quotient, g.op(f"{DOMAIN}::StopGradient", quotient)))
    return NotImplemented


@symbolic("aten::pow")
def _pow(g: GraphContext, x: TracedValue, y: TracedValue) -> TracedValue:
    """The exporter has powers of whole numbers in float32, those of sizes, which are float64, too."""
    if result_type(g) != torch.float64:
        return NotImplemented
    return typed_as_result(g, g.op("Pow", *_alike(g, x, y)))


@symbolic("aten::mish")
def _mish(g: GraphContext, x: TracedValue) -> TracedValue:
    return g.op("Mish", x) if EXPORTER_GLOBALS.export_onnx_opset_version >= 18 else NotImplemented


@symbolic("aten::hardtanh", args="v f f")
def _hardtanh(g: GraphContext, x: TracedValue, low: float, high: float) -> TracedValue:
    if not _is_float(x):
        return NotImplemented
    return _own(g, "HardTanh", x, min_f=low, max_f=high)


@symbolic("aten::relu6")
def _relu6(g: GraphContext, x: TracedValue) -> TracedValue:
    return _own(g, "HardTanh", x, min_f=0.0, max_f=6.0) if _is_float(x) else NotImplemented


@symbolic("aten::dropout", args="v f b")
def _dropout(g: GraphContext, x: TracedValue, p: float, train: bool) -> TracedValue:
    """All of it: zeros. The exporter's ratio is a float32."""
    if not train:
        return NotImplemented
    if p < 1:
        ratio = g.op("Constant", value_t=torch.tensor(p, dtype=torch.float64))
        return g.op("Dropout", x, ratio, g.op("Constant", value_t=torch.tensor(True)))
    return g.op("Mul", x, g.op("Constant", value_t=torch.zeros((), dtype=_result(g).dtype())))


@symbolic("aten::_grouped_mm")
def _grouped_mm(
    g: GraphContext, rows: TracedValue, matrices: TracedValue, ends: TracedValue | None = None,
    bias: TracedValue | None = None, dtype: TracedValue | None = None,
) -> TracedValue:  # fmt: skip
    """Of one matrix for each group of rows; PyTorch has more forms."""
    given = [is_none(x) for x in (ends, bias, dtype)]
    ranks = [rank_of(x) for x in list(g.original_node.inputs())[:2]]
    if given != [False, True, True] or ranks != [2, 3]:
        raise refused("a grouped product of this form", rows)
    return _own(g, "GroupedMatMul", rows, matrices, ends)  # type: ignore[arg-type]  # it is none of those that are None


# --- along a dimension ------------------------------------------------------------------------------------------------


def _rank(g: GraphContext) -> int | None:
    return next(g.original_node.inputs()).type().dim()


@symbolic("aten::cumprod", args="v i v")
def _cumprod(g: GraphContext, x: TracedValue, dim: int, dtype: TracedValue) -> TracedValue:
    return _own(g, "CumProd", *_alike(g, x), axis_i=dim) if _rank(g) else _alike(g, x)[0]


@symbolic("aten::logcumsumexp", args="v i")
def _logcumsumexp(g: GraphContext, x: TracedValue, dim: int) -> TracedValue:
    return _own(g, "LogCumSumExp", x, axis_i=dim) if _rank(g) else x


@symbolic("aten::cummax", args="v i")
def _cummax(g: GraphContext, x: TracedValue, dim: int) -> tuple[TracedValue, ...]:
    return _cumulated(g, x, dim, "CumArgMax")


@symbolic("aten::cummin", args="v i")
def _cummin(g: GraphContext, x: TracedValue, dim: int) -> tuple[TracedValue, ...]:
    return _cumulated(g, x, dim, "CumArgMin")


def _cumulated(g: GraphContext, x: TracedValue, dim: int, name: str) -> tuple[TracedValue, ...]:
    if not _rank(g):
        raise refused(f"{name} of a tensor of rank 0", x)
    index = _own(g, name, x, axis_i=dim, output=1)
    return g.op("GatherElements", x, index, axis_i=dim), index


@symbolic("aten::scatter_reduce", args="v i v v s b")
def _scatter_reduce(
    g: GraphContext, x: TracedValue, dim: int, index: TracedValue, source: TracedValue, reduce: str, include_self: bool
) -> TracedValue:
    names = {"sum": "add", "prod": "mul", "amax": "max", "amin": "min"}
    if not include_self or reduce not in names:
        raise refused(f"scatter_reduce by {reduce}", x)
    return g.op("ScatterElements", x, index, source, axis_i=dim, reduction_s=names[reduce])


# --- bits -------------------------------------------------------------------------------------------------------------

for _kinds, _name in (
    (("bitwise_and", "__and__", "__iand__"), "And"),
    (("bitwise_or", "__or__", "__ior__"), "Or"),
    (("bitwise_xor", "__xor__", "__ixor__"), "Xor"),
):

    def _bits(g: GraphContext, x: TracedValue, y: TracedValue, name: str = _name) -> TracedValue:
        whole = _result(g).dtype() != torch.bool
        return g.op(f"Bitwise{name}" if whole else name, *_alike(g, x, y))

    _SYMBOLICS.update(dict.fromkeys((f"aten::{_kind}" for _kind in _kinds), _bits))


@symbolic("aten::signbit")
def _signbit(g: GraphContext, x: TracedValue) -> TracedValue:
    if _is_float(x):
        return _own(g, "SignBit", x)
    return NotImplemented if _dtype(x) is None else g.op("Less", *_whole(g, x))


def _whole(g: GraphContext, x: TracedValue) -> tuple[TracedValue, ...]:
    """Integers or booleans, and a zero, as int64."""
    to = ONNX_TYPES[torch.int64]
    return g.op("Cast", x, to_i=to), g.op("Constant", value_t=torch.tensor(0))


@symbolic("aten::linspace")
def _linspace(
    g: GraphContext, start: TracedValue, end: TracedValue, steps: TracedValue, *options: TracedValue
) -> TracedValue:
    """From both ends towards the middle, in the result's type, or rounded to it at the end (torch 2.15)."""
    dtype, ends = _result(g).dtype(), list(g.original_node.inputs())[:2]
    if dtype is None or not dtype.is_floating_point:
        return NotImplemented
    to = ONNX_TYPES[dtype]
    once = dtype.itemsize == 2 and _rounds_linspace_once()
    start, end = (
        g.op("Constant", value_t=torch.as_tensor(known.toIValue(), dtype=dtype))
        if known.node().kind() == "prim::Constant"
        else g.op("Cast", value, to_i=to)  # computed from sizes
        for known, value in zip(ends, (start, end), strict=True)
    )
    zero, one = (g.op("Constant", value_t=torch.tensor(n)) for n in (0, 1))
    steps = g.op("Cast", steps, to_i=ONNX_TYPES[torch.int64])
    steps = g.op("Reshape", steps, g.op("Constant", value_t=torch.zeros(0, dtype=torch.int64)))
    last = g.op("Sub", steps, one)
    after = g.op("Range", zero, steps, one)
    before = g.op("Sub", last, after)
    whole = g.op("Max", last, one), after, before
    if once:
        wide = (g.op("Cast", value, to_i=ONNX_TYPES[torch.float32]) for value in (start, end, *whole))
        start, end, parts, after_, before_ = wide
    else:
        parts, after_, before_ = _alike(g, *whole)
    step = g.op("Div", g.op("Sub", end, start), parts)
    up = g.op("Add", start, g.op("Mul", step, after_))
    down = g.op("Sub", end, g.op("Mul", step, before_))
    found = g.op("Where", g.op("Or", g.op("Less", after, before), g.op("Equal", last, zero)), up, down)
    return g.op("Cast", found, to_i=to) if once else found


@functools.cache
def _rounds_linspace_once() -> bool:
    """Does this version of torch compute `linspace` in 16 bits as in float32?"""
    narrow, wide = (torch.linspace(0, 1, 16, dtype=dtype, device="cpu") for dtype in (torch.float16, torch.float32))
    return torch.equal(narrow, wide.half())


@symbolic("aten::where")
def _where(g: GraphContext, condition: TracedValue, *choices: TracedValue) -> TracedValue:
    """A choice between tensors of rank 0 has their type, where the exporter would take them for numbers."""
    if len(choices) != 2 or _dtype(condition) != torch.bool or _result(g).dim() is None:
        return NotImplemented
    return typed_as_result(g, g.op("Where", condition, *choices))


@symbolic("aten::bitwise_not")
def _bitwise_not(g: GraphContext, x: TracedValue) -> TracedValue:
    return g.op("Not" if _result(g).dtype() == torch.bool else "BitwiseNot", x)


@symbolic("aten::bitwise_left_shift", "aten::__lshift__", "aten::__ilshift__")
def _left_shift(g: GraphContext, x: TracedValue, y: TracedValue) -> TracedValue:
    return _shifted(g, x, y, "ShiftLeft")


@symbolic("aten::bitwise_right_shift", "aten::__rshift__", "aten::__irshift__")
def _right_shift(g: GraphContext, x: TracedValue, y: TracedValue) -> TracedValue:
    return _shifted(g, x, y, "ShiftRight")


def _shifted(g: GraphContext, x: TracedValue, y: TracedValue, name: str) -> TracedValue:
    if result_type(g).is_floating_point:
        raise refused("a shift of floats", x)
    return _own(g, name, *_alike(g, x, y))
