"""Sizes near 2^31, 2^62 and 2^63 in models: the shape that exact arithmetic gives, or a sentence with the node's name.

A size that wraps around looks right. Nothing is run here: a plan is made, or refused."""

import math

import pytest
from onnx import TensorProto, helper

from ortmodule import Error, _core
from tests.ops.harness import make_node

SIZES = [n + d for n in (2**31, 2**32, 2**47, 2**62, 2**63) for d in (-1, 0, 1) if n + d < 2**63]
SIGNED = [*SIZES, *(-n for n in SIZES), -(2**63)]
REFUSED = (Error, ValueError, TypeError, MemoryError)


def plan(nodes, constants=(), shape=(1,), names=("y",)):
    """The output's shape, planned for a float32 ``x`` of ``shape``; the node that is looked at is named "target"."""
    graph = helper.make_graph(
        [make_node(op, ins.split(), outs.split(), dict(rest[0]) if rest else {}) for op, ins, outs, *rest in nodes],
        "sizes",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(shape))],
        [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in names],
        initializer=[
            helper.make_tensor(name, kind, dims, values) for name, (kind, dims, values) in dict(constants).items()
        ],
    )
    for node in graph.node:
        node.name = "target" if node.output[0] == names[0] else f"before_{node.output[0]}"
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    made = _core.Model(model.SerializeToString()).plan([("float32", tuple(shape))], [False], [False] * len(names))
    return made.outputs[0][1]


def ints(*values, scalar=False):
    return TensorProto.INT64, [] if scalar else [len(values)], list(values)


def floats(*values):
    return TensorProto.FLOAT, [len(values)], list(values)


def exactly(nodes, expected, constants=(), shape=(1,)):
    """The plan has the shape ``expected``; or is refused by a sentence with a node's name."""
    try:
        found = plan(nodes, constants, shape)
    except REFUSED as refusal:
        assert "target" in str(refusal) or "before_" in str(refusal), str(refusal)
    else:
        assert expected is not None, f"nothing has refused this; its shape is {found}"
        assert found == tuple(expected)


def windows(size, kernel, pads, dilation, stride):
    """Windows along an axis; None where there is none, or a number is none."""
    if min(kernel, dilation, stride) < 1 or pads < 0:
        return None
    room = size + 2 * pads - dilation * (kernel - 1) - 1
    return room // stride + 1 if room >= 0 else None


def cases(s):
    """{name: (nodes, the exact shape or None, constants, shape of x)}"""
    n = {"s": ints(s)}
    expand = ("Expand", "x s", "a")
    window = {"dilations": [1], "strides": [1], "pads": [0, 0]}
    valid = s >= 0
    found = {
        "Expand": ([("Expand", "x s", "y")], [s] if valid else None, n),
        "Expand twice": ([("Expand", "x s", "y")], [s, s] if valid else None, {"s": ints(s, s)}),
        "ConstantOfShape": ([("ConstantOfShape", "s", "y")], [s] if valid else None, n),
        "ConstantOfShape twice": ([("ConstantOfShape", "s", "y")], [s, s] if valid else None, {"s": ints(s, s)}),
        "Tile": ([("Tile", "x s", "y")], [s] if valid else None, n),
        "Tile again": ([expand, ("Tile", "a s", "y")], [s * s] if valid else None, n),
        "Tile a row": ([("Tile", "x s", "y")], [2, 3 * s] if valid else None, {"s": ints(1, s)}, (2, 3)),
        "Pad": ([("Pad", "x s", "y")], [1 + 2 * s] if valid else None, {"s": ints(s, s)}),
        "Pad from one side": ([("Pad", "x s", "y")], [1], {"s": ints(s, -s)} if s > -(2**63) else {"s": ints(0, 0)}),
        "Pad reflect": ([("Pad", "x s", "y", {"mode": "reflect"})], [3 + s] if valid and s < 3 else None,
                        {"s": ints(s, 0)}, (3,)),
        "Pad edges": ([("Pad", "x s", "y", {"mode": "edge"})], [2 + 2 * s] * 2 if valid else None,
                      {"s": ints(s, s, s, s)}, (2, 2)),
        "Concat": ([expand, ("Concat", "a a a", "y", {"axis": 0})], [3 * s] if valid else None, n),
        "OneHot": ([("OneHot", "i s v", "y")], [2, s] if valid else None,
                   {"i": ints(0, 1), "v": floats(0, 1), **n}),
        "Range": ([("Range", "o s d", "y")], [max(s, 0)],
                  {"o": ints(0, scalar=True), "s": ints(s, scalar=True), "d": ints(1, scalar=True)}),
        "Range down": ([("Range", "o s d", "y")], [max(-s + 5, 0)],
                       {"o": ints(5, scalar=True), "s": ints(s, scalar=True), "d": ints(-1, scalar=True)}),
        "Range far": ([("Range", "o s d", "y")], [len(range(-(2**63), s, 2**62))],
                      {"o": ints(-(2**63), scalar=True), "s": ints(s, scalar=True), "d": ints(2**62, scalar=True)}),
        "Range step": ([("Range", "o e s", "y")], [len(range(0, 7, s))],
                       {"o": ints(0, scalar=True), "e": ints(7, scalar=True), "s": ints(s, scalar=True)}),
        "Reshape": ([("Reshape", "x s", "y")], None, n),
        "Reshape of nothing": ([("Reshape", "x s", "y", {"allowzero": 1})], [s, 0] if valid else None,
                               {"s": ints(s, 0)}, (0,)),
        "Reshape to a square": ([("Reshape", "x s", "y", {"allowzero": 1})], None, {"s": ints(s, s)}, (0,)),
        "Reshape to what is left": ([expand, ("Reshape", "a t", "y")], [s // 8, 8] if valid and s % 8 == 0 else None,
                                    {"t": ints(-1, 8), **n}),
        "Flatten": ([expand, ("Flatten", "a", "y", {"axis": 1})], [s, s] if valid else None, {"s": ints(s, s)}),
        "Gather": ([expand, ("ConstantOfShape", "s", "i", {"value": helper.make_tensor("v", TensorProto.INT64, [1],
                                                                                     [0])}),
                    ("Gather", "b i", "y", {"axis": 0})], [s, s] if valid else None, {"t": ints(1, s), **n}),
        "broadcast": ([("Expand", "x s", "a"), ("Expand", "x t", "b"), ("Add", "a b", "y")],
                      [s, s] if valid else None, {"s": ints(s, 1), "t": ints(1, s)}),
        "Where": ([("Expand", "x s", "a"), ("Expand", "x t", "b"), ("Less", "a b", "c"), ("Where", "c a b", "y")],
                  [s, s] if valid else None, {"s": ints(s, 1), "t": ints(1, s)}),
        "MatMul": ([("Expand", "x s", "a"), ("Expand", "x t", "b"), ("MatMul", "a b", "y")],
                   [s, s] if valid else None, {"s": ints(s, 1), "t": ints(1, s)}),
        "Einsum": ([("Expand", "x s", "a"), ("Einsum", "a a", "y", {"equation": "i,j->ij"})],
                   [s, s] if valid else None, n),
        "Slice start": ([("Slice", "x s e a", "y")], [len(range(7)[s:5])],
                        {"e": ints(5), "a": ints(0), **n}, (7,)),
        "Slice end": ([("Slice", "x b s a", "y")], [len(range(7)[1:s])], {"b": ints(1), "a": ints(0), **n}, (7,)),
        "Slice step": ([("Slice", "x b e a s", "y")], [len(range(7)[5:-8 if s < 0 else 7:s])],
                       {"b": ints(5), "e": ints(-8 if s < 0 else 7), "a": ints(0), **n}, (7,)),
        "Split": ([("Split", "x s", "y z", {"axis": 0})], None, {"s": ints(s, min(4 - s, 2**63 - 1))}, (4,)),
        "Resize": ([("Resize", "x none none s", "y")], [s] if valid else None, {"none": floats(), **n}),
        "Resize by a factor": ([("Resize", "x none s", "y")], [s] if valid else None,
                               {"none": floats(), "s": floats(float(s))}),
        "Upsampled rows": ([("Resize", "x none none s", "y", {"mode": "linear"})], [s, s] if valid else None,
                           {"none": floats(), "s": ints(s, s)}, (2, 2)),
        "TopK": ([("TopK", "x s", "y z")], None, n),
        "EyeLike": ([("EyeLike", "x", "y", {"k": s})], [2, 2], {}, (2, 2)),
        "Trilu": ([("Trilu", "x s", "y")], [2, 2], {"s": ints(s, scalar=True)}, (2, 2)),
        "Unsqueeze": ([("Unsqueeze", "x s", "y")], None, n),
        "Transpose": ([("Transpose", "x", "y", {"perm": [s]})], None),
        "DepthToSpace": ([("DepthToSpace", "x", "y", {"blocksize": s})], None, {}, (1, 4, 2, 2)),
        "DepthToSpace of nothing": ([("DepthToSpace", "x", "y", {"blocksize": s})],
                                    [1, 0, 2 * s, 2 * s] if valid else None, {}, (1, 0, 2, 2)),
        "SpaceToDepth": ([("SpaceToDepth", "x", "y", {"blocksize": s})], None, {}, (1, 1, 2, 2)),
        "RandomNormal": ([("RandomNormal", "", "y", {"shape": [s, s]})], [s, s] if valid else None),
        "CumSum": ([("CumSum", "x s", "y")], None, {"s": ints(s, scalar=True)}),
        "ReduceSum": ([expand, ("ReduceSum", "a z", "y", {"keepdims": 0})], [s] if valid else None,
                      {"s": ints(4, s), "z": ints(0)}),
        "GlobalAveragePool": ([expand, ("GlobalAveragePool", "a", "y")], [1, s, 1, 1] if valid else None,
                              {"s": ints(1, s, s, s)}),
    }  # fmt: skip
    found["Gather"] = (
        [expand, ("Expand", "i0 s", "i"), ("Expand", "x t", "b"), ("Gather", "b i", "y", {"axis": 0})],
        [s, s] if valid else None,
        {"i0": ints(0), "t": ints(1, s), **n},
    )
    for key, at in (("pads", (s, s)), ("dilations", (s,)), ("strides", (s,))):
        attributes = {**window, key: list(at)}
        pads, dilation, stride = attributes["pads"][0], attributes["dilations"][0], attributes["strides"][0]
        out = windows(8, 3, pads, dilation, stride)
        shape = None if out is None else [1, 1, out]
        w = {"w": (TensorProto.FLOAT, [1, 1, 3], [0.0] * 3)}
        found[f"Conv {key}"] = ([("Conv", "x w", "y", attributes)], shape, w, (1, 1, 8))
        for pool in ("MaxPool", "AveragePool"):
            kernel = {"kernel_shape": [3], **attributes}
            if pool == "AveragePool" and key == "dilations":
                kernel = {k: v for k, v in kernel.items() if k != "pads"}
            found[f"{pool} {key}"] = ([(pool, "x", "y", kernel)], shape if key != "pads" else False, {}, (1, 1, 8))
    big = {"kernel_shape": [s]}
    found["MaxPool kernel"] = ([("MaxPool", "x", "y", big)], None, {}, (1, 1, 8))
    w = {"w": (TensorProto.FLOAT, [1, 1, 3], [0.0] * 3)}
    for key in ("strides", "dilations", "output_padding", "output_shape"):
        stride, dilation, extra = (s if key == name else d for name, d in
                                   (("strides", 1), ("dilations", 1), ("output_padding", 0)))  # fmt: skip
        size = s if key == "output_shape" else 7 * stride + dilation * 2 + 1 + extra
        found[f"ConvTranspose {key}"] = (
            [("ConvTranspose", "x w", "y", {key: [s]})],
            [1, 1, size] if s > 0 else None,
            w,
            (1, 1, 8),
        )
    return found


@pytest.mark.parametrize("name", cases(2**31))
def test_shapes_are_exact_or_refused(name):
    for size in SIGNED:
        nodes, expected, *rest = cases(size)[name]
        if expected is False:  # how padding of a window is limited is not said here
            try:
                found = plan(nodes, *rest)
            except REFUSED as refusal:
                assert "target" in str(refusal), str(refusal)
            else:
                assert found[-1] == windows(8, 3, size, 1, 1), size
            continue
        exactly(nodes, expected, *rest)


def test_a_sum_of_many_sizes():
    """2^17 operands of 2^46 elements are 2^63, and of 2^47 elements 2^64, which is 0 in 64 bits."""
    for each in (2**46, 2**47):
        nodes = [("Expand", "x s", "a"), ("Concat", " ".join(["a"] * 2**17), "y", {"axis": 0})]
        exactly(nodes, [each * 2**17], {"s": ints(each)})


def test_workspaces_that_do_not_fit():
    """Columns of a convolution whose image and weights are views of one number: 2^16 channels times 2^30 taps, over
    2^30 pixels."""
    constants = {"s": ints(1, 2**16, 2**31 - 1), "t": ints(2, 2**16, 2**30)}
    nodes = [("Expand", "x s", "a"), ("Expand", "x t", "w"), ("Conv", "a w", "y")]
    with pytest.raises(MemoryError, match="(target|before_w)"):
        plan(nodes, constants)


def test_a_result_that_no_machine_holds_is_named():
    with pytest.raises(MemoryError, match=r"a run takes \d+ bytes; .*; the largest: \w+ \((a|target)\) with"):
        plan([("Expand", "x s", "a"), ("Tanh", "a", "y")], {"s": ints(2**46)})


def claims(share):
    """(nodes, constants, shape of x) of tiny models whose results have that share of all memory."""
    floats_in_all = _core.memory_limits()["most"] // 4
    n = int(floats_in_all * share)
    side = math.isqrt(n)
    return {
        "Expand": ([("Expand", "x s", "a"), ("Tanh", "a", "y")], {"s": ints(n)}),
        "ConstantOfShape": ([("ConstantOfShape", "s", "y")], {"s": ints(n)}),
        "Pad by two axes": ([("Pad", "x s", "y")], {"s": ints(*[side // 2] * 4)}, (1, 1)),
        "Pad edges": ([("Pad", "x s", "y", {"mode": "edge"})], {"s": ints(*[side // 2] * 4)}, (2, 2)),
        "Tile": ([("Tile", "x s", "y")], {"s": ints(side, side)}, (1, 1)),
        "OneHot": ([("Expand", "i s", "a"), ("OneHot", "a d v", "y")],
                   {"i": ints(0), "s": ints(n // 2**12), "d": ints(2**12), "v": floats(0, 1)}),
        "Resize": ([("Resize", "x none none s", "y", {"mode": "linear"})],
                   {"none": floats(), "s": ints(side, side)}, (2, 2)),
        "Resize down": ([("Expand", "x s", "a"), ("Tanh", "a", "b"), ("Resize", "b none f", "y",
                                                               {"mode": "linear", "antialias": 1})],
                        {"none": floats(), "f": floats(1e-7), "s": ints(n)}),
        "Range": ([("Range", "o n d", "y")], {"o": ints(0, scalar=True), "n": ints(n, scalar=True),
                                              "d": ints(1, scalar=True)}),
        "MatMul": ([("Expand", "x s", "a"), ("Expand", "x t", "b"), ("MatMul", "a b", "y")],
                   {"s": ints(side, 1), "t": ints(1, side)}),
        "folded": ([("ConstantOfShape", "s", "a"), ("Add", "a a", "b"), ("Mul", "b x", "y")], {"s": ints(n)}),
    }  # fmt: skip


@pytest.mark.parametrize("name", claims(1))
def test_tiny_models_that_claim_more_than_there_is(name):
    """Twice all memory is refused when the plan is made, with the node; the process goes on."""
    nodes, constants, *shape = claims(2)[name]
    with pytest.raises(MemoryError, match=r"out of memory[\s\S]*(target|before_)"):
        plan(nodes, constants, *shape)
    assert plan([("Tanh", "x", "y")]) == (1,)


def test_a_factor_of_a_ten_millionth_costs_what_its_operand_has():
    """Windows of 20 million taps over 4 elements have 4."""
    constants = {"none": floats(), "f": floats(1e-7), "s": ints(1)}
    resized = {"mode": "cubic", "antialias": 1}
    model = [("Resize", "x none f", "y", resized)]
    assert plan(model, constants, (4,)) == (0,)
