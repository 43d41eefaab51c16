"""Says what a value of a traced graph follows from: nothing, sizes, data, random numbers."""

from __future__ import annotations

import torch

from ortmodule.core.size_expr import ARITHMETIC
from ortmodule.core.torch_private import ListType, OptionalType, TensorType, TracedNode, TracedValue, TupleType

#: What a value depends on: the most of what its operands do. OPAQUE: on what a host node computes.
NOTHING, SIZE, DATA, RANDOM, OPAQUE = range(5)

_SIZES = {"aten::size", "aten::sym_size", "aten::numel", "aten::dim", "aten::len"}
_RANDOM = {
    "aten::rand", "aten::rand_like", "aten::randn", "aten::randn_like", "aten::randint", "aten::randint_like",
    "aten::randperm", "aten::bernoulli", "aten::bernoulli_", "aten::uniform_", "aten::normal_", "aten::normal",
    "aten::multinomial", "aten::exponential_", "aten::random_",
}  # fmt: skip
#: The values of operands decide how large a result is.
_SIZED_BY_DATA = {
    "aten::nonzero", "aten::nonzero_numpy", "aten::argwhere", "aten::unique_dim", "aten::_unique", "aten::_unique2",
    "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::one_hot", "aten::bincount",
}  # fmt: skip
#: Those of all but the first operand do, of which the size matters alone.
_SIZED_BY_OTHERS = {
    "aten::masked_select", "aten::_pack_padded_sequence", "aten::_pad_packed_sequence", "aten::tensor_split",
}  # fmt: skip
#: Results are as large as the first operand.
_SIZED_BY_FIRST = {
    "aten::index_put", "aten::index_add", "aten::index_copy", "aten::index_fill", "aten::index_reduce",
    "aten::scatter", "aten::scatter_add", "aten::scatter_reduce", "aten::masked_scatter", "aten::slice_scatter",
    "aten::select_scatter", "aten::diagonal_scatter", "aten::copy",
}  # fmt: skip
#: A random number asked so says nothing about which one it is.
_FINITE = {"aten::isfinite", "aten::isnan", "aten::isinf", "aten::isposinf", "aten::isneginf"}


#: What a value, or (True) the size of it, follows from; and what it depends on at least.
_Causes = tuple[list[tuple[TracedValue, bool]], int]


def causes(node: TracedNode) -> _Causes:
    kind = node.kind()
    if kind in _SIZES:
        return [(value, True) for value in node.inputs()], SIZE
    if kind == "prim::Param":
        return [], DATA
    if kind in _RANDOM:
        return [], RANDOM
    if kind == "ortmodule::call":
        return [], OPAQUE
    least = RANDOM if kind == "aten::dropout" and _drops(node) else NOTHING
    return [(value, False) for value in node.inputs()], least


def causes_of_size(value: TracedValue) -> _Causes:
    """Too many rather than too few: of a size that is thought to depend on data, more is compared than has to be."""
    node, kind = value.node(), value.node().kind()
    if kind == "prim::Param" or _rank(value) == 0:
        return [], SIZE
    if kind == "ortmodule::call":
        return [], DATA
    operands = list(node.inputs())
    repeats = kind == "aten::repeat_interleave"
    if kind in _SIZED_BY_OTHERS or (kind == "aten::index" and _takes_masks(node)) or (repeats and len(operands) > 2):
        chosen = [(v, sized) for v in operands[1:] for sized in (False, True)]
        return [(operands[0], True), *chosen], SIZE
    if kind in _SIZED_BY_DATA or repeats or (kind == "aten::where" and len(operands) == 1):
        return [(v, sized) for v in operands for sized in (False, True)], SIZE
    if kind in _SIZED_BY_FIRST or (kind.endswith("_") and not kind.endswith("__")):
        return [(operands[0], True)], SIZE
    # Numbers among the operands may be sizes.
    numbers = () if kind in ARITHMETIC else (v for v in operands if not _holds_tensors(v))
    return [*((v, True) for v in operands if _holds_tensors(v)), *((v, False) for v in numbers)], SIZE


def _rank(value: TracedValue) -> int | None:
    kind = value.type()
    return kind.dim() if isinstance(kind, TensorType) else None


def _holds_tensors(value: TracedValue) -> bool:
    kind = value.type()
    while isinstance(kind, (ListType, OptionalType)):
        kind = kind.getElementType()
    return isinstance(kind, (TensorType, TupleType))


def _takes_masks(node: TracedNode) -> bool:
    """Does an index select elements by a mask?"""
    chosen = list(node.inputs())[1].node().inputs()
    kinds = [v.type().dtype() for v in chosen if isinstance(v.type(), TensorType)]
    return any(kind in (None, torch.bool, torch.uint8) for kind in kinds)


def _drops(node: TracedNode) -> bool:
    """Does a dropout draw anything?"""
    _, rate, training = (value.toIValue() for value in node.inputs())
    return rate != 0 and training is not False


def dependence(value: TracedValue, known: dict[tuple[int, bool], int]) -> int:
    """What a value depends on. ``known``: the same of others, by their numbers, and of their sizes (True)."""
    first = value.unique(), False
    # With what each follows from, once that was looked up: each look makes objects of torch's.
    asked: list[tuple[TracedValue, tuple[int, bool], list[tuple[int, bool]] | None, int]]
    asked = [(value, first, None, NOTHING)]
    while asked:
        value, key, behind, least = asked.pop()
        if key in known:
            continue
        of_size = key[1]
        if behind is None:
            found, least = causes_of_size(value) if of_size else causes(value.node())
            behind = [(v.unique(), sized) for v, sized in found]
            both = zip(found, behind, strict=True)
            if unknown := [(v, other, None, NOTHING) for (v, _), other in both if other not in known]:
                asked += [(value, key, behind, least), *unknown]
                continue
        most = max(map(known.__getitem__, behind), default=NOTHING)
        if most == RANDOM and not of_size and _is_decided(value.node()):
            most = NOTHING
        elif most == RANDOM and not of_size and value.node().kind() in _FINITE:
            most = DATA
        known[key] = max(most, least)
    return known[first]


def _is_decided(node: TracedNode) -> bool:
    """A uniform random number compared with a constant outside [0, 1): `rand() < layerdrop` where that is 0."""
    if node.kind() not in {"aten::lt", "aten::le", "aten::gt", "aten::ge"}:
        return False
    drawn, bound = node.inputs()
    if drawn.node().kind() not in {"aten::rand", "aten::rand_like"} or bound.node().kind() != "prim::Constant":
        return False
    bound = bound.toIValue()
    return bound < 0 or bound >= 1 or (bound == 0 and node.kind() in {"aten::lt", "aten::ge"})
