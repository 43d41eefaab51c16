"""Sums of what a chain computes, added up by its own kernel on the emulated GPU: compiled, and interpreted."""

import math

import onnx
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ortmodule import _core
from ortmodule.engine.session import Session
from tests.cuda.test_chains import chains
from tests.cuda.test_compiled_chains import nvrtc  # noqa: F401  (a fixture)
from tests.cuda.test_emulated import driver  # noqa: F401  (a fixture)
from tests.ops.harness import ONNX_TYPE, dtype_name

pytestmark = pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed")
TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
#: tanh(x y), and the same behind a dropout; what is folded is t.
CHAIN = [("Mul", "x0 x1", "p", {}), ("Tanh", "p", "t", {})]
DROPPED = [("Mul", "x0 x1", "p", {}), ("Dropout", "p ratio mode", "d", {}), ("Tanh", "d", "t", {})]


def total(axes, op="ReduceSum", of="t", name="s"):
    return (op, f"{of} {'_'.join(map(str, axes))}", name, {"keepdims": 1})


def made(kind, operands, rows, outputs):
    """The model's bytes; a name of numbers is a constant of axes."""
    info, tensor = onnx.helper.make_tensor_value_info, onnx.helper.make_tensor
    constants = [
        tensor("ratio", onnx.TensorProto.FLOAT, [], [0.4]),
        tensor("mode", onnx.TensorProto.BOOL, [], [True]),
    ]
    for axes in sorted({ins.split()[-1] for op, ins, *_ in rows if op.startswith("Reduce")}):
        numbers = [int(n) for n in axes.split("_")]
        constants.append(tensor(axes, onnx.TensorProto.INT64, [len(numbers)], numbers))
    nodes = [onnx.helper.make_node(op, ins.split(), outs.split(), **attrs) for op, ins, outs, attrs in rows]
    inputs = [info(f"x{i}", ONNX_TYPE[kind], list(x.shape)) for i, x in enumerate(operands)]
    results = [info(name, ONNX_TYPE[kind], None) for name in outputs]
    graph = onnx.helper.make_graph(nodes, "folds", inputs, results, initializer=constants)
    opset = [onnx.helper.make_opsetid("", 20)]
    return onnx.helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString()


def placed(shape, kind, moved, seed):
    """Numbers, whose memory begins ``moved`` elements behind an aligned address."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(kind)
    return torch.cat([x.new_zeros(moved), x.flatten()])[moved:].view(x.shape)


def run(model, operands, without=()):
    """Results, and the plan's text."""
    session = Session(model, list(without))
    done = session.run(operands, [False] * len(operands), [False] * len(session.outputs), seed=12345)
    return list(done.outputs), done.plan.text()


def check(kind, shapes, rows, outputs=("t", "s"), moved=0, reference=torch.sum, axes=(0,)):
    """t has the bits that it has without chains, and s is the sum of these numbers. Returns the plan's text."""
    operands = [placed(shape, kind, moved, i) for i, shape in enumerate(shapes)]
    (t, *alone), text = run(made(kind, operands, rows, ["t", *outputs]), operands, ["pointwise_fusion"])
    assert "Fused" not in text
    found, text = run(made(kind, operands, rows, outputs), operands)
    again, _ = run(made(kind, operands, rows, outputs), operands)
    expected = reference(t.double(), dim=axes, keepdim=True)
    for name, x, same in zip(outputs, found, again, strict=True):
        assert torch.equal(x, same)
        if name == "t":
            assert torch.equal(x, t)
        else:
            off = 1e-2 if kind.itemsize == 2 else 1e-5
            torch.testing.assert_close(x, expected.to(kind), atol=1e-5 * t.numel() ** 0.5, rtol=off)
    return text


#: (shape, folded axes): few columns and lanes of rows, in parts; columns between; whole rows by one thread, a warp's
#: threads, a block's, in parts; all.
PLACES = [((5, 8), (0,)), ((300, 72), (0,)), ((64, 16), (0,)), ((3, 50, 40), (1,)), ((2, 30, 4, 8), (0, 1))]
PLACES += [((5, 8), (1,)), ((70, 64), (1,)), ((33, 200), (1,)), ((3, 9000), (1,)), ((7, 4, 48), (1, 2))]
PLACES += [((64, 136), (0, 1)), ((1, 96), (0, 1))]


@pytest.mark.parametrize("moved", [0, 1])
@pytest.mark.parametrize("kind", TYPES, ids=dtype_name)
@pytest.mark.parametrize(("shape", "axes"), PLACES, ids=str)
def test_compiled(nvrtc, shape, axes, kind, moved):  # noqa: F811
    before = _core.cuda_chains()["reason"]
    text = check(kind, [shape, shape[-1:]], [*CHAIN, total(axes)], moved=moved, axes=axes)
    assert "FusedReduce(" in text and "ReduceSum(" not in text
    assert _core.cuda_chains()["reason"] == before, "a chain that is not compiled is interpreted"
    written = nvrtc.fake_nvrtc_text().decode()
    assert ("column_totals" if len(shape) - 1 not in axes else "row_total") in written


@pytest.mark.parametrize("kind", TYPES, ids=dtype_name)
@pytest.mark.parametrize(("shape", "axes"), PLACES, ids=str)
def test_interpreted(driver, shape, axes, kind):  # noqa: F811
    text = check(kind, [shape, shape[-1:]], [*CHAIN, total(axes)], axes=axes)
    assert "FusedReduce(" in text


def test_many_columns_of_few_rows(nvrtc):  # noqa: F811
    """A thread has whole columns, and writes their sums in pieces."""
    shape = (2, 1 << 19)
    assert "FusedReduce(" in check(torch.float32, [shape, shape[-1:]], [*CHAIN, total((0,), "ReduceMean")], ["s"],
                                   reference=torch.mean)  # fmt: skip


@pytest.mark.parametrize("moved", [0, 1])
@pytest.mark.parametrize("kind", TYPES, ids=dtype_name)
@pytest.mark.parametrize(("shape", "axes"), [((40, 64), (0,)), ((70, 192), (0,)), ((9, 64), (1,)), ((9, 320), (1,))])
def test_dropout(nvrtc, shape, axes, kind, moved):  # noqa: F811
    """A warp draws for elements that lie together, whatever its threads add up."""
    text = check(kind, [shape, shape[-1:]], [*DROPPED, total(axes)], moved=moved, axes=axes)
    assert "FusedReduceRandom(" in text and "ReduceSum(" not in text
    assert "kept_bits" in nvrtc.fake_nvrtc_text().decode()


@pytest.mark.parametrize("op", ["ReduceSum", "ReduceMean"])
def test_alone_and_several(nvrtc, op):  # noqa: F811
    """Totals without a result; two of a chain, of which one is wide."""
    reference = torch.mean if op == "ReduceMean" else torch.sum
    for axes in ((0,), (1,)):
        assert "results=[]" in check(torch.bfloat16, [(96, 40), (40,)], [*CHAIN, total(axes, op)], ["s"],
                                     reference=reference, axes=axes)  # fmt: skip
        more = [("Cast", "t", "w", {"to": 1}), total(axes, op, "w", "v"), ("Cast", "v", "u", {"to": 16})]
        text = check(torch.bfloat16, [(96, 40), (40,)], [*CHAIN, total(axes, op), *more], ["t", "s", "u"],
                     reference=reference, axes=axes)  # fmt: skip
        assert f'folds="{op} {op}"' in text


@pytest.mark.parametrize(
    ("shape", "row"),
    [((6, 9), total((0,))), ((6, 9), total((1,))), ((4, 8, 8), total((0, 2))), ((6, 8), total((0,), "ReduceMax"))],
)
def test_what_stays_apart(driver, shape, row):  # noqa: F811
    """Rows that are no whole pieces, axes that are no neighbours, and what is no sum."""
    axes = [int(n) for n in row[1].split()[1].split("_")]
    reference = torch.amax if row[0] == "ReduceMax" else torch.sum
    text = check(torch.float32, [shape, shape[-1:]], [*CHAIN, row], reference=reference, axes=axes)
    assert f"{row[0]}(" in text and "FusedReduce" not in text


@settings(max_examples=60, deadline=None)
@given(chain=chains(sizes=((1, 5, 40), (8, 64, 96))), data=st.data())
def test_sums_in_drawn_chains(chain, data):
    """Totals of a chain's values are no farther off than adding up these numbers may be."""
    kind, shapes, rows, outputs = chain
    (name, *_), axes = outputs, data.draw(st.sampled_from([(0,), (1,), (0, 1)]))
    operands = [placed(shape, kind, 0, i) for i, shape in enumerate(shapes)]
    of, terms = made(kind, operands, [*rows, total(axes, of=name)], ["s", name]), math.prod(shapes[0])
    (_, t), text = run(of, operands, ["pointwise_fusion"])
    assert "Fused" not in text
    (s, same), text = run(of, operands)
    torch.testing.assert_close(same, t, rtol=0, atol=0, equal_nan=True)
    assume("FusedReduce" in text)
    exact = t.double().sum(axes, keepdim=True)
    added = torch.finfo(torch.float64 if kind == torch.float64 else torch.float32).eps
    allowed = terms * added * t.double().abs().sum(axes, keepdim=True) + torch.finfo(kind).eps * exact.abs()
    known = exact.isfinite() & (allowed < torch.finfo(kind).max)  # no partial sum overflows
    assert ((s.double() - exact).abs() <= allowed)[known].all()
    assert not s[exact.isnan()].isfinite().any()
