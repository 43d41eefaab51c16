"""Compares two traces of a module: the graphs have to be the same, up to the sizes of intermediate values.

Constants are included, so a size or a value that Python put into the graph shows.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import Any

import torch

from ortmodule.capture.trace_record import Trace, path_in
from ortmodule.core.torch_private import TensorType, TracedGraph, TracedNode

#: What two traces have to have alike.
RESULTS = ("result", "filled", "own", "used_on", "sources", "writes")
# A tensor type as graphs are printed: `Float(2, 4, strides=[4, 1], requires_grad=1, device=cpu)`.
_VALUE = re.compile(r"%[\w.]+")
_TYPE = re.compile(r"\b([A-Z][A-Za-z0-9]*)\(((?:\d+, )*)(?:strides=\[[\d, ]*\], )?(requires_grad|device)=")


class _Texts:
    """Writes parts of a graph, with values numbered in the order in which they come, and tensors without sizes.
    PyTorch's own numbers count nodes, too, that it has dropped again."""

    def __init__(self) -> None:
        self._numbers: dict[str, str] = {}

    def __call__(self, part: Any) -> str:
        return _VALUE.sub(self._number_of, _TYPE.sub(_rank_of, str(part)))

    def _number_of(self, match: re.Match) -> str:
        return self._numbers.setdefault(match[0], f"%{len(self._numbers)}")


def difference(first: Trace, second: Trace, names: Iterable[str] = ()) -> str:
    """Where two traces disagree, or an empty string. ``names``: the paths of submodules."""
    a: Any
    b: Any
    for a, b in ((first.size_reads, second.size_reads), (first.data_reads, second.data_reads)):
        for one, other in zip(a, b, strict=False):
            if one.place != other.place or not one.is_value(other.value):
                return f"{one.place} takes another way"
        if len(a) != len(b):
            return f"{max(a, b, key=len)[min(len(a), len(b))].place} is reached by one of them only"
    if [slot.name for slot in first.sets] != [slot.name for slot in second.sets]:
        return "not the same attributes are set"
    if any(getattr(first, name) != getattr(second, name) for name in RESULTS):
        return "the results are not alike"
    if first.draws != second.draws:
        return "not the same random numbers are drawn"
    if first.requires_grad != second.requires_grad:
        return "not the same results carry a gradient"
    for a, b in zip(first.nodes, second.nodes, strict=False):
        if (a.kind, a.name, a.arguments, a.result, a.sources) != (b.kind, b.name, b.arguments, b.result, b.sources):
            return f"{a.name} is not called alike, or does not return the same"
        if a.kind == "aten" and not a.function.same_as(b.function):
            return f"{a.name} is called with other numbers"
    texts = [_Texts()(t.graph) for t in (first, second)]
    if texts[0] != texts[1]:
        return _different_nodes(first.graph, second.graph, names) or "the operators are not the same"
    for a, b in zip(_constants(first.graph), _constants(second.graph), strict=True):
        if not _same_tensor(a, b):
            return f"a constant of shape {list(a.shape)} is not the same"
    return ""


def _different_nodes(first: TracedGraph, second: TracedGraph, names: Iterable[str]) -> str:
    """Of two graphs the first operators that are not alike, in PyTorch's words."""
    paths, texts = list(names), (_Texts(), _Texts())
    for one, other in itertools.zip_longest(first.nodes(), second.nodes()):
        node = one or other
        path = path_in(node.scopeName(), paths)
        where = f"in {path}, " if path else ""
        kinds = [each and each.kind().rpartition("::")[2] for each in (one, other)]
        if not all(kinds):
            return f"{where}one of them goes on, with {kinds[0] or kinds[1]}"
        if texts[0](one) == texts[1](other):
            continue
        if kinds[0] != kinds[1]:
            return f"{where}one of them calls {kinds[0]} where the other calls {kinds[1]}"
        if (values := _numbers(one, other)) is not None:
            return f"{where}a number is {values[0]} in one of them and {values[1]} in the other"
        return f"{where}{kinds[0]} has other operands"
    return ""


def _numbers(one: TracedNode, other: TracedNode) -> list[Any] | None:
    """What two constants are, if that is no tensor."""
    kinds = [each.kindOf("value") if each.hasAttribute("value") else "" for each in (one, other)]
    if not all(kind in ("i", "f", "s") for kind in kinds):
        return None
    return [getattr(each, kind)("value") for each, kind in zip((one, other), kinds, strict=True)]


def located(first: Trace, second: Trace, names: Iterable[str]) -> str | None:
    """The path of the submodule, of these ``names``, in which two traces begin to disagree, if it is known."""
    one: Any
    other: Any
    for a, b in ((first.size_reads, second.size_reads), (first.data_reads, second.data_reads)):
        for one, other in zip(a, b, strict=False):
            if one.place != other.place or not one.is_value(other.value):
                return one.submodule if one.submodule == other.submodule else None
    texts = _Texts(), _Texts()
    for one, other in zip(first.graph.nodes(), second.graph.nodes(), strict=False):
        if texts[0](one) != texts[1](other) or not _same_constant(one, other):
            paths = [path_in(node.scopeName(), names) for node in (one, other)]
            parts = zip(*(path.split(".") for path in paths), strict=False)
            common = itertools.takewhile(lambda pair: pair[0] == pair[1], parts)
            return ".".join(a for a, _ in common)
    return None


def _same_constant(one: Any, other: Any) -> bool:
    values = [tensor for node in (one, other) for tensor in _constant(node)]
    return len(values) < 2 or _same_tensor(*values)


def _same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def _rank_of(match: re.Match) -> str:
    return f"{match[1]}({match[2].count(',')} dims, {match[3]}="


def _constants(graph: TracedGraph) -> list[torch.Tensor]:
    return [tensor for node in graph.findAllNodes("prim::Constant") for tensor in _constant(node)]


def _constant(node: TracedNode) -> list[torch.Tensor]:
    """The tensor that it makes, if it makes one."""
    return [node.t("value")] if node.hasAttribute("value") and node.kindOf("value") == "t" else []


def hide_sizes(first: Trace, second: Trace) -> None:
    """Sizes of intermediate values that are not the same in two agreeing traces become unknown in the first."""
    for one, other in zip(first.graph.nodes(), second.graph.nodes(), strict=True):
        for a, b in zip(one.outputs(), other.outputs(), strict=True):
            kind = a.type()
            if not isinstance(kind, TensorType) or kind == (alike := b.type()):
                continue
            sizes, others = kind.sizes(), alike.sizes()
            if sizes is not None and sizes != others:
                unknown: list[int | None] = [None] * len(sizes)
                pairs = zip(sizes, others or unknown, strict=True)
                a.setType(kind.with_sizes([n if n == m else None for n, m in pairs]))
