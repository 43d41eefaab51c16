"""Cuts an exported graph into pieces at its breaks: submodules that PyTorch runs between them, and values.

Piece k has the nodes between break k - 1 and break k, in the order of the trace. What it uses of earlier pieces, and of
breaks, are inputs of it; what later ones use are outputs. Sizes, constants and what follows from the caller's integers
(positions, masks) are computed again by each piece that uses them: they cost little, and passes look for them. A cut
behind a value has a break that does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field

import onnx

from ortmodule.core.names import INPUT, STATE
from ortmodule.core.onnx_utils import OF_SIZES, RANDOM, attributes


@dataclass
class Break:
    """A node that PyTorch runs between two pieces; the number is -1 where nothing runs. Names are those of the whole
    graph."""

    number: int
    operands: list[str]
    outputs: list[str]
    dead: list[str] = field(default_factory=list)  # values that nothing behind it uses


@dataclass
class Piece:
    """``inputs`` and ``outputs``: names of the whole graph; those of parameters and buffers are no ``inputs``."""

    nodes: list[onnx.NodeProto]
    inputs: list[str]
    outputs: list[str]
    calls: list[tuple[int, str]]  # nodes that PyTorch runs inside of it, and their first outputs, which are kept
    dead: list[str] = field(default_factory=list)

    def model(self, whole: onnx.ModelProto, outputs: Sequence[str]) -> onnx.ModelProto:
        """The piece as a model, with these outputs; its inputs are numbered as :attr:`inputs`."""
        part = onnx.ModelProto()
        part.CopyFrom(whole)
        graph, names = part.graph, {name: f"{INPUT}{i}" for i, name in enumerate(self.inputs)}
        del graph.node[:], graph.output[:], graph.value_info[:], graph.input[:]
        graph.node.extend(self.nodes)
        _rename(graph, names)
        # An output that is an input would have two names.
        for name in outputs:
            if name in names:
                graph.node.append(onnx.helper.make_node("Identity", [names[name]], [name]))
        used = {name for node in graph.node for name in node.input}
        given = {value.name: value for value in whole.graph.input}
        for name, new in names.items():
            if name in given:
                graph.input.add().CopyFrom(given[name])
                graph.input[-1].name = new
            else:
                graph.input.append(onnx.ValueInfoProto(name=new))
        graph.input.extend(value for name, value in given.items() if name.startswith(STATE) and name in used)
        graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
        kept = [proto for proto in graph.initializer if proto.name in used]
        del graph.initializer[:]
        graph.initializer.extend(kept)
        return part


@dataclass
class _Places:
    """Where each value is computed: the number of a step, pieces and breaks in turn."""

    step: dict[str, int]
    producer: dict[str, onnx.NodeProto]
    free: set[str]  # values that each piece computes by itself


def cut(
    model: onnx.ModelProto, numbers: Set[int], kept: Iterable[str], integers: Iterable[str], fed: Set[str],
    behind: Set[str] = frozenset(),
) -> tuple[list[Piece | Break], Callable[[str], int]]:  # fmt: skip
    """The steps of a run, pieces and breaks in turn, and a function that says behind which of them a value is there.

    ``numbers``: of the nodes that are breaks; ``kept``: the outputs that are wanted; ``integers``: inputs that hold
    integers which forward does not change; ``fed``: parameters and buffers that are values of the run, as forward or
    an island puts others in their places. ``behind``: values at which the graph is cut, too.
    """
    groups: list[list[onnx.NodeProto]] = [[]]
    for node in model.graph.node:
        if node.op_type == "PythonOp" and attributes(node)["number"] in numbers:
            groups += [[node], []]
        else:
            groups[-1].append(node)
            if not behind.isdisjoint(node.output):
                groups += [[], []]
    places = _places(model, groups, integers)
    steps: list[Piece | Break] = []
    wanted: list[dict[str, None]] = [{} for _ in groups]  # as ordered sets
    initial = {value.name for value in model.graph.initializer}

    def want(name: str) -> None:
        if name in places.step:
            wanted[places.step[name]][name] = None

    for name in kept:
        want(name)
    for i in range(len(groups) - 1, -1, -1):
        if i % 2 and not groups[i]:
            steps.append(Break(-1, [], []))
        elif i % 2:
            (node,) = groups[i]
            given = attributes(node)
            operands = list(node.input[: given["given"]])
            steps.append(Break(given["number"], operands, list(node.output[1:])))
            for name in operands:
                want(name)
        else:
            piece = _piece(groups[i], list(wanted[i]), i, places, initial, fed)
            for name in piece.inputs:
                want(name)
            steps.append(piece)
    steps.reverse()
    _note_dead(steps, set(kept))
    return steps, lambda name: places.step.get(name, -1)


def _places(model: onnx.ModelProto, groups: Sequence[Sequence[onnx.NodeProto]], integers: Iterable[str]) -> _Places:
    places = _Places({}, {}, free_values(model, integers))
    for i, nodes in enumerate(groups):
        for node in nodes:
            for name in node.output:
                places.step[name], places.producer[name] = i, node
    return places


def free_values(model: onnx.ModelProto, integers: Iterable[str]) -> set[str]:
    """The values that follow from sizes, constants and these inputs alone."""
    free = {value.name for value in model.graph.initializer} | set(integers) | {""}
    for node in model.graph.node:
        alike = node.op_type not in RANDOM and node.op_type != "PythonOp"
        if alike and (node.op_type in OF_SIZES or free.issuperset(used_by(node))):
            free.update(node.output)
    return free


def _piece(
    own: Sequence[onnx.NodeProto], outputs: list[str], number: int, places: _Places, initial: set[str], fed: Set[str]
) -> Piece:
    calls = [(attributes(node)["number"], node.output[0]) for node in own if node.op_type == "PythonOp"]
    waiting = [*outputs, *(name for _, name in calls)]
    seen: set[str] = set()
    inputs: dict[str, None] = {}
    taken: set[int] = set()
    while waiting:
        name = waiting.pop()
        if name in seen or name in initial or not name:
            continue
        seen.add(name)
        producer = places.producer.get(name)
        if producer is not None and (places.step[name] == number or name in places.free):
            if id(producer) not in taken:
                taken.add(id(producer))
                waiting += used_by(producer)
        elif not name.startswith(STATE) or name in fed:
            inputs[name] = None
    order = dict.fromkeys(id(node) for node in places.producer.values())
    by_id = {id(node): node for node in places.producer.values()}
    nodes = [by_id[key] for key in order if key in taken]
    return Piece(nodes, sorted(inputs), outputs, calls)


def used_by(node: onnx.NodeProto) -> Iterator[str]:
    """The values that a node uses, those in the graphs inside of it among them."""
    yield from node.input
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            made = {name for inner in graph.node for name in inner.output} | {v.name for v in graph.input}
            made |= {value.name for value in graph.initializer}
            for inner in graph.node:
                yield from (name for name in used_by(inner) if name not in made)


def _rename(graph: onnx.GraphProto, names: dict[str, str]) -> None:
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                _rename(inner, names)


def _note_dead(steps: Sequence[Piece | Break], kept: set[str]) -> None:
    """Says of each step which values are used by it, or made, and not behind it."""
    alive = set(kept)
    for step in reversed(steps):
        used = step.operands if isinstance(step, Break) else step.inputs
        step.dead = sorted({name for name in (*used, *step.outputs) if name not in alive})
        alive.update(used)
