"""Copies that transpose, of sizes that fill tiles and of sizes that leave parts of all kinds over."""

import pytest
import torch
from onnx import TensorProto, helper

from ortmodule.engine.session import Session

KINDS = {
    torch.int8: TensorProto.INT8,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.float32: TensorProto.FLOAT,
    torch.float64: TensorProto.DOUBLE,
}


@pytest.mark.parametrize("shape", [(2048, 1500), (1031, 2111), (64, 33000), (257, 255), (5, 600, 999)], ids=str)
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_the_last_two_dimensions(dtype, shape):
    torch.manual_seed(0)
    x = torch.randint(-100, 100, shape).to(dtype)
    perm = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
    info = [helper.make_tensor_value_info(name, KINDS[dtype], size) for name, size in (("x", shape), ("y", None))]
    graph = helper.make_graph([helper.make_node("Transpose", ["x"], ["y"], perm=perm)], "g", info[:1], info[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]).SerializeToString()
    assert torch.equal(Session(model).run([x], [False]).outputs[0], x.permute(perm))
