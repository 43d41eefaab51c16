"""Values that carry a gradient are found in a graph, and what those of a piece reach."""

import onnx
import pytest
from onnx import TensorProto, helper

from ortmodule.core.names import INPUT, STATE
from ortmodule.lowering.cuts.gradients import carrying, reached_by
from ortmodule.lowering.cuts.graph_cuts import Piece

X, W = f"{INPUT}0", f"{STATE}w"


def node(operator, operands, *results, **attributes):
    return helper.make_node(operator, list(operands), list(results), **attributes)


def test_what_is_computed_with_a_leaf():
    nodes = [node("Mul", (X, W), "y"), node("Shape", ("y",), "sizes"), node("Neg", (X,), "z"), node("Exp", ("y",), "e")]
    assert carrying(nodes, {W}, {}, []) == {W, "y", "e"}


def test_what_is_said_counts():
    nodes = [node("Mul", (X, W), "y"), node("Neg", (X,), "z"), node("Exp", ("z",), "e")]
    assert carrying(nodes, {W}, {"y": False, "z": True}, []) == {W, "z", "e"}


def test_nodes_that_pytorch_runs_say_it_themselves():
    nodes = [node("PythonOp", (W,), "context", "a", "b", number=0), node("Neg", ("a",), "c"), node("Neg", ("b",), "d")]
    assert carrying(nodes, {W}, {}, [(True, False)]) == {W, "a", "c"}


@pytest.mark.parametrize(
    "between, passes",
    [(node("Neg", (X,), "h"), True), (node("StopGradient", (X,), "h"), False), (node("Greater", (X, X), "h"), False),
     (node("Shape", (X,), "h"), False), (node("Cast", (X,), "h", to=TensorProto.INT64), False),
     (node("Cast", (X,), "h", to=TensorProto.FLOAT16), True), (node("TopK", (X, "k"), "h", "places"), True),
     (node("TopK", (X, "k"), "values", "h"), False)],
)  # fmt: skip
def test_what_an_output_reaches(between, passes):
    piece = Piece([between, node("Mul", ("h", W), "y"), node("Mul", ("h", f"{STATE}frozen"), "z")], [X], ["y", "z"], [])
    values = {X, "h", "y", "z", W, f"{STATE}frozen"}
    first = {0} if passes else set()
    assert reached_by(piece, values, {"w"}) == [first | {"w"}, first]
    assert reached_by(piece, values - {"h"}, {"w"}) == [{"w"}, set()]


def test_graphs_inside_of_a_node_use_values_too():
    body = helper.make_graph([node("Mul", (W, "row"), "out")], "body", [onnx.ValueInfoProto(name="row")], [])
    scan = node("Scan", (X,), "y", body=body, num_scan_inputs=1)
    assert carrying([scan], {W}, {}, []) == {W, "y"}
    assert reached_by(Piece([scan], [X], ["y"], []), {X, W, "y"}, {"w"}) == [{0, "w"}]
