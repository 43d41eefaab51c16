"""Runs a captured graph as a function of tensors that autograd knows.

:class:`CompiledGraph` feeds the engine from the caller's tensors and the module's, and puts its outputs where Python
expects them. Parameters are inputs of the autograd node, so hooks on them, `torch.autograd.grad` and
`backward(inputs=...)` work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx
import torch

from ortmodule import _core
from ortmodule.capture.dynamic_dims import Capture
from ortmodule.capture.trace import Source
from ortmodule.core import devices, pytree
from ortmodule.core.config import Config
from ortmodule.core.dtypes import DTYPES, as_pairs
from ortmodule.core.errors import Cause, DoesNotHold, NotInEngine, NotKnown
from ortmodule.core.names import INPUT, STATE
from ortmodule.core.onnx_utils import RANDOM, without_dead
from ortmodule.core.torch_private import saving_hooks
from ortmodule.engine.autotune import Tuning
from ortmodule.engine.session import MemoryGoal, Run, Session, is_captured, overwrite
from ortmodule.guards.guards import Guards
from ortmodule.guards.inventory import Slot
from ortmodule.guards.module_tree import Tree
from ortmodule.host.host_node import DryCalls, Node
from ortmodule.runtime.autograd_bridge import Pending, attach
from ortmodule.runtime.executable import Executable, Executables, Flags, draw_seed
from ortmodule.runtime.grad_buckets import HookDetector, chain
from ortmodule.runtime.lazy_logits import Deferral, deferral_of
from ortmodule.runtime.module_state import ModuleState
from ortmodule.runtime.recompute import ModuleModes
from ortmodule.runtime.segments import Segment, segments_of

MOST_SHAPES = 4096  # of which is remembered whether a graph holds for them
#: The structure of a result that is one tensor, with nothing that forward puts into attributes.
_ONE_TENSOR = pytree.flatten((torch.empty(0), []), results=True)[1]


class Call:
    """One call: its tensors, what they stand in, and what a captured graph holds for, the inputs' sizes aside."""

    __slots__ = ("forward", "state", "tree", "arguments", "inputs", "shapes", "key")

    def __init__(
        self, forward: Callable, state: ModuleState, arguments: pytree.Structure, inputs: list[torch.Tensor]
    ) -> None:
        """``forward``: the module's own. Raises NotInEngine for an empty input."""
        self.forward, self.state, self.tree = forward, state, state.tree
        self.arguments, self.inputs = arguments, inputs
        kinds, shapes = [], []
        for tensor in inputs:
            shape = tensor.shape
            if 0 in shape:
                raise NotInEngine(Cause.DATA, "an input is empty")
            kinds.append((tensor.dtype, len(shape), tensor.requires_grad, tensor.device))
            shapes.append(shape)
        self.shapes = tuple(shapes)
        self.key = (
            arguments.identity,
            tuple(kinds),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
            torch.get_default_dtype(),
            torch.get_deterministic_debug_mode(),
            state.key,
            state.hooked,
        )

    def eager(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The same call in PyTorch, on other tensors."""
        args, kwargs = self.arguments.rebuild(tensors)
        return self.forward(*args, **kwargs)

    def move(self, state: ModuleState) -> None:
        """The module has another state now, which gives the call another key."""
        self.state, self.key = state, (*self.key[:-2], state.key, state.hooked)


class CompiledGraph:
    """A captured graph that runs in the engine.

    It holds for one kind of call: structure of the arguments, types, ranks and needs for gradients of all tensors, and
    grad mode are always those of ``inputs`` and of the module at the time of making; shapes of the inputs may differ.
    Raises what Session raises.
    """

    def __init__(
        self,
        capture: Capture,
        tree: Tree,
        guards: Guards,
        inputs: Sequence[torch.Tensor],
        config: Config,
        tuning: Tuning | None = None,
    ) -> None:
        self.capture, self.tree, self.guards, trace = capture, tree, guards, capture.trace
        self.modes = ModuleModes(tree)
        self.successes = self.failures = 0  # of runs where PyTorch would have run the call else
        off, unseen = config.passes_off, config.padding_unseen
        model = capture.model.SerializeToString()
        memory = MemoryGoal(config.memory_opt_level, config.memory_budget)
        self.session = Session(model, off, trace.nodes, unseen, config.enable_cuda_graphs, tuning, memory)
        self.feeds: list[int | Slot] = [_feed(name, tree) for name in self.session.inputs]
        #: Where the tensors of a run are: (number of the caller's input, None, None), or (-1, dictionary, key).
        self._places = [(f, None, None) if isinstance(f, int) else (-1, f.holder, f.key) for f in self.feeds]
        given = [inputs[i] if holder is None else holder[key] for i, holder, key in self._places]
        #: Places of complex tensors, which the engine gets as pairs.
        self.pairs = frozenset(i for i, t in enumerate(given) if t.is_complex())
        tensors = [as_pairs(t) for t in given]
        self.needs = tuple([torch.is_grad_enabled() and t.requires_grad for t in tensors])
        self.leaves = [i for i, need in enumerate(self.needs) if need]
        self.empty = [i for i in self.leaves if not tensors[i].numel()]
        self.differentiable = [i for i, flag in enumerate(trace.requires_grad) if flag and self.leaves]
        self.n_results = len(trace.requires_grad)
        self.writes = [(_target(write.target, tree), write) for write in trace.writes]
        self._written = [target for target, write in self.writes if not write.replaces]
        self.views = {i: (Source(*view.base), view) for i, view in capture.views.items()}
        sources = [*trace.sources, *(base for base, _ in self.views.values())]
        self._states = {s.key: tree.slots[s.key] for s in sources if s.kind == "state"}
        one = trace.result == _ONE_TENSOR and trace.sources[0].kind == "graph" and not self.views
        self._only_output = trace.sources[0].key if one else None
        self._hand_over = config.enable_mem_efficient_grad_mgmt
        varying = [(i, feed) for i, feed in enumerate(self.feeds) if isinstance(feed, int)]
        self.executables = Executables(
            self.session, tensors, self.needs, varying, self.pairs, self._segments, self._check_views
        )
        self.plans = self.executables.plans
        self.is_random = any(node.op_type in RANDOM for node in capture.model.graph.node)
        self._reads = _Reads(self, trace)
        self._deferral = self._deferral_of(tensors, off, unseen, config.defer_logits)
        self.executables.defer(self._deferral)
        self._hook_detector = HookDetector()
        self._seen: set[tuple] = set()  # shapes for which views have been compared
        self._traced = tuple([t.shape for t in trace.tensors])
        #: Called with an error in backward; returns when PyTorch may compute the gradients.
        self.failed: Callable[[Exception], None] = _raise
        self.prediction: Flags = self._first_prediction([t.dim() for t in trace.outputs])
        # A checkpoint runs forward again, and wants the same tensors saved whatever has happened between.
        self._all_grads: Flags = tuple([i in self.differentiable for i in range(len(self.session.outputs))])

    def _deferral_of(
        self, tensors: Sequence[torch.Tensor], without: frozenset[str], padding_unseen: bool, setting: str
    ) -> Deferral | None:
        trace, names = self.capture.trace, self.session.outputs
        ranks = [t.dim() for t in trace.outputs]
        losses = [i for i in self.differentiable if ranks[i] == 0]
        shared = {*self.views, *(base.key for base, _ in self.views.values() if base.kind == "graph")}
        if not losses or trace.nodes or trace.sets or padding_unseen or self.executables.gpu is not None:
            return None
        written = {name for name, feed in zip(self.session.inputs, self.feeds, strict=True)
                   if any(feed == target for target, _ in self.writes)}  # fmt: skip
        return deferral_of(
            self.capture.model,
            names,
            [i for i in self.differentiable if ranks[i] >= 2 and i not in shared],
            written,
            dict(zip(self.session.inputs, tensors, strict=True)),
            setting,
            lambda model: Session(model, without, tuning=self.session.tuning, memory=self.session.memory),
        )

    def sessions(self) -> list[Session]:
        return [self.session, *(self._deferral.sessions() if self._deferral is not None else [])]

    # --- before a run -------------------------------------------------------------------------------------------------

    def fits(self, inputs: Sequence[torch.Tensor], shapes: tuple, epoch: int) -> bool:
        """Are sizes, attributes and hooks that the graph depends on as it needs them? (It may still turn out not to
        hold.) ``epoch``: as in :meth:`Guards.hold`."""
        for (i, d), size in self.capture.pinned.items():
            if shapes[i][d] != size:
                return False
        if self._reads.known.get(shapes) is not None:
            return False
        guards = self.guards
        return guards.held if epoch == guards.epoch else guards.hold(epoch)

    def traced_on(self, shapes: tuple) -> bool:
        """Were the inputs of the trace as large as these?"""
        return shapes == self._traced

    def has_effects(self) -> bool:
        """May a part of a run have changed something?"""
        return any(node.kind != "aten" for node in self.capture.trace.nodes)

    def changes(self) -> bool:
        """Does a forward change tensors of the caller's or of the module?"""
        return bool(self.writes) or any(node.sets or node.changed for node in self.capture.trace.nodes)

    def refuses(self, shapes: tuple, reason: str) -> DoesNotHold:
        """It does not hold for inputs of these sizes: :meth:`fits` is false from now on."""
        self._reads.known[shapes] = found = DoesNotHold(f"a graph that was traced at other sizes: {reason}")
        return found

    def plan_first(self, shapes: tuple) -> None:
        """As :meth:`Executables.plan_first`."""
        self.executables.plan_first(shapes, self._predicted() if self.differentiable else None)

    def _first_prediction(self, ranks: Sequence[int]) -> Flags:
        """Losses receive gradients; without one every output does."""
        losses = [i for i in self.differentiable if ranks[i] == 0]
        # New contents of a buffer may reach the outputs of a second run: never make one.
        chosen = (
            self.differentiable if any(w.output is not None for _, w in self.writes) else losses or self.differentiable
        )
        return tuple([i in chosen for i in range(len(self.session.outputs))])

    def _predicted(self) -> Flags:
        """Which outputs will receive a gradient, probably."""
        return self.prediction if saving_hooks() is None else self._all_grads

    def _segments(self, plan: Any) -> list[Segment]:
        """The segments in which gradients may be handed over while backward goes on."""
        if self._hand_over == "0" or self.capture.trace.nodes or self.empty or not plan.differentiates:
            return []
        return segments_of(plan, self.leaves, each=self._hand_over == "1")

    def _check_bases(self, inputs: Sequence[torch.Tensor]) -> None:
        for base, view in self.views.values():
            if base.kind != "graph" and view.flat and not self._value(base, inputs, ()).is_contiguous():
                raise NotInEngine(Cause.DATA, "a result shares memory with a tensor that is not contiguous")

    def _check_views(self, plan: Any, shapes: tuple) -> None:
        for i, (base, view) in self.views.items():
            if base.kind == "graph":
                shape = plan.outputs[base.key][1]
            else:
                shape = shapes[base.key] if base.kind == "input" else self._states[base.key].get().shape
            if not view.fits(shape, plan.outputs[i][1]):
                raise NotInEngine(Cause.DATA, "a result is another part of a tensor than in the trace")

    # --- a run --------------------------------------------------------------------------------------------------------

    def __call__(self, call: Call) -> Any:
        """Runs forward and returns what the module would.

        Raises DoesNotHold, with nothing done; what a plan or the engine raises.
        """
        inputs, shapes = call.inputs, call.shapes
        tensors, fed = [], []
        for i, holder, key in self._places:
            tensor = inputs[i] if holder is None else holder[key]
            tensors.append(tensor)
            fed.append(tensor if tensor.is_contiguous() else tensor.contiguous())
        if self.pairs:
            tensors = [as_pairs(t) for t in tensors]
            fed = [t.contiguous() for t in tensors]
        if self._written:
            self._check_memory(inputs)
        if self.views:
            self._check_bases(inputs)
        grads = self._predicted() if self.differentiable else None
        generator, executables = None, self.executables
        executable = executables.plans.get(step := (shapes, grads, (), False))
        if executable is not None and executable.ready:
            executables.plans.move_to_end(step)
            run = Run(executable.plan, fed, draw_seed() if executable.random else 0, None)
        elif self.session.known is None:
            executable, run = executables.start(shapes, grads, fed)
        else:
            executable, run, generator = self._start_with_host(shapes, grads, fed)
        outputs = run.outputs
        if self._reads.data is not None or (self._reads.size is not None and shapes not in self._reads.known):
            self._reads.check(shapes, outputs)
        if self.views and shapes not in self._seen:
            self._compare_views(shapes, inputs, outputs)
        kept = fed
        if self.writes or run.writes:
            kept = self._write(run, inputs, fed)
        if grads is not None:
            pending = Pending(self, executable, run, call, tensors, kept, generator)
            if self._deferral is not None:
                pending.shown = self._shown(self._deferral, executable, run, fed)
            leaves = []
            for i in self.leaves:
                leaves.append(tensors[i])
            if executable.segments and self._hands_over(leaves):
                made = chain(pending, leaves)
            else:
                made = attach(pending, *leaves)
            for i, output in zip(self.differentiable, made, strict=True):
                outputs[i] = output
        for function, args in self.capture.trace.draws:
            function(*args)
        return outputs[self._only_output] if self._only_output is not None else self._result(inputs, outputs)

    def _hands_over(self, leaves: Sequence[torch.Tensor]) -> bool:
        return self._hand_over == "1" or (saving_hooks() is None and self._hook_detector.finds(leaves))

    def _start_with_host(
        self, shapes: tuple, grads: Flags | None, tensors: Sequence[torch.Tensor]
    ) -> tuple[Executable, Run, Any]:
        """With nodes that PyTorch runs; and the states of torch's generators before it."""
        calls, gpu = self.session.calls(), self.executables.gpu
        if self._reads.early is not None:
            self._reads.check_early(shapes, tensors)
        seed = draw_seed() if self.is_random else 0
        # torch's generators cannot be read while they are part of a CUDA graph.
        captured = gpu is not None and is_captured(gpu)
        generator = devices.generators() if grads is not None and not captured else None
        return *self.executables.run_with(shapes, grads, tensors, seed, calls), generator

    def _shown(
        self, deferral: Deferral, executable: Executable, run: Run, tensors: Sequence[torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """What the caller gets for logits that are, or may be, deferred."""
        index = deferral.index
        if executable.defers:
            feeds = dict(zip(self.session.inputs, tensors, strict=True))
            return {index: deferral.deferred(run.outputs[index], feeds)}
        return {index: deferral.watched(run.outputs[index])}

    def _compare_views(self, sizes: tuple, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Once for each shape: does a view show what the engine computed?"""
        for i, (base, view) in self.views.items():
            if (base.key if base.kind == "input" else self._states.get(base.key)) in self._written:
                continue
            made = view.make(self._value(base, inputs, outputs).detach(), outputs[i].shape)
            if not torch.equal(made.nan_to_num(), outputs[i].nan_to_num()):
                raise NotInEngine(Cause.DATA, "a result is another part of a tensor than in the trace")
        if len(self._seen) >= MOST_SHAPES:
            self._seen.clear()
        self._seen.add(sizes)

    def _check_memory(self, inputs: Sequence[torch.Tensor]) -> None:
        """Checks that no tensor that forward changes shares memory with an input."""
        for target in self._written:
            written = inputs[target] if isinstance(target, int) else target.get()
            for i, tensor in enumerate(inputs):
                if i != target and overlap(written, tensor):
                    reason = f"forward changes a tensor that shares memory with input {i}"
                    raise NotInEngine(Cause.DATA, reason)

    def _write(self, run: Run, inputs: Sequence, fed: list[torch.Tensor]) -> list[torch.Tensor]:
        """Writes the new contents to the tensors that forward changes, at once, as PyTorch does. Returns the graph's
        inputs as they were."""
        changes = [(self.feeds[i], tensor, False) for i, tensor in run.writes.items()]
        changes += [(t, run.outputs[w.output], w.replaces) for t, w in self.writes if w.output is not None]
        fed = list(fed)
        with torch.no_grad():
            written = [target for target, _, replaces in changes if not replaces]
            for i, feed in enumerate(self.feeds):  # backward goes on with the old contents
                if self.leaves and any(feed == target for target in written):
                    fed[i] = _copy(fed[i])
            for target, tensor, replaces in changes:
                if replaces and not isinstance(target, int):
                    target.set(tensor)
                else:
                    overwrite(inputs[target] if isinstance(target, int) else target.get(), tensor)
        return fed

    def _result(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> Any:
        outputs = list(outputs)
        for i, (base, view) in self.views.items():
            outputs[i] = view.make(self._value(base, inputs, outputs), outputs[i].shape)
        values = [self._value(source, inputs, outputs) for source in self.capture.trace.sources]
        result, sets = self.capture.trace.result.rebuild(values)
        for slot, value in zip(self.capture.trace.sets, sets, strict=True):
            slot.set(value)
        return result

    def _value(self, source: Source, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> Any:
        if source.kind == "graph":
            return outputs[source.key]
        if source.kind == "number":
            return outputs[source.key].tolist()
        return inputs[source.key] if source.kind == "input" else self._states[source.key].get()


class _Reads:
    """Compares the numbers that Python read from data and sizes in the trace with those of a run."""

    def __init__(self, graph: CompiledGraph, trace: Any) -> None:
        self._trace, self._session = trace, graph.session
        n_outputs = graph.n_results + sum(write.output is not None for write in trace.writes)
        #: The outputs that hold what was read; None: nothing was.
        self.size = n_outputs if trace.size_reads else None
        self.data = n_outputs + bool(trace.size_reads) if trace.data_reads else None
        self.known: dict[tuple, DoesNotHold | None] = {}  # shapes -> what is wrong with them
        self.early: Session | None = None  # what is read, alone, where effects must not come first
        if trace.nodes and (known := graph.session.known) is not None:
            self._tokens = sum(node.kind != "aten" for node in trace.nodes)  # outputs that stand for nodes
            known.plans.append(graph.plans)
            for seen in trace.seen:
                known.learn(*seen)
            if trace.size_reads or trace.data_reads:
                self.early = _only_outputs(graph.capture.model, n_outputs, self._tokens, trace.nodes)
                known.plans.append(self.early.plans)  # they rest on the same knowledge

    def check_early(self, shapes: tuple, tensors: Sequence[torch.Tensor]) -> None:
        """As :meth:`check`, before a node has effects."""
        early, known = self.early, self._session.known
        if early is None or known is None:
            return
        feeds = dict(zip(self._session.inputs, tensors, strict=True))
        given = [feeds[name] for name in early.inputs]
        try:
            outputs = early.run(given, [False] * len(given), calls=DryCalls(known)).outputs
        except NotKnown:
            return
        first = len(self._session.outputs) - self._tokens - len(outputs)
        self.check(shapes, outputs[:1] * first + outputs)  # those that come first are not looked at

    def check(self, shapes: tuple, outputs: Sequence[torch.Tensor]) -> None:
        """Raises DoesNotHold. Sizes are compared once for each shape, data every time."""
        if self.data is not None:
            _compare(self._trace.data_reads, outputs[self.data])
        if self.size is None or shapes in self.known:
            return
        if len(self.known) >= MOST_SHAPES:
            self.known.clear()
        try:
            _compare(self._trace.size_reads, outputs[self.size])
            self.known[shapes] = None
        except DoesNotHold as reason:
            self.known[shapes] = reason
            raise


def _only_outputs(model: onnx.ModelProto, first: int, tokens: int, nodes: Sequence[Node]) -> Session:
    """The outputs from ``first`` on, without the last ``tokens``, which stand for nodes that PyTorch runs."""
    part = onnx.ModelProto()
    part.CopyFrom(model)
    del part.graph.output[len(part.graph.output) - tokens :]
    del part.graph.output[:first]
    return Session(without_dead(part).SerializeToString(), nodes=nodes)


def _raise(error: Exception) -> None:
    raise error


def _target(target: Source, tree: Tree) -> int | Slot:
    return target.key if target.kind == "input" else tree.slots[target.key]


def _feed(name: str, tree: Tree) -> int | Slot:
    if name.startswith(INPUT):
        return int(name.removeprefix(INPUT))
    return tree.slots[name.removeprefix(STATE)]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cpu":
        return tensor.detach().clone()
    copied = _core.empty(torch.Tensor, DTYPES[tensor.dtype], tuple(tensor.shape))
    _core.copy(copied, tensor)
    return copied


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Do two strided tensors share memory?"""
    return _begin(a) < _end(b) and _begin(b) < _end(a)


def _begin(t: torch.Tensor) -> int:
    return t.data_ptr()


def _end(t: torch.Tensor) -> int:
    last = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr() + (last + 1) * t.element_size() if t.numel() else 0


def _compare(reads: Sequence, output: torch.Tensor) -> None:
    for read, value in zip(reads, output.tolist(), strict=True):
        if not read.is_value(value):
            raise DoesNotHold(f"{read.place} found {value:g}, and {read.value:g} when it was traced")
