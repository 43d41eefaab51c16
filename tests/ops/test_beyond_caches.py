"""Results larger than caches are written past them where their rows begin with a cache line, or as usual."""

import onnx
import pytest
import torch
from torch import nn

from ortmodule import ORTModule
from ortmodule.engine.session import DTYPES, Run, Session
from tests.ops.harness import DEVICE, ONNX_TYPE, make_node

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="of the CPU's kernels")

BEYOND = 33 << 20  # bytes
#: (..., rows, columns) before the last two axes trade places; rows of what comes out are whole lines, or not.
SHAPES = {"whole lines": (1024, -1), "parts of lines": (1000, -1), "odd rows": (1023, -1), "planes": (3, 128, -1)}


def numbers(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-100, 100, shape, generator=generator, dtype=torch.int8).to(dtype)


def result_of(graph, tensors):
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=8)
    specs = tuple((DTYPES[t.dtype], tuple(t.shape)) for t in tensors)
    plan = Session(model.SerializeToString()).plan(specs, (False,) * len(tensors))
    run = Run(plan, tensors, 0)
    arena = torch.empty(plan.arena_bytes, dtype=torch.uint8) if plan.arena_bytes else None
    plan.forward(arena, tensors, run.outputs, [], 0)
    return run.outputs[0]


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_transpose(shape, dtype):
    *given, _ = shape
    x = numbers((*given, BEYOND // dtype.itemsize // torch.Size(given).numel() + 5), dtype)
    perm = [*range(x.dim() - 2), x.dim() - 1, x.dim() - 2]
    graph = onnx.helper.make_graph(
        [make_node("Transpose", ["x"], ["y"], {"perm": perm})],
        "transpose",
        [onnx.helper.make_tensor_value_info("x", ONNX_TYPE[dtype], list(x.shape))],
        [onnx.ValueInfoProto(name="y")],
    )
    assert torch.equal(result_of(graph, [x]), x.permute(perm))


class Pointwise(nn.Module):
    """One operator, a chain with two results, and one whose result may take the place of its operand."""

    def forward(self, x, y):
        both = x * y
        return x + y, both, (both - x).abs(), (x + 3).abs_().neg_()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("more", [0, 1029])
def test_pointwise(more, dtype):
    """Threads begin inside of a line, and the last one is not whole."""
    size = BEYOND // dtype.itemsize // 3 + more
    x, y = (numbers((3, size), dtype).roll(k, -1).requires_grad_() for k in (0, 1))
    module = Pointwise()
    model = ORTModule(module)
    for ours, theirs in zip(model(x, y), module(x, y), strict=True):
        assert torch.equal(ours, theirs)
    loss = [sum((r.float() * k).sum() for k, r in enumerate(f(x, y))) for f in (model, module)]
    for ours, theirs in zip(*(torch.autograd.grad(each, (x, y)) for each in loss), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [1024, 769, 5])
def test_rows_of_a_table(width, dtype):
    """Rows that begin anywhere, taken in any order."""
    table, count = numbers((1000, width), dtype), BEYOND // dtype.itemsize // width + 3
    indices = torch.randint(-1000, 1000, (count,), generator=torch.Generator().manual_seed(0))
    graph = onnx.helper.make_graph(
        [make_node("Gather", ["x", "i"], ["y"], {"axis": 0})],
        "rows",
        [
            onnx.helper.make_tensor_value_info("x", ONNX_TYPE[dtype], list(table.shape)),
            onnx.helper.make_tensor_value_info("i", ONNX_TYPE[torch.int64], [count]),
        ],
        [onnx.ValueInfoProto(name="y")],
    )
    assert torch.equal(result_of(graph, [table, indices]), table[indices])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [448, 452], ids=["whole lines", "parts of lines"])
def test_gradient_of_an_embedding(width, dtype):
    """Some rows are taken often, most once or never; what was never taken has a gradient of 0."""
    rows, generator = BEYOND // dtype.itemsize // width + 3, torch.Generator().manual_seed(0)
    indices = torch.cat([torch.randint(rows, (2000,), generator=generator), torch.tensor([0, rows - 1] * 50)])
    dy = torch.randn(len(indices), width, generator=generator).to(dtype)
    model = ORTModule(nn.Embedding(rows, width, dtype=dtype))
    model(indices).backward(dy)
    expected = torch.zeros(rows, width).index_add(0, indices, dy.float()).to(dtype)
    torch.testing.assert_close(model.weight.grad, expected, rtol=0, atol=0 if dtype == torch.bfloat16 else 1e-5)
