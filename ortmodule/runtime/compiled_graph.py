"""Runs a captured graph as a function of tensors that autograd knows.

:class:`CompiledGraph` feeds the engine from the caller's tensors and the module's, and puts its outputs where Python
expects them. Parameters are inputs of the autograd node, so hooks on them, `torch.autograd.grad` and
`backward(inputs=...)` work.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch

from ortmodule import _core
from ortmodule.capture.dynamic_dims import Capture
from ortmodule.capture.trace_record import Source, Write
from ortmodule.core import pytree, rng_state
from ortmodule.core.config import Config
from ortmodule.core.dtypes import as_pairs
from ortmodule.core.errors import Cause, DoesNotHold, NotInEngine
from ortmodule.core.objects.tensor_copies import attributes_of
from ortmodule.core.onnx_utils import drawing
from ortmodule.core.structures import tokens as pytree_tokens
from ortmodule.core.torch_private import deterministic, saving_hooks, warns_only
from ortmodule.engine.autotune import Tuning
from ortmodule.engine.memory_goal import MemoryGoal
from ortmodule.engine.session import Run, Session, copied, is_captured
from ortmodule.guards.guards import Guards
from ortmodule.guards.inventory import Slot
from ortmodule.guards.isolation import containers
from ortmodule.guards.module_tree import Tree
from ortmodule.guards.sharding.local_parameters import with_attached
from ortmodule.runtime.autograd_bridge import Pending, attach
from ortmodule.runtime.calls.capture_budget import MOST_CHANGES, Variant
from ortmodule.runtime.calls.module_state import ModuleState
from ortmodule.runtime.calls.state_before import StateBefore, UnknownState
from ortmodule.runtime.double_backward import ModuleModes, recomputed_results
from ortmodule.runtime.executable import Executable, Executables, Flags, Repeated, draw_seed
from ortmodule.runtime.grad_buckets import EarlyUse, chain, have_hooks, in_a_group
from ortmodule.runtime.lazy_logits import FORWARD, HEAD, MOST_COPIED, Deferral, deferral_of
from ortmodule.runtime.segments import Segment, segments_of
from ortmodule.runtime.tensors.feeds import dtensors_among, feed_of, target_of, written_in_place
from ortmodule.runtime.tensors.memory_settings import goal_of
from ortmodule.runtime.tensors.read_checks import MOST_SHAPES, ReadChecks
from ortmodule.runtime.tensors.result_hooks import WatchedResults, dependents_of
from ortmodule.runtime.tensors.shared_memory import overlap, put
from ortmodule.triton_kernels.use import TritonUse

_NO_RESULT = torch.empty(0)
#: The structure of a result that is one tensor, with nothing that forward puts into attributes.
_ONE_TENSOR = pytree.flatten((torch.empty(0), []), results=True)[1]


#: Which forward of a wrapped module a call is of: its own, or one that a script has put in its place.
OWN, ASSIGNED = "its own", "the one that was assigned"


class OtherLengths(Protocol):
    """The graphs of other lengths of a loop (runtime/variants/lengths.py makes them)."""

    graphs: OrderedDict[int, CompiledGraph | None]

    def at(self, call: Call) -> CompiledGraph | None: ...


class Call:
    """One call: its tensors, what they stand in, and what a captured graph holds for, the inputs' sizes aside."""

    __slots__ = ("forward", "which", "state", "tree", "arguments", "inputs", "count", "given", "shapes", "key",
                 "waits")  # fmt: skip

    def __init__(
        self, forward: Callable, which: str, state: ModuleState, arguments: pytree.Structure,
        inputs: list[torch.Tensor], given: tuple[tuple, dict],
    ) -> None:  # fmt: skip
        """``forward``: what PyTorch would run; ``which``: the module's own, or the one that was assigned; ``given``:
        the caller's own arguments. Tensors of the module that come in other sizes are inputs, too, behind the
        ``count`` of the caller's. Raises NotInEngine for an empty input."""
        self.forward, self.which, self.state, self.tree, self.given = forward, which, state, state.tree, given
        self.arguments, self.count = arguments, len(inputs)
        kinds: list[Any] = []
        missing: list[Any] = []
        shapes = []
        self.waits = False  # for a call that PyTorch runs, and that fills a table
        if self.tree.tables:
            own = tuple([tensor.shape for tensor in inputs])
            self.waits = not all([table.select(own) for table in self.tree.tables])
        if self.tree.resized or self.tree.tables:
            _, more, missing = self.tree.resized_tensors()
            inputs = inputs + more
        self.inputs = inputs
        for tensor in inputs:
            shape = tensor.shape
            if 0 in shape:
                raise NotInEngine(Cause.DATA, "an input is empty")
            kinds.append((tensor.dtype, len(shape), tensor.requires_grad, tensor.device))
            shapes.append(shape)
        self.shapes = tuple(shapes)
        self.key = (
            arguments.identity,
            tuple(kinds + missing),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
            torch.get_default_dtype(),
            deterministic() and 2 - warns_only(),  # torch's debug mode
            which,
            state.key,
            state.hooked,
        )

    @property
    def generators(self) -> list[torch.Generator]:
        """torch's, among the arguments."""
        return pytree.generators(self.given) if pytree_tokens.GENERATOR in self.arguments.tokens else []

    @property
    def mode(self) -> tuple:
        """Training or evaluation, with gradients or without, autocast, and which of the first structures it has."""
        return (*self.key[2:9], self.tree.modules[""].training, min(self.tree.changes, MOST_CHANGES))

    def move(self, state: ModuleState) -> None:
        """The module has another state now, which gives the call another key."""
        self.state, self.key = state, (*self.key[:-2], state.key, state.hooked)


class CompiledGraph:
    """A captured graph that runs in the engine.

    It holds for one kind of call: structure of the arguments, types, ranks and needs for gradients of all tensors, and
    grad mode are always those of ``inputs`` and of the module at the time of making; shapes of the inputs may differ.
    Raises what Session raises.
    """

    _epoch, _of_module = -1, frozenset[int]()  # ids of the containers that the module holds in this epoch
    changed_later: Collection[Any] = ()  # feeds that change behind a run, before its backward

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
        self.modes, self._unknown = ModuleModes(tree), UnknownState.of(tree, trace)
        self.keeps_memory, self.variant = config.keep_memory, Variant("", "", 0)  # of the calls that it is for
        self.missed, self.origin = 0, self  # runs that did not hold; the one that stands among the graphs of its key
        self.lengths: OtherLengths | None = None
        off, unseen, model = config.passes_off, config.padding_unseen, capture.model.SerializeToString()
        graphs, triton = config.enable_cuda_graphs, TritonUse.of(config)
        self.session = Session(model, off, trace.nodes, unseen, graphs, tuning, None, triton)
        self.feeds: list[int | Slot] = [feed_of(name, tree) for name in self.session.inputs]
        self.session.memory = goal_of(config, tree, self.feeds, not trace.nodes)
        #: Where the tensors of a run are: (number of the caller's input, None, None), or (-1, dictionary, key).
        self._places = [(f, None, None) if isinstance(f, int) else (-1, f.holder, f.key) for f in self.feeds]
        given = [inputs[i] if holder is None else holder[key] for i, holder, key in self._places]
        #: Places of complex tensors, which the engine gets as pairs.
        self.pairs = frozenset(i for i, t in enumerate(given) if t.is_complex())
        tensors = [as_pairs(t) for t in given]
        self.needs = tuple([torch.is_grad_enabled() and t.requires_grad for t in tensors])
        self.leaves = [i for i, need in enumerate(self.needs) if need]
        self._dtensors = dtensors_among([self.feeds[i] for i in self.leaves])
        self.empty = [i for i in self.leaves if not tensors[i].numel()]
        self.differentiable = [i for i, flag in enumerate(trace.requires_grad) if flag and self.leaves]
        self._dependents = dependents_of(capture.model, self.differentiable)
        self.n_results, self._reached = len(trace.requires_grad), dict[Flags, frozenset[int]]()
        keys = {feed if isinstance(feed, int) else feed.name: i for i, feed in enumerate(self.feeds)}
        self._reaches = [frozenset(keys[key] for key in reached if key in keys) for reached in trace.reaches]
        self.writes = [(target_of(write.target, tree), write) for write in trace.writes]
        self._written, self._carried = written_in_place(self.writes)
        self.views = {i: (Source(*view.base), view) for i, view in capture.views.items()}
        sources = [*trace.sources, *(base for base, _ in self.views.values())]
        self._states = {s.key: tree.slots[s.key] for s in sources if s.kind == "state"}
        one = trace.result == _ONE_TENSOR and trace.sources[0].is_plain and not self.views
        self._only_output = trace.sources[0].key if one else None
        self._hand_over, self._early_use = config.enable_mem_efficient_grad_mgmt, EarlyUse(tensors, self.leaves)
        self._varying = varying = [(i, feed) for i, feed in enumerate(self.feeds) if isinstance(feed, int)]
        self.executables = Executables(
            self.session, tensors, self.needs, varying, self.pairs, self._segments, self._check_views
        )
        self.plans = self.executables.plans
        self._early_use.plans = self.executables if self.session.memory.chooses else None
        self.is_random = any(True for _ in drawing(capture.model))
        self.draws = self.is_random or any(node.draws for node in trace.nodes)
        self._reads = ReadChecks(trace, capture.model, self.session, self.n_results, self.plans)
        self._deferral = self._deferral_of(tensors, off, unseen, config.defer_logits)
        self.executables.defer(self._deferral)
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
        if not losses or trace.nodes or trace.sets or trace.filled or padding_unseen:
            return None
        # What goes into a container of the caller's stays what it was.
        beside = [i for i in self.differentiable if i not in losses and i not in shared] if not trace.own else []
        written = {name for name, feed in zip(self.session.inputs, self.feeds, strict=True)
                   if any(feed == target for target, _ in self.writes)}  # fmt: skip
        return deferral_of(
            self.capture.model,
            names,
            [i for i in self.differentiable if ranks[i] >= 2 and i not in shared],
            written,
            dict(zip(self.session.inputs, tensors, strict=True)),
            setting,
            lambda model: self.session.like(model, without),
            repeats=not self.writes and sum(tensors[i].nbytes for i, _ in self._varying) <= MOST_COPIED,
            beside=beside,
        )

    def sessions(self) -> list[Session]:
        return [*self.own_sessions(), *(session for graph in self.other_lengths() for session in graph.sessions())]

    def own_sessions(self) -> list[Session]:
        """Those of this length."""
        return [self.session, *(self._deferral.sessions() if self._deferral is not None else [])]

    def other_lengths(self) -> list[CompiledGraph]:
        """The graphs of other lengths of its loop."""
        lengths = self.lengths.graphs.values() if self.lengths is not None else ()
        return [graph for graph in lengths if graph is not None]

    def parts(self) -> Sequence[CompiledGraph]:
        """The graphs that have plans of their own."""
        return [self]

    def count_for(self, variant: Variant) -> None:
        """Its runs, and their backward passes, are those of ``variant`` from now on."""
        for graph in (self, *self.parts()):
            graph.variant = variant

    # --- before a run -------------------------------------------------------------------------------------------------

    def at(self, call: Call) -> CompiledGraph | None:
        """The graph for the length of ``call``, where this one has a loop over it; itself where it has none. None,
        raises: as in ``Lengths.at``."""
        return self if self.lengths is None else self.lengths.at(call)

    def fits(self, inputs: Sequence[torch.Tensor], shapes: tuple, epoch: int) -> bool:
        """Are sizes, attributes and hooks that the graph depends on as it needs them? (It may still turn out not to
        hold.) ``epoch``: as in :meth:`Guards.hold`."""
        for (i, d), size in self.capture.pinned.items():
            if shapes[i][d] != size:
                return False
        for group in self.capture.equal:
            if len({shapes[i][d] for i, d in group}) > 1:
                return False
        for attributes, name, number in self.capture.fixed:
            now = attributes.get(name)
            if type(now) is not type(number) or now != number:
                return False
        if self._reads.known.get(shapes) is not None:
            return False
        if self.capture.trace.facts is not None and not self.fits_facts(inputs):
            return False
        guards = self.guards
        return guards.held if epoch == guards.epoch else guards.hold(epoch)

    @property
    def depends_on_more(self) -> bool:
        """Is :meth:`fits` about more than sizes and what a watch of the module sees?"""
        return self.lengths is not None or bool(self.capture.fixed) or self.capture.trace.facts is not None

    def fits_facts(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Do inputs lie in memory as it needs them, and have they the attributes that it rests on?"""
        needed = self.capture.trace.facts
        return needed is None or needed.hold(inputs)

    def may_miss(self, shapes: tuple) -> bool:
        """May a run find out that it does not hold?"""
        return self._reads.data is not None or (self._reads.size is not None and shapes not in self._reads.known)

    def misfit(self, shapes: tuple) -> DoesNotHold | None:
        """What is known of calls with these sizes that it does not hold for."""
        return self._reads.known.get(shapes)

    def contradicts(self, miss: DoesNotHold) -> bool:
        """Can it not hold for a call that another graph did not hold for, since Python takes another way?"""
        for read, (place, value) in zip(self.capture.trace.data_reads, miss.found, strict=False):
            if read.place != place:
                return False
            if not read.is_value(value):
                return True
        return False

    def traced_on(self, shapes: tuple) -> bool:
        """Were the inputs of the trace as large as these?"""
        return shapes == self._traced

    def has_effects(self) -> bool:
        """May a part of a run have changed something?"""
        return any(node.kind != "aten" for node in self.capture.trace.nodes)

    def changes(self) -> bool:
        """Does a forward change tensors of the caller's or of the module?"""
        return bool(self.writes) or any(node.sets or node.changed for node in self.capture.trace.nodes)

    def recomputed(
        self, call: Call, tensors: Sequence[torch.Tensor], seed: int, before: StateBefore | None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The graph's outputs for its results, by PyTorch, and what stands for the leaves; arguments as of
        :func:`recomputed_results`."""
        made, stands = recomputed_results(self, call.forward, call.arguments, call.inputs, tensors, seed, before)
        sources = [s for s in self.capture.trace.sources if s.kind != "number"]
        by_key = {s.key: t for s, t in zip(sources, made, strict=True) if s.kind == "graph"}
        return [by_key.get(i, _NO_RESULT) for i in range(self.n_results)], stands

    def refuses(self, shapes: tuple, reason: str) -> DoesNotHold:
        """It does not hold for inputs of these sizes: :meth:`fits` is false from now on."""
        self._reads.known[shapes] = found = DoesNotHold(f"a graph that was traced at other sizes: {reason}")
        return found

    def plan_first(self, shapes: tuple) -> None:
        """As :meth:`Executables.plan_first`."""
        self.executables.plan_first(shapes, self.predicted())

    def sketch(
        self, shapes: tuple, inputs: Callable[[], Sequence[torch.Tensor]], memory: MemoryGoal | None = None
    ) -> _core.Plan:
        """The plan that a run with inputs of these sizes has, without the run. ``inputs``: gives such inputs, for what
        data decides. ``memory``: another goal.

        Raises DoesNotHold, and what :meth:`Executables.sketch` raises.
        """

        self._reads.check_before(shapes, lambda: self._fed(inputs()))
        plan = self.executables.sketch(
            shapes, self.predicted(), lambda: self._fed(inputs()), memory, self._hands_over()
        )
        self._check_views(plan, shapes)
        return plan

    def _fed(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found = [given[i] if holder is None else holder[key] for i, holder, key in self._places]
        return [(as_pairs(t) if self.pairs else t).contiguous() for t in found]

    def check_after_error(self, call: Call) -> None:
        """Raises DoesNotHold where Python would have taken another way than the one that the engine refuses."""
        self._reads.check_after_error(call.shapes, lambda: self._fed(call.inputs))

    def joint(self, plan: Any) -> bool:
        """Has a step that makes its gradients by this plan a joint arena?"""
        return plan.joint_bytes > 0 and not self._hands_over()

    def _hands_over(self) -> bool:
        """Is there a use for gradients before backward is through, even of a step that makes them?"""
        feeds = [self.feeds[i] for i in self.leaves]
        return in_a_group() or have_hooks([feed.get() for feed in feeds if isinstance(feed, Slot)])

    def predicted(self) -> Flags | None:
        """Which outputs of the next run will receive a gradient, probably; None: there is no backward."""
        if not self.differentiable:
            return None
        return self.prediction if saving_hooks() is None else self._all_grads

    def reached(self, grads: Flags) -> frozenset[int]:
        """The inputs that PyTorch gives a gradient where these outputs receive one. It is zeros where the engine finds
        that nothing depends on an input."""
        found = self._reached.get(grads)
        if found is None:
            pairs = zip(grads, self._reaches, strict=False)
            found = self._reached[grads] = frozenset().union(*[reached for grad, reached in pairs if grad])
        return found

    def _first_prediction(self, ranks: Sequence[int]) -> Flags:
        """Losses receive gradients; without one every output does."""
        losses = [i for i in self.differentiable if ranks[i] == 0]
        # New contents of a buffer may reach the outputs of a second run: never make one.
        chosen = (
            self.differentiable if any(w.output is not None for _, w in self.writes) else losses or self.differentiable
        )
        return tuple([i in chosen for i in range(len(self.session.outputs))])

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
            tensors, fed = _in_pairs(tensors)
        if self._written:
            self._check_memory(inputs)
        if self.capture.trace.own:
            self.check_held(call)
        if self.views:
            self._check_bases(inputs)
        if self.missed and self._reads.come_first(self.missed, self.variant.runs):
            self._reads.check_early(shapes, fed)
        grads = self.predicted()
        use, before, executables = self._early_use, None, self.executables
        early = use.large and use.finds([tensors[i] for i in self.leaves])
        executable = executables.plans.get(step := (shapes, grads, (), False))
        if executable is not None and executable.ready:
            executables.plans.move_to_end(step)
            run = Run(executable.plan, fed, draw_seed() if executable.random else 0, None, joint=use.joint)
        elif self.session.known is None:
            executable, run = executables.start(shapes, grads, fed, use.joint)
        else:
            executable, run, before = self._start_with_host(shapes, grads, fed, inputs, call.generators)
        outputs = run.outputs
        if self._reads.data is not None or (self._reads.size is not None and shapes not in self._reads.known):
            self._reads.check(shapes, outputs)
        if self.views and shapes not in self._seen:
            self._compare_views(shapes, inputs, outputs)
        kept = self._write(run, inputs, fed) if self.writes or run.writes or self.changed_later else fed
        if grads is not None:
            before = StateBefore(self._unknown) if before is None and self._unknown is not None else before
            pending = Pending(self, executable, run, call, tensors, kept, before)
            if self._deferral is not None:
                pending.shown = self._shown(self._deferral, executable, run, shapes, fed)
            leaves = []
            for i in self.leaves:
                leaves.append(tensors[i])
            if self._dtensors:
                leaves = with_attached(leaves, self._dtensors)
            chains = executable.segments and (self._hand_over == "1" or (early and saving_hooks() is None))
            made = chain(pending, leaves) if chains else attach(pending, *leaves)
            if self._dependents:
                pending.watched = WatchedResults(made, self.differentiable, self._dependents)
            for i, output in zip(self.differentiable, made, strict=True):
                outputs[i] = output
        if self._carried:
            self._carry(inputs, outputs)
        for function, args in self.capture.trace.draws:
            function(*args)
        return outputs[self._only_output] if self._only_output is not None else self._result(call, outputs)

    def _carry(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Puts new contents with a gradient into inputs."""
        with torch.enable_grad():
            for target, i in self._carried:
                inputs[target].copy_(outputs[i])

    def _start_with_host(
        self, shapes: tuple, grads: Flags | None, tensors: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor],
        generators: Sequence[torch.Generator],
    ) -> tuple[Executable, Run, StateBefore | None]:  # fmt: skip
        """With nodes that PyTorch runs; and the state before it. ``generators``: torch's, among the caller's
        arguments."""
        calls, gpu = self.session.calls(), self.executables.gpu
        if calls is not None:
            calls.inputs, calls.generators = self._of_caller(inputs), generators
        seed = draw_seed() if self.is_random else 0
        # torch's generators cannot be read while they are part of a CUDA graph.
        captured = gpu is not None and is_captured(gpu)
        states = rng_state.States(self.capture.trace.drawn_from) if grads is not None and not captured else None
        before = None if states is None else StateBefore(self._unknown, states)
        if self._reads.early is not None:
            self._reads.check_early(shapes, tensors, calls)
        found = self.executables.run_with(shapes, grads, tensors, seed, calls, self._early_use.joint)
        return *found, before

    def _of_caller(self, inputs: Sequence[torch.Tensor]) -> Any:
        """The caller's inputs, by their numbers in the module."""
        return inputs

    def _shown(
        self, deferral: Deferral, executable: Executable, run: Run, shapes: tuple, tensors: Sequence[torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """What the caller gets for logits, and results beside them, that are, or may be, deferred."""
        gpu = self.executables.gpu
        captured = gpu is not None and is_captured(gpu)
        if executable.defers == FORWARD:
            forward = Repeated(self.executables, shapes, run, executable)
            return deferral.repeated(shapes, tensors, [i for i, _ in self._varying], forward)
        if executable.defers == HEAD:
            feeds = dict(zip(self.session.inputs, tensors, strict=True))
            return {deferral.index: deferral.deferred(run.outputs[deferral.index], feeds, at_once=captured)}
        # A CUDA graph of the caller's computes its logits in every replay.
        return {} if captured else deferral.watched(run.outputs)

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

    def check_held(self, call: Call) -> None:
        """Raises NotInEngine where the module holds a container, too, into which forward puts something: in the trace
        they were two."""
        if self._epoch != call.state.epoch:
            self._of_module = frozenset(id(items.container) for items in containers(self.tree))
            self._epoch = call.state.epoch
        for each in pytree.containers(call.given):
            inside = getattr(each, "__dict__", each)
            if not isinstance(each, tuple) and (id(each) in self._of_module or id(inside) in self._of_module):
                name = type(each).__name__
                raise NotInEngine(Cause.DATA, f"an attribute of the module holds the argument ({name}), too")

    def _check_memory(self, inputs: Sequence[torch.Tensor]) -> None:
        """Checks that no tensor that forward changes shares memory with an input, nor is a leaf of autograd's graph."""
        if any(inputs[target].is_leaf and inputs[target].requires_grad for target, _ in self._carried):
            raise NotInEngine(Cause.DATA, "forward changes a leaf that requires a gradient in place")
        for target in self._written:
            written = inputs[target] if isinstance(target, int) else target.get()
            for i, tensor in enumerate(inputs):
                if i != target and overlap(written, tensor):
                    reason = f"forward changes a tensor that shares memory with input {i}"
                    raise NotInEngine(Cause.DATA, reason)

    def _write(self, run: Run, inputs: Sequence, fed: list[torch.Tensor]) -> list[torch.Tensor]:
        """Writes the new contents to the tensors that forward changes, at once, as PyTorch does. Returns the graph's
        inputs as they were."""
        changes: list[tuple[Any, torch.Tensor, Write | None]]
        changes = [(self.feeds[i], tensor, None) for i, tensor in run.writes.items()]
        changes += [(t, run.outputs[w.output], w) for t, w in self.writes if w.output is not None and not w.carries]
        fed = list(fed)
        with torch.no_grad():
            written = [target for target, _, write in changes if write is None or not write.replaces]
            written += [target for target, _ in self._carried]
            for i, feed in enumerate(self.feeds):  # backward goes on with the old contents
                if self.leaves and (feed in self.changed_later or any(feed == target for target in written)):
                    fed[i] = copied(fed[i])
            for target, tensor, write in changes:
                put(target, write, tensor, inputs)
        return fed

    def _result(self, call: Call, outputs: Sequence[torch.Tensor]) -> Any:
        inputs, outputs, trace = call.inputs, list(outputs), self.capture.trace
        for i, (base, view) in self.views.items():
            outputs[i] = view.make(self._value(base, inputs, outputs), outputs[i].shape)
        values = [self._value(source, inputs, outputs) for source in trace.sources]
        held = pytree.containers(call.given) if trace.own else []
        into = {number: held[own] for number, own in trace.own.items()}
        *_, result, sets = trace.result.rebuild(values, into=into)
        for slot, value in zip(trace.sets, sets, strict=True):
            slot.set(value)
        return result

    def _value(self, source: Source, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> Any:
        if source.kind == "graph":
            if source.attributes:
                attributes_of(outputs[source.key]).update(source.attributes)
            return outputs[source.key]
        if source.kind == "number":
            return outputs[source.key].tolist()
        return inputs[source.key] if source.kind == "input" else self._states[source.key].get()


def _in_pairs(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Complex ones as pairs; the same where they lie in order."""
    pairs = [as_pairs(t) for t in tensors]
    return pairs, [t.contiguous() for t in pairs]


def _raise(error: Exception) -> None:
    raise error
