"""Makes graphs of a wrapped module: captures a call, checks the graph, leaves to PyTorch what cannot be captured."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ortmodule.capture import export_cache, scalar_guards, self_check
from ortmodule.capture.dynamic_dims import Capture, capture
from ortmodule.capture.partitioner import Partition
from ortmodule.core import devices, rng_state
from ortmodule.core.config import Config
from ortmodule.core.errors import CaptureError, Cause, DoesNotHold, NoOtherGraph, NotInEngine, Unguardable
from ortmodule.core.logger import Log
from ortmodule.engine.autotune import Tuning
from ortmodule.engine.session import ENGINE_ERRORS, gpu_of, may_plan
from ortmodule.guards.guards import Guards
from ortmodule.guards.hook_effects import conflict
from ortmodule.guards.hook_escapes import escape
from ortmodule.guards.module_tree import Tree
from ortmodule.host.fallback import Fallback
from ortmodule.host.opaque_regions import Opaque
from ortmodule.lowering import export
from ortmodule.runtime.changing_numbers import Changing
from ortmodule.runtime.compiled_graph import Call, CompiledGraph, overlap
from ortmodule.runtime.module_state import ModuleState, ModuleStates

#: Graphs for one key that differ in what Python decided, before PyTorch takes over.
MOST_VARIANTS = 12
#: Graphs for calls that differ in the values of Python numbers.
MOST_VALUES = 8
#: Attempts to capture a call in spite of failures, when attributes that forward reads have changed.
MOST_FAILURES = 3


class Owner(Protocol):
    """A wrapped module, as its compiler sees it (:class:`~ortmodule.runtime.dispatcher.Dispatcher`)."""

    module: nn.Module
    config: Config
    log: Log
    fallback: Fallback
    graphs: dict[tuple, list[CompiledGraph]]
    observers: Any
    tuning: Tuning | None
    states: ModuleStates

    def forward(self, *args: Any, **kwargs: Any) -> Any: ...
    def state(self) -> ModuleState: ...


class Compiler:
    """Makes the graphs of one dispatcher."""

    def __init__(self, owner: Owner) -> None:
        self.owner, self.log = owner, owner.log
        self.exports = 0
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
            self._count_values(call)
            variants = self.owner.graphs.setdefault(call.key, [])
            self._count_variants(call, variants)
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

    def _count_values(self, call: Call) -> None:
        """Counts values of Python numbers: one that changes at every call would be captured at every call."""
        numbers = call.arguments.numbers()
        if not numbers or call.key in self.owner.graphs:
            return
        kind = call.arguments.without_numbers(), call.key[1:]
        changing = call.tree.caches.changing.setdefault(kind, Changing(numbers))
        changing.captured += 1
        if changing.captured > MOST_VALUES:
            reason = f"the numbers among its arguments took more than {MOST_VALUES} values: pass them as tensors"
            raise NotInEngine(Cause.DATA, reason, call.key)

    def _count_variants(self, call: Call, variants: list[CompiledGraph]) -> None:
        if len(variants) == MOST_VARIANTS:
            reason = f"it went {MOST_VARIANTS} different ways through its Python code"
            if (name := variants[0].guards.broken_name()) is not None:
                reason = f"the attribute {name} took more than {MOST_VARIANTS} values"
            raise NoOtherGraph(Cause.TORCH_MODEL, reason, call.key)

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
        if wrong:
            text = f"its graph does not compute what the module does: {wrong}"
            raise NotInEngine(Cause.ONNX_MODEL, text, call.key)
        captured = graph.capture
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
            captured, guards = self._capture_and_guards(call, partition, part)
            start = time.perf_counter()
            begins("read")
            try:
                graph = CompiledGraph(captured, call.tree, guards, call.inputs, self._config(), self.owner.tuning)
                self.seconds["read"] += time.perf_counter() - start
                start = time.perf_counter()
                begins("check")
                wrong = self_check.difference(captured, self.owner.forward, call.arguments, call.tree)
                self.seconds["check"] += time.perf_counter() - start
                graph.plan_first(call.shapes)
                return graph, wrong
            except ENGINE_ERRORS as error:
                if not partition.grow(error, captured):
                    raise NoOtherGraph(Cause.ONNX_MODEL, str(error), call.key) from error

    def _capture_and_guards(self, call: Call, partition: Partition, part: int) -> tuple[Capture, Guards]:
        try:
            if torch.is_grad_enabled() and (text := escape(call.tree, call.state.hooked)) is not None:
                raise CaptureError(text)
            captured = self._capture_partitioned(call, partition, part)
            _check_memory(captured, call.tree)
            if (text := conflict(call.tree, call.state.hooked, captured.trace.attributes)) is not None:
                raise CaptureError(text)
            trace = captured.trace
            guards = Guards(call.tree.attributes, trace.attributes, call.tree.names(), trace.outside)
        except (CaptureError, Unguardable) as error:
            refusal = NoOtherGraph(Cause.TORCH_MODEL, str(error), call.key)
            refusal.guards = self._guards_of_failure(call)
            raise refusal from error
        finally:
            self.owner.states.forget()
        self.seconds["capture"] += captured.seconds
        return captured, guards

    def _capture_partitioned(self, call: Call, partition: Partition, part: int) -> Capture:
        """The module, captured with as much of it left to PyTorch as it takes. Raises CaptureError."""
        owner = self.owner
        while True:
            modules = partition.modules()
            for path, reason in modules.items():
                owner.fallback.allow(NotInEngine(Cause.TORCH_MODEL, f"{path}: {reason}"))
            opaque = Opaque(modules, call.tree.caches.kinds, owner.config.enable_custom_autograd)
            try:
                captured = capture(
                    owner.forward,
                    owner.module,
                    call.tree,
                    call.arguments,
                    call.inputs,
                    owner.config.onnx_opset_version,
                    opaque,
                    part,
                )
                for path, reason in modules.items():
                    self._left(path, reason)
                return captured
            except CaptureError as error:
                if not partition.grow(error):
                    raise

    def _left(self, path: str, reason: str) -> None:
        """PyTorch runs a submodule, or a method, inside the graph."""
        if path not in self._warned and not any(text in reason for text in self.owner.fallback.silent):
            self._warned.add(path)
            what = f"the method {path.replace(':', '.')}" if ":" in path else f"the submodule {path}"
            self.log.warn_once(f"PyTorch runs {what} inside the graph: {reason}")

    def _failed_backward(self, key: object, error: Exception) -> None:
        """PyTorch takes over such calls from their backward on. Raises ``error`` when it must not."""
        reason = NotInEngine(Cause.ONNX_MODEL, str(error), key)
        reason.__cause__ = error
        self.owner.fallback.allow(reason)
        self.owner.fallback.done(reason)

    def _guards_of_failure(self, call: Call) -> Guards | None:
        """The guards that have to break before another attempt; None: no more attempts are made."""
        tree, failures = call.tree, call.tree.caches.failures
        failures[call.key] = failures.get(call.key, 0) + 1
        if failures[call.key] > MOST_FAILURES:
            return None
        try:
            return Guards(tree.attributes, tree.caches.reads, tree.names())
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


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()  # a tensor would hold the node that holds it


def _unpacked(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
