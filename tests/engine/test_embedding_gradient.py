"""The gradient of an embedding: blocks of columns depend on the number of threads, results do not."""

import pytest
import torch
from onnx import TensorProto, helper

from ortmodule.engine.session import Session

KINDS = {torch.float32: TensorProto.FLOAT, torch.bfloat16: TensorProto.BFLOAT16}


def gradient(table, ids, dy):
    inputs = [
        helper.make_tensor_value_info("table", KINDS[table.dtype], list(table.shape)),
        helper.make_tensor_value_info("ids", TensorProto.INT64, list(ids.shape)),
    ]
    outputs = [helper.make_tensor_value_info("y", KINDS[table.dtype], None)]
    graph = helper.make_graph([helper.make_node("Gather", ["table", "ids"], ["y"])], "g", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]).SerializeToString()
    return Session(model).run([table, ids], [True, False], [True]).backward([dy])[0]


@pytest.mark.parametrize("width", [1, 63, 65, 200, 768, 1500, 2100])
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_any_width_and_number_of_threads(dtype, width):
    torch.manual_seed(width)
    table = torch.randn(300, width).to(dtype)
    ids = torch.randint(300, (400,))
    ids[::3] = 7  # one row is hit often, some never
    dy = torch.randn(400, width).to(dtype)
    exact = torch.zeros(300, width, dtype=torch.float64).index_add_(0, ids, dy.double())
    threads, found = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            found.append(gradient(table, ids, dy))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-8, "atol": 1e-4}
    torch.testing.assert_close(found[0].double(), exact, **tolerance)
