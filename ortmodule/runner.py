"""Everything behind one wrapped module: its captured graphs, and the choice of what runs a call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from ortmodule import _core, check, io
from ortmodule.capture import ROWS, SMALL, WHOLE, CaptureError, capture
from ortmodule.explain import explain
from ortmodule.fallback import Cause, Fallback, NotInEngine, engine_allowed
from ortmodule.function import DoesNotHold, Graph, shapes
from ortmodule.logger import Log
from ortmodule.options import DebugOptions, Options
from ortmodule.state import Tree

#: Graphs for one key that differ in what Python decided, before PyTorch takes over.
MOST_VARIANTS = 8
#: Graphs for calls that differ in the values of Python numbers.
MOST_VALUES = 8

# What plans and kernels raise; the shape and type errors of bad input are ValueError and TypeError.
_ENGINE_ERRORS = (_core.Error, ValueError, TypeError)
_NOTHING = object()
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")


class Runner:
    """Runs ``module`` in the engine where it can, in PyTorch where it cannot."""

    def __init__(self, module: nn.Module, debug: DebugOptions | None) -> None:
        self.module, self.options = module, Options.read(debug)
        self.log = Log(type(module).__name__, self.options.log_level)
        self.fallback = Fallback(self.options.fallback, self.log)
        self.graphs: dict[tuple, list[Graph]] = {}
        self.values: dict[tuple, int] = {}  # captures of calls that differ in the values of numbers only
        self.patched: Callable | None = None  # what someone put in place of the wrapper's forward
        self.exports = 0
        self.seconds = {"capture": 0.0, "read": 0.0, "check": 0.0}
        self.latest: Graph | None = None
        self._tree: Tree | None = None
        self._lock = threading.RLock()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, in PyTorch."""
        return self.module.forward(*args, **kwargs)

    def __call__(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        if not engine_allowed():
            return self.forward(*args, **kwargs)
        try:
            return self._in_engine(args, kwargs)
        except NotInEngine as error:
            reason = error
        self.fallback.allow(reason)
        # An error of the caller's is PyTorch's to report, and no reason to give up on such calls.
        result = self.forward(*args, **kwargs)
        self.fallback.done(reason)
        return result

    def _in_engine(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        ordered = kwargs if len(kwargs) < 2 else dict(sorted(kwargs.items()))
        try:
            inputs, arguments = io.flatten((args, ordered))
        except io.Unflattenable as error:
            raise NotInEngine(Cause.DATA, f"an argument holds {error}") from error
        if any([t.numel() == 0 for t in inputs]):
            raise NotInEngine(Cause.DATA, "an input is empty")
        tree = self._current_tree()
        call = _Call(tree, arguments, inputs, lambda: self.forward(*args, **kwargs))
        self.fallback.check(call.key, (call.key, shapes(inputs)))
        result, part = self._known(call)
        if result is _NOTHING:
            with self._lock:
                result, now = self._known(call)  # another thread may have captured it
                if result is _NOTHING:
                    result = self._captured(call, max(part, now))
        return result

    def _known(self, call: _Call) -> tuple[Any, int]:
        """The result of a graph that holds for ``call``, or _NOTHING; how much of the batch to capture it on."""
        part = SMALL
        for graph in tuple(self.graphs.get(call.key, ())):
            if graph.fits(call.inputs):
                part = ROWS  # a graph that was traced on less did not hold
                try:
                    return self._run(graph, call), part
                except DoesNotHold as reason:
                    self.log.debug(str(reason))
        return _NOTHING, part

    def _captured(self, call: _Call, part: int) -> Any:
        grad = torch.is_grad_enabled()
        while True:
            # Tensors of inference mode have no versions, which tell what forward changes.
            with torch.inference_mode(False), torch.set_grad_enabled(grad):
                graph = self._capture(call, part)
            try:
                return self._run(graph, call)
            except DoesNotHold as reason:
                self.log.debug(str(reason))
                if part == WHOLE:
                    text = f"what it does depends on values: {reason}"
                    raise NotInEngine(Cause.TORCH_MODEL, text, call.key) from None
                part += 1

    def _current_tree(self) -> Tree:
        tree = self._tree
        if tree is None or not tree.is_current():
            with self._lock:
                self._tree = tree = Tree(self.module)
                # Graphs take their tensors from places that may be gone.
                self.graphs, self.values, self.fallback.refused = {}, {}, {}
        hooked = "every module" if any(getattr(nn_module, name) for name in _GLOBAL_HOOKS) else tree.hooked()
        if hooked is not None:
            raise NotInEngine(Cause.TORCH_MODEL, f"there are hooks on {hooked}, which a graph would not call")
        return tree

    def _capture(self, call: _Call, part: int) -> Graph:
        foreign = call.tree.foreign()
        for i, tensor in enumerate(call.inputs):
            if tensor.device.type != "cpu":
                foreign = f"input {i} is on {tensor.device}"
        if foreign is not None:
            raise NotInEngine(Cause.DEVICE, foreign, call.key)
        self._count_values(call)
        variants = self.graphs.setdefault(call.key, [])
        if len(variants) == MOST_VARIANTS:
            reason = f"it went {MOST_VARIANTS} different ways through its Python code"
            raise NotInEngine(Cause.TORCH_MODEL, reason, call.key)
        try:
            captured = capture(
                self.forward, self.module, call.tree, call.arguments, call.inputs, self.options.opset, part
            )
        except CaptureError as error:
            raise NotInEngine(Cause.TORCH_MODEL, str(error), call.key) from error
        self.seconds["capture"] += captured.seconds
        start = time.perf_counter()
        try:
            graph = Graph(captured, call.tree, call.inputs)
            self.seconds["read"] += time.perf_counter() - start
            start = time.perf_counter()
            wrong = check.difference(captured, self.forward, call.arguments, call.tree)
            self.seconds["check"] += time.perf_counter() - start
        except _ENGINE_ERRORS as error:
            raise NotInEngine(Cause.ONNX_MODEL, str(error), call.key) from error
        if wrong:
            text = f"its graph does not compute what the module does: {wrong}"
            raise NotInEngine(Cause.ONNX_MODEL, text, call.key)
        captured.trace.tensors = captured.trace.outputs = None
        self.exports += 1
        variants.insert(0, graph)
        return graph

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
            result = graph(call.inputs, call.eager)
        except _ENGINE_ERRORS as error:
            raise NotInEngine(Cause.ONNX_MODEL, str(error), (call.key, shapes(call.inputs))) from error
        self.fallback.reason = None
        if self.latest is None:
            self.latest = graph
            self.log.info(str(explain(self)))
        self.latest = graph
        return result


class _Call:
    """One call: its tensors, what they stand in, and what a captured graph holds for, the inputs' sizes aside."""

    __slots__ = ("tree", "arguments", "inputs", "eager", "key")

    def __init__(
        self, tree: Tree, arguments: io.Structure, inputs: list[torch.Tensor], eager: Callable[[], Any]
    ) -> None:
        self.tree, self.arguments, self.inputs, self.eager = tree, arguments, inputs, eager
        self.key = (
            arguments,
            tuple([(t.dtype, t.dim(), t.requires_grad, t.device) for t in inputs]),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
            torch.get_default_dtype(),
            tree.key(),
        )
