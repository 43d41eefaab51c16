"""Graphs for other programs: operators of the engine's own domain in ONNX's, and names of nodes that are unique.

Only operators that ONNX's say in a few nodes are written out; a graph that has others (`DropoutTrain`, `CrossEntropy`,
fused ones) keeps these, and ONNX Runtime does not open it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx
import torch
from onnx import helper, numpy_helper

from ortmodule.core.names import DOMAIN
from ortmodule.core.onnx_utils import attributes

#: What the engine adds to operators of ONNX: Gather refuses negative indices, as an embedding does.
_HINTS = {"from_end"}
_BEFORE_START = torch.iinfo(torch.int64).min


class _Writer:
    """The nodes that take the place of one."""

    def __init__(self, node: onnx.NodeProto) -> None:
        self.node, self.a = node, attributes(node)
        self.nodes: list[onnx.NodeProto] = []
        self.made = 0

    def __call__(self, kind: str, *inputs: str, last: bool = False, **options: Any) -> str:
        """Adds a node and returns the name of its result: that of the whole, where it is the last."""
        name = self.node.output[0] if last else self._name()
        self.nodes.append(helper.make_node(kind, inputs, [name], self.node.name, **options))
        return name

    def const(self, value: torch.Tensor) -> str:
        name = self._name()
        content = numpy_helper.from_array(value.numpy(), name)
        self.nodes.append(helper.make_node("Constant", [], [name], self.node.name, value=content))
        return name

    def ints(self, values: list[int]) -> str:
        return self.const(torch.tensor(values, dtype=torch.int64).reshape(len(values)))

    def like(self, number: float, value: str) -> str:
        """``number`` in the type of ``value``."""
        return self("CastLike", self.const(torch.tensor(number, dtype=torch.float32)), value)

    def _name(self) -> str:
        self.made += 1
        return f"{self.node.output[0]}/standard{self.made}"


def _matmul_bias(w: _Writer, a: str, b: str, c: str = "", *others: str) -> bool:
    if others or w.a.get("wide"):
        return False
    alpha = w.a.get("alpha", 1.0)
    product = w("MatMul", a, b, last=alpha == 1 and not c)
    if alpha != 1:
        product = w("Mul", product, w.like(alpha, product), last=not c)
    if c:
        w("Add", product, c, last=True)
    return True


def _strided_slice(w: _Writer, x: str) -> None:
    starts, counts, steps = w.a["starts"], w.a["counts"], w.a["steps"]
    ends = [start + count * step for start, count, step in zip(starts, counts, steps, strict=True)]
    ends = [_BEFORE_START if end < 0 else end for end in ends]
    axes = w.ints(list(range(len(starts))))
    w("Slice", x, w.ints(starts), w.ints(ends), axes, w.ints(steps), last=True)


def _softmax_grad(w: _Writer, dy: str, y: str) -> None:
    total = w("ReduceSum", w("Mul", dy, y), w.ints([w.a.get("axis", -1)]), keepdims=1)
    w("Mul", y, w("Sub", dy, total), last=True)


def _log_softmax_grad(w: _Writer, dy: str, y: str) -> None:
    total = w("ReduceSum", dy, w.ints([w.a.get("axis", -1)]), keepdims=1)
    w("Sub", dy, w("Mul", w("Exp", y), total), last=True)


def _relu_grad(w: _Writer, dy: str, y: str) -> None:
    zero = w.like(0.0, y)
    w("Where", w("LessOrEqual", y, zero), zero, dy, last=True)


def _sigmoid_grad(w: _Writer, dy: str, y: str) -> None:
    w("Mul", dy, w("Mul", y, w("Sub", w.like(1.0, y), y)), last=True)


def _tanh_grad(w: _Writer, dy: str, y: str) -> None:
    w("Mul", dy, w("Sub", w.like(1.0, y), w("Mul", y, y)), last=True)


def _erf_grad(w: _Writer, dy: str, x: str) -> None:
    slope = w("Mul", w("Exp", w("Neg", w("Mul", x, x))), w.like(2 / math.sqrt(math.pi), x))
    w("Mul", dy, slope, last=True)


def _embedding(w: _Writer, weight: str, indices: str) -> None:
    w("Gather", weight, indices, last=True)


def _contiguous(w: _Writer, x: str) -> None:
    w("Identity", x, last=True)


#: By the operator. One that returns False has attributes that ONNX's operators cannot say.
_FORMS: dict[str, Callable[..., bool | None]] = {
    "Contiguous": _contiguous,
    "Embedding": _embedding,
    "ErfGrad": _erf_grad,
    "LogSoftmaxGrad": _log_softmax_grad,
    "MatMulBias": _matmul_bias,
    "ReluGrad": _relu_grad,
    "SigmoidGrad": _sigmoid_grad,
    "SoftmaxGrad": _softmax_grad,
    "StridedSlice": _strided_slice,
    "TanhGrad": _tanh_grad,
}


def in_standard_form(model: onnx.ModelProto) -> onnx.ModelProto:
    """``model`` itself, changed: what ONNX's operators can say is said with them, and names of nodes are unique."""
    types = {v.name: v.type.tensor_type for v in (*model.graph.input, *model.graph.value_info, *model.graph.output)}
    types |= {v.name: onnx.TypeProto.Tensor(elem_type=v.data_type) for v in model.graph.initializer}
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if not node.domain:
            for attribute in [a for a in node.attribute if a.name in _HINTS]:
                node.attribute.remove(attribute)
        nodes += _standard(node, types) or [node] if node.domain == DOMAIN else [node]
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return name_apart(model)


def _standard(node: onnx.NodeProto, types: dict[str, onnx.TypeProto.Tensor]) -> list[onnx.NodeProto]:
    """The nodes in the place of ``node``; none where it has no such form."""
    writer = _Writer(node)
    given, result = types.get(node.input[0]), types.get(node.output[0])
    if node.op_type == "Place":
        sizes = None if given is None else [d.dim_value for d in given.shape.dim]
        return writer.nodes if _place(writer, sizes) else []
    if node.op_type == "FloorDiv":
        known = result or given
        return writer.nodes if _floor_div(writer, known and known.elem_type) else []
    form = _FORMS.get(node.op_type)
    if form is None or sum(map(bool, node.output)) != 1 or form(writer, *node.input) is False:
        return []
    return writer.nodes


def _place(w: _Writer, counts: list[int] | None) -> bool:
    """Of a box without gaps: padding around it, with zeros or the filler."""
    starts, sizes, steps = w.a["starts"], w.a["shape"], w.a["steps"]
    if counts is None or any(s != 1 and n != 1 for s, n in zip(steps, counts, strict=True)):
        return False
    behind = [size - start - n for size, start, n in zip(sizes, starts, counts, strict=True)]
    data, *filler = w.node.input
    w("Pad", data, w.ints([*starts, *behind]), *filler, last=True)
    return True


def _floor_div(w: _Writer, kind: int | None) -> bool:
    """ONNX's Div of integers rounds towards 0."""
    x, y = w.node.input
    if kind in (onnx.TensorProto.INT64, onnx.TensorProto.INT32):
        w("Div", w("Sub", x, w("Mod", x, y)), y, last=True)
        return True
    return False


def name_apart(model: onnx.ModelProto) -> onnx.ModelProto:
    """``model`` itself: each node with a name has one that no other has, as ONNX Runtime wants it. The first of a name
    keeps it: nodes of gradients and of decomposed operators bear the name of what they come from."""
    taken = {node.name for node in model.graph.node}
    seen: set[str] = set()
    counts: dict[str, int] = {}
    for node in model.graph.node:
        name = node.name
        if name in seen:
            while node.name in taken:
                counts[name] = counts.get(name, 0) + 1
                node.name = f"{name}_{counts[name]}"
            taken.add(node.name)
        elif name:
            seen.add(name)
    return model
