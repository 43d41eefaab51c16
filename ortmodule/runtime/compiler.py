"""Makes graphs of a wrapped module: captures a call, checks the graph, leaves to PyTorch what cannot be captured."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ortmodule.capture import export_cache, scalar_guards, self_check
from ortmodule.capture.dynamic_dims import Capture, capture
from ortmodule.capture.loops.check import LoopCheck
from ortmodule.capture.numbers import data_numbers
from ortmodule.capture.partitioner import FAST_PATH, Partition, has_fast_path
from ortmodule.core import devices, rng_state
from ortmodule.core.config import Config
from ortmodule.core.errors import CaptureError, Cause, DoesNotHold, NoOtherGraph, NotInEngine, Unguardable
from ortmodule.core.logger import Log
from ortmodule.engine.autotune import Tuning
from ortmodule.engine.session import ENGINE_ERRORS, gpu_of, may_plan
from ortmodule.guards.guards import Guards
from ortmodule.guards.hook_effects import conflict
from ortmodule.guards.module_tree import Tree
from ortmodule.guards.sharding.sharded import has_refused, refuse_parts, waiting
from ortmodule.guards.writes.surroundings import reads_any
from ortmodule.host import escapes
from ortmodule.host.fallback import Fallback
from ortmodule.host.host_node import varying
from ortmodule.host.opaque_regions import Opaque
from ortmodule.lowering import export
from ortmodule.lowering.cuts.data_cuts import data_cuts
from ortmodule.runtime.broken_graph import BrokenGraph
from ortmodule.runtime.calls.capture_budget import Budget
from ortmodule.runtime.calls.held_arguments import reads_of
from ortmodule.runtime.calls.module_state import ModuleState, ModuleStates
from ortmodule.runtime.compiled_graph import Call, CompiledGraph
from ortmodule.runtime.executable import computed
from ortmodule.runtime.piece_graph import Interpreter
from ortmodule.runtime.tensors.shared_memory import overlap
from ortmodule.runtime.variants.lengths import Lengths

#: Submodules that are left to PyTorch for one reason, of which a user is told each.
MOST_TOLD = 8
#: A graph is cut where what runs twice otherwise, to find sizes, is at least such a share of a step.
LEAST_AHEAD = 0.05


class Owner(Protocol):
    """A wrapped module, as its compiler sees it (:class:`~ortmodule.runtime.dispatcher.Dispatcher`)."""

    module: nn.Module
    config: Config
    log: Log
    fallback: Fallback
    graphs: dict[tuple, list[CompiledGraph]]
    budget: Budget
    observers: Any
    tuning: Tuning | None
    states: ModuleStates
    interpret: Interpreter

    def state(self) -> ModuleState: ...
    def units(self, tree: Tree) -> dict[str, nn.Module]: ...
    def inside(self, path: str) -> contextlib.AbstractContextManager: ...


class Compiler:
    """Makes the graphs of one dispatcher."""

    def __init__(self, owner: Owner) -> None:
        self.owner, self.log = owner, owner.log
        self.exports = 0
        self.checks = True  # each graph beside the module; not where nothing is to run
        self.seconds = {"capture": 0.0, "read": 0.0, "check": 0.0}
        self.cache = export_cache.Cache(owner.config.cache_dir) if owner.config.cache_dir else None
        self._warned: set[str] = set()  # submodules that PyTorch runs

    def compile(self, call: Call, part: int) -> CompiledGraph:
        """A new graph for ``call``, first among those of its key. ``part``: how much of the batch it is traced on.

        Raises NotInEngine.
        """
        may_plan(gpu_of(call.inputs))
        grad = torch.is_grad_enabled()
        # Tensors of inference mode have no versions, which tell what forward changes.
        # What a trace saves is no matter of a checkpoint around the module.
        with torch.inference_mode(False), torch.set_grad_enabled(grad), saved_tensors_hooks(_packed, _unpacked):
            self._refuse_devices(call)
            variants = self.owner.graphs.setdefault(call.key, [])
            shown = self.log.shows_exporter
            with (
                self.log.building(3) as begins, export.exporter_logs(shown), export_cache.using(self.cache),
                rng_state.found(),
            ):  # fmt: skip
                return self._build(call, part, variants, begins)

    def leave_more(self, call: Call, error: Exception, graph: CompiledGraph) -> bool:
        """The engine refuses ``graph``: can another submodule be left to PyTorch, so that a new one is worth it?"""
        return _partition(call).grow(error, graph.capture)

    def leave_deciding(self, call: Call, reason: DoesNotHold) -> bool:
        """A graph of the whole call holds for none like it. Can the submodule that decides be left to PyTorch?"""
        error = CaptureError(f"what it does depends on values: {reason}")
        error.submodule = reason.submodule
        return _partition(call).grow(error)

    def _refuse_devices(self, call: Call) -> None:
        refused = call.tree.unsupported_tensor()
        if refused is None:
            named = [(slot.name, slot.get()) for slot in call.tree.slots.values()]
            refused = devices.refusal(named + [(f"input {i}", t) for i, t in enumerate(call.inputs)])
        if refused is not None:
            raise NotInEngine(Cause.DEVICE, refused, call.key)

    def _build(
        self, call: Call, part: int, variants: list[CompiledGraph], begins: Callable[[str], None]
    ) -> CompiledGraph:
        """A checked graph, first among ``variants``. ``begins`` is called with the name of every phase."""
        *before, _ = call.tree.key()
        graph, wrong = self._checked(call, part, begins)
        if wrong:
            # Some modules leave something out when they are traced: the second trace hides that there is one.
            with scalar_guards.hidden_tracing(), contextlib.suppress(NotInEngine):
                graph, still = self._checked(call, part, begins)
                wrong = wrong if still else ""
        if wrong and graph.capture.converts:
            # What Python does with numbers that are traced may hang on their types: all of them are compared.
            with data_numbers.compared(), contextlib.suppress(NotInEngine):
                graph, wrong = self._checked(call, part, begins)
        if wrong and _partition(call).leave_fast_paths():
            graph, wrong = self._checked(call, part, begins)
        if wrong:
            text = f"its graph does not compute what the module does: {wrong}"
            if has_fast_path(self.owner.module):
                text = FAST_PATH
            raise NotInEngine(Cause.ONNX_MODEL, text, call.key)
        self._left({path: why for path, why in _partition(call).modules().items() if path not in call.tree.sharded})
        captured = graph.capture
        for line in captured.trace.prints:
            self.log.warn_once(f"forward prints, or writes to a file ({line}): it does not where the engine runs it")
        captured.trace.tensors, captured.trace.outputs, captured.sample = [], [], []  # nothing needs them any more
        state = self.owner.state()
        if state.tree is call.tree and state.key != call.state.key and before == list(state.tree.key()[:-1]):
            call.move(state)  # forward puts hooks on submodules, and capturing it has done that now
            variants = self.owner.graphs.setdefault(call.key, [])
        graph.failed = functools.partial(self._failed_backward, call.key)
        self.exports += 1
        variants.insert(0, graph)
        return graph

    def _config(self) -> Config:
        config = self.owner.config
        # Observers watch one node of autograd's.
        return replace(config, enable_mem_efficient_grad_mgmt="0") if self.owner.observers else config

    def _checked(self, call: Call, part: int, begins: Callable[[str], None]) -> tuple[CompiledGraph, str]:
        """A graph, and what is wrong with it."""
        while True:
            begins("capture")
            partition = _partition(call)
            try:
                captured, guards = self._capture_and_guards(call, partition, part)
            except NoOtherGraph:
                if not _without_parts(call.tree):
                    raise
                continue
            start = time.perf_counter()
            begins("read")
            try:
                graph = self._read(guards, captured, call)
                self.seconds["read"] += time.perf_counter() - start
                start = time.perf_counter()
                begins("check")
                wrong = ""
                if self.checks:
                    wrong = self_check.difference(captured, call.forward, call.arguments, call.tree, self.owner.tuning)
                self.seconds["check"] += time.perf_counter() - start
                if any([call.tree.vary(path) for path in varying(captured.trace.nodes, wrong)]):
                    self.owner.budget.go_on(wrong)
                    continue
                if captured.loop is not None:
                    checks = LoopCheck(captured, call.forward, call.arguments, call.tree)
                    uncut = not _places_to_cut(captured, call)  # for all lengths: a graph of one has thousands of nodes
                    graph.lengths = Lengths(graph, checks, functools.partial(self._read, guards, uncut=uncut))
                else:
                    graph.plan_first(call.shapes)
                return graph, wrong
            except NoOtherGraph:
                if _without_parts(call.tree):
                    continue
                if not captured.trace.used_on:
                    raise
                call.tree.caches.cuts = False  # the submodules that use what they put there are left to PyTorch
            except ENGINE_ERRORS as error:
                if not partition.grow(error, captured):
                    raise NoOtherGraph(Cause.ONNX_MODEL, str(error), call.key) from error
                self.owner.budget.go_on(str(error))

    def _read(self, guards: Guards, captured: Capture, call: Call, uncut: bool = False) -> CompiledGraph:
        given = captured, call.tree, guards, call.inputs, self._config(), self.owner.tuning
        if not captured.trace.used_on and not any(node.breaks for node in captured.trace.nodes):
            graph = CompiledGraph(*given)
            if uncut or not (cuts := _cuts(graph, call)):
                return graph
            with contextlib.suppress(CaptureError, *ENGINE_ERRORS):
                return BrokenGraph(*given, self.owner.interpret, cuts)
            return graph
        try:
            return BrokenGraph(*given, self.owner.interpret)
        except CaptureError as error:
            raise NoOtherGraph(Cause.TORCH_MODEL, str(error), call.key) from error

    def _capture_and_guards(self, call: Call, partition: Partition, part: int) -> tuple[Capture, Guards]:
        hooked = [path for path in call.state.hooked if path not in call.tree.sharded]
        try:
            captured = self._capture_partitioned(call, partition, part)
            _check_memory(captured, call.tree)
            if (text := conflict(call.tree, hooked, captured.trace.attributes)) is not None:
                raise CaptureError(text)
            trace = captured.trace
            reads = partition.switches() | reads_of(call.arguments, call.tree) | trace.attributes
            guards = Guards(
                call.tree.attributes, reads, call.tree.described_names(), trace.outside, trace.fields, sets=trace.sets
            )
            _check_breaks(captured, guards, call.tree)
        except (CaptureError, Unguardable) as error:
            # A trace calls no hooks, which forward may count on.
            text = conflict(call.tree, hooked, call.tree.caches.reads)
            cause = error.cause if isinstance(error, CaptureError) and not text else Cause.TORCH_MODEL
            refusal = NoOtherGraph(cause, text or str(error), call.key)
            refusal.guards = _guards_of_failure(call)
            raise refusal from error
        finally:
            self.owner.states.forget()
            call.tree.caches.holders.forget()
        self.seconds["capture"] += captured.seconds
        return captured, guards

    def _capture_partitioned(self, call: Call, partition: Partition, part: int) -> Capture:
        """The module, captured with as much of it left to PyTorch as it takes. Raises CaptureError."""
        owner = self.owner
        while True:
            modules = partition.modules()
            for path, reason in ((p, why) for p, why in modules.items() if p not in call.tree.sharded):
                owner.fallback.allow(NotInEngine(Cause.TORCH_MODEL, f"{path}: {reason}"))
            hooked = call.tree.hooks.keeping(call.state.hooked)
            wrapped = {path: waiting(m) for path, m in call.tree.sharded.items()} | owner.units(call.tree)
            caches, functions = call.tree.caches, owner.config.enable_custom_autograd
            parted = {path: (why, functools.partial(owner.inside, path)) for path, why in caches.parted.items()}
            opaque = Opaque(modules, caches.kinds, functions, hooked, wrapped, caches.cuts, parted, caches.varying)
            try:
                return capture(
                    call.forward,
                    owner.module,
                    call.tree,
                    call.arguments,
                    call.inputs,
                    owner.config.onnx_opset_version,
                    opaque,
                    part,
                )
            except CaptureError as error:
                parallel = call.tree.parallel.values()
                if has_refused(parallel) or not partition.grow(error):
                    if not parallel:
                        raise
                    refuse_parts(parallel)  # the next call finds them beside the graph
                    text = f"{error}; from now on PyTorch runs layers of tensor parallelism between parts of the graph"
                    raise NotInEngine(Cause.TORCH_MODEL, text) from error
                owner.budget.go_on(str(error))

    def _left(self, modules: dict[str, str]) -> None:
        """PyTorch runs these submodules, or methods, inside the graph."""
        counts: Counter[str] = Counter()
        for path, reason in modules.items():
            if path not in self._warned and not any(text in reason for text in self.owner.fallback.silent):
                self._warned.add(path)
                counts[reason] += 1
                if counts[reason] <= MOST_TOLD:
                    what = f"the method {path.replace(':', '.')}" if ":" in path else f"the submodule {path}"
                    self.log.warn_once(f"PyTorch runs {what} inside the graph: {reason}")
        for reason, count in counts.items():
            if count > MOST_TOLD:
                self.log.warn_once(f"PyTorch runs {count - MOST_TOLD} more submodules inside the graph: {reason}")

    def _failed_backward(self, key: object, error: Exception) -> None:
        """PyTorch takes over such calls from their backward on. Raises ``error`` when it must not."""
        reason = NotInEngine(Cause.ONNX_MODEL, str(error), key)
        reason.__cause__ = error
        self.owner.fallback.allow(reason)
        self.owner.fallback.done(reason)


def _cuts(graph: CompiledGraph, call: Call) -> frozenset[str]:
    """The values to cut a graph at, where what data decides its sizes from would take a good part of a step, twice."""
    trace, session = graph.capture.trace, graph.session
    if trace.nodes or (trace.data_reads and graph.writes) or graph.capture.loop is not None or session.memory.budget:
        return frozenset()
    if graph.executables.gpu is not None:  # there row counts are guessed
        return frozenset()
    cuts = _places_to_cut(graph.capture, call)
    if not cuts:
        return frozenset()
    try:
        plan = graph.sketch(call.shapes, lambda: call.inputs)
    except (DoesNotHold, NotInEngine, *ENGINE_ERRORS):
        return frozenset()
    return frozenset(cuts) if graph.executables.ahead > LEAST_AHEAD * computed(plan) else frozenset()


def _places_to_cut(captured: Capture, call: Call) -> list[str]:
    return data_cuts(captured.model, [i for i, t in enumerate(call.inputs) if not t.is_floating_point()])


def _without_parts(tree: Tree) -> bool:
    """No more submodules are breaks for what their runs have shown. False: none was."""
    caches = tree.caches
    parted, caches.whole, caches.parted = caches.parted, caches.whole | caches.parted.keys(), {}
    caches.unsized = frozenset()
    return bool(parted)


def _guards_of_failure(call: Call) -> Guards | None:
    """The guards that have to break before another attempt; None: no more attempts are made."""
    tree = call.tree
    try:
        return Guards(tree.attributes, tree.caches.reads, tree.described_names(), exact=True)
    except Unguardable:
        return None


def _partition(call: Call) -> Partition:
    return Partition(call.tree, call.state.key, call.state.hooked)


def _check_memory(captured: Capture, tree: Tree) -> None:
    """Refuses a tensor that forward changes and that shares memory: a graph would not change the other tensors."""
    tree.refresh()
    for write in captured.trace.writes:
        if write.target.kind == "state" and not write.replaces:
            written = tree.slots[write.target.key]
            for slot in tree.slots.values():
                if slot is not written and overlap(slot.get(), written.get()):
                    raise CaptureError(f"forward changes {written.name}, which shares memory with {slot.name}")


def _check_breaks(captured: Capture, guards: Guards, tree: Tree) -> None:
    """Refuses breaks that change what the rest of forward reads, and those whose changes cannot be undone."""
    trace = captured.trace
    paths = list(dict.fromkeys(node.name for node in trace.nodes if node.breaks))
    if not paths:
        return
    breaks = ", ".join(paths)
    inside = {id(m) for path in paths for m in tree.modules[path].modules()}
    if (name := reads_any([m for m in tree.modules.values() if id(m) not in inside], trace.altered)) is not None:
        raise CaptureError(f"forward reads {name}, which {breaks} changes")
    if (key := guards.reading(trace.altered)) is not None:
        raise CaptureError(f"{guards.places[key]} reads {guards.label(key)}, which {breaks} changes")
    if any(escapes.still_kept(each()) for each in trace.escaped):
        raise CaptureError(f"something keeps a tensor of {breaks} where capture cannot find it")
    trace.altered, trace.escaped = [], []


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()  # a tensor would hold the node that holds it


def _unpacked(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
