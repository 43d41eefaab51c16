"""Finds where to cut a graph, so that sizes which data decides are known when what is behind is planned.

A plan needs all sizes. One that data decides is found by running what it follows from before the step (a prologue), and
that runs once more in the step. Where a mask follows from hidden states, that is all in front of it, for each mask. Cut
behind the mask, what is in front has run when what is behind is planned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx

from ortmodule.core.names import INPUT
from ortmodule.core.onnx_utils import OF_SIZES
from ortmodule.lowering.cuts.graph_cuts import free_values, used_by

#: Operators whose result has as many elements as their first operand says, and those that take numbers: from which on.
_COUNTS = ("NonZero", "Unique", "Compress")
_TAKES = {
    "Slice": 1, "Range": 0, "Expand": 1, "Reshape": 1, "Tile": 1, "ConstantOfShape": 0, "Pad": 1, "Split": 1, "TopK": 1,
    "OneHot": 1, "Resize": 2,
}  # fmt: skip
#: To run these twice costs something.
_PRODUCTS = {"MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "LSTM", "GRU", "RNN", "Attention"}


def data_cuts(model: onnx.ModelProto, integers: Iterable[int]) -> list[str]:
    """The values, in their order; between two of them is a matrix product or a convolution. ``integers``: inputs of
    integers, which decide sizes without that."""
    free = free_values(model, [f"{INPUT}{i}" for i in integers])
    producers: dict[str, tuple[int, onnx.NodeProto]] = {}
    cuts: list[str] = []
    start = 0  # of what is behind the last cut
    for place, node in enumerate(model.graph.node):
        for name in _asked(node):
            if name not in free and _is_deep(name, start, producers):
                start = producers[name][0] + 1
                cuts.append(name)
        producers |= dict.fromkeys(node.output, (place, node))
    return cuts


def _asked(node: onnx.NodeProto) -> Iterable[str]:
    """The operands whose elements decide the size of the node's results."""
    if node.op_type in _COUNTS:
        return node.input[int(node.op_type == "Compress") :][:1]
    return node.input[_TAKES[node.op_type] :] if node.op_type in _TAKES else ()


def _is_deep(name: str, start: int, producers: Mapping[str, tuple[int, onnx.NodeProto]]) -> bool:
    """Is there a product in what a value follows from, from node ``start`` on?"""
    waiting, seen = [name], set()
    while waiting:
        name = waiting.pop()
        place, node = producers.get(name, (-1, None))
        if node is None or place < start or name in seen or node.op_type in OF_SIZES:
            continue
        seen.add(name)
        if node.op_type in _PRODUCTS:
            return True
        waiting += used_by(node)
    return False
