"""Chains of pointwise operators on the emulated GPU: bit for bit what the operators give one by one."""

import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ortmodule import _core
from ortmodule.engine.session import Session
from tests.ops.harness import ONNX_TYPE

pytestmark = pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed")

UNARY = ["Neg", "Abs", "Relu", "Sigmoid", "Tanh", "Exp", "Sqrt", "Erf", "Softplus", "HardSwish", "Floor", "Elu"]
BINARY = ["Add", "Sub", "Mul", "Div", "Max", "Min", "PRelu"]
TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
#: Of the operands: all of a result, rows, columns, one number.
SHAPES = [lambda m, n: (m, n), lambda m, n: (n,), lambda m, n: (m, 1), lambda m, n: ()]


@st.composite
def chains(draw, sizes=((1, 3, 7, 33), (1, 2, 5, 64, 129))):
    """Rows of nodes over x0, x1, ...: the first operand is whole; a Transpose gives one of them strides."""
    dtype = draw(st.sampled_from(TYPES))
    m, n = (draw(st.sampled_from(each)) for each in sizes)
    shapes = [(m, n)] + [draw(st.sampled_from(SHAPES))(m, n) for _ in range(draw(st.integers(0, 3)))]
    names = [f"x{i}" for i in range(len(shapes))]
    rows = []
    if draw(st.booleans()):
        shapes.append((n, m))
        rows.append(("Transpose", f"x{len(names)}", "turned", {"perm": [1, 0]}))
        names.append("turned")
    whole = ["x0"]
    for i in range(draw(st.integers(2, 9))):
        made = f"v{i}"
        kind = draw(st.sampled_from(["unary", "binary", "where", "dropout"]))
        first, second = draw(st.sampled_from(whole)), draw(st.sampled_from(names))
        if kind == "unary":
            rows.append((draw(st.sampled_from(UNARY)), first, made, {}))
        elif kind == "binary":
            rows.append((draw(st.sampled_from(BINARY)), f"{first} {second}", made, {}))
        elif kind == "where":
            rows += [
                ("Less", f"{first} {second}", f"c{i}", {}),
                ("Where", f"c{i} {first} {second}", made, {}),
            ]
        else:
            rows.append(("Dropout", f"{first} ratio mode", made, {}))
        whole.append(made)
        names.append(made)
    outputs = {whole[-1], draw(st.sampled_from(whole[1:]))}
    return dtype, shapes, rows, sorted(outputs)


def model(dtype, shapes, rows, outputs):
    nodes = [onnx.helper.make_node(op, ins.split(), outs.split(), **attrs) for op, ins, outs, attrs in rows]
    info = onnx.helper.make_tensor_value_info
    inputs = [info(f"x{i}", ONNX_TYPE[dtype], [f"x{i}_{d}" for d in range(len(s))]) for i, s in enumerate(shapes)]
    constants = [
        onnx.helper.make_tensor("ratio", onnx.TensorProto.FLOAT, [], [0.4]),
        onnx.helper.make_tensor("mode", onnx.TensorProto.BOOL, [], [True]),
    ]
    results = [info(name, ONNX_TYPE[dtype], ["m", "n"]) for name in outputs]
    graph = onnx.helper.make_graph(nodes, "chain", inputs, results, initializer=constants)
    return onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=8
    ).SerializeToString()


def step(made, tensors, without, wants=None):
    """Results and gradients, as bits; the names of the operators that ran. ``wants``: which operands have gradients."""
    session = Session(made, without)
    run = session.run(tensors, wants or [True] * len(tensors), [True] * len(session.outputs), seed=12345)
    generator = torch.Generator().manual_seed(1)
    dy = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in run.outputs]
    results = list(run.outputs)
    text = run.plan.text()
    results += [x for x in run.backward(dy) if x is not None]
    return [x.contiguous().reshape(-1).view(torch.uint8) for x in results], text


def check_bits(made, tensors):
    """Chains give what the operators give one by one. A chain adds gradients up in an order of its own, which
    tests/cuda/test_chain_folds.py looks at: such gradients are not asked for."""
    wants = None
    together, text = step(made, tensors, [])
    if "FusedReduce" in text:
        wants = [x.numel() == tensors[0].numel() for x in tensors]
        together, text = step(made, tensors, [], wants)
        assert "FusedReduce" not in text
    alone, text = step(made, tensors, ["pointwise_fusion"], wants)
    assert "Fused" not in text
    assert len(alone) == len(together)
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other)


@settings(max_examples=60, deadline=None)
@given(chain=chains())
def test_bits_are_those_of_single_operators(chain):
    dtype, shapes, *_ = chain
    generator = torch.Generator().manual_seed(0)
    check_bits(model(*chain), [torch.randn(shape, generator=generator).to(dtype) for shape in shapes])


def test_chains_are_made():
    rows = [("Tanh", "x0", "v0", {}), ("Add", "v0 x0", "v1", {})]
    _, text = step(model(torch.float32, [(3, 5)], rows, ["v1"]), [torch.randn(3, 5)], [])
    assert "Fused(" in text, text
