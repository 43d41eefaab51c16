"""Graphs are read as they are written: attributes, constants, what draws, and what outputs depend on."""

import numpy
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from ortmodule.core import onnx_utils


def test_attributes():
    node = helper.make_node("Op", [], [], mode="wrap", axis=2, sizes=[1, 2], share=0.5)
    assert onnx_utils.attributes(node) == {"mode": "wrap", "axis": 2, "sizes": [1, 2], "share": 0.5}


@pytest.mark.parametrize("dtype", [numpy.float32, numpy.int64, numpy.bool_, numpy.float16])
def test_a_constant_is_a_tensor_of_its_own(dtype):
    values = numpy.array([[0, 1], [1, 0]], dtype)
    proto = numpy_helper.from_array(values)
    found = onnx_utils.tensor(proto)
    assert found.numpy().dtype == dtype and (found.numpy() == values).all()
    found.zero_()  # it may be written
    assert (numpy_helper.to_array(proto) == values).all()


def test_bfloat16():
    x = torch.tensor([1.0, -2.5, 3e38], dtype=torch.bfloat16)
    raw = x.view(torch.int16).numpy().tobytes()
    proto = helper.make_tensor("x", TensorProto.BFLOAT16, [3], raw, raw=True)
    assert torch.equal(onnx_utils.tensor(proto), x)


@pytest.mark.parametrize(
    "given, value",
    [
        ({"value": numpy_helper.from_array(numpy.array([1, 2]))}, torch.tensor([1, 2])),
        ({"value_float": 0.5}, torch.tensor(0.5)),
        ({"value_ints": [3, 4]}, torch.tensor([3, 4])),
        ({"value_floats": [3.0]}, torch.tensor([3.0])),
    ],
)
def test_constant_nodes(given, value):
    found = onnx_utils.constant(helper.make_node("Constant", [], ["c"], **given))
    assert found.dtype == value.dtype and torch.equal(found, value)


def test_a_constant_without_a_value():
    assert onnx_utils.constant_of({}) is None
    with pytest.raises(ValueError, match="the constant c has no value"):
        onnx_utils.constant(helper.make_node("Constant", [], ["c"]))


def model(*nodes, inputs=("x",), outputs=("y",), initializers=()):
    values = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in names] for names in (inputs, outputs)]
    return helper.make_model(helper.make_graph(nodes, "g", *values, initializer=initializers))


def test_constants_of_a_graph():
    kept = numpy_helper.from_array(numpy.array([1.0], numpy.float32), "w")
    found = onnx_utils.constants(model(helper.make_node("Constant", [], ["c"], value_int=2), initializers=[kept]))
    assert {name: value.tolist() for name, value in found.items()} == {"w": [1.0], "c": 2}


def ratio(value):
    return numpy_helper.from_array(numpy.array(value), f"r{value}")


def test_what_draws():
    ratios = [ratio(0.25), ratio(0.0), ratio(True), ratio(False)]
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Dropout", ["a", "r0.25", "rTrue"], ["b"]),
        helper.make_node("Dropout", ["a", "r0.0", "rTrue"], ["c"]),  # drops nothing
        helper.make_node("Dropout", ["a", "r0.25", "rFalse"], ["d"]),  # does not train
        helper.make_node("Dropout", ["a", "", "rTrue"], ["e"]),  # ONNX's own ratio
        helper.make_node("RandomNormal", [], ["f"], shape=[1]),
        helper.make_node("RandomNormal", [], ["g"], shape=[1], domain="other"),
    ]
    found = [(node.output[0], share) for node, share in onnx_utils.drawing(model(*nodes, initializers=ratios))]
    assert found == [("b", 0.25), ("e", 0.5), ("f", 0.0)]


def test_without_dead_nodes():
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Exp", ["a"], ["dead"]),
        helper.make_node("Split", ["a"], ["p", "q"]), helper.make_node("Neg", ["q"], ["y"]),
    ]  # fmt: skip
    whole = model(*nodes)
    left = onnx_utils.without_dead(whole)
    assert [node.op_type for node in left.graph.node] == ["Relu", "Split", "Neg"]
    assert len(whole.graph.node) == 4
