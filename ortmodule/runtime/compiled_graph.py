"""A captured graph as a function of tensors that autograd knows (:mod:`ortmodule.runtime.autograd_bridge`).

:class:`Graph` feeds the engine from the caller's tensors and the module's, and puts its outputs where Python expects
them. Parameters are inputs of the autograd node, so hooks on them, `torch.autograd.grad` and `backward(inputs=...)`
work.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import onnx
import torch

from ortmodule import _core
from ortmodule.capture.dynamic_dims import Capture
from ortmodule.capture.trace import Source
from ortmodule.core import devices
from ortmodule.core.dtypes import as_pairs
from ortmodule.core.errors import Cause, DoesNotHold, NotInEngine, NotKnown
from ortmodule.core.names import INPUT, STATE
from ortmodule.core.onnx_utils import RANDOM, without_dead
from ortmodule.core.torch_private import has_saving_hooks
from ortmodule.engine.autotune import Tuning
from ortmodule.engine.row_count_predictor import Counts
from ortmodule.engine.session import (
    DTYPES,
    ENGINE_ERRORS,
    MOST_PLANS,
    Run,
    Session,
    gpu_of,
    is_captured,
    overwrite,
    run_planned,
)
from ortmodule.guards.guards import Guards
from ortmodule.guards.module_tree import Slot, Tree
from ortmodule.host.host_node import Calls, DryCalls, Node
from ortmodule.runtime.autograd_bridge import Bridge, Call, Flags, Prepared
from ortmodule.runtime.grad_buckets import Segment, Watch, chain, segments_of
from ortmodule.runtime.lazy_logits import Deferral, deferral_of
from ortmodule.runtime.recompute import Modes

MOST_SHAPES = 4096  # of which is remembered whether a graph holds for them


class Graph:
    """A captured graph that runs in the engine.

    It holds for one kind of call: structure of the arguments, types, ranks and needs for gradients of all tensors, and
    grad mode are always those of ``inputs`` and of the module at the time of making; shapes of the inputs may differ.
    ``without``, ``padding_unseen``, ``graphs``, ``tuning``: as Session takes them. ``defer``, ``hand_over``:
    the settings DEFER_LOGITS and ENABLE_MEM_EFFICIENT_GRAD_MGMT. Raises what Session raises.
    """

    def __init__(
        self,
        capture: Capture,
        tree: Tree,
        guards: Guards,
        inputs: Sequence[torch.Tensor],
        without: Iterable[str] = (),
        padding_unseen: bool = False,
        defer: str = "0",
        graphs: bool = False,
        tuning: Tuning | None = None,
        hand_over: str = "0",
    ) -> None:
        self.capture, self.tree, self.guards, trace = capture, tree, guards, capture.trace
        self.modes = Modes(tree)
        model = capture.model.SerializeToString()
        self.session = Session(model, without, trace.nodes, padding_unseen, graphs, tuning)
        self.feeds: list[int | Slot] = [_feed(name, tree) for name in self.session.inputs]
        #: Places of complex tensors, which the engine gets as pairs.
        self.pairs = frozenset(i for i, t in enumerate(self._given(inputs)) if t.is_complex())
        tensors = self._tensors(inputs)
        self.needs = tuple(torch.is_grad_enabled() and t.requires_grad for t in tensors)
        self._gpu = gpu_of(tensors)
        self._specs = [(DTYPES.get(t.dtype, str(t.dtype)), tuple(t.shape)) for t in tensors]
        self._varying = [(i, feed) for i, feed in enumerate(self.feeds) if isinstance(feed, int)]
        self.leaves = [i for i, need in enumerate(self.needs) if need]
        self.empty = [i for i in self.leaves if not tensors[i].numel()]
        self.differentiable = [i for i, flag in enumerate(trace.requires_grad) if flag and self.leaves]
        self.n_results = len(trace.requires_grad)
        self.writes = [(self._target(write.target, tree), write) for write in trace.writes]
        self._written = [target for target, write in self.writes if not write.replaces]
        self.views = {i: (Source(*view.base), view) for i, view in capture.views.items()}
        sources = [*trace.sources, *(base for base, _ in self.views.values())]
        self._states = {s.key: tree.slots[s.key] for s in sources if s.kind == "state"}
        n_outputs = self.n_results + sum(write.output is not None for write in trace.writes)
        self._size_reads = n_outputs if trace.size_reads else None
        self._data_reads = n_outputs + bool(trace.size_reads) if trace.data_reads else None
        self.plans: OrderedDict[tuple, Prepared] = OrderedDict()
        self._counts = Counts(MOST_PLANS)
        self.draws = any(node.op_type in RANDOM for node in capture.model.graph.node)
        self._early: Session | None = None  # what is read of data and sizes, where effects must not come first
        if trace.nodes:
            self._tokens = sum(node.kind != "aten" for node in trace.nodes)  # outputs that stand for nodes
            self.session.known.plans.append(self.plans)
            for seen in trace.seen:
                self.session.known.learn(*seen)
            if trace.size_reads or trace.data_reads:
                self._early = _only_outputs(capture.model, n_outputs, self._tokens, trace.nodes)
                self.session.known.plans.append(self._early.plans)  # they rest on the same knowledge
        self._deferral = self._deferral_of(tensors, without, padding_unseen, defer)
        self._hand_over, self._watch = hand_over, Watch()
        self._holds: dict[tuple, DoesNotHold | None] = {}
        self._seen: set[tuple] = set()  # shapes for which views have been compared
        self._traced = shapes(trace.tensors)
        #: Told of an error in backward; returns when PyTorch may compute the gradients.
        self.failed: Callable[[Exception], None] = _raise
        self.prediction: Flags = self._first_prediction([t.dim() for t in trace.outputs])

    def _deferral_of(
        self, tensors: Sequence[torch.Tensor], without: Iterable[str], padding_unseen: bool, setting: str
    ) -> Deferral | None:
        trace, names = self.capture.trace, self.session.outputs
        ranks = [t.dim() for t in trace.outputs]
        losses = [i for i in self.differentiable if ranks[i] == 0]
        shared = {*self.views, *(base.key for base, _ in self.views.values() if base.kind == "graph")}
        if not losses or trace.nodes or trace.sets or padding_unseen or self._gpu is not None:
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
            lambda model: Session(model, without, tuning=self.session.tuning),
        )

    def sessions(self) -> list[Session]:
        return [self.session, *(self._deferral.sessions() if self._deferral is not None else [])]

    # --- before a run -------------------------------------------------------------------------------------------------

    def fits(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Are the sizes that the graph depends on those of ``inputs``? (It may still turn out not to hold.)"""
        for (i, d), size in self.capture.pinned.items():
            if inputs[i].shape[d] != size:
                return False
        return self._holds.get(shapes(inputs)) is None

    def traced_on(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Were the inputs of the trace as large as these?"""
        return shapes(inputs) == self._traced

    def has_effects(self) -> bool:
        """May a part of a run have changed something?"""
        return any(node.kind != "aten" for node in self.capture.trace.nodes)

    def changes(self) -> bool:
        """Does a forward change tensors of the caller's or of the module?"""
        return bool(self.writes) or any(node.sets or node.changed for node in self.capture.trace.nodes)

    def refuses(self, inputs: Sequence[torch.Tensor], reason: str) -> DoesNotHold:
        """It does not hold for inputs of these sizes: :meth:`fits` is false from now on."""
        self._holds[shapes(inputs)] = found = DoesNotHold(f"a graph that was traced at other sizes: {reason}")
        return found

    def _tensors(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        given = self._given(inputs)
        for i in self.pairs:
            given[i] = as_pairs(given[i])
        return given

    def _given(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [inputs[feed] if isinstance(feed, int) else feed.holder[feed.key] for feed in self.feeds]

    def _target(self, target: Source, tree: Tree) -> int | Slot:
        return target.key if target.kind == "input" else tree.slots[target.key]

    def _first_prediction(self, ranks: Sequence[int]) -> Flags:
        """Losses receive gradients; without one every output does."""
        losses = [i for i in self.differentiable if ranks[i] == 0]
        # New contents of a buffer may reach the outputs of a second run: never make one.
        chosen = (
            self.differentiable if any(w.output is not None for _, w in self.writes) else losses or self.differentiable
        )
        return tuple(i in chosen for i in range(len(self.session.outputs)))

    def _predicted(self) -> Flags:
        """Which outputs will receive a gradient, probably."""
        if not _packs():
            return self.prediction
        # A checkpoint runs forward again, and wants the same tensors saved whatever has happened between.
        return tuple(i in self.differentiable for i in range(len(self.session.outputs)))

    def prepare(
        self,
        shapes: tuple,
        output_grads: Flags | None,
        sizes: tuple[int, ...] = (),
        calls: Calls | None = None,
        defers: bool = False,
    ) -> Prepared:
        """The plan for these shapes of the inputs; ``sizes`` and ``calls`` as in :meth:`Session.plan`. ``defers``:
        with hidden states in place of scores."""
        key = (shapes, output_grads, sizes, defers)
        prepared = self.plans.get(key)
        if prepared is not None:
            self.plans[key] = self.plans.pop(key, prepared)
            return prepared
        specs = list(self._specs)
        for i, feed in self._varying:
            specs[i] = (specs[i][0], (*shapes[feed], 2) if i in self.pairs else tuple(shapes[feed]))
        session = self._deferral.session if defers else self.session
        plan = session.plan(specs, self.needs, output_grads, sizes, calls, self._gpu)
        if self.views and not plan.prologue:
            self._check_views(plan, shapes)
        reads = [[i for i, flag in enumerate(flags) if flag] for flags in (plan.reads_input, plan.reads_output)]
        prepared = Prepared(plan, output_grads, sizes, plan.random, *reads, session, defers, self._segments(plan))
        self.plans[key] = prepared
        while len(self.plans) > MOST_PLANS:
            self.plans.popitem(last=False)
        return prepared

    def _segments(self, plan: Any) -> list[Segment]:
        """In which gradients may be handed over while backward goes on."""
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

    def plan_first(self, inputs: Sequence[torch.Tensor]) -> None:
        """For a GPU, the plan of the first run is made already: what has no kernel there is found out, backward's, too.

        Raises what making it raises.
        """
        if self._gpu is not None:
            grads, calls = self._predicted() if self.differentiable else None, self.session.calls()
            try:
                self.prepare(shapes(inputs), grads, (), calls)
            except ENGINE_ERRORS:
                if calls is None or not calls.without_guesses():
                    raise
                self.prepare(shapes(inputs), grads, (), calls)

    # --- a run --------------------------------------------------------------------------------------------------------

    def __call__(self, inputs: Sequence[torch.Tensor], eager: Callable[[Sequence[torch.Tensor]], Any]) -> Any:
        """Runs forward and returns what the module would. ``eager``: the same call in PyTorch, on other tensors.

        Raises DoesNotHold, with nothing done; what a plan or the engine raises.
        """
        sizes = shapes(inputs)
        tensors = self._tensors(inputs)
        if self._written:
            self._check_memory(inputs)
        if self.views:
            self._check_bases(inputs)
        leaves = [tensors[i] for i in self.leaves]
        grads = self._predicted() if self.differentiable else None
        contiguous = [t if t.is_contiguous() else t.contiguous() for t in tensors]
        calls = self.session.calls()
        if calls is None:
            prepared, run = self._started(sizes, grads, contiguous)
            generator = None
        else:
            if self._early is not None:
                self._check_early(sizes, contiguous)
            seed = draw_seed() if self.draws else 0
            # torch's generators cannot be read while they are part of a CUDA graph.
            generator = devices.generators() if grads is not None and not self._is_captured() else None
            prepared, run = self.run(sizes, grads, contiguous, seed, calls)
        outputs = run.outputs
        self._check(sizes, outputs)
        if self.views and sizes not in self._seen:
            self._compare_views(sizes, inputs, outputs)
        fed = contiguous
        if self.writes or run.writes:
            fed = self._write(run, inputs, contiguous)
        if grads is not None:
            call = Call(self, prepared, run, sizes, inputs, tensors, fed, eager, generator)
            if self._deferral is not None:
                call.shown = self._shown(prepared, run, contiguous)
            early = prepared.segments and (self._hand_over == "1" or (not _packs() and self._watch.finds(leaves)))
            made = chain(call, leaves) if early else Bridge.apply(call, *leaves)
            for i, output in zip(self.differentiable, made, strict=True):
                outputs[i] = output
        return self._result(inputs, outputs)

    def _is_captured(self) -> bool:
        return self._gpu is not None and is_captured(self._gpu)

    def _started(self, shapes: tuple, grads: Flags | None, tensors: Sequence[torch.Tensor]) -> tuple[Prepared, Run]:
        deferral = self._deferral
        if deferral is not None and grads is not None and not grads[deferral.index] and deferral.waits():
            prepared, seed = self._planned(shapes, grads, tensors, defers=True)
            if not deferral.pays(prepared.plan.fired):
                prepared, seed = self._planned(shapes, grads, tensors, seed)
        elif self._gpu is not None:
            return self._started_there(shapes, grads, tensors)
        else:
            prepared, seed = self._planned(shapes, grads, tensors)
        return prepared, Run(prepared.plan, tensors, seed or 0, graphs=self.session.graphs)

    def _started_there(
        self, shapes: tuple, grads: Flags | None, tensors: Sequence[torch.Tensor]
    ) -> tuple[Prepared, Run]:
        """On a GPU: with the numbers of rows that earlier steps had, where they have been the same for a while."""
        step, seed, known = (shapes, grads), None, ()
        guess = self._counts.expected(step)
        plans = [self.prepare(shapes, grads, guess[:k]) for k in range(len(guess) + 1)]
        if guess and all(prologue.plan.bounded for prologue in plans[:-1]):
            seed = draw_seed() if any(prepared.random for prepared in plans) else None
            counting = [self.session.next_size(prologue.plan, tensors, seed or 0) for prologue in plans[:-1]]
            run = Run(plans[-1].plan, tensors, seed or 0, graphs=self.session.graphs)
            found = tuple(count() for count in counting)
            if all(count <= room for count, room in zip(found, guess, strict=True)):
                self._counts.learn(step, found)
                return plans[-1], run
            right = next(k for k, room in enumerate(guess) if found[k] != room)
            known = found[: right + 1]  # what comes behind was counted among other rows
            del run
        prepared, seed = self._planned(shapes, grads, tensors, seed, sizes=known)
        self._counts.learn(step, prepared.sizes)
        return prepared, Run(prepared.plan, tensors, seed or 0, graphs=self.session.graphs)

    def _planned(
        self,
        shapes: tuple,
        grads: Flags | None,
        tensors: Sequence[torch.Tensor],
        seed: int | None = None,
        defers: bool = False,
        sizes: tuple[int, ...] = (),
    ) -> tuple[Prepared, int | None]:
        """A plan that is no prologue, and the seed of the run; ``seed``: the one that was drawn already; ``sizes``:
        those that are known already."""
        prepared = self.prepare(shapes, grads, sizes, defers=defers)
        while True:
            if seed is None and prepared.random:
                seed = draw_seed()
            if not prepared.plan.prologue:
                return prepared, seed
            more = self.session.next_size(prepared.plan, tensors, seed or 0)()
            prepared = self.prepare(shapes, grads, (*prepared.sizes, more), defers=defers)

    def _shown(self, prepared: Prepared, run: Run, tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """What the caller gets for scores that are, or may be, deferred."""
        index = self._deferral.index
        if prepared.defers:
            feeds = dict(zip(self.session.inputs, tensors, strict=True))
            return {index: self._deferral.deferred(run.outputs[index], feeds)}
        return {index: self._deferral.watched(run.outputs[index])}

    def run(
        self, shapes: tuple, grads: Flags | None, tensors: Sequence[torch.Tensor], seed: int, calls: Calls
    ) -> tuple[Prepared, Run]:
        """A forward with nodes that PyTorch runs; those that are ``done`` in ``calls`` do not run again."""
        prepared = None

        def plan(sizes: tuple[int, ...]) -> _core.Plan:
            nonlocal prepared
            prepared = self.prepare(shapes, grads, sizes, calls)
            return prepared.plan

        _, run = run_planned(plan, tensors, seed, calls, self.session.graphs)
        return prepared, run

    def _check_early(self, shapes: tuple, tensors: Sequence[torch.Tensor]) -> None:
        """What Python would decide, before a node has effects."""
        feeds = dict(zip(self.session.inputs, tensors, strict=True))
        given = [feeds[name] for name in self._early.inputs]
        try:
            outputs = self._early.run(given, [False] * len(given), calls=DryCalls(self.session.known)).outputs
        except NotKnown:
            return
        first = len(self.session.outputs) - self._tokens - len(outputs)
        self._check(shapes, [None] * first + outputs)

    def _check(self, shapes: tuple, outputs: Sequence[torch.Tensor]) -> None:
        """Would Python decide as it did in the trace? Sizes are compared once for each shape, data every time."""
        trace = self.capture.trace
        if self._data_reads is not None:
            _compare(trace.data_reads, outputs[self._data_reads])
        if self._size_reads is None or shapes in self._holds:
            return
        if len(self._holds) >= MOST_SHAPES:
            self._holds.clear()
        try:
            _compare(trace.size_reads, outputs[self._size_reads])
            self._holds[shapes] = None
        except DoesNotHold as reason:
            self._holds[shapes] = reason
            raise

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
        """What forward changes must not share memory with an input."""
        for target in self._written:
            written = inputs[target] if isinstance(target, int) else target.get()
            for i, tensor in enumerate(inputs):
                if i != target and overlap(written, tensor):
                    reason = f"forward changes a tensor that shares memory with input {i}"
                    raise NotInEngine(Cause.DATA, reason)

    def _write(self, run: Run, inputs: Sequence, fed: list[torch.Tensor]) -> list[torch.Tensor]:
        """Puts what forward changes in its place, at once, as PyTorch does. Returns what the graph was fed."""
        changes = [(self.feeds[i], tensor, False) for i, tensor in run.writes.items()]
        changes += [(t, run.outputs[w.output], w.replaces) for t, w in self.writes if w.output is not None]
        fed = list(fed)
        with torch.no_grad():
            written = [target for target, _, replaces in changes if not replaces]
            for i, feed in enumerate(self.feeds):  # backward goes on with the old contents
                if self.leaves and any(feed == target for target in written):
                    fed[i] = _copy(fed[i])
            for target, tensor, replaces in changes:
                if replaces:
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


def _packs() -> bool:
    """Are there hooks on what autograd saves, as a checkpoint's?"""
    return has_saving_hooks()


def _only_outputs(model: onnx.ModelProto, first: int, tokens: int, nodes: Sequence[Node]) -> Session:
    """The outputs from ``first`` on, without the last ``tokens``, which stand for nodes that PyTorch runs."""
    part = onnx.ModelProto()
    part.CopyFrom(model)
    del part.graph.output[len(part.graph.output) - tokens :]
    del part.graph.output[:first]
    return Session(without_dead(part).SerializeToString(), nodes=nodes)


def _raise(error: Exception) -> None:
    raise error


def _feed(name: str, tree: Tree) -> int | Slot:
    if name.startswith(INPUT):
        return int(name.removeprefix(INPUT))
    return tree.slots[name.removeprefix(STATE)]


def shapes(inputs: Sequence[torch.Tensor]) -> tuple[torch.Size, ...]:
    """The shapes of some tensors, hashable."""
    return tuple([t.shape for t in inputs])


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


def draw_seed() -> int:
    """63 bits of torch's generator: `manual_seed` repeats a run."""
    return torch.empty(1, dtype=torch.int64).random_().tolist()[0]
