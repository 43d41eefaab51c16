"""Where a graph is cut: what crosses, what each piece computes by itself, what is let go."""

from onnx import TensorProto, helper

from ortmodule.lowering.cuts.graph_cuts import Break, Piece, cut


def model(*nodes, inputs=("input/0", "input/1", "state/w")):
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in inputs]
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in nodes[-1].output]
    return helper.make_model(helper.make_graph(list(nodes), "graph", given, made))


def island(number, operand, output):
    attributes = {"number": number, "given": 1, "domain": "ortmodule"}
    return helper.make_node("PythonOp", [operand, "state/w"], [f"token{number}", output], **attributes)


def steps_of(made, breaks, integers=(), fed=frozenset()):
    kept = [made.graph.output[0].name]
    return cut(made, breaks, kept, integers, fed)


def test_what_crosses():
    made = model(
        helper.make_node("MatMul", ["input/0", "state/w"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        island(0, "r", "y"),
        helper.make_node("Add", ["y", "h"], ["z"]),
    )
    (first, between, last), step_of = steps_of(made, {0})
    assert isinstance(first, Piece) and isinstance(between, Break) and isinstance(last, Piece)
    assert (first.inputs, sorted(first.outputs)) == (["input/0"], ["h", "r"])
    assert (between.operands, between.outputs) == (["r"], ["y"])
    assert (last.inputs, last.outputs) == (["h", "y"], ["z"])
    assert between.dead == ["r"] and last.dead == ["h", "y"]
    assert [step_of(name) for name in ("h", "y", "z", "input/0")] == [0, 1, 2, -1]
    part = last.model(made, last.outputs)
    assert [value.name for value in part.graph.input] == ["input/0", "input/1"]
    assert list(part.graph.node[0].input) == ["input/1", "input/0"]


def test_masks_and_sizes_are_computed_by_each_piece_and_draws_are_not():
    made = model(
        helper.make_node("Cast", ["input/1"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("RandomUniformLike", ["input/0"], ["drawn"]),
        helper.make_node("Mul", ["input/0", "mask"], ["a"]),
        helper.make_node("Mul", ["a", "drawn"], ["h"]),
        helper.make_node("Shape", ["input/0"], ["size"]),
        island(0, "h", "y"),
        helper.make_node("Mul", ["y", "mask"], ["b"]),
        helper.make_node("Mul", ["b", "drawn"], ["c"]),
        helper.make_node("Reshape", ["c", "size"], ["z"]),
    )
    (first, _, last), _ = steps_of(made, {0}, ["input/1"])
    assert sorted(first.outputs) == ["drawn", "h"]
    assert last.inputs == ["drawn", "input/0", "input/1", "y"]
    assert [node.op_type for node in last.nodes] == ["Cast", "Shape", "Mul", "Mul", "Reshape"]
    (first, _, last), _ = steps_of(made, {0})
    assert "mask" in first.outputs and "mask" in last.inputs


def test_a_node_that_is_no_break_stays_in_its_piece():
    made = model(island(0, "input/0", "a"), island(1, "a", "b"), helper.make_node("Relu", ["b"], ["z"]))
    (first, between, last), _ = steps_of(made, {1}, fed={"state/w"})
    assert first.calls == [(0, "token0")] and first.inputs == ["input/0", "state/w"] and between.number == 1
    assert last.inputs == ["b"]
