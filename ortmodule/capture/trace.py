"""Traces a module once: a TorchScript graph, and how its inputs and outputs meet Python.

Every tensor that the module holds is an input of the graph (so no weight enters it), and everything that forward
changes is an extra output. Tracing leaves the module, its buffers and all random generators as they were.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ortmodule.capture import scalar_guards
from ortmodule.capture.calls import batched_sizes, function_caches
from ortmodule.capture.calls.checkpoints import Checkpoints, OfCheckpoints
from ortmodule.capture.calls.checkpoints import met as meeting_checkpoints
from ortmodule.capture.calls.imports import untraced_imports
from ortmodule.capture.calls.scripted_calls import inlined
from ortmodule.capture.effects.container_items import changed_items, check_value, settle_refilled, tensors_in
from ortmodule.capture.effects.filled_caches import check_caches, forget_own, may_set_up, put_resized
from ortmodule.capture.effects.side_effects import Hidden, SideEffects, hidden
from ortmodule.capture.effects.traced_tables import TracedTables
from ortmodule.capture.numbers import object_reads, size_types, symbolic_numbers, tensor_facts
from ortmodule.capture.numbers.data_numbers import Numbers
from ortmodule.capture.numbers.given_arrays import GivenArrays
from ortmodule.capture.numbers.numpy_numbers import traced as traced_number
from ortmodule.capture.numbers.read_causes import DATA, SIZE
from ortmodule.capture.numbers.tensor_reads import TensorReads, given_to, set_by_forward
from ortmodule.capture.output_aliasing import sightings
from ortmodule.capture.randomness import chance, drawn_values
from ortmodule.capture.randomness.chance import Chance
from ortmodule.capture.trace_mode import Saved, TraceMode, copied_in_trace
from ortmodule.capture.trace_record import HeldBefore, Source, Trace, Write, path_in, vector
from ortmodule.core import errors, pytree
from ortmodule.core.dtypes import as_pairs
from ortmodule.core.errors import NotTraceable, Unflattenable, blaming
from ortmodule.core.names import CHANGES_PARAMETER, NOTHING, STATE
from ortmodule.core.objects.garbage import no_collections
from ortmodule.core.objects.interception import replaced
from ortmodule.core.objects.tensor_memory import memory_of, version_of
from ortmodule.core.size_expr import is_number
from ortmodule.core.snapshot import Items, TensorMemory
from ortmodule.core.structures.tokens import SPLIT
from ortmodule.core.torch_private import (
    DisableTorchFunction,
    TracedGraph,
    get_trace_graph,
    get_value_trace,
    jit_pass_dce,
    jit_pass_inline,
    jit_pass_lower_all_tuples,
)
from ortmodule.guards.global_reads import read_by_arguments
from ortmodule.guards.inventory import Slot, path_of
from ortmodule.guards.isolation import Contents, containers, contents
from ortmodule.guards.module_tree import Tree
from ortmodule.guards.reads.held_tensors import check_unchanged
from ortmodule.guards.writes.setting_changes import settings_left_alone
from ortmodule.host import autograd_functions
from ortmodule.host.collectives import WAIT, Collectives, wait_late
from ortmodule.host.collectives import recording as recording_collectives
from ortmodule.host.host_node import Node, leaves_of
from ortmodule.host.met_calls import recording as recording_regions
from ortmodule.host.opaque_regions import CALL, Opaque, Regions, eagerly
from ortmodule.host.parallel_layers import recording as recording_dtensors
from ortmodule.lowering import export
from ortmodule.lowering.decompose import rewrite
from ortmodule.lowering.functionalize import without_view_writes
from ortmodule.lowering.uninitialized import check_written

#: What torch's tracer says of a tensor with a gradient that is no input.
_AT_OUTSIDE = "Cannot insert a Tensor that requires grad as a constant"
MOST_OUTSIDE_TENSORS = 1024
_COUNTERS = (int, float, complex, str)
#: Change statistics that they are given.
_NORMALIZING = {"aten::batch_norm", "aten::instance_norm", "aten::native_batch_norm"}


def trace(
    forward: Callable, module: nn.Module, tree: Tree, arguments: pytree.Structure, tensors: Sequence[torch.Tensor],
    opset: int, opaque: Opaque, numbers: Numbers, high: bool = False,
) -> Trace:  # fmt: skip
    """Traces ``forward(*args, **kwargs)`` of ``module`` with ``tensors`` in the places that ``arguments`` has for them.

    ``numbers``: from data. ``high``: what generators of Python and NumPy draw. Raises NotTraceable, and what forward
    raises.
    """
    given = forward, module, tree, arguments, tensors, opset, opaque, numbers, high
    found = _trace(*given, False)
    if (left := _hidden(found, tree)) is None:
        return found
    del found
    found = _trace(*given, True)  # an error where forward, and not what PyTorch runs, has left something
    if (more := _hidden(found, tree)) is not None or not left.is_found():
        raise NotTraceable((more or left).text)
    return found


def _hidden(found: Trace, tree: Tree) -> Hidden | None:
    flat: Any = found.module
    flat.before, flat.containers, flat.versions, flat.effects = {}, [], {}, None  # which hold what forward has set
    return hidden(tree.caches.holders, flat.mode, flat.regions.kept)


def _trace(
    forward: Callable, module: nn.Module, tree: Tree, arguments: pytree.Structure, tensors: Sequence[torch.Tensor],
    opset: int, opaque: Opaque, numbers: Numbers, high: bool, looking: bool,
) -> Trace:  # fmt: skip
    """As :func:`trace`. ``looking``: at what each submodule does, to find the one that is to blame."""
    flat, graph, outputs = _record(forward, module, tree, arguments, tensors, opaque, numbers, high, looking)
    scripted = {path_in(node.scopeName(), tree.modules) for node in graph.findAllNodes("prim::CallFunction")}
    _simplify(graph, flat, tree)
    flat.exported = True
    with tree.isolated():
        rewrite(graph, opset, flat.regions)
    sizes, data = flat.recorder.of(SIZE), flat.recorder.of(DATA)
    for read in flat.recorder.reads:
        read.tensor = None
    outputs = [t.detach() for t in outputs]
    return Trace(
        flat,
        graph,
        outputs,
        list(tensors),
        flat.result,
        flat.sources,
        flat.requires_grad,
        flat.reaches,
        flat.views,
        flat.writes,
        flat.sets,
        flat.settled,
        flat.recorder.attributes,
        flat.chance.reads | flat.attributes.others | flat.mode.settings() | read_by_arguments(arguments.classes()),
        flat.recorder.fields,
        sizes,
        data,
        flat.chance.draws,
        flat.chance.drawn_from,
        list(flat.chance.prints),
        flat.regions.nodes,
        flat.regions.seen,
        scripted,
        flat.filled,
        flat.own,
        flat.used_on,
        flat.regions.altered,
        flat.regions.escaped,
        numbers.taken,
        tensor_facts.facts(tensors, flat.recorder.asks_layout, flat.attributes.of_inputs),
        flat.resized,
    )


def _record(
    forward: Callable, module: nn.Module, tree: Tree, arguments: pytree.Structure, tensors: Sequence[torch.Tensor],
    opaque: Opaque, numbers: Numbers, high: bool, looking: bool,
) -> tuple[_Flat, TracedGraph, Sequence[torch.Tensor]]:  # fmt: skip
    """The module as it was traced, its graph, and its results. Arguments as of :func:`_trace`."""
    saved, changes, second, operands = Saved(), OfCheckpoints(), False, False
    failure: BaseException | None
    while True:
        flat, failure = _Flat(forward, module, tree, arguments, Regions(tree, opaque), operands, changes), None
        flat.looks = looking
        with (
            saved_tensors_hooks(saved.pack, saved.unpack),
            tree.counted(high * numbers.further, numbers.counts) as flat.counters,
            tree.isolated() as flat.copies, tree.unhooked(), no_collections(),
            scalar_guards.recording() as flat.recorder, flat.mode, function_caches.left_out(), export.tracing(flat),
            untraced_imports(), inlined(), recording_regions(flat.regions), recording_collectives(flat.collectives),
            meeting_checkpoints(), recording_dtensors(flat.mode.dtensors),
        ):  # fmt: skip
            try:
                chance.seed(high)
                flat.recorder.where, flat.recorder.numbers = flat.regions.innermost, numbers
                numbers.begin()
                graph, outputs, _ = get_trace_graph(flat, tuple(tensors), strict=False, _return_inputs_states=True)
                flat.mode.check(flat.regions.written)
                flat.collectives.check()
            except errors.FillsCache as error:
                failure = error
            except Unflattenable as error:
                failure = NotTraceable(f"forward returns {error}")
            except Exception as error:
                failure = flat.mode.cause(error)
            finally:
                flat.mode.put_back()
                if failure is not None:
                    flat.regions.mark(failure)
                flat.regions.forget()
                tree.learn(flat.recorder.attributes, flat.recorder.fields, flat.recorder.sites)
        if isinstance(failure, (errors.DrawsOperand, errors.Moved)) and not operands:
            operands = True
            continue
        if saved.keeps_from_now_on() or numbers.calls.new() or tree.knows_now(failure):
            continue
        if isinstance(failure, errors.FillsCache):
            break
        if isinstance(failure, (errors.Moved, errors.ChangesAround)) and not looking:
            looking = True  # which submodule has done it?
            continue
        if failure is None and changes.are_to_be_found(flat.checkpoints, flat.changes()):
            continue
        if not _adopts(tree, flat, failure, second):
            break
        second = True
    if failure is not None:
        try:
            raise failure
        finally:
            failure = None  # its traceback knows this frame: nothing would be freed
    return flat, graph, outputs


def _adopts(tree: Tree, flat: _Flat, failure: BaseException | None, second: bool) -> bool:
    """Is the module to be traced once more, as tensors that forward has from elsewhere become inputs? ``second``: it is
    for the second time."""
    known = len(tree.outside)
    stopped = failure is not None and _AT_OUTSIDE in str(failure)  # it has not met all of them
    may_be_met = tree.adopt(flat.mode.outside.values(), second and not stopped)
    return (stopped and known < len(tree.outside) < MOST_OUTSIDE_TENSORS) or (may_be_met and not second)


def _simplify(graph: TracedGraph, flat: _Flat, tree: Tree) -> None:
    """Inlines scripted functions, and turns writes through views into operators without effects.

    Raises NotTraceable.
    """
    flat.regions.check_apart()
    autograd_functions.settle(graph, flat.regions.calls, CALL)
    jit_pass_inline(graph)
    jit_pass_lower_all_tuples(graph)
    jit_pass_dce(graph)
    waits = {i for i, node in enumerate(flat.regions.nodes) if (node.kind, node.name) == ("collective", WAIT)}
    wait_late(graph, CALL, waits)
    try:
        check_written(graph)
        without_view_writes(graph)
    except NotTraceable as error:
        error.submodule = path_in(error.__dict__.pop("node").scopeName(), tree.modules)
        raise
    results = list(graph.outputs())
    for write in flat.writes:
        if write.output is not None and not write.replaces and results[write.output].node().kind() == "prim::Param":
            raise NotTraceable(f"forward changes {write.target.kind} {write.target.key} in a way that is not traced")


# --- the module that is traced ----------------------------------------------------------------------------------------


class _Flat(nn.Module):
    """Flat tensors in, flat tensors out; its state is every tensor of the user's module, by our names."""

    def __init__(
        self, forward: Callable, module: nn.Module, tree: Tree, arguments: pytree.Structure, regions: Regions,
        operands: bool, changes: OfCheckpoints,
    ) -> None:  # fmt: skip
        """``operands``: numbers that Python draws are operands."""
        super().__init__()
        self.regions, self.chance = regions, Chance(self._drawn if operands else None)
        regions.entered, regions.left = self._entered, self._left
        regions.made = lambda tensors: self.mode.know(tensors)
        regions.runs, regions.ran = self.chance.check, self.chance.go_on
        self.model = module  # a child only for the scopes in node names
        self.training = module.training
        self.call, self.tree, self.arguments = forward, tree, arguments
        self.copies: dict[str, torch.Tensor] = {}
        self.counters: dict[str, torch.Tensor] = {}  # attributes that are numbers
        self.arrays = GivenArrays(regions.node)
        self.given: dict[str, tuple[Slot, torch.Tensor, int]] = {}  # parameters, and their versions
        self.settled: list[tuple[Slot, Any]] = []
        self.refilled: list[Slot] = []  # attributes in which forward changes something
        self.resized = tree.resized_tensors()[0]
        self.looks = False  # at what each submodule does, to find the one that is to blame
        self.effects: SideEffects | None = None
        self.filled, self.own, self.used_on, self.leaves = False, dict[int, int](), list[int](), dict[int, Source]()
        regions.begins = regions.traced = self.look
        self.exported = False  # the trace is there: its graph gets complex numbers as pairs
        self.recorder, self.mode = scalar_guards.Recorder(), TraceMode(regions.draw, regions.node, tree)
        self.collectives = Collectives(regions.node, self.mode.write)
        self.checkpoints = Checkpoints(tree, regions, self.chance, self.mode, changes.looked_for)

    def state_dict(  # type: ignore[override]  # torch has overloads
        self, *args: Any, destination: dict | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict:
        destination = {} if destination is None else destination
        pairs: dict[Any, Any] = {}
        met: set[int] = set()
        for slot in self.tree.slots.values():
            tensor = slot.get() if keep_vars else slot.get().detach()
            if id(slot.get()) in met:  # it was a copy in the trace, beside the tensor that forward has from elsewhere
                tensor = tensor.detach()
            met.add(id(slot.get()))
            if self.exported and tensor.is_complex():  # the same tensor gives the same pairs
                tensor = pairs.setdefault(id(slot.get()), as_pairs(tensor))
            destination[STATE + slot.name] = tensor
        return destination

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        numbers = self.arguments.number_places()
        tensors = [t if i in numbers else copied_in_trace(t) for i, t in enumerate(given)]
        self.leaves = {id(leaf): Source("input", i) for i, leaf in enumerate(given)}
        parameters = [slot.get() for slot in self.tree.parameters]
        versions = [t._version for t in tensors]
        named = zip(self.tree.parameters, parameters, strict=True)
        self.given = {slot.name: (slot, t, version_of(t)) for slot, t in named}
        self.copies |= put_resized(self.tree, self.resized, tensors)
        self.versions = {name: (t, t._version) for name, t in self.copies.items()}
        self.recorder.fields.ran, self.recorder.checkpoints = self.chance.ran, self.checkpoints
        with self.recorder.paused():
            self._keep_contents()
            hooks, modules = self.tree.hooks.entries(), self.tree.modules.values()
            given = self.call.args if isinstance(self.call, functools.partial) else ()  # a forward that was assigned
            around = self.tree.around(modules, given)
            self.mode.around = {memory for t in around.tensors.values() if (memory := memory_of(t))}
            self.mode.keep(parameters)
            self._put_counters()
        args, kwargs = self.arguments.rebuild(tensors, traced_number, array=self.arrays.of)
        own = tensors[: len(tensors) - len(self.resized)]  # of the call
        self.attributes, tables = TensorReads(given_to(self.tree, own), self.mode.is_made), TracedTables(self.tree, own)
        self.effects = SideEffects(around, self.containers, (args, kwargs), self.arguments, own, self.regions)
        try:
            with (
                settings_left_alone(),  # its own reads are none of forward's
                self.mode.looking(tensors, parameters, self.copies.values(), self.counters.values()),
                self.chance.looking(around.values, modules), self.recorder.numbers.converting(self.recorder),
                object_reads.watched(self.recorder, around.values, self.before.values()),
                self.attributes.watched(), replaced(size_types.as_numbers(self.mode.know)),
                tables.in_place(), replaced(batched_sizes.results_told(self.mode.know)),
            ):  # fmt: skip
                result = self.call(*args, **kwargs)
            with self.recorder.paused():
                self.effects.check()
        finally:
            with self.recorder.paused():
                self.tree.caches.holders.put_back(around)
        with self.recorder.paused():
            filled = self.effects.filled()
            changed = [t._version != version for t, version in zip(tensors, versions, strict=True)]
            self._check_parameters()
            self._settle_hooks(hooks)
            forget_own(self.recorder, self.before, self.versions)
            self.sets = self._sets(self.before, self.containers, self._elsewhere(result, own), result, tables)
            if self.tree.may_fill:
                check_caches(self.tree, self.sets, self.recorder.met, self.versions, self.before, own)
            written = [i for i, flag in enumerate(changed) if flag and id(tensors[i]) not in self.mode.moved]
            value = *([] if filled is None else [filled]), result, [slot.get() for slot in self.sets]
            used_on = self.effects.used_on(result, filled is not None, value[-1])
            outputs = self._results(value, tensors, parameters, written)
            settle_refilled(self.refilled, self.before, self.tree.attributes.refilled, self.mode.uses_left(outputs))
            self.used_on = [i for i, t in enumerate(outputs) if id(t) in used_on]
            outputs += self._writes(tensors, changed)
            for read in (self.recorder.of(SIZE), self.recorder.of(DATA)):
                outputs += [vector([r.tensor for r in read if r.tensor is not None])] if read else []
            outputs += self.regions.tokens
        if not outputs:
            raise NotTraceable(NOTHING)
        return tuple(outputs)

    def changes(self) -> list[Any]:
        """What forward has changed of the module and its arguments."""
        return [*self.sets, *self.settled, *self.writes, *([self.filled] if self.filled else [])]

    def _keep_contents(self) -> None:
        """Of the module, as they are when forward begins."""
        self.before, self.containers = contents(self.tree), containers(self.tree)
        self.recorder.began = {id(kept.container): kept.then for kept in self.containers}
        held = {id(tensor) for tensor in self.copies.values()}
        self.mode.left = {id(t) for kept in self.containers for t in tensors_in(kept.then) if id(t) not in held}

    def _drawn(self, function: Callable, args: tuple, kwargs: dict[str, Any], between: Any) -> Any:
        """What Python or NumPy draw in every run; a number lies ``between`` these, if that is known."""
        return drawn_values.draw(functools.partial(self.regions.node, "draw"), function, args, kwargs, between)

    def _put_counters(self) -> None:
        for slot in self.tree.counters:
            attributes = self.tree.modules[slot.name.rpartition(".")[0]].__dict__
            number: Any = symbolic_numbers.traced(self.counters[slot.name])
            attributes[slot.key] = self.before[slot.name.rpartition(".")[0]].attributes[str(slot.key)] = number

    def look(self) -> None:
        """A submodule has been traced: raises NotTraceable for what a graph cannot repeat."""
        if self.looks:
            self.chance.check()
            self._check_parameters()
        if self.effects is not None and self.looks:
            with self.recorder.paused():
                self.effects.look()

    def _check_parameters(self) -> None:
        """Raises NotTraceable for one that has been changed."""
        for slot, tensor, version in self.given.values():
            if slot.find() is not tensor or version_of(tensor) != version:
                text = f"forward {CHANGES_PARAMETER} {slot.name}"
                if slot.find() is tensor and not tensor.requires_grad:
                    raise errors.WritesParameter(text, tensor)
                may_set_up(self.tree, text)
                raise errors.ChangesAround(text)

    def _entered(self, path: str) -> HeldBefore:
        """PyTorch is about to run an opaque submodule."""
        held = {slot.name: slot.find() for slot in self.tree.others}
        versions = {name: (t, version_of(t)) for name, t in held.items() if isinstance(t, torch.Tensor)}
        changes = CHANGES_PARAMETER in self.regions.opaque.modules.get(path, "")
        inside = {id(p) for p in self.tree.modules[path].parameters()} if changes else set()
        parameters = [
            (slot, t, version_of(t), memory_of(t), TensorMemory(t) if id(t) in inside else None)
            for slot, t, _ in self.given.values()
        ]  # fmt: skip
        return HeldBefore(contents(self.tree), containers(self.tree), versions, parameters)

    def _left(self, before: HeldBefore, node: Node, outputs: list[torch.Tensor]) -> None:
        """It has run. What it changed of the module it will change by itself; for the graph these tensors are results
        of its node. Where they carry a gradient the graph's take their place."""
        now = contents(self.tree)
        for path, then in before.contents.items():
            for holder, key in then.changed(now[path]):
                value = Slot(path, holder, key).find()
                if isinstance(value, nn.Parameter):
                    raise NotTraceable(f"{node.name}, which PyTorch would run inside the graph, sets a parameter")
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    node.sets.append(Slot(path_of(path, key), holder, key))
                    outputs.append(value)
                else:
                    self.before[path].take(now[path], holder, key)
        self._put_back_parameters(before, node)
        for i, kept in enumerate(self.containers):
            if any(entered.container is kept.container and entered.changed() for entered in before.containers):
                self.containers[i] = type(kept)(kept.container)
                self.regions.altered.append(kept.container)
        check_unchanged(self.tree.held, self.versions, f"{node.name}, which PyTorch would run inside the graph,")
        for slot in self.tree.others:
            (tensor, version), value = before.versions.get(slot.name, (None, 0)), slot.find()
            if not isinstance(value, torch.Tensor) or (value is tensor and version_of(value) == version):
                continue
            original, count = self.versions[slot.name]
            if tensor is not original or version != count:
                raise NotTraceable(f"{node.name}, which PyTorch would run inside the graph, changes {slot.name} again")
            self.versions[slot.name] = value, version_of(value)
            if not value.requires_grad:
                node.sets.append(slot)
                outputs.append(value)

    def _put_back_parameters(self, before: HeldBefore, node: Node) -> None:
        """Those that a submodule has changed in place, which it does to the module's own in every run."""
        for slot, tensor, version, memory, copy in before.parameters:
            if version_of(tensor) == version and memory_of(tensor) == memory:
                continue
            text = f"{node.name} {CHANGES_PARAMETER} {slot.name}"
            if copy is None:
                with blaming(node.name):
                    raise NotTraceable(text)
            copy.put_back()
            node.writes.append(slot)
            node.breaks = node.breaks or text
            self.given[slot.name] = slot, tensor, version_of(tensor)

    def _results(
        self, result: Any, tensors: Sequence, parameters: Sequence, changed: Iterable[int]
    ) -> list[torch.Tensor]:  # fmt: skip
        """``changed``: the inputs that it changes in place."""
        assert self.effects is not None
        self.filled, held = len(result) == 3, self.effects.held
        leaves, self.result, self.own = pytree.flatten_filled(result, held)
        inside = pytree.flatten_filled(result[0], held)[1] if self.filled else None
        if inside is not None and inside.objects:
            raise NotTraceable("forward puts an object without tensors into an argument")
        if any(hasattr(type(value), "to_local") for value in result[-1]) or (inside and SPLIT in inside.tokens):
            raise NotTraceable("forward keeps a DTensor, which a graph does not make")
        known = {id(t): Source("input", i) for i, t in enumerate(tensors)}
        known |= {id(t): Source("state", slot.name) for slot, t in zip(self.tree.parameters, parameters, strict=True)}
        known |= {id(t): Source("state", name) for name, t in self.copies.items()}
        self.sources: list[Source] = []
        outputs: list[torch.Tensor] = []
        for tensor in leaves:
            number = symbolic_numbers.stands_for_one(tensor) or (id(tensor) not in known and is_number(tensor))
            if id(tensor) not in known or (number and known[id(tensor)].kind != "number"):
                marks = () if id(tensor) in known else set_by_forward(tensor)
                known[id(tensor)] = Source("number" if number else "graph", len(outputs), marks)
                outputs.append(tensor)
            self.sources.append(known[id(tensor)])
        #: Outputs behind those of the result, which forward writes into inputs; autograd knows these writes.
        self.carried = {i: len(outputs) + n for n, i in enumerate(i for i in changed if tensors[i].requires_grad)}
        outputs += [tensors[i] for i in self.carried]
        self.requires_grad = [t.requires_grad for t in outputs]
        known |= self.leaves
        reached = [leaves_of([t], self.regions) for t in outputs]
        self.reaches = [frozenset(known[key].key for key in found if key in known) for found in reached]
        if any(t.requires_grad and t.is_leaf for t in outputs):
            raise NotTraceable(
                "forward gives away a tensor that is to have a gradient of its own (requires_grad_(), "
                "requires_grad=True), which only PyTorch's autograd gives it"
            )
        held = [(known[id(t)], t) for t in (*tensors, *parameters, *self.copies.values())]
        others = [((source.kind, source.key), t) for source, t in held]
        with eagerly(), DisableTorchFunction():
            found = sightings(outputs, others)
        self.views = {s.key: found[s.key] for s in self.sources if s.kind == "graph" and s.key in found}
        return outputs

    def _elsewhere(self, result: Any, tensors: Sequence[torch.Tensor]) -> set[int]:
        """The ids of tensors that are an input, in the result, or in a place of the module when forward begins: where
        forward sets an attribute to one, it is that very tensor."""
        held = [*self.copies.values(), *(tensor for _, tensor, _ in self.given.values())]
        return {id(t) for t in (*tensors, *held, *pytree.flatten(result, results=True)[0])}

    def _sets(
        self, before: dict[str, Contents], kept: list[Items], elsewhere: set[int], result: Any, tables: TracedTables
    ) -> list[Slot]:  # fmt: skip
        """The attributes that forward set, and those by which it knows that it has put hooks on submodules. New
        contents of buffers and plain tensors are no such, but for tensors that are ``elsewhere``, too."""
        found, inside = [], []
        others = {(id(slot.holder), slot.key) for slot in self.tree.others}
        now = contents(self.tree)
        for path, then in before.items():
            for holder, key in then.changed(now[path]):
                slot = Slot(path_of(path, key), holder, key)
                value = slot.find()
                new = isinstance(value, torch.Tensor) and (id(holder), key) in others and not value.requires_grad
                if new and (id(value) not in elsewhere or value is self.copies.get(path_of(path, key))):
                    continue
                if value is then.attributes.get(key) and not isinstance(value, torch.Tensor):
                    inside.append((slot, self.recorder.attributes.get((id(then.module), key)), path))
                elif self.settled and holder is then.module.__dict__ and not then.attributes.get(key) and value is True:
                    self.settled.append((slot, value))
                else:
                    with blaming(path):
                        self._check_set(path, slot, then, value)
                    found.append(slot)
        if inside:
            with blaming(inside[0][-1]):
                items, settled = changed_items(inside, kept, result, tables.learn)
            found += items
            self.settled += settled
            self.refilled = [slot for slot, _, _ in inside] if items else []
        return found

    def _settle_hooks(self, before: dict[tuple[str, str], Items]) -> None:
        """Hooks that forward puts on submodules, once."""
        for (path, name), kept in before.items():
            hooks, then = kept.container, kept.then
            if any(hooks.get(key) is not hook for key, hook in then.items()):
                raise NotTraceable(f"forward removes a hook from {path}")
            for key, hook in hooks.items():
                if key not in then:
                    if not path or name != "_forward_hooks" or self.tree.hooks.reach_of(hook) is None:
                        raise NotTraceable(f"forward puts a hook on {path}, which a graph would not call")
                    self.settled.append((Slot(f"a hook on {path}", hooks, key), hook))

    def _check_set(self, path: str, slot: Slot, then: Contents, value: Any) -> None:
        """Can it be done again by setting a value like this one?"""
        module, key = then.module, str(slot.key)
        place = self.recorder.attributes.get((id(module), key))
        if slot.holder is not module.__dict__ and slot.holder is not module._buffers or key not in slot.holder:
            raise NotTraceable(f"forward adds or removes {slot.name}")
        if slot.holder is module._buffers and key not in then.inner["_buffers"]:
            raise NotTraceable(f"forward registers the buffer {slot.name}")
        if place is not None and type(value) in _COUNTERS and type(value) is type(then.attributes.get(key)):
            text = f"{place} reads the attribute {slot.name}, which forward sets to another value"
            raise errors.CountsAttribute(text, path, key) if type(value) in (int, float) else NotTraceable(text)
        check_value(f"the attribute {slot.name}", value)

    def _writes(self, tensors: Sequence, changed: Sequence[bool]) -> list[torch.Tensor]:
        """New contents of the inputs, buffers and plain tensors that forward changed."""
        self.writes: list[Any] = []
        outputs: list[torch.Tensor] = []
        moved = self.mode.moved

        def add(target: Any, tensor: torch.Tensor, replaces: Any) -> None:
            if tensor.requires_grad:
                raise NotTraceable(
                    f"forward changes {target.kind} {target.key} in place; the result carries a gradient"
                )
            value = get_value_trace(tensor)
            given = not replaces and value.node().kind() == "prim::Param"
            own = given and any(use.user.kind() in _NORMALIZING for use in value.uses())
            output = None if own else len(self.requires_grad) + len(outputs)
            self.writes.append(Write(target, output, replaces, id(tensor) in moved))
            outputs.extend([] if own else [tensor])

        for i, tensor in enumerate(tensors):
            if i in self.carried:
                self.writes.append(Write(Source("input", i), self.carried[i], False, carries=True))
            elif (changed[i] or id(tensor) in moved) and i < len(tensors) - len(self.resized):
                add(Source("input", i), tensor, False)
        for slot in self.tree.others:
            (copy, version), now = self.versions[slot.name], slot.find()
            if any(slot.holder is each.holder and slot.key == each.key for each in self.sets):
                continue
            if now is not copy and slot in self.tree.written:
                raise NotTraceable(f"forward puts another parameter in the place of {slot.name}")
            if now is not copy or version_of(copy) != version or id(now) in moved:
                add(Source("state", slot.name), now, now is not copy)
        check_unchanged(self.tree.held, self.versions, "forward", moved)
        self.arrays.check(tensors, self.sources, self.views, self.writes)
        return outputs
