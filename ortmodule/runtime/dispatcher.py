"""Runs calls of a wrapped module in the captured graph that holds for them, or else in PyTorch.

The order of a call: what its arguments are (:func:`_flattened`), what the module is (:mod:`module_state`), a graph for
both (:attr:`Dispatcher.graphs`), the run (:class:`~ortmodule.runtime.compiled_graph.CompiledGraph`). Where there is no
graph the :class:`~ortmodule.runtime.compiler.Compiler` makes one.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ortmodule.capture.dynamic_dims import ROWS, SMALL, WHOLE
from ortmodule.capture.effects.filled_caches import MOST_CALLS
from ortmodule.core import pytree, torch_private
from ortmodule.core.config import Config, DebugOptions, read_config
from ortmodule.core.errors import (
    CallsOwn,
    Cause,
    Disagrees,
    DoesNotHold,
    FillsCache,
    NoOtherGraph,
    NotCaptured,
    NotInEngine,
    Raised,
    Unflattenable,
    Waits,
)
from ortmodule.core.logger import Log
from ortmodule.core.names import CHECKPOINT
from ortmodule.core.objects.dispatchers import dispatcher_of
from ortmodule.core.structures.tokens import TENSOR
from ortmodule.core.torch_private import (
    KEEPS,
    PARAMETRIZE,
    forward_level,
    in_backward,
    is_fx_tracing,
    peek_transform,
    traced,
)
from ortmodule.engine.autotune import Tuning
from ortmodule.engine.refusals import Refusals
from ortmodule.engine.session import ENGINE_ERRORS
from ortmodule.guards.module_tree import Tree
from ortmodule.guards.sharding.sharded import is_sharded
from ortmodule.host.fallback import THREAD, Fallback, inside_assigned
from ortmodule.host.host_node import varying
from ortmodule.host.met_calls import recording
from ortmodule.host.passed_calls import Diverted
from ortmodule.runtime.attachments import Attachments
from ortmodule.runtime.calls import capture_budget
from ortmodule.runtime.calls.capture_budget import Budget, Variant
from ortmodule.runtime.calls.held_arguments import taken_from_module
from ortmodule.runtime.calls.module_state import ModuleState, ModuleStates
from ortmodule.runtime.calls.parts import Inner, breaks_of
from ortmodule.runtime.calls.reruns import Reruns
from ortmodule.runtime.calls.usage import Usage
from ortmodule.runtime.compiled_graph import ASSIGNED, OWN, Call, CompiledGraph
from ortmodule.runtime.compiler import Compiler
from ortmodule.runtime.variants import call_differences
from ortmodule.runtime.variants.changing_numbers import note, with_changing_numbers
from ortmodule.runtime.variants.known_waits import KnownWaits, found_of, waits_for, with_found
from ortmodule.runtime.variants.plain_arguments import CONSTANTS
from ortmodule.triton_kernels.use import TritonUse

_NOTHING = object()
MOST_STRUCTURES = 1024  # of arguments that are remembered
_structures: dict[tuple, pytree.Structure] = {}
TRANSFORMED = (
    "PyTorch runs calls of this module inside of torch.func transforms and forward-mode differentiation, which look at "
    "its operations"
)


class Dispatcher:
    """Runs ``module`` in the engine where it can, in PyTorch where it cannot."""

    def __init__(
        self, module: nn.Module, debug: DebugOptions | None, config: Config | None, attach: Attachments
    ) -> None:
        self.module, self.given, self.debug = module, config, debug
        self.config = config = read_config(config, debug)
        self.log = Log(type(module).__name__, config.log_level)
        torch_private.tell(self.log.warn_once)
        silent = [CHECKPOINT] if config.allow_autograd_checkpoint else []
        self.fallback = Fallback(config.fallback_policy, config.fallback_retry, self.log, silent, config.strict)
        self.usage = Usage(module, self.fallback.bypassed)
        self.budget = Budget(config.capture_share, self.fallback.allows(Cause.TORCH_MODEL), self.log)
        self.reruns, self.known_waits = Reruns(), KnownWaits()
        self.graphs: dict[tuple, list[CompiledGraph]] = {}
        #: What stands in place of the wrapper's forward; the same as a function of the module's, which is captured; and
        #: as the script has given it.
        self.assigned: Callable | None = None
        self.assigned_forward: Callable | None = None
        self.given_forward: Callable | None = None
        self._calling_own: set[tuple] = set()  # kinds of calls in which it calls the module's own forward
        self._looks_for_own = False  # while such a call is captured
        self.latest: CompiledGraph | None = None
        self.observers, self.saver, self.report = attach.observers(self), attach.saver(self), attach.report
        self.clusters = attach.clusters(self)
        self.tuning = Tuning.of(config)
        TritonUse.of(config)  # an error of its file is one of the wrapping
        self.refusals = Refusals(self.log)
        self.states = ModuleStates(module)
        self.interpret, self._wrap = attach.interpret, attach.wrap
        self._units: dict[int, Any] = {}  # submodules that are wrapped, by the ids of the submodules
        self.parts = Inner(self._unit)
        self.compiler = Compiler(self)
        self._names: dict[str, frozenset[str]] = {}  # of the parameters of a forward
        self._lock = threading.RLock()

    def in_pytorch(self, which: str = OWN) -> Callable:
        """The module's own forward, or the one that was assigned, in PyTorch."""
        if which == OWN or self.assigned_forward is None:
            return self._own
        return functools.partial(self._assigned, self.assigned_forward)

    def _own(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.forward(*args, **kwargs)

    def _assigned(self, forward: Callable, /, *args: Any, **kwargs: Any) -> Any:
        with inside_assigned(self):
            return forward(*args, **kwargs)

    def assign(
        self, assigned: Callable | None, forward: Callable | None = None, given: Callable | None = None
    ) -> None:  # fmt: skip
        """``assigned`` takes the place of the wrapper's forward; ``forward``: the same as a function of the module;
        ``given``: as the script has given it."""
        with self._lock:
            self.assigned, self.given_forward = assigned, given
            self._calling_own.clear()
            if forward is not self.assigned_forward:
                self.assigned_forward, self._names, self.latest = forward, {}, None
                self.states, self.graphs, self.fallback.refused = ModuleStates(self.module), {}, {}
                self.known_waits = KnownWaits()
                self.budget = Budget(self.config.capture_share, self.fallback.allows(Cause.TORCH_MODEL), self.log)

    def call_assigned(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call of the forward that was assigned: captured in the place of the module's own, but where it calls that
        one. Python runs what is around it then."""
        kind = call_differences.kind(args, kwargs)
        if kind is None or kind in self._calling_own:
            return self.given_forward(*args, **kwargs)  # type: ignore[misc]  # there is one
        try:
            return self(args, kwargs, ASSIGNED)
        except CallsOwn:
            self._add_calling_own(kind)
            return self.given_forward(*args, **kwargs)  # type: ignore[misc]  # there is one
        except NotCaptured as found:
            reason = found.reason
        # Not captured, or not now. The module's own forward may be within it, and can be.
        calls = self.usage.calls
        with self.reruns.noting(reason.inputs if isinstance(reason, Waits) else None):
            result = self.budget.in_pytorch(self.given_forward, args, kwargs, reason)  # type: ignore[arg-type]  # there is one
        if self.usage.calls > calls:
            self.budget.discard(reason.variant if isinstance(reason, Waits) else None)
            self._add_calling_own(kind)
        else:
            self.fallback.allow(reason)
            self.usage.pytorch += 1
            self.fallback.done(reason)
        return result

    def _add_calling_own(self, kind: tuple) -> None:
        if len(self._calling_own) >= MOST_STRUCTURES:
            self._calling_own.clear()
        self._calling_own.add(kind)

    def __call__(self, args: tuple, kwargs: dict[str, Any], which: str = OWN) -> Any:
        # Where something looks at the operations that a module consists of, PyTorch runs it.
        looked_at = (
            traced()
            or torch.compiler.is_compiling()
            or is_fx_tracing()
            or peek_transform() is not None
            or forward_level() >= 0
        )
        if THREAD.only_pytorch or looked_at:
            return self._aside(args, kwargs, which)
        if self.fallback.forcing and self.fallback.forced():
            self.usage.pytorch += 1
            return self.in_pytorch(which)(*args, **kwargs)
        if self.known_waits.known and which == OWN and not self.reruns.calls:
            known = self.known_waits.look(args, kwargs, self.state, self.budget)
            if known is not None:
                return self._in_pytorch_again(known, args, kwargs)
        reason: BaseException
        try:
            return self._in_engine(args, kwargs, which)
        except NotInEngine as error:
            reason = error
        except Raised as raised:
            reason = raised.error
        if not isinstance(reason, NotInEngine):
            raise reason  # the caller's own, as PyTorch would raise it
        if which == ASSIGNED and reason.finish is None:
            raise NotCaptured(reason)
        self.fallback.allow(reason)
        self.usage.pytorch += 1
        if reason.finish is not None:
            finish, reason.finish = reason.finish, None
            self.fallback.done(reason)
            return finish()
        found, reason.found = reason.found, None
        # An error of the caller's is PyTorch's to report, and no reason to give up on such calls.
        with self.reruns.noting(reason.inputs if isinstance(reason, Waits) else None):
            forward = functools.partial(self._forward_around_units, which, reason)
            result = self.budget.in_pytorch(forward, args, kwargs, reason)
        self.fallback.done(reason)
        if which == OWN and found is not None:
            self.known_waits.add(args, kwargs, found)
        return result

    def _in_pytorch_again(self, reason: NotInEngine, args: tuple, kwargs: dict[str, Any]) -> Any:
        self.usage.pytorch += 1
        forward: Callable = self.module.forward
        if self.parts.may_be_of_whole(reason):
            forward = functools.partial(self._forward_around_units, OWN, reason)
        result = self.budget.in_pytorch(forward, args, kwargs, reason)
        self.fallback.reason = reason.reason
        return result

    def _aside(self, args: tuple, kwargs: dict[str, Any], which: str) -> Any:
        """A call whose operations something looks at."""
        if self._looks_for_own and which == OWN and THREAD.in_assigned is self:
            raise CallsOwn
        if not (THREAD.only_pytorch or traced() or torch.compiler.is_compiling() or is_fx_tracing()):
            self.fallback.bypassed(TRANSFORMED)
            self.usage.pytorch += 1
        return self.in_pytorch(which)(*args, **kwargs)

    def _in_engine(self, args: tuple, kwargs: dict[str, Any], which: str) -> Any:
        if len(kwargs) > 1:
            kwargs = self._in_order(kwargs, which)
        inputs, arguments = _flattened(args, kwargs)
        state = self.state()
        if "" in state.hooked or PARAMETRIZE.get(KEEPS):
            state.check()
        if state.watch.holds(inputs):
            inputs, arguments = taken_from_module(inputs, arguments, state)
        forward = self._own if which == OWN else self.in_pytorch(which)
        call = Call(forward, which, state, arguments, inputs, (args, kwargs))
        if self.reruns.calls and self.reruns.is_rerun(inputs):
            raise Waits(None, "there was no graph for it in forward, and backward computes it again", "")
        if (
            state.tree.caches.changing and call.key not in self.graphs
            and (other := with_changing_numbers(call)) is not None
        ):  # fmt: skip
            changing, same = other
            try:
                return self._run_call(same)
            except Waits:
                raise
            except NotInEngine as error:
                self.log.debug(f"a graph for all values of its numbers: {error}")
                changing.refused = True
        return self._run_call(call)

    def prepare(self, args: tuple, kwargs: dict[str, Any]) -> tuple[CompiledGraph, Call]:
        """The graph that is for such a call, captured where there is none yet, and the call; it does not run.

        Raises NotInEngine, and DoesNotHold where only a trace of the whole batch could hold.
        """
        if self.assigned_forward is not None:
            with contextlib.suppress(CallsOwn):
                return self._prepare(args, kwargs, ASSIGNED)
        return self._prepare(args, kwargs, OWN)

    def _prepare(self, args: tuple, kwargs: dict[str, Any], which: str) -> tuple[CompiledGraph, Call]:
        with self._lock:
            kwargs = self._in_order(kwargs, which)
            inputs, arguments = _flattened(args, kwargs)
            state = self.state()
            state.check()
            if state.watch.holds(inputs):
                inputs, arguments = taken_from_module(inputs, arguments, state)
            call = Call(self.in_pytorch(which), which, state, arguments, inputs, (args, kwargs))
            for part in (None, SMALL, ROWS):
                if part is not None:
                    variant = self._variant(call, [])
                    self._compiled(call, part, variant)
                for origin in tuple(self.graphs.get(call.key, ())):
                    with contextlib.suppress(DoesNotHold):
                        graph = origin.at(call)
                        if graph is not None and graph.fits(call.inputs, call.shapes, call.state.epoch):
                            return graph, call
            raise DoesNotHold("what it does at its own sizes shows only when all of it is traced at once")

    def _run_call(self, call: Call) -> Any:
        refusal = None
        if self.fallback.refused:
            refusal = self.fallback.refusal(call.state.epoch, call.key, (call.key, call.shapes))
            if refusal is not None and not isinstance(refusal, NoOtherGraph):
                raise with_found(refusal, call, self.fallback.refused)
        tried = tuple(self.graphs.get(call.key, ()))
        result, part, misses = self._known(call, tried)
        if result is _NOTHING:
            if refusal is not None:
                raise refusal if tried else with_found(refusal, call, self.fallback.refused)
            with self._lock:
                if tried != (others := tuple(self.graphs.get(call.key, ()))):  # another thread may have captured it
                    result, now, misses = self._known(call, others)
                    part = max(part, now)
                if result is _NOTHING:
                    result = self._captured(call, part, misses)
        return result

    def _in_order(self, kwargs: dict[str, Any], which: str) -> dict[str, Any]:
        """Forward cannot tell in which order the parameters that it names were given; of others it can."""
        if (known := self._names.get(which)) is None:
            forward = self.module.forward if which == OWN else self.assigned_forward
            parameters = inspect.signature(forward).parameters.values()  # type: ignore[arg-type]  # there is one
            known = frozenset(p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD))
            self._names[which] = known
        names = sorted(known & kwargs.keys())
        return {name: kwargs[name] for name in names} | {k: v for k, v in kwargs.items() if k not in known}

    def units(self, tree: Tree) -> dict[str, nn.Module]:
        """The sharded submodules by path, each as an ORTModule: a graph of its own, which FSDP2's hooks run around."""
        return {path: self._unit(m) for path, m in tree.sharded.items() if is_sharded(type(m))}

    def _unit(self, module: nn.Module) -> Any:
        if id(module) not in self._units:
            self._units[id(module)] = self._wrap(module, self.debug, self.given)
            dispatcher_of(self._units[id(module)]).usage.inner = True
        return self._units[id(module)]

    def inside(self, path: str) -> contextlib.AbstractContextManager:
        """What a call of a submodule runs in that PyTorch runs, and parts of which are graphs of their own."""
        return self.parts.inside(path, self.state().tree, self.budget)

    def _forward_around_units(self, which: str, reason: NotInEngine, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`in_pytorch`; submodules that are sharded, or parts, still are graphs of their own."""
        forward, tree = self.in_pytorch(which), self.state().tree  # a capture that failed has forgotten the latest one
        units = self.units(tree) if tree.sharded else self.parts.of_whole(reason, tree, self.budget)
        if not units:
            return forward(*args, **kwargs)
        with recording(Diverted(tree, units)):
            return forward(*args, **kwargs)

    def state(self) -> ModuleState:
        """What the module is now, with what was captured of it; looked at again only when something has changed."""
        state = self.states.latest
        if (
            state is None
            or state.watch.changed()
            or (state.polled and state.tree.moved())
            or (state.reach is not None and not state.reach.holds())
        ):
            with self._lock:
                state = self.states.look()
                self.graphs, self.fallback.refused = state.tree.caches.graphs, state.tree.caches.refused
        return state

    def _known(self, call: Call, graphs: Sequence[CompiledGraph]) -> tuple[Any, int, list[DoesNotHold] | None]:
        """The result of one of ``graphs``, those of its key, that holds for ``call``, or _NOTHING; how much of it
        to capture on; why graphs that have run did not hold, or None where some have not run that may."""
        part, skipped = SMALL, False
        misses: list[DoesNotHold] = []
        for origin in graphs:
            if origin.variant.wasted and not (self.budget.may_waste(origin.variant) or in_backward()):
                skipped = True
                continue
            if misses and any(origin.contradicts(miss) for miss in misses):
                continue
            try:
                if (graph := origin if origin.lengths is None else origin.at(call)) is None:
                    continue
            except DoesNotHold as reason:
                part = ROWS
                self.log.debug(str(reason))
                continue
            if graph is not origin:
                part = ROWS  # where the graph of a loop does not hold, the length is captured by itself
            if graph.fits(call.inputs, call.shapes, call.state.epoch):
                part = ROWS  # a graph that was traced on less did not hold
                try:
                    if (result := self._run(graph, call)) is not _NOTHING:
                        return result, part, misses
                except DoesNotHold as reason:
                    misses.append(reason.with_traceback(None))  # whose frames hold the list
                    self.log.debug(str(reason))
        return _NOTHING, part, None if skipped else misses

    def _variant(self, call: Call, misses: list[DoesNotHold] | None) -> Variant:
        """The one that ``call`` is of, which is to be captured now; raises Waits otherwise."""
        graphs = self.graphs.get(call.key, ())
        seen = [] if misses is None else misses
        key = (call.key, None) if misses is None else call_differences.split(call, graphs, seen)
        if (variant := self.budget.known_variant(key)) is None:
            others = [other for other, found in self.graphs.items() if found and other != call.key]
            variant = self.budget.variant(
                key,
                lambda: call_differences.describe(call, graphs, seen, others),
                sum(t.numel() for t in call.inputs),
            )
        try:
            if misses is None:
                raise self.budget.unknown(variant)
            # What backward computes again the engine has run before: it is to run there.
            self.budget.ask(variant, call.mode, must=in_backward())
        except Waits as reason:
            reason.inputs = call.inputs[: call.count]
            if not seen:
                reason.found = found_of(call, reason, graphs, bool(graphs), key, misses is None)
            raise
        return variant

    def _captured(self, call: Call, part: int, misses: list[DoesNotHold] | None) -> Any:
        """The result of a graph that is made for ``call``. Raises Waits where that is not to be made now."""
        note(call.tree.caches.changing, call.arguments, call.key[1:])
        if call.waits:
            raise waits_for(call, "forward keeps a table for each size, and none for these yet")
        variant = self._variant(call, misses)
        while True:
            try:
                call.tree.may_keep = not self.fallback.strict and not in_backward()
                call.tree.may_fill = call.tree.may_keep and call.tree.fills < MOST_CALLS and self.budget.bounded
                made = self._compiled(call, part, variant)
            except FillsCache as reason:
                self.budget.discard(variant)
                raise self._fills(call, reason) from None
            finally:
                call.tree.may_fill = call.tree.may_keep = False
            if self.state().watch.holds(call.inputs[: call.count]):
                raise NotInEngine(Cause.DATA, "forward reads a tensor from elsewhere that it is given, too")
            try:
                if (graph := made.at(call)) is None:
                    raise DoesNotHold("the module is not as it was when it was captured")
                if not graph.fits_facts(call.inputs):
                    raise DoesNotHold("its inputs do not lie in memory as those parts of them that were traced")
                if (result := self._run(graph, call)) is not _NOTHING:
                    return result
            except DoesNotHold as reason:
                self.log.debug(str(reason))
                if part == WHOLE and self.compiler.leave_deciding(call, reason):
                    self.graphs[call.key].remove(made)
                    continue
                other = f"what a part of the batch does: {reason}"  # it may hold for other calls
                made.count_for(self.budget.add_graph(other, reason.place, variant.elements))
                variant.wasted = 0.0  # that was a part of the capture
                if part == WHOLE:
                    text = f"what it does depends on values: {reason}"
                    raise NoOtherGraph(Cause.TORCH_MODEL, text, call.key) from None
                part += 1

    def _fills(self, call: Call, reason: FillsCache) -> Waits:
        if not (reason.tables or reason.refused):
            call.tree.fill(reason.slots, reason.numbers, call.shapes[: call.count])
        call.tree.keep(reason.tables, reason.refused, call.shapes[: call.count])
        self.states.forget()
        self.log.info(str(reason))
        return waits_for(call, str(reason))

    def _compiled(self, call: Call, part: int, variant: Variant) -> CompiledGraph:
        """A new graph, of this variant. Raises NotInEngine, and CallsOwn."""
        self._looks_for_own = call.which == ASSIGNED
        self.known_waits.clear()
        try:
            with self.budget.capturing(variant):
                made = self.compiler.compile(call, part)
        finally:
            self._looks_for_own = False
        made.count_for(variant)
        self.known_waits.add_captured(call.given)
        self._make_room(made)
        return made

    def _make_room(self, latest: CompiledGraph) -> None:
        """Forgets the graph that was last used longest ago, where there are too many beside the ``latest``."""
        graphs = [(graph, found) for found in self.graphs.values() for graph in found if graph is not latest]
        if len(graphs) >= capture_budget.MOST_GRAPHS:
            oldest, among = min(graphs, key=lambda pair: pair[0].variant.used)
            among.remove(oldest)
            self.budget.drop(oldest.variant)

    def _run(self, graph: CompiledGraph, call: Call) -> Any:
        """The result of ``graph``; _NOTHING when one with more submodules left to PyTorch is to be made."""
        variant, start = graph.variant, capture_budget.clock()
        drawn = torch.get_rng_state() if graph.draws and graph.may_miss(call.shapes) else None
        try:
            result = self.observers.run(graph, call) if self.observers else graph(call)
        except DoesNotHold:
            variant.wasted += capture_budget.clock() - start
            graph.missed += 1
            if drawn is not None:  # the seed of a run that nothing came of
                torch.set_rng_state(drawn)
            raise
        except Raised as raised:
            if not isinstance(raised.error, Disagrees) or graph.changes():
                raise
            # All that it has changed is what hooks change.
            key = None if self._learn(graph, call, raised.error) else call.key
            raise NotInEngine(Cause.TORCH_MODEL, str(raised.error), key) from raised.error
        except NotInEngine as reason:
            if self._learn(graph, call, reason.__cause__):
                reason.key = None
            raise
        except ENGINE_ERRORS as error:
            if not graph.has_effects() and not isinstance(error, MemoryError):
                graph.check_after_error(call)
                if not graph.traced_on(call.shapes):
                    raise graph.refuses(call.shapes, str(error)) from error
                if self.compiler.leave_more(call, error, graph):
                    self.log.debug(str(error))
                    self.graphs[call.key].remove(graph.origin)
                    return _NOTHING
            raise NotInEngine(Cause.ONNX_MODEL, str(error), (call.key, call.shapes)) from error
        self.usage.engine += 1
        variant.runs += 1
        variant.seconds += capture_budget.clock() - start
        variant.used = start
        self.fallback.reason = None
        if graph.capture.trace.nodes and (breaks := breaks_of(graph.capture.trace.nodes, call.tree)):
            self._break(graph, breaks, call)
        if graph.executables.gpu is not None:
            self.refusals.listen()
        if self.latest is not graph:
            if self.saver is not None:
                self.saver.save(graph, call)
            first, self.latest = self.latest is None, graph
            if first:
                self.log.info(str(self.report(self)).removeprefix(f"{self.log.name}: "))
            if self.clusters is not None:
                self.clusters.tell(graph, call)
        return result

    def _learn(self, graph: CompiledGraph, call: Call, error: BaseException | None) -> bool:
        """Did ``graph`` fail for a submodule that returns what it is given in some calls? Another one is made, then, as
        soon as that may be; until then it runs the other calls."""
        if not isinstance(error, Disagrees) or not (paths := varying(graph.capture.trace.nodes, str(error))):
            return False
        for path in paths:
            call.tree.vary(path)
        if self.budget.may_capture_again():
            self._replace(graph, call)
        return True

    def _break(self, graph: CompiledGraph, breaks: dict[str, str], call: Call) -> None:
        """Another graph takes the place of ``graph``, which these submodules break."""
        if self.budget.may_capture_again() and self._replace(graph, call):
            call.tree.caches.parted |= breaks

    def _replace(self, graph: CompiledGraph, call: Call) -> bool:
        """Forgets ``graph``; the next such call is captured. False: it was forgotten before."""
        graphs = self.graphs.get(call.key, [])
        if graph.origin not in graphs:
            return False
        graphs.remove(graph.origin)
        self.budget.capture_again(graph.variant)
        return True


for _method in (Dispatcher.__call__, Dispatcher.call_assigned):
    torch_private.uncompiled(_method, "the engine runs an ORTModule: there is nothing to compile in it")


def _flattened(args: tuple, kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], pytree.Structure]:
    """``pytree.flatten((args, kwargs))``, in one step where all are plain.

    Raises NotInEngine for a value that a graph cannot take in.
    """
    tensors: list[torch.Tensor] = []
    tokens: list[Any] = []
    for value in (*args, *kwargs.values()):
        cls = type(value)
        if cls is torch.Tensor and value.layout is torch.strided and not (value.is_neg() or value.is_quantized):
            tensors.append(value)
            tokens.append(TENSOR)
        elif cls in CONSTANTS:
            tokens.append((cls, value))
        else:
            break
    else:
        key = (len(args), tuple(kwargs), tuple(tokens))
        structure = _structures.get(key) if len(tensors) == len(set(map(id, tensors))) else None
        if structure is not None:
            return tensors, structure
    count = len(tensors)
    try:
        tensors, structure = pytree.flatten((args, kwargs))
    except Unflattenable as error:
        raise NotInEngine(Cause.DATA, f"an argument holds {error}") from error
    if len(tokens) == len(args) + len(kwargs) and len(tensors) == count:
        if len(_structures) >= MOST_STRUCTURES:
            _structures.clear()
        _structures[len(args), tuple(kwargs), tuple(tokens)] = structure
    return tensors, structure
