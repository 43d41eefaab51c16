"""Everything behind one wrapped module: its captured graphs, and the choice of what runs a call."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ortmodule import _core
from ortmodule.capture import export_cache, scalar_guards, self_check
from ortmodule.capture.dynamic_dims import ROWS, SMALL, WHOLE, Capture, capture
from ortmodule.capture.partitioner import Parts
from ortmodule.core import devices, pytree, torch_private
from ortmodule.core.config import DebugOptions, Options
from ortmodule.core.errors import (
    CaptureError,
    Cause,
    Disagrees,
    DoesNotHold,
    NotInEngine,
    Raised,
    Unflattenable,
    Unguardable,
)
from ortmodule.core.logger import Log
from ortmodule.core.names import CHECKPOINT
from ortmodule.engine.autotune import Tuning
from ortmodule.engine.refusals import Refusals
from ortmodule.engine.session import ENGINE_ERRORS, gpu_of, may_plan
from ortmodule.guards.guards import Guards
from ortmodule.guards.hook_effects import conflict
from ortmodule.guards.module_tree import Tree
from ortmodule.host.fallback import Fallback, engine_allowed
from ortmodule.host.opaque_regions import Opaque
from ortmodule.lowering import export
from ortmodule.runtime.compiled_graph import Graph, overlap, shapes

#: Graphs for one key that differ in what Python decided, before PyTorch takes over.
MOST_VARIANTS = 12
#: Graphs for calls that differ in the values of Python numbers.
MOST_VALUES = 8

_NOTHING = object()
#: Attempts to capture a call in spite of failures, when attributes that forward reads have changed.
MOST_FAILURES = 3
#: Trees of modules that are remembered with their graphs: parts come and go.
MOST_TREES = 4


class Attachments(NamedTuple):
    """What the debug package looks on with; each is made for one runner."""

    observers: Callable[[Runner], Any]  # observers of its runs, or None
    saver: Callable[[Runner], Any]  # writes its graphs, or None
    report: Callable[[Runner], object]  # its report, when it is printed


class Runner:
    """Runs ``module`` in the engine where it can, in PyTorch where it cannot."""

    def __init__(self, module: nn.Module, debug: DebugOptions | None, attach: Attachments) -> None:
        self.module, self.options = module, Options.read(debug)
        self.log = Log(type(module).__name__, self.options.log_level)
        torch_private.tell(self.log.warn_once)
        silent = [CHECKPOINT] if self.options["ALLOW_AUTOGRAD_CHECKPOINT"] else []
        self.fallback = Fallback(self.options.fallback, self.options["FALLBACK_RETRY"], self.log, silent)
        self.graphs: dict[tuple, list[Graph]] = {}
        self.values: dict[tuple, int] = {}  # captures of calls that differ in the values of numbers only
        self.patched: Callable | None = None  # what someone put in place of the wrapper's forward
        self._names: frozenset[str] | None = None  # of the parameters of forward
        self.exports = 0
        self.seconds = {"capture": 0.0, "read": 0.0, "check": 0.0}
        self.latest: Graph | None = None
        self.observers, self.saver, self.report = attach.observers(self), attach.saver(self), attach.report
        self.tuning = Tuning.of(self.options)
        self.refusals = Refusals(self.log)
        self.cache = export_cache.Cache(self.options["CACHE_DIR"]) if self.options["CACHE_DIR"] else None
        self._trees: list[Tree] = []
        self._told: set[str] = set()  # submodules that PyTorch runs
        self._state: _State | None = None
        self._epochs = itertools.count()
        self._lock = threading.RLock()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, in PyTorch."""
        return self.module.forward(*args, **kwargs)

    def __call__(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        if not engine_allowed() or self.fallback.forced():
            return self.forward(*args, **kwargs)
        try:
            return self._in_engine(args, kwargs)
        except NotInEngine as error:
            reason = error
        except Raised as raised:
            reason = raised.error
        if not isinstance(reason, NotInEngine):
            raise reason  # the caller's own, as PyTorch would raise it
        self.fallback.allow(reason)
        # An error of the caller's is PyTorch's to report, and no reason to give up on such calls.
        result = self.forward(*args, **kwargs)
        self.fallback.done(reason)
        return result

    def _eager(self, arguments: pytree.Structure, tensors: Sequence[torch.Tensor]) -> Any:
        args, kwargs = arguments.rebuild(tensors)
        return self.forward(*args, **kwargs)

    def _in_engine(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        ordered = kwargs if len(kwargs) < 2 else self._in_order(kwargs)
        try:
            inputs, arguments = pytree.flatten((args, ordered))
        except Unflattenable as error:
            raise NotInEngine(Cause.DATA, f"an argument holds {error}") from error
        if any([t.numel() == 0 for t in inputs]):
            raise NotInEngine(Cause.DATA, "an input is empty")
        state = self._current_state()
        call = _Call(state, arguments, inputs, lambda tensors: self._eager(arguments, tensors))
        self.fallback.check(state.epoch, call.key, (call.key, shapes(inputs)))
        result, part = self._known(call)
        if result is _NOTHING:
            with self._lock:
                result, now = self._known(call)  # another thread may have captured it
                if result is _NOTHING:
                    result = self._captured(call, max(part, now))
        return result

    def _in_order(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Forward cannot tell in which order the parameters that it names were given; of others it can."""
        if self._names is None:
            parameters = inspect.signature(self.module.forward).parameters.values()
            self._names = frozenset(p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD))
        names = sorted(self._names & kwargs.keys())
        return {name: kwargs[name] for name in names} | {k: v for k, v in kwargs.items() if k not in self._names}

    def _known(self, call: _Call) -> tuple[Any, int]:
        """The result of a graph that holds for ``call``, or _NOTHING; how much of the batch to capture it on."""
        part = SMALL
        for graph in tuple(self.graphs.get(call.key, ())):
            if graph.fits(call.inputs) and graph.guards.hold(call.state.epoch):
                part = ROWS  # a graph that was traced on less did not hold
                try:
                    return self._run(graph, call), part
                except _OtherParts as reason:
                    self.log.debug(str(reason))
                    self.graphs[call.key].remove(graph)
                except DoesNotHold as reason:
                    self.log.debug(str(reason))
        return _NOTHING, part

    def _captured(self, call: _Call, part: int) -> Any:
        may_plan(gpu_of(call.inputs))
        grad = torch.is_grad_enabled()
        while True:
            # Tensors of inference mode have no versions, which tell what forward changes.
            # What a trace saves is no matter of a checkpoint around the module.
            with torch.inference_mode(False), torch.set_grad_enabled(grad), saved_tensors_hooks(_packed, _unpacked):
                graph = self._capture(call, part)
            try:
                return self._run(graph, call)
            except _OtherParts as reason:
                self.log.debug(str(reason))
                self.graphs[call.key].remove(graph)
            except DoesNotHold as reason:
                self.log.debug(str(reason))
                if part == WHOLE:
                    text = f"what it does depends on values: {reason}"
                    raise NotInEngine(Cause.TORCH_MODEL, text, call.key) from None
                part += 1

    def _current_state(self) -> _State:
        """What the module is now; looked at again only when something has changed."""
        state = self._state
        if state is None or state.watch.changed() or state.tree.polled or not state.tree.follows():
            with self._lock:
                self._state = state = self._look()
        if "" in state.hooked:
            raise NotInEngine(Cause.TORCH_MODEL, "there are hooks on every module, which a graph would not call")
        return state

    def _look(self) -> _State:
        tree = next((tree for tree in self._trees if tree.is_current()), None)
        if tree is None:
            # Graphs take their tensors from places that may be gone.
            tree = Tree(self.module)
            self._trees = [tree, *self._trees[: MOST_TREES - 1]]
        self.graphs, self.values, self.fallback.refused = tree.graphs, tree.values, tree.refused
        tree.attributes.look(tree.names())
        watch = tree.watch()
        return _State(tree, watch, tree.hooked(), tree.number(), next(self._epochs))

    def _capture(self, call: _Call, part: int) -> Graph:
        foreign = call.tree.foreign()
        if foreign is None:
            named = [(slot.name, slot.get()) for slot in call.tree.slots.values()]
            foreign = devices.refusal(named + [(f"input {i}", t) for i, t in enumerate(call.inputs)])
        if foreign is not None:
            raise NotInEngine(Cause.DEVICE, foreign, call.key)
        self._count_values(call)
        variants = self.graphs.setdefault(call.key, [])
        if len(variants) == MOST_VARIANTS:
            reason = f"it went {MOST_VARIANTS} different ways through its Python code"
            if (name := variants[0].guards.broken_name()) is not None:
                reason = f"the attribute {name} took more than {MOST_VARIANTS} values"
            raise NotInEngine(Cause.TORCH_MODEL, reason, call.key)
        heard = self.log.hears_exporter
        with self.log.building(3) as begins, export.heard(heard), export_cache.using(self.cache):
            return self._build(call, part, variants, begins)

    def _build(self, call: _Call, part: int, variants: list[Graph], begins: Callable[[str], None]) -> Graph:
        """A new graph, first among ``variants``. ``begins`` is told of every phase."""
        *before, _ = call.tree.key()
        captured, graph, wrong = self._checked(call, part, begins)
        if wrong:
            # Some modules leave something out when they are traced: they need not know.
            with scalar_guards.secretly(), contextlib.suppress(NotInEngine):
                captured, graph, still = self._checked(call, part, begins)
                wrong = wrong if still else ""
        if wrong:
            text = f"its graph does not compute what the module does: {wrong}"
            raise NotInEngine(Cause.ONNX_MODEL, text, call.key)
        captured.trace.tensors = captured.trace.outputs = captured.sample = None
        state = self._current_state()
        if state.tree is call.tree and state.key != call.state.key and before == list(state.tree.key()[:-1]):
            call.move(state)  # forward puts hooks on submodules, and capturing it has done that now
            variants = self.graphs.setdefault(call.key, [])
        graph.failed = functools.partial(self._failed_backward, call.key)
        self.exports += 1
        variants.insert(0, graph)
        return graph

    def _checked(self, call: _Call, part: int, begins: Callable[[str], None]) -> tuple[Capture, Graph, str]:
        """A capture, its graph, and what is wrong with it."""
        begins("capture")
        parts = _parts(call)
        try:
            captured = self._captured_in_parts(call, parts, part)
            _check_memory(captured, call.tree)
            if (text := conflict(call.tree, call.state.hooked, captured.trace.attributes)) is not None:
                raise CaptureError(text)
            guards = Guards(call.tree.attributes, captured.trace.attributes, call.tree.names())
        except (CaptureError, Unguardable) as error:
            refusal = NotInEngine(Cause.TORCH_MODEL, str(error), call.key)
            refusal.guards = self._guards_of_failure(call)
            raise refusal from error
        finally:
            self._state = None  # there is more to watch now
        self.seconds["capture"] += captured.seconds
        start = time.perf_counter()
        begins("read")
        try:
            graph = Graph(
                captured,
                call.tree,
                guards,
                call.inputs,
                self.options.without,
                self.options.padding_unseen,
                self.options["DEFER_LOGITS"],
                self.options["ENABLE_CUDA_GRAPHS"],
                self.tuning,
                # Observers watch one node.
                "0" if self.observers else self.options["ENABLE_MEM_EFFICIENT_GRAD_MGMT"],
            )
            self.seconds["read"] += time.perf_counter() - start
            start = time.perf_counter()
            begins("check")
            wrong = self_check.difference(captured, self.forward, call.arguments, call.tree)
            self.seconds["check"] += time.perf_counter() - start
            graph.plan_first(call.inputs)
        except ENGINE_ERRORS as error:
            if parts.grow(error, captured):
                return self._checked(call, part, begins)
            raise NotInEngine(Cause.ONNX_MODEL, str(error), call.key) from error
        return captured, graph, wrong

    def _captured_in_parts(self, call: _Call, parts: Parts, part: int) -> Capture:
        """The module with as many parts left to PyTorch as it takes. Raises CaptureError."""
        while True:
            modules = parts.modules()
            for path, reason in modules.items():
                self.fallback.allow(NotInEngine(Cause.TORCH_MODEL, f"{path}: {reason}"))
            opaque = Opaque(modules, call.tree.kinds, self.options["ENABLE_CUSTOM_AUTOGRAD"])
            try:
                captured = capture(
                    self.forward, self.module, call.tree, call.arguments, call.inputs, self.options.opset, opaque, part
                )
                for path, reason in modules.items():
                    self._left(path, reason)
                return captured
            except CaptureError as error:
                if not parts.grow(error):
                    raise

    def _left(self, path: str, reason: str) -> None:
        """PyTorch runs a submodule, or a method, inside the graph."""
        if path not in self._told and not any(text in reason for text in self.fallback.silent):
            self._told.add(path)
            what = f"the method {path.replace(':', '.')}" if ":" in path else f"the submodule {path}"
            self.log.warn_once(f"PyTorch runs {what} inside the graph: {reason}")

    def _failed_backward(self, key: object, error: Exception) -> None:
        """PyTorch takes over such calls from their backward on. Raises ``error`` when it must not."""
        reason = NotInEngine(Cause.ONNX_MODEL, str(error), key)
        reason.__cause__ = error
        self.fallback.allow(reason)
        self.fallback.done(reason)

    def _guards_of_failure(self, call: _Call) -> Guards | None:
        """What has to change before it is worth another attempt; None: nothing, there were enough of them."""
        tree = call.tree
        tree.failures[call.key] = tree.failures.get(call.key, 0) + 1
        if tree.failures[call.key] > MOST_FAILURES:
            return None
        try:
            return Guards(tree.attributes, tree.reads, tree.names())
        except Unguardable:
            return None

    def _count_values(self, call: _Call) -> None:
        """A number that is another one at every call would be captured at every call."""
        if call.key in self.graphs:
            return
        kind = (call.arguments.without_numbers(), call.key[1:])
        self.values[kind] = self.values.get(kind, 0) + 1
        if self.values[kind] > MOST_VALUES:
            reason = f"the numbers among its arguments took more than {MOST_VALUES} values: pass them as tensors"
            raise NotInEngine(Cause.DATA, reason, call.key)

    def _run(self, graph: Graph, call: _Call) -> Any:
        try:
            result = self.observers.run(graph, call) if self.observers else graph(call.inputs, call.eager)
        except Raised as raised:
            if not isinstance(raised.error, Disagrees) or graph.changes():
                raise
            # All that it has changed is what hooks change.
            raise NotInEngine(Cause.TORCH_MODEL, str(raised.error), call.key) from raised.error
        except ENGINE_ERRORS as error:
            if not graph.has_effects() and not isinstance(error, MemoryError):
                if not graph.traced_on(call.inputs):
                    raise graph.refuses(call.inputs, str(error)) from error
                if _parts(call).grow(error, graph.capture):
                    raise _OtherParts(str(error)) from error
            raise NotInEngine(Cause.ONNX_MODEL, str(error), (call.key, shapes(call.inputs))) from error
        self.fallback.reason = None
        self.refusals.listen()
        if self.saver is not None:
            self.saver.save(graph, call)
        if self.latest is None:
            self.latest = graph
            self.log.info(str(self.report(self)))
        self.latest = graph
        return result


def _parts(call: _Call) -> Parts:
    return Parts(call.tree, call.state.key, call.state.hooked)


def _check_memory(captured: Capture, tree: Tree) -> None:
    """A tensor that forward changes has to be alone in its memory: to a graph, the others would stay as they are."""
    tree.refresh()
    for write in captured.trace.writes:
        if write.target.kind == "state" and not write.replaces:
            written = tree.slots[write.target.key]
            for slot in tree.slots.values():
                if slot is not written and overlap(slot.get(), written.get()):
                    raise CaptureError(f"forward changes {written.name}, which shares memory with {slot.name}")


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()  # a tensor would hold the node that holds it


def _unpacked(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _OtherParts(Exception):
    """The engine refuses a graph; one with more submodules left to PyTorch is worth an attempt."""


class _State(NamedTuple):
    """A module between two changes."""

    tree: Tree
    watch: _core.Watch
    hooked: tuple[str, ...]  # submodules with hooks
    key: int  # stands for what the tree says of its tensors and training flags
    epoch: int  # another one after every change


class _Call:
    """One call: its tensors, what they stand in, and what a captured graph holds for, the inputs' sizes aside."""

    __slots__ = ("state", "tree", "arguments", "inputs", "eager", "key")

    def __init__(self, state: _State, arguments: pytree.Structure, inputs: list[torch.Tensor], eager: Callable) -> None:
        self.state, self.tree = state, state.tree
        self.arguments, self.inputs, self.eager = arguments, inputs, eager
        self.key = (
            arguments,
            tuple([(t.dtype, t.dim(), t.requires_grad, t.device) for t in inputs]),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
            torch.get_default_dtype(),
            torch.get_deterministic_debug_mode(),
            state.key,
            state.hooked,
        )

    def move(self, state: _State) -> None:
        """The module has another state now, which is nothing to the call but another key."""
        self.state, self.key = state, (*self.key[:-2], state.key, state.hooked)
