"""Translates operators that change only a tensor's shape: squeeze, pad, tile, chunk.

Ranks and lists have the lengths of the trace, so no translation asks in the graph which it is, as the exporter's do.
"""

from __future__ import annotations

import torch

from ortmodule.core.names import DOMAIN
from ortmodule.core.torch_private import (
    GraphContext,
    TracedValue,
    maybe_get_const,
    parse_arg,
    prepare_onnx_paddings,
    squeeze_helper,
    unpack_list,
)
from ortmodule.lowering.symbolics import symbolic, tensor_type
from ortmodule.lowering.traced_tensors import rank_of


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


@symbolic("aten::chunk", args="v v i")
def _chunk(g: GraphContext, x: TracedValue, chunks: TracedValue, dim: int) -> TracedValue:
    """Into fewer parts than are asked for, which the exporter does not know; each run has as many as the trace."""
    unpacked = [use.user for use in g.original_node.output().uses() if use.user.kind() == "prim::ListUnpack"]
    asked = maybe_get_const(chunks, "i")
    if not unpacked or not isinstance(asked, int) or (count := unpacked[0].outputsSize()) == asked or g.opset < 18:
        return NotImplemented
    parts = g.op("Split", x, axis_i=dim, num_outputs_i=count, outputs=count)
    return g.op("prim::ListConstruct", *([parts] if count == 1 else parts))
