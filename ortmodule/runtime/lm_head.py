"""Finds the head of a model: the nodes between its last hidden states and the logits.

A head can be computed later, from the hidden states and its weights alone. So a graph can leave it to the loss, which
needs fewer rows of the logits, or none of them as a whole (:mod:`ortmodule.core.lazy_tensor`).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence

import onnx
import torch

from ortmodule.core.dtypes import DTYPES
from ortmodule.core.names import STATE
from ortmodule.core.onnx_utils import RANDOM, without_dead
from ortmodule.engine.session import Session, gpu_of

#: A head has no more products than these (a language model's may have a layer before the last one), nor more nodes.
MOST_PRODUCTS, MOST_NODES = 2, 64
_PRODUCTS = {"MatMul", "Gemm"}
LOSSES = {"SoftmaxCrossEntropyLoss", "SmoothedCrossEntropy", "NegativeLogLikelihoodLoss"}
_DOMAINS = {"", "ortmodule"}
_LEFT_OUT = "ortmodule.left_out."  # and the name of the output
_NEVER = {*RANDOM, "PythonOp", "Dropout"}


class Head:
    """The nodes of ``model`` from the hidden states to ``logits``, as a graph of their own."""

    def __init__(self, model: onnx.ModelProto, hidden: str, logits: str, nodes: Sequence[onnx.NodeProto]) -> None:
        self.hidden, self.logits = hidden, logits
        part = onnx.ModelProto()
        part.CopyFrom(model)
        for field in ("node", "input", "output", "value_info"):
            part.graph.ClearField(field)
        used = {name for node in nodes for name in node.input}
        part.graph.node.extend(nodes)
        part.graph.input.extend(value for value in model.graph.input if value.name in used)
        part.graph.input.append(onnx.ValueInfoProto(name=hidden))
        part.graph.output.append(onnx.ValueInfoProto(name=logits))
        self._part = part.SerializeToString()
        #: The inputs of ``model`` that it reads.
        self.weights = [value.name for value in part.graph.input if value.name != hidden]

    @functools.cached_property
    def _session(self) -> Session:
        return Session(self._part)

    def like(self, hidden: torch.Tensor, weights: Sequence[torch.Tensor]) -> tuple[torch.dtype, tuple[int, ...]]:
        """Type and shape of the logits."""
        tensors = self._in_order(hidden, weights)
        specs = tuple((DTYPES[t.dtype], tuple(t.shape)) for t in tensors)
        dtype, shape = self._session.plan(specs, (False,) * len(specs), gpu=gpu_of(tensors)).outputs[0]
        return getattr(torch, dtype), shape

    def compute(self, hidden: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """The logits. ``weights``: in the order of :attr:`weights`, contiguous."""
        tensors = self._in_order(hidden, weights)
        return self._session.run(tensors, (False,) * len(tensors)).outputs[0]

    def _in_order(self, hidden: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        named = dict(zip(self.weights, weights, strict=True)) | {self.hidden: hidden}
        return [named[name] for name in self._session.inputs]


class Heads:
    """Finds heads in ``model``. ``written``: inputs that forward changes."""

    def __init__(self, model: onnx.ModelProto, written: Iterable[str]) -> None:
        self._model, self._written = model, frozenset(written)

    @functools.cached_property
    def _nodes(self) -> list[onnx.NodeProto]:
        return list(self._model.graph.node)

    @functools.cached_property
    def _makers(self) -> dict[str, tuple[int, onnx.NodeProto]]:
        return {name: (i, node) for i, node in enumerate(self._nodes) for name in node.output}

    @functools.cached_property
    def _fixed(self) -> set[str]:
        """The names of what weights and constants alone decide."""
        graph = self._model.graph
        fixed = {proto.name for proto in graph.initializer}
        fixed |= {v.name for v in graph.input if v.name.startswith(STATE) and v.name not in self._written}
        for node in self._nodes:
            if _is_plain(node) and all(not name or name in fixed for name in node.input):
                fixed |= set(node.output)
        return fixed

    @functools.cached_property
    def _losses(self) -> list[tuple[set[str], set[str]]]:
        """Of each loss: all names that it follows from, and those that its logits do."""
        ends = [(i, node) for i, node in enumerate(self._nodes) if node.op_type in LOSSES]
        return [(self._before(i, node.input), self._before(i, node.input[:1])) for i, node in ends]

    def _before(self, end: int, names: Iterable[str]) -> set[str]:
        """What these names follow from, by more than a shape; ``end``: nodes before it make them."""
        reached = set(names)
        for node in reversed(self._nodes[:end]):
            if node.op_type != "Shape" and not reached.isdisjoint(node.output):
                reached.update(node.input)
        return reached

    def _feeds_a_loss(self, name: str) -> bool:
        """Does the first loss that follows from it follow from it by its logits?"""
        return next((name in by_logits for by_any, by_logits in self._losses if name in by_any), False)

    def find(self, logits: str) -> Head | None:
        """The head behind ``logits``, an output that a loss looks at, or None."""
        if not self._feeds_a_loss(logits):
            return None
        makers, fixed = self._makers, self._fixed
        taken: dict[int, onnx.NodeProto] = {}
        frontier, products, found = {logits}, 0, None
        while len(taken) < MOST_NODES and all(name in makers for name in frontier):
            at, node = max((makers[name] for name in frontier), key=lambda maker: maker[0])
            products += node.op_type in _PRODUCTS
            if products > MOST_PRODUCTS or not _is_plain(node):
                break
            taken[at] = node
            frontier = frontier.difference(node.output).union(n for n in node.input if n and n not in fixed)
            if products and len(frontier) == 1:
                found = next(iter(frontier)), dict(taken)
        if found is None or found[0] not in makers:
            return None
        hidden, nodes = found
        # What weights and constants alone decide: casts and transposes of weights, constants.
        wanted = {name for node in nodes.values() for name in node.input}
        for at, node in reversed(list(enumerate(self._nodes))):
            if not wanted.isdisjoint(node.output) and fixed.issuperset(node.output):
                wanted |= set(node.input)
                nodes[at] = node
        return Head(self._model, hidden, logits, [node for _, node in sorted(nodes.items())])


def without_head(model: onnx.ModelProto, head: Head) -> bytes:
    """The graph with the hidden states in place of the logits."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for value in changed.graph.output:
        if value.name == head.logits:
            value.CopyFrom(onnx.ValueInfoProto(name=head.hidden))
    return without_dead(changed).SerializeToString()


def without_outputs(model: onnx.ModelProto, names: Collection[str]) -> bytes:
    """The graph with a constant in place of each of these outputs."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for value in changed.graph.output:
        if value.name in names:
            left_out = _LEFT_OUT + value.name
            changed.graph.node.append(onnx.helper.make_node("Constant", [], [left_out], value_float=0.0))
            value.CopyFrom(onnx.ValueInfoProto(name=left_out))
    return without_dead(changed).SerializeToString()


def _is_plain(node: onnx.NodeProto) -> bool:
    """Does it compute the same whenever it runs?"""
    inside = any(a.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) for a in node.attribute)
    return node.domain in _DOMAINS and node.op_type not in _NEVER and not inside
