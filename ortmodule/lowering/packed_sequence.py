"""Translates packed sequences to ONNX (`torch.nn.utils.rnn.pack_padded_sequence`).

A recurrent layer of ONNX takes sequences side by side, each with its length. So what is packed is remembered beside the
padded sequences that it was made of; a layer takes these, and its results are packed where a node reads them. How
many rows there are, and how long the longest sequence is, data decides: both are what NonZero finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ortmodule.core.dtypes import ONNX_TYPES
from ortmodule.core.torch_private import (
    GraphContext,
    TracedValue,
    generic_rnn,
    get_const,
    get_tensor_rank,
    is_tensor_list,
    maybe_get_const,
    squeeze_helper,
    unpack_list,
)
from ortmodule.lowering.symbolics import record, refused, symbolic

_INT64 = ONNX_TYPES[torch.int64]
_INT32 = ONNX_TYPES[torch.int32]


@dataclass(frozen=True)
class Packing:
    """How sequences are packed: all of them by one `batch_sizes`."""

    lengths: TracedValue  # int64 [batch]
    steps: TracedValue  # int64 [1], of the padded sequences
    batch: TracedValue  # int64 [1]
    mask: TracedValue  # bool [steps, batch]
    rows: TracedValue  # int64 [n]: where packed rows lie among all


def _numbers(g: GraphContext, *numbers: int) -> TracedValue:
    return g.op("Constant", value_t=torch.tensor(numbers))


def _part(g: GraphContext, x: TracedValue, start: int, end: int) -> TracedValue:
    return g.op("Slice", x, _numbers(g, start), _numbers(g, end))


def _flat(g: GraphContext, x: TracedValue) -> TracedValue:
    """[steps, batch, ...] as [steps * batch, ...]."""
    return g.op("Reshape", x, g.op("Concat", _numbers(g, -1), _part(g, g.op("Shape", x), 2, 1 << 30), axis_i=0))


def _where(g: GraphContext, mask: TracedValue) -> TracedValue:
    """The places of a vector that are true."""
    return g.op("Reshape", g.op("NonZero", mask), _numbers(g, -1))


def _swapped(g: GraphContext, x: TracedValue) -> TracedValue:
    """Steps and batch exchanged."""
    rank = get_tensor_rank(x)
    return g.op("Transpose", x, perm_i=[1, 0, *range(2, rank)])


def _packing(batch_sizes: TracedValue) -> Packing:
    found = record.packings.get(batch_sizes.unique())
    if found is None:
        raise refused("batch sizes that no packing made", batch_sizes)
    return found


def _padded(g: GraphContext, data: TracedValue, packing: Packing) -> TracedValue:
    """Packed rows in their places, [steps, batch, ...]; beyond a sequence's end it means nothing."""
    known = record.padded.get(data.unique())
    if known is not None:
        return known
    rest = _part(g, g.op("Shape", data), 1, 1 << 30)
    count = g.op("Mul", packing.steps, packing.batch)
    zero = g.op("CastLike", g.op("Constant", value_t=torch.tensor(0.0)), data)
    zeros = g.op("Expand", zero, g.op("Concat", count, rest, axis_i=0))
    rows = g.op("Unsqueeze", packing.rows, _numbers(g, 1))
    whole = g.op("ScatterND", zeros, rows, data)
    return g.op("Reshape", whole, g.op("Concat", packing.steps, packing.batch, rest, axis_i=0))


def _packed(g: GraphContext, x: TracedValue, packing: Packing) -> TracedValue:
    data = g.op("Gather", _flat(g, x), packing.rows, axis_i=0)
    record.padded[data.unique()] = x
    return data


@symbolic("aten::_pack_padded_sequence", args="v v b")
def _pack(g: GraphContext, x: TracedValue, lengths: TracedValue, batch_first: bool) -> tuple[TracedValue, ...]:
    if batch_first:
        x = _swapped(g, x)
    lengths = g.op("Cast", lengths, to_i=_INT64)
    shape = g.op("Shape", x)
    steps, batch = _part(g, shape, 0, 1), _part(g, shape, 1, 2)
    zero, one = (g.op("Constant", value_t=torch.tensor(n)) for n in (0, 1))
    numbers = g.op("Range", zero, squeeze_helper(g, steps, [0]), one)
    mask = g.op("Less", g.op("Unsqueeze", numbers, _numbers(g, 1)), g.op("Unsqueeze", lengths, _numbers(g, 0)))
    rows = _where(g, g.op("Reshape", mask, _numbers(g, -1)))
    counts = g.op("ReduceSum", g.op("Cast", mask, to_i=_INT64), _numbers(g, 1), keepdims_i=0)
    batch_sizes = g.op("Gather", counts, _where(g, g.op("Greater", counts, zero)), axis_i=0)
    packing = Packing(lengths, steps, batch, mask, rows)
    record.packings[batch_sizes.unique()] = packing
    return _packed(g, x, packing), batch_sizes


@symbolic("aten::_pad_packed_sequence", args="v v b t v")
def _pad(
    g: GraphContext,
    data: TracedValue,
    batch_sizes: TracedValue,
    batch_first: bool,
    padding: torch.Tensor,
    total: TracedValue,
) -> tuple[TracedValue, ...]:
    packing = _packing(batch_sizes)
    x = _padded(g, data, packing)
    rank = get_tensor_rank(data) + 1
    value = g.op("CastLike", g.op("Constant", value_t=torch.as_tensor(padding)), data)
    inside = g.op("Unsqueeze", packing.mask, _numbers(g, *range(2, rank))) if rank > 2 else packing.mask
    x = g.op("Where", inside, x, value)
    total = g.op("Reshape", g.op("Cast", total, to_i=_INT64), _numbers(g, 1))
    x = g.op("Slice", x, _numbers(g, 0), total)
    more = g.op("Max", g.op("Sub", total, packing.steps), _numbers(g, 0))
    pads = g.op("Concat", _numbers(g, *[0] * rank), more, _numbers(g, *[0] * (rank - 1)), axis_i=0)
    x = g.op("Pad", x, pads, value)
    return _swapped(g, x) if batch_first else x, packing.lengths


@symbolic("aten::select")
def _first_size(g: GraphContext, x: TracedValue, dim: TracedValue, index: TracedValue) -> TracedValue:
    """The first of the batch sizes is the batch's."""
    packing = record.packings.get(x.unique())
    if packing is None or maybe_get_const(index, "i") != 0:
        return NotImplemented
    return squeeze_helper(g, packing.batch, [0])


def _recurrent(kind: str, variant: str) -> None:
    def layer(g: GraphContext, *operands: Any) -> tuple[TracedValue, ...]:
        if not is_tensor_list(operands[3]):  # the form for padded sequences
            return NotImplemented
        data, batch_sizes, states, weights, *rest = operands
        names = ("has_biases", "num_layers", "dropout", "train", "bidirectional")
        kinds = ("i", "i", "f", "i", "i")
        biases, layers, dropout, train, both = map(get_const, rest, kinds, names)
        packing = _packing(batch_sizes)
        states = unpack_list(states) if variant == "LSTM" else states
        results = generic_rnn(
            g, variant, _padded(g, data, packing), states, unpack_list(weights), biases, layers,
            dropout, train, both, batch_sizes=g.op("Cast", packing.lengths, to_i=_INT32),
        )  # fmt: skip
        if not isinstance(results, Sequence):
            return results
        return _packed(g, results[0], packing), *results[1:]

    symbolic(f"aten::{kind}")(layer)


for _kind, _variant in (("lstm", "LSTM"), ("gru", "GRU"), ("rnn_tanh", "RNN_TANH"), ("rnn_relu", "RNN_RELU")):
    _recurrent(_kind, _variant)
