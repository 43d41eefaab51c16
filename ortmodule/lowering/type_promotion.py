"""Casts operands of a trace to the types that PyTorch computes with.

PyTorch decides the type of a result by categories: an integer tensor and a Python float make a float of the default
type, a float64 tensor of rank 0 does not widen a float32 vector. ONNX has no such rules, and the exporter guesses them.
The trace knows the types that came out, so here every operand gets an explicit cast to them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ortmodule import _core
from ortmodule.core.dtypes import dtype_of
from ortmodule.core.size_expr import ARITHMETIC, ROUNDING, divides, is_rounded
from ortmodule.core.torch_private import TensorType, TracedGraph, TracedNode, TracedValue, parse_schema

# Operands have the type of the result.
_ARITHMETIC = frozenset(
    f"aten::{name}"
    for name in (  # noqa: SIM905
        "add sub rsub mul div true_divide floor_divide remainder fmod pow float_power maximum minimum fmax fmin where "
        "logaddexp copysign xlogy lerp addcmul addcdiv cat concat concatenate stack hstack vstack clamp "
        "clamp_min clamp_max exp exp2 log log2 log10 sqrt rsqrt reciprocal sin cos tan sinh cosh tanh asin "
        "acos atan asinh acosh atanh sigmoid erf softmax log_softmax mean "
        # Under autocast these compute in the type of the products inside.
        "matmul einsum tensordot inner linalg_multi_dot chain_matmul linalg_vecdot linalg_matrix_power"
    ).split()
) | {f"aten::{function}" for _, function, _ in _core.pointwise_operators()}
#: Recurrent layers, of whose results autocast may make 16-bit ones.
_RECURRENT = frozenset(("aten::rnn_tanh", "aten::rnn_relu", "aten::lstm", "aten::gru"))
# They have the type that they would have in a sum.
_COMPARISONS = frozenset(f"aten::{name}" for name in ("eq", "ne", "lt", "le", "gt", "ge"))


def promote(graph: TracedGraph) -> None:
    """Puts casts before operands of another type than PyTorch computes with."""
    _widen_numbers(graph)
    for node in list(graph.nodes()):
        kind = node.kind()
        if kind == "aten::full":
            _say_type(graph, node, 2)
            continue
        if kind in _ARITHMETIC:
            wanted = dtype_of(node.output()) if node.outputsSize() == 1 else None
        elif kind in _COMPARISONS:
            wanted = _compared_as(node)
        elif kind in _RECURRENT:
            found = {dtype_of(value) for value in node.outputs()}
            wanted = found.pop() if len(found) == 1 else None
        else:
            _cast_as_computed(graph, node)
            continue
        if wanted is None:
            continue
        if takes_a_wide_factor(node):
            _cast_operands(graph, node, torch.float32)
            _round_result(graph, node, wanted)
        else:
            _cast_operands(graph, node, wanted)


# --- factors of float16 tensors ---------------------------------------------------------------------------------------

#: PyTorch multiplies 16-bit tensors by numbers, and divides them, in float32; in sums it rounds the numbers.
_SCALED = frozenset(("aten::mul", "aten::div", "aten::true_divide"))


def takes_a_wide_factor(node: TracedNode) -> bool:
    """Has a product or quotient in float16 a number, or a tensor of rank 0, that float16 cannot hold?

    One that is merely rounded stays, since patterns know it; and bfloat16 has float32's range.
    """
    operands = list(node.inputs())
    if node.kind().removesuffix("_") not in _SCALED or len(operands) != 2 or dtype_of(node.output()) != torch.float16:
        return False  # three operands: a quotient that is rounded to an integer
    return any(map(_is_beyond_half, operands if "mul" in node.kind() else operands[1:]))


def _is_beyond_half(value: TracedValue) -> bool:
    """Only a constant's value counts: two traces that differ in sizes have to agree."""
    dtype = dtype_of(value)
    if dtype in (None, torch.float16, torch.bool) or value.type().dim() != 0:
        return False
    if value.node().kind() != "prim::Constant":
        return not _is_root(value)
    number = torch.as_tensor(value.toIValue(), dtype=torch.float64)
    off = (number.half().double() - number).abs()  # NaN: neither it nor infinity is rounded
    return bool(off > torch.finfo(torch.float16).eps * number.abs())


def _is_root(value: TracedValue) -> bool:
    """A root of a size, or one by it: attention scales by them."""
    node = value.node()
    while node.kind() in ("aten::to", "aten::reciprocal"):
        node = next(node.inputs()).node()
    return node.kind() in ("aten::pow", "aten::sqrt", "aten::rsqrt")


def _round_result(graph: TracedGraph, node: TracedNode, narrow: torch.dtype) -> None:
    """A result in float32, and what uses it in ``narrow``."""
    result = node.output()
    with graph.insert_point_guard(node):
        arguments = [graph.insertConstant(constant) for constant in (narrow, False, False, None)]
        cast = graph.create("aten::to", [result, *arguments], 1)
    cast.insertAfter(node)
    cast.output().setType(result.type())
    result.setType(result.type().with_dtype(torch.float32))
    result.replaceAllUsesWith(cast.output())
    cast.replaceInput(0, result)


def _widen_numbers(graph: TracedGraph) -> None:
    """Python computes with sizes in float64; in a trace these numbers are tensors, whose fractions are float32."""
    sizes: set[int] = set()
    wide: list[TracedValue] = []
    for node in list(graph.nodes()):
        if node.kind() == "prim::NumToTensor" or (is_rounded(node) and next(node.inputs()).unique() in sizes):
            sizes.add(node.output().unique())
        elif node.kind() in ARITHMETIC and node.outputsSize() == 1:
            operands = [v for v in node.inputs() if dtype_of(v) is not None]
            known = [v.unique() in sizes for v in operands]
            if not any(known) or not all(k or _is_number(v) for k, v in zip(known, operands, strict=True)):
                continue
            result = node.output()
            if dtype_of(result) == torch.float32:
                result.setType(result.type().with_dtype(torch.float64))
                result = _as_quotient(graph, node) if divides(node) else result
                wide.append(result)
            if dtype_of(result) in _NUMBERS:
                sizes.add(result.unique())
    for value in wide:
        others = [use for use in value.uses() if not _takes_wide(use.user)]
        if not others:
            continue
        with graph.insert_point_guard(value.node()):
            arguments = [graph.insertConstant(constant) for constant in (torch.float32, False, False, None)]
            cast = graph.create("aten::to", [value, *arguments], 1)
        cast.insertAfter(value.node())
        cast.output().setType(value.type().with_dtype(torch.float32))
        for use in others:
            use.user.replaceInput(use.offset, cast.output())


def _as_quotient(graph: TracedGraph, node: TracedNode) -> TracedValue:
    """3 / n as it is, in place of 1 / n * 3, which is rounded twice."""
    inverse, number = node.inputs()
    with graph.insert_point_guard(node):
        quotient = graph.insertNode(graph.create("aten::div", [number, next(inverse.node().inputs())], 1)).output()
    quotient.setType(node.output().type())
    node.output().replaceAllUsesWith(quotient)
    node.destroy()
    return quotient


def _takes_wide(node: TracedNode) -> bool:
    if node.kind() == "aten::ScalarImplicit":
        return all(_takes_wide(use.user) for use in node.output().uses())
    if node.kind() in _ARITHMETIC | _COMPARISONS | ROUNDING.keys() or is_rounded(node):
        return True
    return any(dtype_of(v) == torch.float64 for v in node.outputs())


def _is_number(value: TracedValue) -> bool:
    """A Python number of the trace. (A tensor of rank 0 that is a constant may be float64, too; it is as exact.)"""
    return value.node().kind() == "prim::Constant" and value.type().dim() == 0 and dtype_of(value) in _NUMBERS


_NUMBERS = (torch.int64, torch.float64, torch.bool)


def _say_type(graph: TracedGraph, node: TracedNode, i: int) -> None:
    """The argument `dtype`, where it is left to PyTorch."""
    if list(node.inputs())[i].node().mustBeNone() and dtype_of(node.output()) is not None:
        with graph.insert_point_guard(node):
            node.replaceInput(i, graph.insertConstant(dtype_of(node.output())))


def _operands(node: TracedNode) -> Iterator[tuple[TracedNode, int, TracedValue]]:
    """Tensors among the inputs, those in lists too, with who uses them; not the condition of a choice."""
    for i, value in enumerate(node.inputs()):
        if value.node().kind() == "prim::ListConstruct":
            yield from ((value.node(), k, item) for k, item in enumerate(value.node().inputs()))
        elif not (i == 0 and node.kind() == "aten::where"):
            yield node, i, value


def _compared_as(node: TracedNode) -> torch.dtype | None:
    a, b = list(node.inputs())[:2]
    x, y = _example(a), _example(b)
    if None in (dtype_of(a), dtype_of(b)) or dtype_of(a) == dtype_of(b) or x is None or y is None:
        return None
    return torch.result_type(x, y)


def _example(value: TracedValue) -> torch.Tensor | float | None:
    """Something that promotes as `value` does."""
    dtype, rank = dtype_of(value), value.type().dim() if isinstance(value.type(), TensorType) else None
    if dtype is None or rank is None:
        return None
    if value.node().kind() == "prim::Constant" and rank == 0:
        return value.toIValue().item()  # a Python number: an operand that is a tensor is never a constant here
    return torch.empty([1] * rank, dtype=dtype)


#: Types that autocast casts between.
_CAST_BY_AUTOCAST = frozenset((torch.float16, torch.bfloat16, torch.float32))
#: Operators whose result has another type than their operand, because that is what they are for.
_CONVERSIONS = frozenset(("aten::to", "aten::_to_copy", "aten::type_as"))


def _cast_as_computed(graph: TracedGraph, node: TracedNode) -> None:
    """Casts operands of an operator that autocast does not know, as it knows one of its parts: a square is a power, a
    cross entropy has a softmax, which a GPU's autocast computes in float32. The type of the result shows it."""
    kind = node.kind()
    found = {dtype_of(value) for value in node.outputs()} if kind.startswith("aten::") else set()
    wanted = next(iter(found)) if len(found) == 1 else None
    if wanted is None or wanted not in _CAST_BY_AUTOCAST or kind in _CONVERSIONS or _is_told_its_type(node):
        return
    given = {dtype_of(value) for _, _, value in _operands(node)} & _CAST_BY_AUTOCAST
    if given and given != found and (len(given) == 1 or wanted is torch.float32):
        _cast_operands(graph, node, wanted, _CAST_BY_AUTOCAST)


def _is_told_its_type(node: TracedNode) -> bool:
    names = (
        [argument.name for argument in parse_schema(node.schema()).arguments] if node.schema() != "(no schema)" else []
    )
    given = dict(zip(names, node.inputs(), strict=False))
    return "dtype" in given and not given["dtype"].node().mustBeNone()


def _cast_operands(
    graph: TracedGraph, node: TracedNode, wanted: torch.dtype, of: frozenset[torch.dtype] | None = None
) -> None:
    """``of``: only operands of these types."""
    for user, i, value in _operands(node):
        if node.kind() in _RECURRENT and dtype_of(value) == torch.int64:
            continue  # the batch sizes of a packed sequence
        if of is not None and dtype_of(value) not in of:
            continue
        # Constants of rank 0 are Python numbers: the exporter gives them the type of the other operand.
        if dtype_of(value) in (None, wanted) or value.node().kind() == "prim::Constant" and value.type().dim() == 0:
            continue
        with graph.insert_point_guard(user):
            arguments = [graph.insertConstant(constant) for constant in (wanted, False, False, None)]
            cast = graph.insertNode(graph.create("aten::to", [value, *arguments], 1))
        cast.output().setType(value.type().with_dtype(wanted))
        user.replaceInput(i, cast.output())
