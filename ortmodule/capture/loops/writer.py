"""Writes the graph of one length: the steps of a loop, as many as there are.

As bytes: a message of protobuf for each of thousands of nodes would take longer than everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import onnx

from ortmodule.capture.loops.sequence import NODE, OPERAND, PART, RESULT, Item, Literal
from ortmodule.capture.loops.steps import Affine, Formula, Number, Result, Section, constant_at


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    found.append(number)
    return bytes(found)


def _field(tag: int, content: bytes) -> bytes:
    return bytes((tag << 3 | 2,)) + _varint(len(content)) + content


_INPUT, _OUTPUT, _NODE_NAME, _NODE_IN_GRAPH, _GRAPH_IN_MODEL = 1, 2, 3, 1, 7


def _head(item: Item, name: str) -> bytes:
    """A node without its operands and results."""
    assert item.node is not None
    rest = onnx.NodeProto()
    rest.CopyFrom(item.node)
    del rest.input[:], rest.output[:]
    rest.name = name
    return rest.SerializeToString()


def name_of(section: Section, item: int, port: int, step: int) -> str:
    name = section.names[item][port]
    return f"{name}@{step:05d}" if section.repeats and name else name


def operand_name(sections: list[Section], each: Formula, i: int, n: int, writer: Writer) -> str:
    if isinstance(each, str):
        return each
    if isinstance(each, Result):
        return name_of(sections[each.section], each.item, each.port, each.step.at(i, n))
    return writer.constant(constant_at(each, i, n))


class StepWriter:
    """Writes the steps of a loop by filling a number into the bytes of one."""

    def __init__(self, sections: list[Section], section: Section) -> None:
        assert section.rest is not None
        self.numbers: list[Affine | Formula] = []  # to fill in: of a step, or the name of a constant
        parts, content = [], b""
        for q, (item, operands) in enumerate(zip(section.items, section.rest.operands, strict=True)):
            content += b"".join(self._part(_INPUT, *self._operand(sections, each)) for each in operands)
            if item.what == NODE:
                assert item.node is not None
                content += self._part(_NODE_NAME, item.node.name + "@", Affine(0, 1)) + _escaped(_head(item, ""))
            for name in section.names[q]:
                content += self._part(_OUTPUT, name + "@", Affine(0, 1)) if name else self._part(_OUTPUT, "", None)
            following = section.items[q + 1].what if q + 1 < len(section.items) else ""
            if item.what != OPERAND and following != PART:
                length = len(content.replace(b"%05d", b"00000").replace(b"%%", b"%"))
                parts.append(bytes((_NODE_IN_GRAPH << 3 | 2,)) + _escaped(_varint(length)) + content)
                content = b""
        self.text = b"".join(parts)

    def _operand(self, sections: list[Section], each: Formula) -> tuple[str, Affine | Formula | None]:
        if isinstance(each, str):
            return each, None
        if not isinstance(each, Result):
            return "constant@", each
        name = sections[each.section].names[each.item][each.port]
        return (name + "@", each.step) if sections[each.section].repeats else (name, None)

    def _part(self, tag: int, name: str, number: Affine | Formula | None) -> bytes:
        text = name.encode()
        if number is not None:
            self.numbers.append(number)
        size = len(text) + (5 if number is not None else 0)
        return (
            bytes((tag << 3 | 2,)) + _escaped(_varint(size)) + _escaped(text) + (b"%05d" if number is not None else b"")
        )


def _escaped(text: bytes) -> bytes:
    return text.replace(b"%", b"%%")


@lru_cache(maxsize=256)
def _constant_node(kind: int, shape: tuple[int, ...], size: int) -> tuple[bytes, bytes]:
    """The bytes of a Constant node before its elements, which are ``size`` bytes, with places for its number, and those
    behind them."""
    name = "constant@00000"
    value = onnx.TensorProto(data_type=kind, dims=shape, raw_data=bytes(size))
    node = onnx.NodeProto(op_type="Constant", output=[name], name=name)
    node.attribute.append(onnx.helper.make_attribute("value", value))
    behind = onnx.AttributeProto(type=onnx.AttributeProto.TENSOR).SerializeToString()
    text = _field(_NODE_IN_GRAPH, node.SerializeToString())
    before = text.removesuffix(bytes(size) + behind)
    assert len(before) == len(text) - size - len(behind), "fields come in the order of their numbers"
    return _escaped(before).replace(name.encode(), b"constant@%05d"), behind


class Writer:
    """The bytes of one graph."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._nodes: list[bytes] = []
        self._constants: dict[tuple, int] = {}
        self._constant_nodes: list[bytes] = []
        self._operands: list[str] = []  # of the next node with many
        self._open: tuple[bytes, list[str]] | None = None  # a node whose parts follow
        self._results: list[str] = []

    def _constant_number(self, kind: int, shape: tuple[int, ...], elements: bytes) -> int:
        key = (kind, shape, elements)
        number = self._constants.get(key)
        if number is None:
            number = self._constants[key] = len(self._constants)
            before, behind = _constant_node(kind, shape, len(elements))
            self._constant_nodes.append(before % (number, number) + elements + behind)
        return number

    def _literal_number(self, literal: Literal) -> int:
        return self._constant_number(literal.kind, literal.value.shape, literal.value.tobytes())

    def constant(self, literal: Literal) -> str:
        return f"constant@{self._literal_number(literal):05d}"

    def steps(self, fast: StepWriter, numbers: range) -> None:
        self._close()
        n = self.n
        columns: list[Sequence[int]] = []
        for each in fast.numbers:
            if isinstance(each, Affine):
                columns.append(each.of(numbers, n))
            elif isinstance(each, Literal):
                columns.append([self._literal_number(each)] * len(numbers))
            elif isinstance(each, Number):
                columns.append([self._constant_number(each.kind, each.shape, e) for e in each.bytes_of(numbers, n)])
            else:
                columns.append([self._literal_number(constant_at(each, i, n)) for i in numbers])
        self._nodes += [fast.text % row for row in zip(*columns, strict=True)]

    def add(self, item: Item, operands: list[str], outputs: list[str]) -> None:
        if item.what == PART:
            assert self._open is not None
            self._open[1].extend(outputs)
            return
        self._close()
        if item.what == OPERAND:
            self._operands += operands
        elif item.what == RESULT:
            self._results += operands
        elif item.what == NODE:
            assert item.node is not None
            step = outputs[0].rpartition("@")[2] if outputs and "@" in outputs[0] else ""
            head = _head(item, f"{item.node.name}@{step}" if step else item.node.name)
            given, self._operands = self._operands + operands, []
            self._open = b"".join(_field(_INPUT, name.encode()) for name in given) + head, outputs

    def _close(self) -> None:
        if self._open is not None:
            node, outputs = self._open
            node += b"".join(_field(_OUTPUT, name.encode()) for name in outputs)
            self._nodes.append(_field(_NODE_IN_GRAPH, node))
            self._open = None

    def finished(self, around: onnx.ModelProto) -> onnx.ModelProto:
        self._close()
        model = onnx.ModelProto()
        model.CopyFrom(around)
        for value, name in zip(model.graph.output, self._results, strict=True):
            value.name = name
        graph = model.graph.SerializeToString()
        model.ClearField("graph")
        nodes = b"".join((*self._constant_nodes, *self._nodes))
        return onnx.load_model_from_string(model.SerializeToString() + _field(_GRAPH_IN_MODEL, nodes + graph))


def without_nodes(model: onnx.ModelProto, like: onnx.ModelProto) -> onnx.ModelProto:
    """What is around the nodes, without sizes that are others in ``like``."""
    around = onnx.ModelProto()
    around.CopyFrom(model)
    for field_name in ("node", "value_info", "initializer"):
        around.graph.ClearField(field_name)
    for value in around.graph.output:
        value.type.tensor_type.ClearField("shape")
    for value, other in zip(around.graph.input, like.graph.input, strict=True):
        dims = zip(value.type.tensor_type.shape.dim, other.type.tensor_type.shape.dim, strict=True)
        for d, (dim, different) in enumerate(dims):
            if dim.HasField("dim_value") and dim != different:
                dim.dim_param = f"{value.name}/{d}"
    return around
