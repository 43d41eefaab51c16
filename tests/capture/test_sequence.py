"""A graph is a sequence of items, alike where they do the same to the same operands, whatever their names."""

import numpy
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortmodule.capture.loops.sequence import NODE, OPERAND, PART, READ, RESULT, Literal, Ref, alike, sequence
from ortmodule.capture.numbers.read_causes import SIZE
from ortmodule.capture.scalar_guards import Read
from ortmodule.core.errors import Unrepeatable


def model(*nodes, outputs=("y",), initializers=()):
    values = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in names] for names in (["x"], outputs)]
    return helper.make_model(helper.make_graph(nodes, "g", *values, initializer=initializers))


def constant(name, *values):
    return numpy_helper.from_array(numpy.array(values, numpy.float32), name)


NODES = [
    helper.make_node("Relu", ["x"], ["a"]),
    helper.make_node("Split", ["a"], ["p", "q"], axis=0),
    helper.make_node("Concat", ["q", "p", "c"], ["y"], axis=0),
]


def test_items():
    items = sequence(model(*NODES, initializers=[constant("c", 1, 2)]), [Read(None, 3.0, SIZE, "a.py:1")])
    assert [item.what for item in items] == [NODE, NODE, PART, PART, OPERAND, OPERAND, OPERAND, NODE, RESULT, READ]
    assert items[0].operands == ["x"] and items[1].operands == [Ref(0, 0)]
    assert items[4].operands == [Ref(3, 0)] and isinstance(items[6].operands[0], Literal)
    assert items[8].operands == [Ref(7, 0)] and items[9].operands[0].value == 3.0


def renamed(prefix):
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in NODES]
    for node in nodes:
        for values in (node.input, node.output):
            values[:] = [value if value in ("x", "y") else prefix + value for value in values]
    return model(*nodes, initializers=[constant(f"{prefix}c", 1, 2)])


def test_names_do_not_count():
    one, other = sequence(renamed("a"), []), sequence(renamed("b"), [])
    assert alike(one, other) and not alike(one, other[:-1])


@pytest.mark.parametrize(
    "nodes, initializers",
    [
        (NODES, [constant("c", 1, 3)]),
        ([NODES[0], NODES[1], helper.make_node("Concat", ["p", "q", "c"], ["y"], axis=0)], None),
        ([NODES[0], NODES[1], helper.make_node("Concat", ["q", "p", "c"], ["y"], axis=1)], None),
        ([helper.make_node("Elu", ["x"], ["a"]), *NODES[1:]], None),
    ],
    ids=["a constant", "operands", "an attribute", "an operator"],
)
def test_what_counts(nodes, initializers):
    first = sequence(model(*NODES, initializers=[constant("c", 1, 2)]), [])
    assert not alike(first, sequence(model(*nodes, initializers=initializers or [constant("c", 1, 2)]), []))


def test_constants_are_alike_to_the_bit():
    literal = Literal(TensorProto.FLOAT, numpy.array([1.5, -0.0], numpy.float32))
    assert literal.same(Literal(TensorProto.FLOAT, literal.value.copy()))
    assert not literal.same(Literal(TensorProto.FLOAT, numpy.array([1.5, 0.0], numpy.float32)))


@pytest.mark.parametrize(
    "node, why",
    [
        (helper.make_node("Relu", ["nowhere"], ["y"]), "nowhere is from nowhere"),
        (helper.make_node("Constant", [], ["y"], value_float=1.0), "the constant y is no tensor"),
        (helper.make_node("If", ["x"], ["y"], "branch", then_branch=helper.make_graph([], "g", [], [])), "a graph"),
    ],
)
def test_what_repeats_not(node, why):
    with pytest.raises(Unrepeatable, match=why):
        sequence(model(node), [])
