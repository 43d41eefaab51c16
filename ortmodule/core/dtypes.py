"""Maps element types of torch to those of the engine."""

import onnx
import torch

from ortmodule.core.torch_private import TensorType, TracedValue

DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "bool",
}

#: The numbers that ONNX has for them.
ONNX_TYPES = {
    dtype: onnx.TensorProto.DataType.Value(name.upper()) for dtype, name in DTYPES.items() if "float" not in name
}
ONNX_TYPES |= {torch.float32: onnx.TensorProto.FLOAT, torch.float64: onnx.TensorProto.DOUBLE}
ONNX_TYPES |= {torch.bfloat16: onnx.TensorProto.BFLOAT16, torch.float16: onnx.TensorProto.FLOAT16}
ONNX_TYPES |= {torch.complex64: onnx.TensorProto.COMPLEX64, torch.complex128: onnx.TensorProto.COMPLEX128}

#: The other way round, of those that the engine has.
TORCH_TYPES = {ONNX_TYPES[dtype]: dtype for dtype in DTYPES}

#: Complex numbers are pairs of these in a graph.
REAL_TYPES = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def as_pairs(tensor: torch.Tensor) -> torch.Tensor:
    """What a graph is given for a tensor: ``float[..., 2]`` for ``complex[...]``, others as they are."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Have both the same type, shape and elements?"""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def is_tensor(value: TracedValue) -> bool:
    """Is a value of a trace's graph a tensor?"""
    return isinstance(value.type(), TensorType)


def is_complex(value: TracedValue) -> bool:
    """Does a trace's graph have complex numbers there?"""
    dtype = dtype_of(value)
    return dtype is not None and dtype.is_complex


def dtype_of(value: TracedValue) -> torch.dtype | None:
    """The type of a tensor's elements in a trace's graph. None: it is no tensor, or of no known type."""
    kind = value.type()
    return kind.dtype() if isinstance(kind, TensorType) else None
