"""Casts between float32 and 16-bit floats on the emulated GPU have PyTorch's bits (kernels/pointwise.cu).

Of tensors that lie together, at any address and of any size, and of others.
"""

import itertools

import onnx
import pytest
import torch

from ortmodule import _core
from ortmodule.engine.session import Session
from tests.cuda.test_emulated import driver  # noqa: F401  (a fixture)
from tests.ops.harness import ONNX_TYPE, dtype_name

pytestmark = pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed")

TYPES = [torch.float32, torch.bfloat16, torch.float16]
PAIRS = list(itertools.permutations(TYPES, 2))
#: Less than what a thread takes, as much, more by one; more than a block.
COUNTS = [0, 1, 7, 8, 9, 2049, 5000]


def cast(x, to, perm=None):
    """The engine's cast of a matrix, transposed before if `perm` says so."""
    info = onnx.helper.make_tensor_value_info
    nodes = [] if perm is None else [onnx.helper.make_node("Transpose", ["x"], ["t"], perm=perm)]
    nodes.append(onnx.helper.make_node("Cast", ["x" if perm is None else "t"], ["y"], to=ONNX_TYPE[to]))
    operands, results = [info("x", ONNX_TYPE[x.dtype], ["a", "b"])], [info("y", ONNX_TYPE[to], None)]
    graph = onnx.helper.make_graph(nodes, "g", operands, results)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=8)
    return Session(model.SerializeToString()).run([x], [False]).outputs[0]


def numbers(count, kind):
    """Of all sizes, rounded both ways, with what is no number."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count + 8, generator=generator) * 10.0 ** torch.randint(-9, 9, (count + 8,), generator=generator)
    x[:6] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 1e-41, 65520.0])
    return x.to(kind)


@pytest.mark.parametrize(("kind", "to"), PAIRS, ids=dtype_name)
@pytest.mark.parametrize("place", [0, 1])
def test_bits(driver, kind, to, place):  # noqa: F811
    for count in COUNTS:
        x = numbers(count, kind)[place : place + count].view(1, count)
        found, expected = cast(x, to), x.to(to)
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.nan_to_num(nan=1.0), expected.nan_to_num(nan=1.0)), count


@pytest.mark.parametrize(("kind", "to"), PAIRS, ids=dtype_name)
def test_what_is_turned(driver, kind, to):  # noqa: F811
    x = torch.randn(33, 17, generator=torch.Generator().manual_seed(0)).to(kind)
    assert torch.equal(cast(x, to, [1, 0]), x.t().to(to))
