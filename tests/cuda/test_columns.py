"""Sums of columns (kernels/reduce.cu), eight neighbours at a time, on the emulated GPU."""

import onnx
import pytest
import torch

from ortmodule import _core
from ortmodule.engine.session import Session
from tests.cuda.test_emulated import driver  # noqa: F401  (a fixture)
from tests.ops.harness import ONNX_TYPE, dtype_name

pytestmark = pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed")

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
#: Columns: fewer than a piece, one, more than a warp's; more than a block's; no whole pieces.
WIDTHS = [3, 8, 40, 72, 264, 515]


def column_totals(x):
    """As the kernels add up: eight lanes of each part of the rows in float32 or float64, then float64."""
    rows, parts = x.shape[0], max(1, min(64, x.shape[0] // 64))
    wide = x if x.dtype == torch.float64 else x.float()
    total = torch.zeros(x.shape[1], dtype=torch.float64)
    for part in range(parts):
        begin, end = rows * part // parts, rows * (part + 1) // parts
        lanes = torch.zeros(8, x.shape[1], dtype=wide.dtype)
        for row in range(begin, end):
            lanes[(row - begin) % 8] += wide[row]
        partial = torch.zeros(x.shape[1], dtype=torch.float64)
        for lane in lanes:
            partial += lane.double()
        total += partial
    return total.to(wide.dtype).to(x.dtype)


def reduced(x):
    """The engine's sum over rows."""
    info, axes = onnx.helper.make_tensor_value_info, onnx.numpy_helper.from_array(torch.tensor([0]).numpy(), "axes")
    node = onnx.helper.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=0)
    operands, results = [info("x", ONNX_TYPE[x.dtype], ["a", "b"])], [info("y", ONNX_TYPE[x.dtype], None)]
    graph = onnx.helper.make_graph([node], "g", operands, results, [axes])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=8)
    return Session(model.SerializeToString()).run([x], [False]).outputs[0]


@pytest.mark.parametrize("dtype", TYPES, ids=dtype_name)
@pytest.mark.parametrize("place", [0, 1])
def test_columns(driver, dtype, place):  # noqa: F811
    """The bits of sums in the documented order, from any address."""
    generator = torch.Generator().manual_seed(0)
    for width in WIDTHS:
        x = torch.randn(place + 203 * width, generator=generator).to(dtype)[place:].view(203, width)
        assert torch.equal(reduced(x), column_totals(x)), width
