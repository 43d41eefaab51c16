"""Captures a graph that holds for other sizes than those it was traced at.

A trace records what happened for one set of inputs. Two traces are made, on small slices of the caller's batch, with
different values and different sizes, and the graphs are compared. Equal graphs hold for any size of the dimensions
that differed. Where they are not equal, or the second trace fails, fewer dimensions are varied; the ones that stay
as they were are *pinned*: the graph serves only calls with these sizes there.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import onnx
import torch
from torch import nn

from ortmodule.capture import export_cache, pattern_rewriter
from ortmodule.capture.alike_sizes import alike
from ortmodule.capture.loops.loop import Loop, look
from ortmodule.capture.numbers.data_numbers import DOWN, UP, Numbers, followed
from ortmodule.capture.output_aliasing import View, agreed, check_places
from ortmodule.capture.scalar_guards import line_of_error
from ortmodule.capture.trace import trace
from ortmodule.capture.trace_comparison import difference, hide_sizes, located
from ortmodule.capture.trace_record import Trace, Write
from ortmodule.capture.trace_sizes import BATCH, Dim, Dims, Sizes
from ortmodule.core import pytree, torch_private
from ortmodule.core.errors import (
    CaptureError,
    Cause,
    ExportError,
    MissingPrivate,
    NotTraceable,
    TraceFailed,
    Unclear,
    Unrepeatable,
)
from ortmodule.core.names import STATE
from ortmodule.guards.module_tree import Tree
from ortmodule.guards.reads.size_tables import Key
from ortmodule.host.opaque_regions import Opaque
from ortmodule.lowering import export

SMALL, ROWS, WHOLE = range(3)  # how much of a batch is traced
#: What is tried for another trace with numbers from data: (the step between equal numbers, other sizes and rows).
MOST_ALIKE = 3  # other sizes that are tried since Python does the same at them
WAYS = ((DOWN, False), (UP, False), (DOWN, True))
#: How much larger a counter of calls is in a second trace. Python may do something in every second, fifth or tenth call
#: alone: the next call takes another way then, and the sixtieth the same.
FURTHER = (1, 60)


_MISSING = object()


def _blaming(error: CaptureError | TraceFailed, submodule: str | None, cause: Cause = Cause.TORCH_MODEL) -> Exception:
    # (No frame may know the exception that it raises: tensors would live on.)
    error.submodule, error.cause = submodule, cause
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
    counted: Mapping[str, float] = field(default_factory=dict)  #: attributes that are numbers, at the sample
    follows: dict[str, Key] = field(default_factory=dict)  #: those that follow from sizes
    converts: bool = False  #: are numbers among what is traced that Python converts?
    #: Numbers of the module that have to be these: (attributes, name, number).
    fixed: tuple[tuple[Mapping[str, Any], str, float], ...] = ()

    def numbers_at(self, tensors: Sequence[torch.Tensor]) -> dict[str, float]:
        """Those that follow sizes, for tensors of other sizes."""
        return {name: key.of([t.shape for t in tensors]) for name, key in self.follows.items()}

    def at_length(self, n: int) -> Capture:
        """The same of another length, which the loop's template fits."""
        assert self.loop is not None
        outputs = [torch.empty((0,) * rank) for rank in self.loop.ranks]
        trace = replace(self.trace, size_reads=self.loop.template.reads(n), outputs=outputs, tensors=[])
        pinned = self.pinned | dict.fromkeys(self.loop.dims, n)
        model = self.loop.template.model(n)
        return replace(self, model=model, trace=trace, pinned=pinned, traces=0, seconds=0.0, sample=[], loop=None)


def capture(
    forward: Callable, module: nn.Module, tree: Tree, arguments: pytree.Structure, tensors: Sequence[torch.Tensor],
    opset: int, opaque: Opaque, part: int = SMALL, rewritten: bool = True,
) -> Capture:  # fmt: skip
    """Captures ``forward`` for calls like this one.

    ``part``: of the batch to trace on, SMALL, ROWS or WHOLE; more of it when forward fails on less. ``rewritten``: by
    the patterns that a user has registered.
    Raises CaptureError.
    """
    start, made, converts = time.perf_counter(), 0, False
    numbers = arguments.number_places()
    try:
        torch_private.check_capture()
    except MissingPrivate as error:
        raise CaptureError(str(error)) from None

    def at(sizes: Sizes, from_data: Numbers, high: bool = False) -> Trace:
        nonlocal made, converts
        made += 1
        from_data.counts = dims.numbers_at(sizes, second=high)
        try:
            given = forward, module, tree, arguments, sizes.cut(tensors, numbers)
            found = trace(*given, opset, opaque, from_data, high)
            converts |= from_data.met
            counts[id(found)] = tree.counts(high * from_data.further) | from_data.counts
            return found
        except ExportError as error:
            raise CaptureError(str(error), error.kind) from error
        except NotTraceable as error:
            raise _blaming(TraceFailed(str(error)), getattr(error, "submodule", None), error.cause) from None
        except Exception as error:
            raise _blaming(TraceFailed(_text_of(error)), getattr(error, "submodule", None)) from error

    more = len(tree.resized_tensors()[0])
    shapes = [t.shape for t in tensors[: -more or None]]
    follows, counts = tree.following(shapes), dict[int, dict[str, float]]()  # counts: those of each trace
    dims, model = Dims(tensors, more, tree.ranks, follows), None
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
    least = min((first, second), key=lambda trace: sum(t.numel() for t in trace.tensors))
    first.graph = first.module = None  # type: ignore[assignment]  # nothing needs them any more
    for output in views:  # PyTorch differentiates them
        first.requires_grad[output] = False
    found = pattern_rewriter.apply(model, opset) if rewritten and short is None else {}
    replaced, loop = (found, None) if short is None else (short.replaced, short.loop)
    fixed = _fixed(dims, tree, varied, shapes) if dims.kept and short is None else ()
    numbers_of = tuple(dims.equal), counts[id(least)], follows, converts, fixed
    return Capture(
        model, first, pinned, made, time.perf_counter() - start, least.tensors, views, replaced, loop, *numbers_of
    )


def _text_of(error: Exception) -> str:
    """What a user is told of an error of forward in a trace."""
    first = str(error).partition("\n")[0]  # what follows may be the elements of a tensor
    place = line_of_error(error)
    if "support saved tensor hooks" in first:
        return f"{place} uses a transform of torch.func, through which nothing is traced"
    if first.startswith("Unsupported value kind: Tensor"):
        return f"{place} calls an operator of a tensor that no tracer of torch knows: sparse, nested or of torch.vmap"
    return f"{type(error).__name__}: {first}" + (f" (a trace fails at {place})" if place else "")


def _fixed(
    dims: Dims, tree: Tree, varied: frozenset[Dim], shapes: Sequence[Sequence[int]]
) -> tuple[tuple[Mapping[str, Any], str, float], ...]:  # fmt: skip
    """The numbers of the module that both traces have alike, as they are at a call with inputs of these ``shapes``."""
    paths = [(name, *name.rpartition(".")[::2]) for name in dims.staying(varied)]
    return tuple((vars(tree.modules[path]), key, dims.follows[name].of(shapes)) for name, path, key in paths)


def _exported(
    dims: Dims, first: Trace, second: Trace, varied: frozenset[Dim], opset: int
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


def _two_traces(at: Callable[..., Trace], dims: Dims, part: int, tree: Tree, opset: int | None) -> _Agreed:
    """Two traces that agree, and the dimensions whose sizes differ between them. ``opset``: where a loop over a length
    may be captured at short lengths, that of the graphs; the last part of the result, unless there is none."""
    numbers = followed()
    try:
        return _two_with(at, dims, part, tree, opset, numbers)
    except CaptureError:
        if not numbers.met:
            raise
    # What Python does with some number from data cannot be traced: all of them are compared in every run.
    return _two_with(at, dims, part, tree, opset, Numbers(symbolic=False))


def _two_with(
    at: Callable[..., Trace], dims: Dims, part: int, tree: Tree, opset: int | None, numbers: Numbers
) -> _Agreed:
    first, sizes = _first(lambda sizes: at(sizes, numbers), dims, part)
    with _settled(first):
        return _agreeing(at, dims, tree, first, sizes, opset, numbers)


class _Short:
    """Traces of a module with a loop over the dimensions ``group``, at short lengths."""

    def __init__(
        self, at: Callable[..., Trace], dims: Dims, longest: Sizes, varied: frozenset[Dim],
        group: frozenset[Dim], opset: int, numbers: Numbers,
    ) -> None:  # fmt: skip
        """Raises Unrepeatable where there is no such loop."""
        self._at, self._dims, self._longest, self._varied, self._group = at, dims, longest, varied, group
        self._opset, self._numbers = opset, numbers
        self.traces: list[tuple[Trace, Trace]] = []
        self.views: dict[int, View] = {}
        self.replaced: dict[str, int] = {}
        self.loop, self.first, self.model = look(self._exported, group, {dim: longest.lengths[dim] for dim in varied})
        self.second = self.traces[0][1]

    def _sizes(self, n: int) -> Sizes:
        return self._dims.sized(self._longest.lengths | dict.fromkeys(self._group, n), bool(self._longest.packed))

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
        except (TraceFailed, CaptureError, ExportError, Unclear) as error:
            raise Unrepeatable(str(error)) from None
        first.graph = second.graph = first.module = second.module = None  # type: ignore[assignment]  # nothing needs them
        self.traces.append((first, second))
        self.views, self.replaced = views, pattern_rewriter.apply(model, self._opset)
        return first, model


def _short(
    at: Callable[..., Trace], dims: Dims, sizes: Sizes, varied: frozenset[Dim], unlike: list[frozenset[Dim]],
    opset: int, numbers: Numbers,
) -> _Short | None:  # fmt: skip
    """A loop over dimensions that do not vary. ``unlike``: dimensions with whose sizes the number of nodes varies."""
    dims.fixed = False  # the numbers are others for other lengths
    for group in [part for whole_group in dims.groups(sizes) for part in dims.parts(whole_group)]:
        if group & varied or not any(group <= dimensions for dimensions in unlike):
            continue
        lengths = {dim: sizes.lengths[dim] if dim in varied else size for dim, size in dims.given.items()}
        with contextlib.suppress(Unrepeatable):
            return _Short(at, dims, replace(sizes, lengths=lengths), varied, group, opset, numbers)
    return None


def _most_that_vary(
    dims: Dims, sizes: Sizes, second: Callable[[frozenset[Dim]], Trace | None], tried: set[frozenset[Dim]]
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


class _Seconds:
    """Makes traces that are to agree with a first one, and knows why they do not."""

    def __init__(self, at: Callable[..., Trace], dims: Dims, tree: Tree, first: Trace, numbers: Numbers) -> None:
        self._at, self._dims, self._tree, self.first, self._numbers = at, dims, tree, first, numbers
        self.reason, self._failed = "", False
        self.submodule: str | None = None
        self.tried = set[frozenset[Dim]]()
        self.unlike = list[frozenset[Dim]]()  # dimensions with whose sizes the number of nodes varies

    def agreeing(self, sizes: Sizes, varied: frozenset[Dim]) -> Trace | None:
        """Another trace, if it agrees with the first, which has these ``sizes``."""
        self.tried.add(varied)
        for fixed in (False, True) if self._dims.staying(varied) else (False,):
            self._dims.fixed = fixed
            for further in FURTHER if self._tree.counters and self.first.data_reads else FURTHER[:1]:
                if (other := self._in_some_way(sizes, varied, further)) is not None:
                    self._dims.kept = fixed
                    return other
        return None

    def _in_some_way(self, sizes: Sizes, varied: frozenset[Dim], further: int) -> Trace | None:
        """The same. ``further``: how much larger counters of calls are."""
        for step, otherwise in WAYS:
            mine = self._numbers.after(self.first.numbers, step, further)
            if (other := self._with_numbers(sizes, varied, mine, otherwise)) is not None:
                return other
            if not self.first.numbers or not (mine.changed or self._failed):
                break
        return None

    def _with_numbers(self, sizes: Sizes, varied: frozenset[Dim], mine: Numbers, otherwise: bool) -> Trace | None:
        """The same. ``mine``: what becomes of numbers from data; ``otherwise``: at other sizes and rows than by
        preference."""
        probes = self._dims.probes(sizes, varied, otherwise)
        other = self._at_probes(probes, mine)
        for _ in range(MOST_ALIKE):
            if not self.reason or probes[-1].packed or self._dims.ranks > 1:
                break
            reads = None if other is None else other.size_reads
            lengths = alike(sizes.lengths, probes[-1].lengths, varied, self.first.size_reads, reads)
            if lengths is None:
                break
            probes = [replace(probes[-1], lengths=lengths)]
            other = self._at_probes(probes, mine)
        if other is not None and self.reason:
            if len(list(self.first.graph.nodes())) != len(list(other.graph.nodes())):
                self.unlike.append(varied)
            return None
        return other

    def _at_probes(self, probes: list[Sizes], mine: Numbers) -> Trace | None:
        """A trace at one of these sizes, and the :attr:`reason` why it is not like the first."""
        self._failed = True
        try:
            other = _at_one_of(probes, lambda sizes: self._at(sizes, mine, high=True))
        except TraceFailed as error:
            self.reason, self.submodule = str(error), error.submodule
            return None
        self._failed = False
        self.reason, self.submodule = _disagreement(self.first, other, self._tree)
        return other


def _agreeing(
    at: Callable[..., Trace], dims: Dims, tree: Tree, first: Trace, sizes: Sizes, opset: int | None,
    numbers: Numbers,
) -> _Agreed:  # fmt: skip
    """As :func:`_two_traces`. ``first``: made at ``sizes``, before what forward sets once was there."""
    seconds = _Seconds(at, dims, tree, first, numbers)
    other, varied = _most_that_vary(dims, sizes, functools.partial(seconds.agreeing, sizes), seconds.tried)
    if first.settled:
        if other is None and (other := seconds.agreeing(sizes, varied)) is None:
            then = f"forward sets {first.settled[0][0].name}, and does something else from then on"
            raise _blaming(CaptureError(then), seconds.submodule)
        first, other = other, first  # that is how forward goes on
    elif (unlike := seconds.unlike) and opset and (short := _short(at, dims, sizes, varied, unlike, opset, numbers)):
        return short.first, short.second, varied, short
    # What is pinned has to be traced at the size that it is pinned to.
    while True:
        pinned = {dim: size for dim, size in dims.given.items() if dim not in varied}
        if other is not None and all(sizes.lengths[dim] == size for dim, size in pinned.items()):
            return first, other, varied, None
        sizes, reason, submodule = dims.sized(sizes.lengths | pinned, bool(sizes.packed)), "", None
        try:
            first = seconds.first = at(sizes, numbers)
            other = seconds.agreeing(sizes, varied) if not first.settled else None
            reason, submodule = seconds.reason, seconds.submodule
        except TraceFailed as error:
            reason, submodule, other = str(error), error.submodule, None
        if other is None and not varied:
            raise _blaming(CaptureError(f"traces of two parts of one batch do not agree: {reason}"), submodule)
        varied = varied if other is not None else frozenset()


def _at_one_of(sizes: Sequence[Sizes], at: Callable[[Sizes], Trace]) -> Trace:
    """A trace at the first of these that there is one for. Raises TraceFailed."""
    *preferred, last = sizes
    for each in preferred:
        with contextlib.suppress(TraceFailed):
            return at(each)
    return at(last)


def _disagreement(first: Trace, other: Trace, tree: Tree) -> tuple[str, str | None]:
    """Why two traces make no graph, or an empty string; and the path of the submodule to blame, if it is known."""
    if reason := difference(first, other, tree.modules):
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


def _first(at: Callable[..., Trace], dims: Dims, part: int) -> tuple[Trace, Sizes]:
    cause: TraceFailed | None = None
    try:
        for sizes in dims.first_sizes(part):
            try:
                return at(sizes), sizes
            except TraceFailed as error:
                cause = error
        assert cause is not None
        raise _blaming(CaptureError(str(cause)), cause.submodule, cause.cause) from cause
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
