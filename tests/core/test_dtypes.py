"""Every element type of the engine has a name, an ONNX number, and the way back; complex numbers are pairs."""

import onnx
import pytest
import torch
from torch._C import parse_ir

from ortmodule import _core
from ortmodule.core import dtypes


@pytest.mark.parametrize("dtype", dtypes.DTYPES, ids=str)
def test_there_and_back(dtype):
    number = dtypes.ONNX_TYPES[dtype]
    assert dtypes.TORCH_TYPES[number] is dtype
    numpys = onnx.helper.tensor_dtype_to_np_dtype(number)
    assert numpys.itemsize == dtype.itemsize and numpys.name == dtypes.DTYPES[dtype]


@pytest.mark.parametrize("dtype", dtypes.DTYPES, ids=str)
def test_the_engine_knows_the_name(dtype):
    assert _core.empty(torch.Tensor, dtypes.DTYPES[dtype], (2, 3)).dtype is dtype


@pytest.mark.parametrize("dtype, real", dtypes.REAL_TYPES.items(), ids=str)
def test_complex_numbers_are_pairs(dtype, real):
    x = torch.randn(3, 2, dtype=dtype)
    for each in (x, x.conj()):
        pairs = dtypes.as_pairs(each)
        assert pairs.dtype is real and pairs.shape == (3, 2, 2)
        assert torch.equal(torch.view_as_complex(pairs.contiguous()), each.resolve_conj())


def test_others_stay():
    x = torch.ones(2)
    assert dtypes.as_pairs(x) is x


def test_same_tensor():
    x = torch.tensor([1.0, 2.0])
    assert dtypes.same_tensor(x, x.clone())
    others = [x.double(), x[:, None], torch.tensor([1.0, 3.0]), torch.tensor([1.0, float("nan")])]
    assert not any(dtypes.same_tensor(x, other) for other in others)


GRAPH = """
graph(%x : Float(2, 3), %z : ComplexFloat(2), %n : int, %t : Tensor):
  return (%x)
"""


def test_values_of_a_trace():
    x, z, n, t = parse_ir(GRAPH).inputs()
    assert [dtypes.dtype_of(v) for v in (x, z, n, t)] == [torch.float32, torch.complex64, None, None]
    assert [dtypes.is_tensor(v) for v in (x, z, n, t)] == [True, True, False, True]
    assert [dtypes.is_complex(v) for v in (x, z, n, t)] == [False, True, False, False]
