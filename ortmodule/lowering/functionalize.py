"""Replaces writes through views in a trace by operators without effects.

A trace records `y.t().mul_(2)` as a multiplication whose result no node reads; that y has changed it does not say. Here
every tensor of a trace is known as a view of a *root*, by the steps that lead to it. A write goes into a copy
of the view, and the copy back into the root, step by step; what reads the root, or a view of it, from then on reads
what there is after the write.

Assignments to slices (`y[:, 0] = x`), whose other views no node reads, stay: the exporter has them. A write that is not
understood is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ortmodule.core.dtypes import is_complex, is_tensor
from ortmodule.core.errors import NotTraceable
from ortmodule.core.torch_private import ListType, TensorType, TracedGraph, TracedNode, TracedValue, parse_schema
from ortmodule.lowering.data_windows import Window, type_of_rows, window_of
from ortmodule.lowering.decompose import number_in_trace
from ortmodule.lowering.traced_tensors import dtype_of, sizes_of


@dataclass(frozen=True)
class _Step:
    """From a tensor to a view of it: a node, of whose results one after `prim::ListUnpack`."""

    node: TracedNode
    unpack: TracedNode | None = None
    index: int = 0

    @property
    def kind(self) -> str:
        return self.node.kind().removeprefix("aten::")


@dataclass(frozen=True)
class _Alias:
    """A value: which root it is a view of, by which steps, and how often that had been written by then."""

    root: int
    steps: tuple[_Step, ...]
    writes: int


#: What the exporter does itself: an assignment to slices, all of it in one line of a program.
_ASSIGNMENTS = {"aten::copy_", "aten::fill_"}
_SLICES = {"select", "slice"}
#: Change what a tensor looks like, not what is in it.
_RESHAPED = {f"aten::{name}_" for name in ("t", "transpose", "swapaxes", "swapdims", "squeeze", "unsqueeze")}
#: `x &= y` has a name of its own.
_BITS = {
    "aten::__iand__": "aten::bitwise_and_", "aten::__ior__": "aten::bitwise_or_",
    "aten::__ixor__": "aten::bitwise_xor_", "aten::__ilshift__": "aten::bitwise_left_shift_",
    "aten::__irshift__": "aten::bitwise_right_shift_",
}  # fmt: skip
#: They look at no elements.
_SIZES = {"aten::size", "aten::numel", "aten::dim", "aten::is_floating_point", "aten::is_complex"}
_SAME_ORDER = {
    "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as", "contiguous", "alias",
    "ravel", "to", "_reshape_alias",
}  # fmt: skip
_END = 2**63 - 1
_COMPUTED = object()
#: Without a tensor to write to these take a type, a layout, a device and whether memory is pinned.
_FACTORIES = frozenset(
    f"aten::{name}"
    for name in "arange empty eye full linspace logspace ones rand randint randn randperm range zeros".split()  # noqa: SIM905
)
_SPLITS = {"unbind", "chunk", "split", "split_with_sizes"}


def without_view_writes(graph: TracedGraph) -> None:
    """Replaces writes through views in a TorchScript trace, in place. Raises NotTraceable for one that is not
    understood, with the ``node``."""
    nodes = list(graph.nodes())
    if not any(_written(node) is not None for node in nodes):
        return
    if any(True for node in nodes for _ in node.blocks()):
        return
    for node in nodes:
        _say_by_views(graph, node)
    roots = _Walk(graph, frozenset(), rewrites=False).run()
    if roots:
        _Walk(graph, roots, rewrites=True).run()


def _say_by_views(graph: TracedGraph, node: TracedNode) -> None:
    """`f(x, out=y)` becomes `y.copy_(f(x))`, and a diagonal that is filled a view of it."""
    operands, place = list(node.inputs()), _written(node)
    if node.kind() == "aten::narrow" and all(type(_constant(n)) is int for n in operands[1:]):
        start, length = (n.toIValue() for n in operands[2:])
        if start >= 0:
            with graph.insert_point_guard(node):
                numbers = [graph.insertConstant(n) for n in (start, start + length, 1)]
                made = graph.insertNode(graph.create("aten::slice", [*operands[:2], *numbers], 1))
            made.copyMetadata(node)
            made.output().setType(node.output().type())
            node.output().replaceAllUsesWith(made.output())
            node.destroy()
        return
    if place is None:
        return
    with graph.insert_point_guard(node):
        if place > 0:
            if node.outputsSize() != 1 or _sizes(operands[place]) != _sizes(node.output()):
                raise _refusal(node, "has several results, or one of another shape, to write to")
            given = [*operands[:place], *operands[place + 1 :]]
            if node.kind() in _FACTORIES:
                given += [graph.insertConstant(option) for option in (dtype_of(node.output()), None, None, None)]
            made = graph.insertNode(graph.create(node.kind(), given, 1))
            made.output().setType(node.output().type())
            written = graph.create("aten::copy_", [operands[place], made.output(), graph.insertConstant(False)], 1)
        elif node.kind() == "aten::fill_diagonal_" and _sizes(operands[0]) and not operands[2].toIValue():
            if len(sizes_of(operands[0])) != 2:
                return
            numbers = [graph.insertConstant(n) for n in (0, 0, 1)]
            made = graph.insertNode(graph.create("aten::diagonal", [operands[0], *numbers], 1))
            made.output().inferTypeFrom(_like(operands[0]).diagonal())
            written = graph.create("aten::fill_", [made.output(), operands[1]], 1)
        elif node.kind() in _RESHAPED or node.kind() in _BITS:
            kind = _BITS.get(node.kind(), node.kind().removesuffix("_"))
            made = graph.insertNode(graph.create(kind, operands, 1))
            made.copyMetadata(node)
            made.output().setType(node.output().type())
            node.output().replaceAllUsesWith(made.output())
            node.destroy()
            return
        else:
            return
        written = graph.insertNode(written)
    for new in (made, written):
        new.copyMetadata(node)
    written.output().setType(made.output().type())
    node.output().replaceAllUsesWith(written.output() if place > 0 else operands[0])
    node.destroy()


class _Walk:
    """From the first node to the last. Without ``rewrites`` it finds the roots that have to be rewritten."""

    def __init__(self, graph: TracedGraph, roots: frozenset[int], rewrites: bool) -> None:
        self.graph, self.roots, self.rewrites = graph, roots, rewrites
        self.found: set[int] = set()
        self.aliases: dict[int, _Alias] = {}
        self.now: dict[int, TracedValue] = {}  # roots: what holds their elements
        self.writes: dict[int, int] = {}
        self.given = {value.unique() for value in graph.inputs()}
        self.rebuilt: dict[tuple, TracedValue] = {}  # views of roots as they are now

    def run(self) -> frozenset[int]:
        nodes = [*self.graph.nodes(), self.graph.return_node()]
        for node, following in zip(nodes, [*nodes[1:], None], strict=True):
            if node.kind() not in _SIZES:
                self._read(node)
            if following is not None:
                self._meet(node, following)
        return frozenset(self.found)

    def _alias(self, value: TracedValue) -> _Alias:
        known = self.aliases.get(value.unique())
        if known is None:
            root = value.unique()
            known = self.aliases[root] = _Alias(root, (), 0)
            self.now[root], self.writes[root] = value, 0
        return known

    def _read(self, node: TracedNode) -> None:
        """Operands that were written since they were made are made again."""
        for i, value in enumerate(list(node.inputs())):
            alias = self.aliases.get(value.unique())
            if alias is None or alias.writes == self.writes[alias.root]:
                continue
            if not self.rewrites:
                if alias.steps:
                    self.found.add(alias.root)
            elif alias.root in self.roots:
                with self.graph.insert_point_guard(node):
                    node.replaceInput(i, self._chain(alias, node)[-1])

    def _chain(self, alias: _Alias, node: TracedNode) -> list[TracedValue]:
        """The root as it is now, and after each of the steps; for ``node``, before which new nodes go."""
        values = [self.now[alias.root]]
        for n in range(1, len(alias.steps) + 1):
            key = alias.steps[:n], alias.root, self.writes[alias.root]
            if key not in self.rebuilt:
                self.rebuilt[key] = self._rebuilt_view(alias.steps[n - 1], values[-1], node)
            values.append(self.rebuilt[key])
            self.aliases[values[-1].unique()] = _Alias(alias.root, alias.steps[:n], self.writes[alias.root])
        return values

    def _rebuilt_view(self, step: _Step, base: TracedValue, node: TracedNode) -> TracedValue:
        values = [base, *list(step.node.inputs())[1:]]
        if step.kind == "slice" and (window := window_of(step.node)) is not None:
            rows = self._rows(window, step.node, node)
            made = self._insert("aten::index_select", [base, values[1], rows], node)
            made.output().setType(step.node.output().type())
            return made.output()
        made = self._insert(step.node.kind(), values, node, step.node.outputsSize())
        for new, old in zip(made.outputs(), step.node.outputs(), strict=True):
            new.setType(old.type())
        if step.unpack is None:
            return made.output()
        unpacked = self._insert("prim::ListUnpack", [made.output()], node, step.unpack.outputsSize())
        for new, old in zip(unpacked.outputs(), step.unpack.outputs(), strict=True):
            new.setType(old.type())
        return list(unpacked.outputs())[step.index]

    def _rows(self, window: Window, taken: TracedNode, node: TracedNode) -> TracedValue:
        """The numbers of the rows that a slice ``taken`` has."""
        nothing, one = self.graph.insertConstant(None), self.graph.insertConstant(1)
        count, length = sizes_of(taken.output())[taken.inputsAt(1).toIValue()], window.length
        if is_tensor(length):
            length = self._insert("aten::Int", [length], node).output()
            length.setType(taken.inputsAt(2).type())
        device = window.start.type().device() or torch.device("cpu")
        options = [self.graph.insertConstant(torch.int64), nothing, self.graph.insertConstant(device), nothing]
        counted = self._insert("aten::arange", [length, *options], node)
        rows = self._insert("aten::add", [counted.output(), window.start, one], node)
        for made in (counted, rows):
            made.output().setType(type_of_rows(count, device))
        return rows.output()

    def _insert(self, kind: str, operands: Sequence[TracedValue], node: TracedNode, count: int = 1) -> TracedNode:
        """A new node at the insert point, on behalf of ``node``."""
        made = self.graph.insertNode(self.graph.create(kind, list(operands), count))
        if node.kind() != "prim::Return":
            made.copyMetadata(node)
        return made

    def _meet(self, node: TracedNode, following: TracedNode) -> None:
        """Notes what the results of ``node`` are views of, and what it writes."""
        if node.kind() == "prim::ListUnpack":
            made = node.input().node()
            if made.kind().removeprefix("aten::") in _SPLITS:
                base = self._alias(made.inputsAt(0))
                for i, value in enumerate(node.outputs()):
                    steps = (*base.steps, _Step(made, node, i))
                    self.aliases[value.unique()] = _Alias(base.root, steps, self.writes[base.root])
            return
        if _written(node) == 0:
            self._write(node, following)
        elif _is_view(node):
            base = self._alias(node.inputsAt(0))
            steps = (*base.steps, _Step(node))
            self.aliases[node.output().unique()] = _Alias(base.root, steps, self.writes[base.root])

    def _write(self, node: TracedNode, following: TracedNode) -> None:
        target = self._alias(node.inputsAt(0))
        root, steps = target.root, target.steps
        self.writes[root] += 1
        assigns = node.kind() in _ASSIGNMENTS and all(_of_one_line(step, node) for step in steps)
        if self.rewrites and root in self.roots:
            self._rewrite(node, following, target)
        elif steps and (not assigns or root in self.given or node.output().uses() or is_complex(node.output())):
            self.found.add(root)
        elif not steps:
            self.now[root] = node.output()
        self.aliases[node.output().unique()] = _Alias(root, steps, self.writes[root])

    def _rewrite(self, node: TracedNode, following: TracedNode, target: _Alias) -> None:
        if not target.steps:
            self.now[target.root] = node.output()
            return
        self.writes[target.root] -= 1
        with self.graph.insert_point_guard(node):
            chain = self._chain(target, node)
            copy = self._insert("aten::clone", [chain[-1], self.graph.insertConstant(None)], node)
            copy.output().setType(chain[-1].type())
            node.replaceInput(0, copy.output())
            self._expand_anew(node, chain[-1])
        written = node.output()
        with self.graph.insert_point_guard(following):
            for step, base in zip(reversed(target.steps), reversed(chain[:-1]), strict=True):
                written = self._put_back(node, step, base, written)
        self.now[target.root] = written
        self.writes[target.root] += 1
        self.aliases[written.unique()] = _Alias(target.root, (), self.writes[target.root])

    def _expand_anew(self, node: TracedNode, target: TracedValue) -> None:
        """What is assigned to a slice that begins where data says: as large as its rows, of which no size depends on
        data."""
        if target.node().kind() != "aten::index_select" or node.inputsSize() < 2:
            return
        value = node.inputsAt(1)
        if value.node().kind() == "aten::expand_as" and value.node().inputsAt(1).node().kind() == "aten::slice":
            expanded = self._insert("aten::expand_as", [value.node().inputsAt(0), target], node)
            expanded.output().setType(value.type())
            node.replaceInput(1, expanded.output())

    def _put_back(self, node: TracedNode, step: _Step, base: TracedValue, part: TracedValue) -> TracedValue:
        """``base`` with ``part`` in the place of what ``step`` takes from it."""
        kind, numbers = step.kind, list(step.node.inputs())[1:]
        if kind == "slice" and (window := window_of(step.node)) is not None:
            rows = self._rows(window, step.node, node)
            made = self._insert("aten::index_copy", [base, numbers[0], rows, part], node)
        elif kind == "slice":
            made = self._around(node, base, part, numbers)
        elif kind in ("select", "diagonal"):
            made = self._insert(f"aten::{kind}_scatter", [base, part, *numbers], node)
        elif kind in ("t", "transpose", "swapaxes", "swapdims", "mT"):
            made = self._insert(step.node.kind(), [part, *numbers], node)
        elif kind in ("permute", "movedim") and (back := _order_back(step.node, base)) is not None:
            made = self._insert("aten::permute", [part, self.graph.insertConstant(back)], node)
        elif kind in _SPLITS and step.unpack is not None:
            made = self._joined(node, step, base, part)
        elif kind in _SAME_ORDER and _same_type(step.node.output(), base) or _is_whole(step.node):
            made = self._insert("aten::reshape_as", [part, base], node)
        elif kind == "detach" and not base.requires_grad():
            return part
        elif kind == "detach":  # other values, and the gradient of what they stand for
            ones = self._insert("aten::ones_like", [base, *[self.graph.insertConstant(None) for _ in range(5)]], node)
            ones.output().setType(base.type())
            made = self._insert("ortmodule::sloped", [part, base, ones.output()], node)
        else:
            raise _refusal(node, f"changes a tensor through {kind}, which a graph cannot say")
        like = torch.empty(sizes_of(base), dtype=dtype_of(base), device=base.type().device())
        made.output().inferTypeFrom(like.requires_grad_(base.requires_grad() or part.requires_grad()))
        return made.output()

    def _around(
        self, node: TracedNode, base: TracedValue, part: TracedValue, numbers: Sequence[TracedValue]
    ) -> TracedNode:
        """A part in the place of a slice: between what is before it and behind it, where that is a run of elements."""
        dim, start, end, step = numbers
        if not _is_run(*map(_constant, (start, end, step))):
            return self._insert("aten::slice_scatter", [base, part, *numbers], node)
        zero, most, one = (self.graph.insertConstant(n) for n in (0, _END, 1))
        start, end = (other if _constant(n) is None else n for n, other in ((start, zero), (end, most)))
        around = [self._insert("aten::slice", [base, dim, *ends, one], node) for ends in ((zero, start), (end, most))]
        for each in around:
            ends = [number_in_trace(value) for value in list(each.inputs())[2:4]]
            if None in ends:  # data decides one bound: behind, or before, is what the part leaves
                left = sizes_of(base)[dim.toIValue()] - sizes_of(part)[dim.toIValue()]
                ends = [0, left]
            each.output().setType(_shortened(base, dim.toIValue(), slice(*ends)))
        listed = self._insert("prim::ListConstruct", [around[0].output(), part, around[1].output()], node)
        listed.output().setType(ListType.ofTensors())
        return self._insert("aten::cat", [listed.output(), dim], node)

    def _joined(self, node: TracedNode, step: _Step, base: TracedValue, part: TracedValue) -> TracedNode:
        assert step.unpack is not None, "it is one of several results"
        parts = self._insert(step.node.kind(), [base, *list(step.node.inputs())[1:]], node)
        parts.output().setType(step.node.output().type())
        unpacked = self._insert("prim::ListUnpack", [parts.output()], node, step.unpack.outputsSize())
        for new, old in zip(unpacked.outputs(), step.unpack.outputs(), strict=True):
            new.setType(old.type())
        values = [part if i == step.index else value for i, value in enumerate(unpacked.outputs())]
        listed = self._insert("prim::ListConstruct", values, node)
        listed.output().setType(ListType.ofTensors())
        place = {"unbind": 1}.get(step.kind, 2)
        dim = list(step.node.inputs())[place]
        return self._insert("aten::stack" if step.kind == "unbind" else "aten::cat", [listed.output(), dim], node)


# --- what nodes do ----------------------------------------------------------------------------------------------------


_known: dict[tuple, tuple[int | None, bool]] = {}


def _effects(node: TracedNode) -> tuple[int | None, bool]:
    """The place of the operand that an operator changes, the first or `out`; may its result lie in the memory of the
    first?"""
    kind = node.kind()
    if not kind.startswith("aten::"):
        return None, False
    form = kind, tuple(map(is_tensor, node.inputs()))  # asking for a schema takes longer
    if form not in _known:
        _known[form] = _effects_of(node.schema())
    return _known[form]


def _effects_of(schema: str) -> tuple[int | None, bool]:
    try:
        arguments = parse_schema(schema).arguments
    except RuntimeError:  # conversions of numbers have none
        return None, False
    aliases = [argument.alias_info for argument in arguments]
    for i, (argument, alias) in enumerate(zip(arguments, aliases, strict=True)):
        if alias is not None and alias.is_write and (i == 0 or argument.is_out):
            return i, False
    return None, bool(aliases) and aliases[0] is not None


def _written(node: TracedNode) -> int | None:
    return _effects(node)[0]


def _is_view(node: TracedNode) -> bool:
    """Does the one result lie in the memory of the first operand?"""
    if not _effects(node)[1] or node.outputsSize() != 1 or not is_tensor(node.output()):
        return False
    if node.kind().removeprefix("aten::") not in ("reshape", "contiguous", "to", "flatten", "reshape_as", "ravel"):
        return True
    base, result = _like(node.inputsAt(0)), _like(node.output())
    if base.dtype != result.dtype:
        return False
    try:
        return base.view(result.shape).stride() == result.stride()
    except RuntimeError:
        return False


def _of_one_line(step: _Step, node: TracedNode) -> bool:
    """A slice that the exporter takes for a part of the assignment `node`."""
    return step.kind in _SLICES and step.node.sourceRange() == node.sourceRange()


def _constant(value: TracedValue) -> object:
    """A number of a trace; something that is none if it is computed there."""
    return value.toIValue() if value.node().kind() == "prim::Constant" else _COMPUTED


def _shortened(value: TracedValue, dim: int, part: slice) -> TensorType:
    """The type of a part of a tensor along one dimension."""
    before = sizes_of(value)
    sizes = [len(range(n)[part]) if i == dim % len(before) else n for i, n in enumerate(before)]
    return TensorType.create_from_tensor(torch.empty(sizes, dtype=dtype_of(value), device=value.type().device()))


def _is_run(start: object, end: object, step: object) -> bool:
    """Does a slice with these numbers end behind its start, whatever the size?"""
    if step != 1:
        return False
    if start in (None, 0) or end in (None, _END):
        return True
    # (A bool is no number here.)
    return type(start) is int and type(end) is int and (start < 0) == (end < 0) and start <= end


def _like(value: TracedValue) -> torch.Tensor:
    """Something without memory that lies as a tensor of a trace does."""
    strides = value.type().strides()
    if strides is None:
        raise TypeError(f"the strides of {value.debugName()} are not known in the trace")
    return torch.empty_strided(sizes_of(value), strides, dtype=dtype_of(value), device="meta")


def _sizes(value: TracedValue) -> list[int] | None:
    return value.type().sizes() if is_tensor(value) else None


def _same_type(one: TracedValue, other: TracedValue) -> bool:
    return one.type().dtype() == other.type().dtype()


def _is_whole(node: TracedNode) -> bool:
    """An expansion that repeats nothing."""
    return node.kind() in ("aten::expand", "aten::expand_as") and _sizes(node.inputsAt(0)) == _sizes(node.output())


def _order_back(node: TracedNode, base: TracedValue) -> list[int] | None:
    """The permutation that undoes `permute` or `movedim` by constants."""
    numbers = [_constants(value) for value in list(node.inputs())[1:]]
    if None in numbers:
        return None
    rank = len(sizes_of(base))
    moved = getattr(torch, node.kind().removeprefix("aten::"))(
        torch.empty([*range(1, rank + 1)], device="meta"), *numbers
    )
    return [list(moved.shape).index(d + 1) for d in range(rank)]


def _constants(value: TracedValue) -> list[int] | int | None:
    """A number, or a list of numbers; None if one is computed."""
    node = value.node()
    found: Any = value.toIValue() if node.kind() == "prim::Constant" else [_constant(each) for each in node.inputs()]
    return found if all(type(n) is int for n in (found if isinstance(found, list) else [found])) else None


def _refusal(node: TracedNode, what: str) -> NotTraceable:
    error = NotTraceable(f"{node.kind()} {what}")
    error.node = node
    return error
