"""Captures a graph that holds for other sizes than those it was traced at.

A trace records what happened for one set of inputs. Two traces are made, on small slices of the caller's batch, with
different values and different sizes, and the graphs are compared. Equal graphs hold for any size of the dimensions
that differed. Where they are not equal, or the second trace fails, fewer dimensions are varied; the ones that stay
as they were are *pinned*: the graph serves only calls with these sizes there.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import onnx
import torch
from torch import nn

from ortmodule.capture import export_cache, pattern_rewriter
from ortmodule.capture.data_numbers import DOWN, UP, Numbers
from ortmodule.capture.loops.loop import Loop, look
from ortmodule.capture.loops.sequence import Unrepeatable
from ortmodule.capture.output_aliasing import View, agreed, check_places
from ortmodule.capture.scalar_guards import line_of_error
from ortmodule.capture.trace import trace
from ortmodule.capture.trace_comparison import difference, hide_sizes, located
from ortmodule.capture.trace_record import Trace, Write
from ortmodule.core import pytree, torch_private
from ortmodule.core.errors import CaptureError, ExportError, MissingPrivate, NotTraceable, Unclear
from ortmodule.core.names import STATE
from ortmodule.core.tensor_copies import with_attributes
from ortmodule.guards.module_tree import Tree
from ortmodule.host.opaque_regions import Opaque
from ortmodule.lowering import export

Dim = tuple[int, int]  # (tensor, dimension)
SHORT = 8  # lengths are cut to this for tracing
SMALL, ROWS, WHOLE = range(3)  # how much of a batch is traced
#: What is tried for another trace with numbers from data: (the step between equal numbers, other sizes and rows).
WAYS = ((DOWN, False), (UP, False), (DOWN, True))


_MISSING = object()


class _Failed(Exception):
    """One trace failed."""

    submodule: str | None = None


def _blaming(error: CaptureError | _Failed, submodule: str | None) -> Exception:
    # (No frame may know the exception that it raises: tensors would live on.)
    error.submodule = submodule
    return error


@dataclass
class Capture:
    """A graph, how it meets Python, and the sizes that it depends on."""

    model: onnx.ModelProto
    trace: Trace
    pinned: dict[Dim, int]
    traces: int
    seconds: float
    sample: list[torch.Tensor]  #: small inputs that it was traced on
    views: dict[int, View] = field(default_factory=dict)  #: outputs that are to be views of something
    replaced: dict[str, int] = field(default_factory=dict)  #: how often each of the user's patterns was found
    loop: Loop | None = None  #: the length that the graph is for is one of many
    equal: tuple[frozenset[Dim], ...] = ()  #: dimensions that have to be of one size

    def at_length(self, n: int) -> Capture:
        """The same of another length, which the loop's template fits."""
        assert self.loop is not None
        outputs = [torch.empty((0,) * rank) for rank in self.loop.ranks]
        trace = replace(self.trace, size_reads=self.loop.template.reads(n), outputs=outputs, tensors=[])
        pinned = self.pinned | dict.fromkeys(self.loop.dims, n)
        model = self.loop.template.model(n)
        return replace(self, model=model, trace=trace, pinned=pinned, traces=0, seconds=0.0, sample=[], loop=None)


@dataclass
class _Sizes:
    """Sizes to trace at, and where each row begins: other values for another trace."""

    lengths: dict[Dim, int]
    shift: bool = False
    varied: frozenset[Dim] = field(default=frozenset())
    other_rows: frozenset[Dim] = field(default=frozenset())  # dimensions in which the second takes the first's place
    kept: frozenset[int] = field(default=frozenset())  # tensors of which the first rows are taken in any case

    def cut(self, tensors: Sequence[torch.Tensor], numbers: frozenset[int]) -> list[torch.Tensor]:
        """``numbers``: those of ``tensors`` that are Python numbers of the caller's."""
        return [self._another(t) if i in numbers else self._cut_one(i, t) for i, t in enumerate(tensors)]

    def _another(self, number: torch.Tensor) -> torch.Tensor:
        if not self.shift:
            return number.clone()
        return number + 1 if number.dtype == torch.int64 else number * 0.9375 + (number == 0) * 0.0625

    def _cut_one(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        part, shift = tensor.detach(), self.shift and index not in self.kept
        for d, size in enumerate(tensor.shape):
            length = self.lengths[index, d]
            first = size - length if shift and length < size else 1 if shift and (index, d) in self.varied else 0
            if (length, first) != (size, 0):
                part = part.index_select(d, (torch.arange(length, device=part.device) + first) % size)
            if (index, d) in self.other_rows and length > 1:
                part = part.index_select(d, torch.arange(length, device=part.device).clamp(min=1))
        if self.shift and not self.varied and part.is_floating_point() and part.dim():
            part = part.roll(1, -1)
        part = part.clone() if part is tensor or part.data_ptr() == tensor.data_ptr() else part
        return with_attributes(part.requires_grad_(tensor.requires_grad), tensor)


def capture(
    forward: Callable, module: nn.Module, tree: Tree, arguments: pytree.Structure, tensors: Sequence[torch.Tensor],
    opset: int, opaque: Opaque, part: int = SMALL, rewritten: bool = True,
) -> Capture:  # fmt: skip
    """Captures ``forward`` for calls like this one.

    ``part``: of the batch to trace on, SMALL, ROWS or WHOLE; more of it when forward fails on less. ``rewritten``: by
    the patterns that a user has registered.
    Raises CaptureError.
    """
    start, made = time.perf_counter(), 0
    numbers = arguments.number_places()
    try:
        torch_private.check_capture()
    except MissingPrivate as error:
        raise CaptureError(str(error)) from None

    def at(sizes: _Sizes, from_data: Numbers, high: bool = False) -> Trace:
        nonlocal made
        made += 1
        try:
            return trace(forward, module, tree, arguments, sizes.cut(tensors, numbers), opset, opaque, from_data, high)
        except ExportError as error:
            raise CaptureError(str(error), error.kind) from error
        except NotTraceable as error:
            raise _blaming(_Failed(str(error)), getattr(error, "submodule", None)) from None
        except Exception as error:
            first = str(error).partition("\n")[0]  # what follows may be the elements of a tensor
            place = line_of_error(error)
            text = f"{type(error).__name__}: {first}" + (f" (a trace fails at {place})" if place else "")
            raise _blaming(_Failed(text), getattr(error, "submodule", None)) from error

    dims, model = _Dims(tensors, len(tree.resized_tensors()[0]), tree.ranks), None
    with export.CAPTURING:
        while model is None:
            loops = opset if rewritten and part == SMALL else None
            first, second, varied, short = _two_traces(at, dims, part, tree, loops)
            if short is not None:
                model, views = short.model, short.views
                break
            model, views = _exported(dims, first, second, varied, opset)
    _check_own_writes(model, [write for write in first.writes if write.output is None])
    pinned = {(i, d): n for i, t in enumerate(first.tensors) for d, n in enumerate(t.shape) if (i, d) not in varied}
    sample = min(first.tensors, second.tensors, key=lambda tensors: sum(t.numel() for t in tensors))
    first.graph = first.module = None  # type: ignore[assignment]  # nothing needs them any more
    for output in views:  # PyTorch differentiates them
        first.requires_grad[output] = False
    if short is not None:
        replaced, loop = short.replaced, short.loop
    else:
        replaced, loop = pattern_rewriter.apply(model, opset) if rewritten else {}, None
    equal = tuple(dims.equal)
    return Capture(model, first, pinned, made, time.perf_counter() - start, sample, views, replaced, loop, equal)


def _exported(
    dims: _Dims, first: Trace, second: Trace, varied: frozenset[Dim], opset: int
) -> tuple[onnx.ModelProto | None, dict[int, View]]:
    """The graph of two traces that agree, and which of its outputs are views. None: fewer dimensions may vary."""
    hide_sizes(first, second)
    first.seen += second.seen
    first.escaped += second.escaped
    views = _views(first, second)
    try:
        check_places(first.graph, list(views))
    except Unclear as error:
        raise CaptureError(str(error)) from None
    try:
        return export_cache.exported(first, varied, opset), views
    except ExportError as error:
        if dims.equal:  # as much may vary by itself, and be exported
            dims.equal, dims.together = [], False
            return None, views
        # The exporter may need a size that it cannot see: pin one kind of dimensions after the other.
        dims.pinned = max((dims.kind[dim] for dim in varied), default=BATCH)
        if dims.pinned == BATCH or "support" in str(error):
            raise CaptureError(str(error), error.kind) from error
        return None, views


@contextlib.contextmanager
def _settled(found: Trace) -> Iterator[None]:
    """What forward sets once, as it finds it missing, is set: the call that is captured would do it anyway.

    It is as before after an error.
    """
    before = [(slot, slot.find(_MISSING)) for slot, _ in found.settled]
    for slot, value in found.settled:
        slot.set(value)
    try:
        yield
    except BaseException:
        for slot, value in before:
            slot.holder.pop(slot.key) if value is _MISSING else slot.set(value)
        raise


_Agreed = tuple[Trace, Trace, frozenset[Dim], "_Short | None"]


def _two_traces(at: Callable[..., Trace], dims: _Dims, part: int, tree: Tree, opset: int | None) -> _Agreed:
    """Two traces that agree, and the dimensions whose sizes differ between them. ``opset``: where a loop over a length
    may be captured at short lengths, that of the graphs; the last part of the result, unless there is none."""
    numbers = Numbers()
    try:
        return _two_with(at, dims, part, tree, opset, numbers)
    except CaptureError:
        if not numbers.met:
            raise
    # What Python does with some number from data cannot be traced: all of them are compared in every run.
    return _two_with(at, dims, part, tree, opset, Numbers(symbolic=False))


def _two_with(
    at: Callable[..., Trace], dims: _Dims, part: int, tree: Tree, opset: int | None, numbers: Numbers
) -> _Agreed:
    first, sizes = _first(lambda sizes: at(sizes, numbers), dims, part)
    with _settled(first):
        return _agreeing(at, dims, tree, first, sizes, opset, numbers)


class _Short:
    """Traces of a module with a loop over the dimensions ``group``, at short lengths."""

    def __init__(
        self, at: Callable[..., Trace], dims: _Dims, lengths: dict[Dim, int], varied: frozenset[Dim],
        group: frozenset[Dim], opset: int, numbers: Numbers,
    ) -> None:  # fmt: skip
        """Raises Unrepeatable where there is no such loop."""
        self._at, self._dims, self._lengths, self._varied, self._group = at, dims, lengths, varied, group
        self._opset, self._numbers = opset, numbers
        self.traces: list[tuple[Trace, Trace]] = []
        self.views: dict[int, View] = {}
        self.replaced: dict[str, int] = {}
        self.loop, self.first, self.model = look(self._exported, group, {dim: lengths[dim] for dim in varied})
        self.second = self.traces[0][1]

    def _sizes(self, n: int) -> _Sizes:
        return _Sizes(self._lengths | dict.fromkeys(self._group, n))

    def _exported(self, n: int) -> tuple[Trace, onnx.ModelProto]:
        sizes = self._sizes(n)
        try:
            first = self._at(sizes, self._numbers)
            if first.numbers:
                raise Unrepeatable("numbers are taken out of data")
            second = self._at(self._dims.probe(sizes, self._varied), self._numbers.after([], UP), high=True)
            if reason := difference(first, second):
                raise Unrepeatable(reason)
            views = _views(first, second)
            if self.traces and (views != self.views or _views(self.traces[0][0], first) != views):
                raise Unrepeatable("a result is another part of a tensor at another length")
            check_places(first.graph, list(views))
            hide_sizes(first, second)
            model = export_cache.exported(first, self._varied, self._opset)
        except (_Failed, CaptureError, ExportError, Unclear) as error:
            raise Unrepeatable(str(error)) from None
        first.graph = second.graph = first.module = second.module = None  # type: ignore[assignment]  # nothing needs them
        self.traces.append((first, second))
        self.views, self.replaced = views, pattern_rewriter.apply(model, self._opset)
        return first, model


def _short(
    at: Callable[..., Trace], dims: _Dims, sizes: _Sizes, varied: frozenset[Dim], unlike: list[frozenset[Dim]],
    opset: int, numbers: Numbers,
) -> _Short | None:  # fmt: skip
    """A loop over dimensions that do not vary. ``unlike``: dimensions with whose sizes the number of nodes varies."""
    for group in [part for whole_group in dims.groups(sizes) for part in dims.parts(whole_group)]:
        if group & varied or not any(group <= dimensions for dimensions in unlike):
            continue
        lengths = {dim: sizes.lengths[dim] if dim in varied else size for dim, size in dims.given.items()}
        with contextlib.suppress(Unrepeatable):
            return _Short(at, dims, lengths, varied, group, opset, numbers)
    return None


def _most_that_vary(
    dims: _Dims, sizes: _Sizes, second: Callable[[frozenset[Dim]], Trace | None], tried: set[frozenset[Dim]]
) -> tuple[Trace | None, frozenset[Dim]]:
    """A trace that agrees with the first, at as many other sizes as there is one for; None: at none.

    ``second``: makes one. All groups of dimensions, then one fewer: features come last, and can seldom vary.
    """
    groups = dims.groups(sizes)
    other = None
    varied: frozenset[Dim] = frozenset()
    for n in range(len(groups), 0, -1):
        varied = frozenset().union(*groups[:n])
        if (other := second(varied)) is not None:
            break
        varied = frozenset()
    for group in [part for whole_group in groups for part in dims.parts(whole_group)]:
        if varied | group not in tried and (found := second(varied | group)) is not None:
            other, varied = found, varied | group
    # Of an adjacency matrix, say, whose rows are a batch, and whose columns are not:
    for group in groups if dims.together else ():
        if not group <= varied and len(dims.parts(group)) > 1:
            dims.equal.append(group)
            if (found := second(varied | group)) is not None:
                other, varied = found, varied | group
            else:
                dims.equal.pop()
    return other, varied


def _agreeing(
    at: Callable[..., Trace], dims: _Dims, tree: Tree, first: Trace, sizes: _Sizes, opset: int | None,
    numbers: Numbers,
) -> _Agreed:  # fmt: skip
    """As :func:`_two_traces`. ``first``: made at ``sizes``, before what forward sets once was there."""
    reason, submodule, failed = "", None, False
    tried: set[frozenset[Dim]] = set()
    unlike: list[frozenset[Dim]] = []  # dimensions with whose sizes the number of nodes varies

    def second(varied: frozenset[Dim]) -> Trace | None:
        """Another trace, if it agrees with the first."""
        tried.add(varied)
        for step, otherwise in WAYS:
            mine = numbers.after(first.numbers, step)
            if (other := with_numbers(varied, mine, otherwise)) is not None or not first.numbers:
                return other
            if not mine.changed and not failed:
                break
        return None

    def with_numbers(varied: frozenset[Dim], mine: Numbers, otherwise: bool) -> Trace | None:
        """The same. ``mine``: what becomes of numbers from data; ``otherwise``: at other sizes and rows than by
        preference."""
        nonlocal reason, submodule, failed
        failed = True
        try:
            other = _at_one_of(dims.probes(sizes, varied, otherwise), lambda sizes: at(sizes, mine, high=True))
        except _Failed as error:
            reason, submodule = str(error), error.submodule
            return None
        failed = False
        reason, submodule = _disagreement(first, other, tree)
        if reason and len(list(first.graph.nodes())) != len(list(other.graph.nodes())):
            unlike.append(varied)
        return None if reason else other

    other, varied = _most_that_vary(dims, sizes, second, tried)
    if first.settled:
        if other is None and (other := second(varied)) is None:
            name = first.settled[0][0].name
            raise _blaming(CaptureError(f"forward sets {name}, and does something else from then on"), submodule)
        first, other = other, first  # that is how forward goes on
    elif opset is not None and unlike and (short := _short(at, dims, sizes, varied, unlike, opset, numbers)):
        return short.first, short.second, varied, short
    # What is pinned has to be traced at the size that it is pinned to.
    while True:
        pinned = {dim: size for dim, size in dims.given.items() if dim not in varied}
        if other is not None and all(sizes.lengths[dim] == size for dim, size in pinned.items()):
            return first, other, varied, None
        sizes = _Sizes(sizes.lengths | pinned)
        try:
            first = at(sizes, numbers)
            other = second(varied) if not first.settled else None
        except _Failed as error:
            reason, submodule, other = str(error), error.submodule, None
        if other is None and not varied:
            text = f"traces of two parts of one batch do not agree: {reason}"
            raise _blaming(CaptureError(text), submodule)
        varied = varied if other is not None else frozenset()


def _at_one_of(sizes: Sequence[_Sizes], at: Callable[[_Sizes], Trace]) -> Trace:
    """A trace at the first of these that there is one for. Raises _Failed."""
    *preferred, last = sizes
    for each in preferred:
        with contextlib.suppress(_Failed):
            return at(each)
    return at(last)


def _disagreement(first: Trace, other: Trace, tree: Tree) -> tuple[str, str | None]:
    """Why two traces make no graph, or an empty string; and the path of the submodule to blame, if it is known."""
    if reason := difference(first, other):
        return reason, located(first, other, tree.modules)
    if other.settled:
        return f"forward sets {other.settled[0][0].name} once more", None
    try:
        _views(first, other)
    except Unclear as error:
        return str(error), None
    return "", None


def _views(first: Trace, other: Trace) -> dict[int, View]:
    return agreed(first.views, other.views, [(write.target.kind, write.target.key) for write in first.writes])


def _first(at: Callable[..., Trace], dims: _Dims, part: int) -> tuple[Trace, _Sizes]:
    tried: list[_Sizes] = []
    cause: _Failed | None = None
    try:
        for sizes in [dims.small(), dims.rows(), dims.whole()][part:]:
            if sizes in tried:
                continue
            tried.append(sizes)
            try:
                return at(sizes), sizes
            except _Failed as error:
                cause = error
        raise _blaming(CaptureError(str(cause)), None if cause is None else cause.submodule) from cause
    finally:
        cause = None  # its traceback knows this frame: the callers' tensors would live on


def _check_own_writes(model: onnx.ModelProto, writes: Sequence[Write]) -> None:
    """A buffer that changed without a trace must be one that BatchNormalization updates."""
    covered = set()
    for node in model.graph.node:
        if node.op_type == "BatchNormalization" and any(a.name == "training_mode" and a.i for a in node.attribute):
            covered |= set(node.input[3:5])
    for write in writes:
        if write.target.kind != "state" or STATE + write.target.key not in covered:
            raise CaptureError(f"forward changes {write.target.kind} {write.target.key} in a way that is not traced")


# --- which sizes ------------------------------------------------------------------------------------------------------

BATCH, LENGTH, SPACE, FEATURE = range(4)  # what a dimension probably is; nothing but the order of attempts rests on it


class _Dims:
    """The dimensions of the inputs, in groups that have one size and so probably vary together."""

    def __init__(self, tensors: Sequence[torch.Tensor], resized: int = 0, ranks: int = 1) -> None:
        """``resized``: how many of ``tensors``, the last ones, are the module's. ``ranks``: among so many dimensions
        may be split."""
        self.ranks = ranks
        self.given: dict[Dim, int] = {(i, d): n for i, t in enumerate(tensors) for d, n in enumerate(t.shape)}
        self.count = len(tensors) - resized
        firsts = Counter(t.shape[0] for t in tensors[: self.count] if t.dim())
        self.batch = firsts.most_common(1)[0][0] if firsts else 0
        self.kind = {
            (i, d): self._kind(tensors[i], d) if i < self.count else _kind_in_table(tensors[i].shape, d)
            for i, d in self.given
        }
        self.pinned = FEATURE + 1  # kinds from this on are not varied
        #: Integers that begin with 0 and do not get smaller: offsets of bags or graphs, which no other row may begin.
        self.rising = frozenset(i for i, t in enumerate(tensors) if _rises(t))
        self.equal: list[frozenset[Dim]] = []  # dimensions whose sizes are equal in every trace
        self.together = True  # is it tried whether dimensions may vary while they are equal?

    def _kind(self, tensor: torch.Tensor, d: int) -> int:
        if d == 0:
            return BATCH if tensor.shape[0] == self.batch else LENGTH
        if not tensor.is_floating_point():
            return LENGTH
        if tensor.dim() >= 4:
            return FEATURE if d == 1 else SPACE
        return LENGTH if (tensor.dim(), d) == (3, 1) else FEATURE

    def small(self) -> _Sizes:
        """A batch of two, even of one, and lengths of at most SHORT."""
        return self._cut({BATCH: lambda n: 2, LENGTH: lambda n: min(n, SHORT)})

    def rows(self) -> _Sizes:
        """A batch of at most two."""
        return self._cut({BATCH: lambda n: min(n, 2)})

    def whole(self) -> _Sizes:
        """As given."""
        return _Sizes(dict(self.given))

    def _cut(self, by_kind: dict[int, Callable[[int], int]]) -> _Sizes:
        """Dimensions of one size stay equal: the first of their kinds decides."""
        kind: dict[int, int] = {}
        for dim, n in self.given.items():
            kind[n] = min(self.kind[dim], kind.get(n, FEATURE))
        return _Sizes({dim: by_kind.get(kind[n], int)(n) for dim, n in self.given.items()})

    def groups(self, sizes: _Sizes) -> list[frozenset[Dim]]:
        """Dimensions of one size: they probably vary together. The batch comes first, features last."""
        found: dict[int, list[Dim]] = {}
        for dim, size in sizes.lengths.items():
            if size > 1 and self.kind[dim] < self.pinned:
                found.setdefault(size, []).append(dim)
        return [frozenset(g) for g in sorted(found.values(), key=lambda g: min(self.kind[d] for d in g))]

    def parts(self, group: frozenset[Dim]) -> list[frozenset[Dim]]:
        """A group, and its dimensions of each kind: their sizes may be equal by accident."""
        kinds = sorted({self.kind[dim] for dim in group})
        if len(kinds) == 1:
            return [group]
        return [group, *(frozenset(d for d in group if self.kind[d] == kind) for kind in kinds)]

    def probe(
        self, sizes: _Sizes, varied: frozenset[Dim], otherwise: bool = False, keeping: bool = False
    ) -> _Sizes:  # fmt: skip
        """Other sizes for the dimensions that vary, other values for all. ``otherwise``: longer, and a batch that stays
        as large as it is loses its first row. ``keeping``: those that rise begin as they do, and nothing is longer
        than it is in the call."""
        new = dict(sizes.lengths)
        for dim in varied:
            kind = next((min(self.kind[d] for d in group) for group in self.equal if dim in group), self.kind[dim])
            size = sizes.lengths[dim]
            # A table that is larger than the call needs it stays so.
            alone = all(i >= self.count for (i, d), n in sizes.lengths.items() if n == size and (i, d) in varied)
            new[dim] = _other(size, LENGTH if alone else kind, otherwise or alone)
            if self.ranks > 1 and size % self.ranks == 0:
                down = new[dim] // self.ranks * self.ranks
                new[dim] = down if down and new[dim] < size else -(-new[dim] // self.ranks) * self.ranks
                new[dim] += self.ranks if new[dim] == size else 0
            if keeping:
                new[dim] = min(new[dim], self.given[dim])
        rows = {dim for dim in new if self.kind[dim] == BATCH and dim not in varied} if otherwise else ()
        kept = self.rising if keeping else frozenset()
        return _Sizes(new, shift=True, varied=varied, other_rows=frozenset(rows), kept=kept)

    def probes(self, sizes: _Sizes, varied: frozenset[Dim], otherwise: bool) -> list[_Sizes]:
        """What is tried, in this order."""
        ways = (False, True) if self.rising else (False,)
        return [self.probe(sizes, varied, otherwise, keeping) for keeping in ways]


def _kind_in_table(shape: torch.Size, d: int) -> int:
    """Of a mask all sizes but ones are lengths, of a table of positions all but the last."""
    return FEATURE if d == len(shape) - 1 and shape[d] not in shape[:d] else LENGTH


MOST_OFFSETS = 1 << 20  # looked at for rising: a copy is made of them


def _rises(tensor: torch.Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool or not tensor.dim():
        return False
    rows = tensor.detach()
    return (
        rows.shape[-1] > 1
        and 0 < rows.numel() <= MOST_OFFSETS
        and not rows[..., 0].any()
        and bool((rows.diff() >= 0).all())
    )


def _other(size: int, kind: int, longer: bool) -> int:
    """A different size of at least two: a little smaller, since positions may be limited, where that is possible.

    Its half is different, too: what Python computes from a size is to show.
    """
    if kind == BATCH:
        return size + 3
    if longer:
        return size + max(2, size // 4)
    if size < 4:
        return size + 2
    if kind == SPACE and size < 64:
        return size + size // 2
    return max(2, size * 3 // 4)
