"""Runs a captured graph that submodules break: engine, PyTorch, engine, joined by PyTorch's own autograd.

A *break* is a submodule whose tensors hooks, containers or other user code can see. It is called as in eager mode, on
the tensors of the one autograd graph there is, so whatever it lets escape belongs to that graph. What lies between two
breaks is a *piece*: a graph of its own, with a plan and an autograd node of its own (:class:`CompiledGraph`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import Any

import onnx
import torch

from ortmodule import _core
from ortmodule.capture.dynamic_dims import Capture
from ortmodule.capture.trace_record import Source, Trace, Write
from ortmodule.core import devices, pytree
from ortmodule.core.config import Config
from ortmodule.core.dtypes import DTYPES, as_pairs
from ortmodule.core.errors import CaptureError, Cause, Disagrees, Incomparable, NotInEngine, Raised, StateError, Unknown
from ortmodule.core.names import INPUT, STATE, USED_ON
from ortmodule.core.objects.weights import weights
from ortmodule.core.onnx_utils import OF_SIZES, RANDOM, attributes
from ortmodule.engine.autotune import Tuning
from ortmodule.engine.memory_goal import MemoryGoal
from ortmodule.engine.session import ENGINE_ERRORS, Session
from ortmodule.guards.guards import Guards
from ortmodule.guards.inventory import Slot
from ortmodule.guards.module_tree import Tree
from ortmodule.guards.sharding.collectives import alone
from ortmodule.host.escapes import changed_by_breaks
from ortmodule.host.fallback import only_pytorch
from ortmodule.host.host_node import Node, operands_of, specs_of
from ortmodule.host.met_calls import recording
from ortmodule.host.passed_calls import Replayed
from ortmodule.lowering.cuts.gradients import carrying, reached_by
from ortmodule.lowering.cuts.graph_cuts import Break, Piece, cut
from ortmodule.runtime.calls.parts import parts_of
from ortmodule.runtime.compiled_graph import Call, CompiledGraph
from ortmodule.runtime.piece_graph import Interpreter, PieceCall, PieceDraw, PieceGraph
from ortmodule.runtime.rng_replay import replaying
from ortmodule.runtime.tensors.feeds import fed
from ortmodule.runtime.tensors.shared_memory import put

#: The engine runs a module only if breaks hold no more than this share of its weights, those of embeddings aside.
MOST_OUTSIDE = 0.5


class BrokenGraph(CompiledGraph):
    """A captured graph in pieces. Raises CaptureError for one that cannot be cut, and what the engine raises."""

    def __init__(
        self, capture: Capture, tree: Tree, guards: Guards, inputs: Sequence[torch.Tensor], config: Config,
        tuning: Tuning | None, interpret: Interpreter, cuts: Set[str] = frozenset(),
    ) -> None:  # fmt: skip
        """``cuts``: values at which it is cut, too."""
        self.pieces: list[PieceGraph] = []
        #: Called with each piece and its inputs before it runs; what it returns with the outputs.
        self.watch: Callable[[PieceGraph, list[torch.Tensor]], Callable[[Any], None]] | None = None
        super().__init__(capture, tree, guards, inputs, config, tuning)
        trace, model = capture.trace, capture.model
        self.breaks = {i: node for i, node in enumerate(trace.nodes) if node.breaks}
        self._unsized = tree.caches.unsized & {node.name for node in self.breaks.values()}
        if self._unsized and self.writes:  # which could not be taken back if one returns something else
            raise CaptureError(f"{min(self._unsized)} returns tensors of any size, in a module that changes buffers")
        _check_share(self.breaks.values(), tree)
        _check_reads(model, self._reads_from(), self.breaks, self._unsized)
        outputs = self.session.outputs
        self._names = list(outputs[: self.n_results])
        #: What forward changes: where it is, by the output with its new contents.
        self._new = [
            (target, write, outputs[write.output]) for target, write in self.writes if write.output is not None
        ]
        #: Parameters and buffers that others take the places of while it runs.
        moved = [write.target.key for _, write in self.writes if write.replaces and write.target.kind == "state"]
        moved += [slot.name for node in self.breaks.values() for slot in node.sets]
        self._moved = {STATE + name: tree.slots[name] for name in moved if name in tree.slots}
        written = {target for target, _ in self.writes if isinstance(target, int)}
        integers = [
            f"{INPUT}{i}" for i, t in enumerate(inputs)
            if i not in written and not t.is_floating_point() and not t.is_complex()
        ]  # fmt: skip
        #: The outputs that hold what Python reads, where that is compared behind all pieces: they have no effects.
        self._read_late = [] if trace.nodes or self.writes else self._reads_from()
        kept = [*self._names, *(name for _, _, name in self._new), *self._read_late]
        behind = {self._names[i] for i in trace.used_on}
        self.steps, self._step_of = cut(model, self.breaks.keys(), kept, integers, self._moved.keys(), behind | cuts)
        self._check_used_on(behind)
        examples = _examples(capture, self.steps, tree, self._moved)
        self._make_pieces(examples, guards, config, tuning, interpret, trace)
        changed = {target for target, _ in self.writes} | {slot for node in self.breaks.values() for slot in node.sets}
        for piece in self.pieces:
            piece.changed_later = {feed for feed in piece.feeds if isinstance(feed, Slot) and feed in changed}
        self._writes_after = self._place_writes()
        if not self._read_late:
            self._reads.always_first()

    def _make_pieces(
        self, examples: dict[str, torch.Tensor], guards: Guards, config: Config, tuning: Tuning | None,
        interpret: Interpreter, trace: Trace,
    ) -> None:  # fmt: skip
        differentiable = self._differentiable(examples)
        self.runs: list[PieceGraph | Node | None] = []
        for number, step in enumerate(self.steps):
            if isinstance(step, Break):
                self.runs.append(trace.nodes[step.number] if step.number >= 0 else None)
                continue
            flags = [name in differentiable for name in step.outputs]
            given = [examples[name] for name in step.inputs]
            given = [t.requires_grad_(name in differentiable) for name, t in zip(step.inputs, given, strict=True)]
            model = step.model(self.capture.model, [*step.outputs, *(name for _, name in step.calls)])
            used = {name for node in model.graph.node for name in node.input}
            own = [w for _, w in self.writes if w.output is None and STATE + str(w.target.key) in used]
            own += self._in_place(number, step)
            part = replace(
                trace,
                reaches=reached_by(step, differentiable, set().union(*trace.reaches)),
                result=pytree.flatten(None)[1],
                sources=[Source("graph", i) for i in range(len(step.outputs))],
                requires_grad=flags,
                outputs=[examples[name] for name in step.outputs],
                tensors=given,
                views={},
                writes=own,
                settled=[],
                sets=[],
                size_reads=[],
                data_reads=[],
                draws=[],
                filled=False,
                own={},
                nodes=trace.nodes if step.calls else [],
            )
            capture = replace(self.capture, model=model, trace=part, views={}, pinned={}, sample=[])
            results = {i for i, name in enumerate(step.outputs) if name in self._names and name not in self._crossing()}
            if step is not self.steps[-1]:  # islands and other pieces get logits as they are
                settings = replace(config, defer_logits="0")
            else:
                settings = config
            piece = PieceGraph(step, capture, self.tree, guards, given, settings, tuning, results, interpret)
            piece.modes = self.modes
            self.pieces.append(piece)
            self.runs.append(piece)
            # A plan for small inputs: what the engine refuses is found before a submodule has effects.
            shapes = tuple([t.shape for t in given])
            if not step.calls:
                piece.executables.prepare(shapes, piece.predicted())

    def _differentiable(self, examples: dict[str, torch.Tensor]) -> set[str]:
        """The values that carry a gradient: results and operands of breaks as they were traced, others where one that
        does is computed with."""
        trace = self.capture.trace
        if not self.leaves and not any(flag for node in trace.nodes for flag in node.flags):
            return set()
        leaves = {self.session.inputs[i] for i in self.leaves}
        said: dict[str, bool] = dict(zip(self._names, trace.requires_grad, strict=True))
        said |= {name: False for name, t in examples.items() if not t.is_floating_point()}
        for step in self.steps:
            if isinstance(step, Break) and step.number >= 0:
                node = trace.nodes[step.number]
                said.update(zip(step.outputs, node.flags, strict=True))
                needs = zip(step.operands, node.needs, strict=True)
                said.update((name, need) for name, need in needs if name not in leaves)
        return carrying(self.capture.model.graph.node, leaves, said, [node.flags for node in trace.nodes])

    def _check_used_on(self, behind: set[str]) -> None:
        """Raises CaptureError where the rest of forward does not go on with the very value that the caller gets."""
        producer = {name: node for node in self.capture.model.graph.node for name in node.output}
        for name in behind:
            used = any(name in (step.operands if isinstance(step, Break) else step.inputs) for step in self.steps)
            if not used or name not in producer or producer[name].op_type == "Identity":
                raise CaptureError(USED_ON)

    def _in_place(self, number: int, step: Piece) -> list[Write]:
        """What this piece changes of its own inputs and of state: it copies what backward reads."""
        found = []
        for entry in list(self._new):
            target, write, name = entry
            if self._step_of(name) != number or write.replaces or write.data:
                continue
            place = f"{INPUT}{target}"
            if isinstance(target, int) and place not in step.inputs:
                continue
            source = Source("input", step.inputs.index(place)) if isinstance(target, int) else write.target
            found.append(replace(write, target=source, output=step.outputs.index(name)))
            self._new.remove(entry)
        return found

    def _crossing(self) -> set[str]:
        """The values that a later step uses."""
        return {name for s in self.steps for name in (s.operands if isinstance(s, Break) else s.inputs)}

    def _place_writes(self) -> list[list[tuple[Any, Write, str]]]:
        """By step: what forward changes of inputs and state that is known behind it."""
        found: list[list[tuple[Any, Write, str]]] = [[] for _ in self.steps]
        for target, write, name in self._new:
            found[max(self._step_of(name), 0)].append((target, write, name))
        return found

    def _reads_from(self) -> list[str]:
        """The outputs that hold what Python reads."""
        return [self.session.outputs[i] for i in self._reads.places]

    @property
    def failed(self) -> Callable[[Exception], None]:
        return self._failed

    @failed.setter
    def failed(self, function: Callable[[Exception], None]) -> None:
        self._failed = function
        for piece in self.pieces:
            piece.failed = function

    def sessions(self) -> list[Session]:
        return [session for piece in self.pieces for session in piece.sessions()]

    def parts(self) -> Sequence[CompiledGraph]:
        return self.pieces

    def plan_first(self, shapes: tuple) -> None:
        pass

    def sketch(
        self, shapes: tuple, inputs: Callable[[], Sequence[torch.Tensor]], memory: MemoryGoal | None = None
    ) -> _core.Plan:
        breaks = ", ".join(sorted({node.name for node in self.breaks.values()}))
        text = f"PyTorch runs {breaks} between parts of the graph, in memory that no plan counts"
        raise _core.UnsupportedError(
            text if breaks else "the graph is in pieces, and no plan counts what is between them"
        )

    def has_effects(self) -> bool:
        return True

    # --- a run --------------------------------------------------------------------------------------------------------

    def __call__(self, call: Call) -> Any:
        inputs, shapes, trace = call.inputs, call.shapes, self.capture.trace
        if self._written:
            self._check_memory(inputs)
        if trace.own or any(node.given for node in self.breaks.values()):
            self.check_held(call)
        if self.views:
            self._check_bases(inputs)
        if self._reads.early is not None and (trace.nodes or self.may_miss(shapes)):
            self._check_reads(call)
        values: dict[str, torch.Tensor] = {f"{INPUT}{i}": t for i, t in enumerate(inputs)}
        for name, slot in self._moved.items():
            values[name] = slot.get()
        returned: list[Any] = []  # by the breaks that ran
        drawn: list[PieceDraw] = []  # by the pieces that ran, where PyTorch may have to draw it, too
        held = pytree.containers(call.given) if any(node.given for node in self.breaks.values()) else []
        for step, run, new in zip(self.steps, self.runs, self._writes_after, strict=True):
            if run is None:
                made = []
            elif isinstance(step, Break):
                assert isinstance(run, Node)
                try:
                    made = self._run_break(step, run, values, call, held, returned)
                except Disagrees as error:
                    raise self._unfinished(call, returned, drawn, error) from error
            else:
                assert isinstance(run, PieceGraph)
                given = [values[name] for name in step.inputs]
                if run.is_random and self._unsized:
                    drawn.append(PieceDraw(run, given, devices.generators()))
                ran = None if self.watch is None else self.watch(run, given)
                made = self._run_piece(run, given, call, bool(returned))
                if ran is not None:
                    ran(made)
            values.update(zip(step.outputs, made, strict=True))
            for target, write, name in new:
                self._write_one(target, write, values[name], inputs)
            for name in step.dead:
                values.pop(name, None)
        if self._read_late and self.may_miss(shapes):
            self._reads.check(shapes, {i: values[self.session.outputs[i]] for i in self._reads.places})
        outputs = [self._valued(name, values) for name in self._names]
        if self.views and shapes not in self._seen:
            self._compare_views(shapes, inputs, outputs)
        for function, args in trace.draws:
            function(*args)
        return outputs[self._only_output] if self._only_output is not None else self._result(call, outputs)

    def _valued(self, name: str, values: dict[str, torch.Tensor]) -> torch.Tensor:
        return values[name] if name in values else self.tree.slots[name.removeprefix(STATE)].get()

    def _run_piece(self, piece: PieceGraph, inputs: list[torch.Tensor], call: Call, ran: bool) -> Any:
        """The piece's outputs. ``ran``: a break has run, and must not run again."""
        reason: Exception
        try:
            if ran and any(0 in t.shape for t in inputs):
                raise NotInEngine(Cause.DATA, "a submodule that PyTorch runs returns an empty tensor")
            return piece(PieceCall(inputs, call.generators))  # type: ignore[arg-type]  # it asks no more of its call
        except (NotInEngine, *ENGINE_ERRORS) as error:
            if not ran:
                raise
            reason = error
        try:
            return piece.in_pytorch(inputs)
        except Unknown:
            text = f"ORTModule: {reason}. It has run a submodule already, so PyTorch cannot run the whole call"
            raise Raised(StateError(text)) from reason
        except Exception as error:
            raise Raised(error) from None

    def _run_break(
        self, step: Break, node: Node, values: dict[str, torch.Tensor], call: Call, held: Sequence[Any],
        returned: list[Any],
    ) -> list[torch.Tensor]:  # fmt: skip
        """``held``: the containers of the caller's. Raises Disagrees when it has run, and the graph cannot go on with
        what it returned."""
        given = [self._valued(name, values) for name in step.operands]
        before = operands_of(given) if self._reads.early is not None else ()
        passed = [t.clone() if i in node.changed else t for i, t in enumerate(given)]
        try:
            outputs = node.call(passed, held, returned, call.generators)
        except Disagrees:
            raise
        except Exception as error:
            raise Raised(error) from None
        outputs += [slot.get() for slot in node.sets]
        for made, flag, (dtype, rank) in zip(outputs, node.flags, node.kinds, strict=True):
            if (DTYPES.get(made.dtype), made.dim()) != (dtype, rank) or (made.requires_grad and not flag):
                raise Disagrees(f"{node.name} returns another kind of tensor than when it was traced")
        known = self.session.known
        if before and known is not None and node.name not in self._unsized:  # (no read follows from these)
            found, _ = known.answer(step.number, before, True)
            results = specs_of(outputs)
            known.learn(step.number, before, results)
            if found is not None and found != results:
                known.rules[step.number] = None
                raise Disagrees(f"{node.name} returns tensors of other sizes than those that Python counted on")
        return outputs

    def _unfinished(
        self, call: Call, returned: list[Any], drawn: Sequence[PieceDraw], error: Disagrees
    ) -> NotInEngine:  # fmt: skip
        """PyTorch runs the call from the beginning, with what the breaks have returned: they do not run again."""
        steps = list(zip(self.steps, self.runs, self._writes_after, strict=True))
        count = [i for i, run in enumerate(self.runs) if isinstance(run, Node)][len(returned) - 1]
        done = [run for run in self.runs[:count] if isinstance(run, PieceGraph)]
        changed = any(piece.writes for piece in done) or any(new for *_, new in steps[:count])
        lost = changed or [piece for piece in done if piece.is_random] != [each.piece for each in drawn]
        nodes = [run for run in self.runs[: count + 1] if isinstance(run, Node)]

        def finish() -> Any:
            try:
                if lost:
                    raise Incomparable
                values = [value for each in drawn for value in each.values()]
                replayed = Replayed(self.tree, nodes, returned)
                around = replaying(self.tree, nodes, values, passed=replayed) if values else recording(replayed)
                with only_pytorch(), around:
                    return call.forward(*call.given[0], **call.given[1])
            except Incomparable:
                text = f"ORTModule: {error}, and what was drawn and changed before cannot be taken back"
                raise StateError(f"{text}: PyTorch will run the next such call") from None

        reason = NotInEngine(Cause.TORCH_MODEL, str(error), call.key)
        reason.finish = finish
        return reason

    def _write_one(self, target: Any, write: Write, value: torch.Tensor, inputs: Sequence[torch.Tensor]) -> None:
        if write.carries:
            with torch.enable_grad():
                inputs[target].copy_(value)
            return
        with torch.no_grad():
            put(target, write, value if write.replaces else value.detach(), inputs)

    def _check_reads(self, call: Call) -> None:
        tensors = [as_pairs(t).contiguous() for t in fed(self.feeds, call.inputs)]
        if not self._reads.check_early(call.shapes, tensors):
            reason = "Python reads a size behind a submodule that PyTorch runs, which is not known before that runs"
            raise NotInEngine(Cause.TORCH_MODEL, reason, (call.key, call.shapes))


# --- what is found when it is made ------------------------------------------------------------------------------------


def _check_share(breaks: Any, tree: Tree) -> None:
    """Raises CaptureError where most of the module would be breaks."""
    sizes = weights(tree.modules.values())
    # Those that are sharded are graphs of their own, and so are parts. Those of unknown sizes were islands before.
    others = tree.sharded.keys() | tree.caches.unsized
    inside = {id(p) for node in breaks if node.name not in others for p in tree.modules[node.name].parameters()}
    parted = (path for node in breaks if node.name in tree.caches.parted for path in parts_of(tree, node.name))
    inside -= {id(p) for path in parted for p in tree.modules[path].parameters()}
    outside = sum(size for key, size in sizes.items() if key in inside)
    if outside > MOST_OUTSIDE * sum(sizes.values()):
        names = ", ".join(dict.fromkeys(node.name for node in breaks))
        raise CaptureError(
            f"submodules that PyTorch would run ({names}) hold {outside / sum(sizes.values()):.0%} of the weights: "
            f"{next(iter(breaks)).breaks}"
        )


def _check_reads(model: onnx.ModelProto, reads: Sequence[str], breaks: dict[int, Node], unsized: Set[str]) -> None:
    """Raises CaptureError where Python reads what a break computes, or what is drawn: neither can be had before. Nor
    can a size that may follow from what those that are ``unsized`` return."""
    producer = {name: node for node in model.graph.node for name in node.output}
    waiting, seen = [(name, False) for name in reads], set()
    while waiting:
        name, is_sized = waiting.pop()
        node = producer.get(name)
        if node is None or (name, is_sized) in seen:
            continue
        seen.add((name, is_sized))
        number = attributes(node)["number"] if node.op_type == "PythonOp" else None
        path = breaks[number].name if number in breaks else None
        if path is not None and (not is_sized or path in unsized):
            raise CaptureError(f"Python reads what {path} computes, which PyTorch runs by itself")
        if node.op_type in RANDOM and not is_sized:
            raise CaptureError("Python reads numbers that are drawn, beside submodules that PyTorch runs")
        waiting += [(each, is_sized or node.op_type in OF_SIZES) for each in node.input]


def _examples(
    capture: Capture, steps: Sequence[Piece | Break], tree: Tree, moved: dict[str, Slot]
) -> dict[str, torch.Tensor]:
    """All values at the cuts, for the small inputs that the graph was traced on."""
    inputs = {f"{INPUT}{i}": t.detach() for i, t in enumerate(capture.sample)}
    found = inputs | {name: slot.get().detach() for name, slot in moved.items()}
    names = dict.fromkeys(name for step in steps for name in step.outputs if name not in found)
    if not names:
        return found
    model = onnx.ModelProto()
    model.CopyFrom(capture.model)
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    session = Session(model.SerializeToString(), nodes=capture.trace.nodes)
    around = changed_by_breaks(tree, capture.trace.nodes)
    with tree.isolated(), tree.unhooked(), only_pytorch(), around.around(), alone():
        feeds = [
            inputs[name] if name in inputs else tree.slots[name.removeprefix(STATE)].get() for name in session.inputs
        ]
        try:
            run = session.run([as_pairs(t.detach()).clone().contiguous() for t in feeds], [False] * len(feeds))
        except Raised as raised:
            raise CaptureError(f"{type(raised.error).__name__}: {raised.error}") from None
        return found | dict(zip(names, run.outputs, strict=True))
