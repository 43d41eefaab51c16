"""Translates operators that change only a tensor's shape: squeeze, view, pad, tile, chunk, split.

Ranks and lists have the lengths of the trace, so no translation asks in the graph which it is, as the exporter's do.
"""

from __future__ import annotations

import itertools

import torch

from ortmodule.core.names import DOMAIN
from ortmodule.core.torch_private import (
    GraphContext,
    ListType,
    TracedValue,
    maybe_get_const,
    parse_arg,
    prepare_onnx_paddings,
    squeeze_helper,
    unpack_list,
)
from ortmodule.lowering.symbolics import symbolic, tensor_type
from ortmodule.lowering.traced_tensors import rank_of

_UNPACK = "prim::ListUnpack"
_END = 2**63 - 1
_ZERO_IS_ZERO = 14  # the opset from which a Reshape may take 0 for a size


@symbolic("aten::squeeze")
def _squeeze(g: GraphContext, x: TracedValue, dim: TracedValue | None = None) -> TracedValue:
    """What is one in the trace goes. What is not has to stay: a run that would be different is found by what was read,
    or refused by the engine."""
    traced = next(g.original_node.inputs())
    kind = tensor_type(traced)
    sizes = None if kind is None else kind.varyingSizes()
    if sizes is None:
        return NotImplemented
    dims = set(range(len(sizes)))
    if dim is not None and sizes:
        named = maybe_get_const(dim, "t")
        dims = {d % len(sizes) for d in torch.as_tensor(named).reshape(-1).tolist()}
    gone = [d for d in sorted(dims) if sizes[d] == 1]
    kept = [d for d in sorted(dims) if sizes[d] != 1 and not _is_read(traced, d)]
    if kept:
        like = x
        x = g.op(f"{DOMAIN}::NotOne", x, axes_i=kept)
        x.setType(like.type())
    return squeeze_helper(g, x, gone) if gone else x


def _is_read(value: TracedValue, dim: int) -> bool:
    """Is a size of this traced value compared with a number?"""
    for use in value.uses():
        if use.user.kind() == "aten::size" and list(use.user.inputs())[1].toIValue() == dim:
            users = [u.user for u in use.user.output().uses()]
            users += [u.user for n in users if n.kind() == "prim::NumToTensor" for u in n.output().uses()]
            if any(user.kind() == "aten::eq" for user in users):
                return True
    return False


@symbolic("aten::view", "aten::reshape")
def _reshape(g: GraphContext, x: TracedValue, shape: TracedValue) -> TracedValue:
    """A size that is computed may be 0, which the exporter's operator takes for the one that there is."""
    if g.opset < _ZERO_IS_ZERO or isinstance(maybe_get_const(shape, "is"), (list, tuple)):
        return NotImplemented
    return g.op("Reshape", x, shape, allowzero_i=1)


@symbolic("aten::pad")
def _pad(g: GraphContext, x: TracedValue, pad: TracedValue, mode: TracedValue, value: TracedValue) -> TracedValue:
    """Around a circle as one operator; the exporter has a copy for each side of each axis. Negative pads cut first, and
    what is left goes around."""
    if parse_arg(mode, "s") != "circular":
        return NotImplemented
    pads, zero = prepare_onnx_paddings(g, x, pad), g.op("Constant", value_t=torch.tensor(0))
    return g.op("Pad", g.op("Pad", x, g.op("Min", pads, zero)), g.op("Max", pads, zero), mode_s="wrap")


@symbolic("aten::tile")
def _tile(g: GraphContext, x: TracedValue, times: TracedValue) -> TracedValue:
    """Of a shorter list the first dimensions are there once; for a longer one the tensor has more dimensions, of 1."""
    numbers, rank = _numbers(g, times), rank_of(next(g.original_node.inputs()))
    one = g.op("Constant", value_t=torch.tensor([1]))
    numbers = [one] * (rank - len(numbers)) + numbers
    if len(numbers) > rank:
        x = g.op("Unsqueeze", x, g.op("Constant", value_t=torch.arange(len(numbers) - rank)))
    return g.op("Tile", x, g.op("Concat", *numbers, axis_i=0)) if numbers else g.op("Identity", x)


def _numbers(g: GraphContext, values: TracedValue) -> list[TracedValue]:
    """The numbers of a list, constant or not, each a tensor of one element."""
    constant = maybe_get_const(values, "is")
    if isinstance(constant, (list, tuple)):
        return [g.op("Constant", value_t=torch.tensor([number])) for number in constant]
    flat = g.op("Constant", value_t=torch.tensor([-1]))
    return [g.op("Reshape", value, flat) for value in unpack_list(values)]


def _parts(g: GraphContext) -> int:
    """How many results the traced call has; 0: it is not known."""
    return next((u.user.outputsSize() for u in g.original_node.output().uses() if u.user.kind() == _UNPACK), 0)


@symbolic("aten::chunk", args="v v i")
def _chunk(g: GraphContext, x: TracedValue, chunks: TracedValue, dim: int) -> TracedValue:
    """Into fewer parts than are asked for, or by a size, which the exporter does not know; each run has as many as the
    trace."""
    asked, count = maybe_get_const(chunks, "i"), _parts(g)
    if not count or count == asked or g.opset < 18:
        return NotImplemented
    if not isinstance(asked, int):
        one = g.op("Constant", value_t=torch.tensor([1]))
        number = g.op("Reshape", chunks, g.op("Constant", value_t=torch.tensor([-1])))
        size = g.op("Gather", g.op("Shape", x), g.op("Constant", value_t=torch.tensor([dim])))
        step = g.op("Div", g.op("Sub", g.op("Add", size, number), one), number)
        return g.op("prim::ListConstruct", *_slices(g, x, step, dim, count))
    parts = g.op("Split", x, axis_i=dim, num_outputs_i=count, outputs=count)
    return g.op("prim::ListConstruct", *([parts] if count == 1 else parts))


@symbolic("aten::split", "aten::unsafe_split", "aten::split_copy", args="v v i")
def _split(g: GraphContext, x: TracedValue, length: TracedValue, dim: int) -> TracedValue | list[TracedValue]:
    """Each run has as many parts as the trace; the exporter's have the lengths of the trace, as those of one element
    have in any case."""
    node = g.original_node
    fused = node.hasAttribute("_outputs")  # with the node that takes the list apart
    count = node.i("_outputs") if fused else _parts(g)
    if not count or isinstance([*node.inputs()][1].type(), ListType) or maybe_get_const(length, "i") == 1:
        return NotImplemented
    step = g.op("Reshape", length, g.op("Constant", value_t=torch.tensor([-1])))
    parts = _slices(g, x, step, dim, count)
    return (parts if count > 1 else parts[0]) if fused else g.op("prim::ListConstruct", *parts)


def _slices(g: GraphContext, x: TracedValue, step: TracedValue, dim: int, count: int) -> list[TracedValue]:
    """``count`` parts of ``step`` elements each, but for the last one, which has all that is left."""
    axis = g.op("Constant", value_t=torch.tensor([dim]))
    ends = [g.op("Mul", step, g.op("Constant", value_t=torch.tensor([i]))) for i in range(1, count)]
    bounds = [g.op("Constant", value_t=torch.tensor([0])), *ends, g.op("Constant", value_t=torch.tensor([_END]))]
    return [g.op("Slice", x, first, last, axis) for first, last in itertools.pairwise(bounds)]
