"""Operands whose elements lie further apart than 32 bits count: views of memory that is there only by its addresses."""

import mmap

import onnx
import pytest
import torch

from ortmodule.engine.session import Session
from tests.ops.harness import DEVICE, ONNX_TYPE, make_node, value_info

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU has no memory that is not there"),
]

APART = (1 << 29) + 3  # elements between two columns: rows are 2^33 bytes of float32 apart, and more
ROWS, COLUMNS = 5, 4


@pytest.fixture(scope="module")
def stored():
    """(ROWS, COLUMNS * APART) of float32, of which zeros cost nothing."""
    size = ROWS * COLUMNS * APART * 4
    try:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000))
    except OSError as error:
        pytest.skip(f"no addresses for {size} bytes: {error}")
    x = torch.frombuffer(memory, dtype=torch.float32).view(ROWS, COLUMNS * APART)
    x[:, ::APART] = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    return x


SLICE = ("Slice", "x start end axis step", "v", {})
AS = {"start": [0], "end": [COLUMNS * APART], "axis": [1], "step": [APART]}
W = torch.linspace(-1, 1, COLUMNS * 3).view(COLUMNS, 3)

#: What is done with v, the columns that are there: (rows of nodes, what PyTorch does).
USES = {
    "copy": ([("Transpose", "v", "y", {"perm": [1, 0]})], lambda v, w: v.t()),
    "pointwise": ([("Exp", "v", "a", {}), ("Mul", "a v", "y", {})], lambda v, w: v.exp() * v),
    "softmax": ([("Softmax", "v", "y", {"axis": 1})], lambda v, w: v.softmax(1)),
    "softmax of columns": ([("Softmax", "v", "y", {"axis": 0})], lambda v, w: v.softmax(0)),
    "sum": ([("ReduceSum", "v", "y", {"keepdims": 0})], lambda v, w: v.sum()),
    "cumulative sum": ([("CumSum", "v axis", "y", {})], lambda v, w: v.cumsum(1)),
    "product": ([("MatMul", "v w", "y", {})], lambda v, w: v @ w),
    "gather": ([("Gather", "v three", "y", {"axis": 1})], lambda v, w: v[:, [3, 0]]),
    "concat": ([("Concat", "v v", "y", {"axis": 1})], lambda v, w: torch.cat([v, v], 1)),
    "where": ([("Less", "v zero", "c", {}), ("Where", "c zero v", "y", {})], lambda v, w: v.relu()),
}


def run(rows, x, ref, constants):
    y = ref(x, W)
    inputs, fed = [value_info("x", x)], [x]
    if any("w" in row[1].split() for row in rows):
        inputs, fed = [*inputs, value_info("w", W)], [x, W]
    graph = onnx.helper.make_graph(
        [make_node(op, ins.split(), outs.split(), attrs) for op, ins, outs, attrs in rows],
        "huge",
        inputs,
        [value_info("y", y)],
        initializer=[onnx.helper.make_tensor(n, ONNX_TYPE[t.dtype], t.shape, t.tolist()) for n, t in constants.items()],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=8)
    session = Session(model.SerializeToString())
    needs = [False, True][: len(fed)]
    found = session.run(fed, needs, [True])
    torch.testing.assert_close(found.outputs[0], y.contiguous())
    if len(fed) > 1:
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
        v = x[:, ::APART]
        torch.testing.assert_close(found.backward([dy])[1], v.t() @ dy)
    plan = next(iter(session.plans.values()))
    assert plan.arena_bytes < 1 << 20, "the operand itself was copied"


@pytest.mark.parametrize("use", USES)
def test_huge_strides(stored, use):
    rows, ref = USES[use]
    constants = {name: torch.tensor(numbers) for name, numbers in AS.items()}
    constants |= {"three": torch.tensor([3, 0]), "zero": torch.tensor([0.0])}
    if use == "cumulative sum":
        constants["axis"] = torch.tensor([1])
    run([SLICE, *rows], stored, lambda x, w: ref(x[:, ::APART], w), constants)


def test_huge_indices(stored):
    """Elements that are asked for by where they are."""
    flat = stored.view(-1)
    places = [0, APART, (COLUMNS * ROWS - 1) * APART, COLUMNS * APART, 17, -1]
    constants = {"places": torch.tensor(places)}
    run([("Gather", "x places", "y", {"axis": 0})], flat, lambda x, w: x[places], constants)
    run([("GatherElements", "x places", "y", {"axis": 0})], flat, lambda x, w: x[places], constants)
