"""Writes and reads NumPy's numbers and arrays among arguments and results, for :mod:`ortmodule.core.pytree`.

A number is written as the Python number that it equals, beside its type, so it may become an operand as Python's do. An
array among the arguments is a tensor of its own memory: what forward does to that memory a graph does not do.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch

from ortmodule.core.errors import Unflattenable
from ortmodule.core.structures.leaves import Leaf, WholeLeaf
from ortmodule.core.structures.tokens import ARRAY

FLOATS = (numpy.float16, numpy.float32, numpy.float64)
INTEGERS = (
    numpy.int8, numpy.int16, numpy.int32, numpy.int64, numpy.uint8, numpy.uint16, numpy.uint32, numpy.uint64,
)  # fmt: skip
#: Of arrays that a graph takes.
DTYPES = frozenset(map(numpy.dtype, (*FLOATS, *INTEGERS[:5], numpy.bool_, numpy.complex64, numpy.complex128)))


class NumpyFloatLeaf(Leaf):
    """As text: NaN equals itself, and -0.0 is not 0.0."""

    @staticmethod
    def write(writer: Any, value: Any, cls: type) -> None:
        writer.tokens += (cls, value.item().hex())

    @staticmethod
    def read(reader: Any, cls: type) -> Any:
        return cls(float.fromhex(next(reader.tokens)))


class NumpyIntegerLeaf(Leaf):
    @staticmethod
    def write(writer: Any, value: Any, cls: type) -> None:
        writer.tokens += (cls, value.item())

    @staticmethod
    def read(reader: Any, cls: type) -> Any:
        return cls(next(reader.tokens))


class ArrayLeaf(Leaf):
    @staticmethod
    def write(writer: Any, value: numpy.ndarray, cls: type) -> None:
        if writer.results:
            return WholeLeaf.write(writer, value, cls)
        if value.dtype not in DTYPES:
            raise Unflattenable(f"an array of {value.dtype}")
        if id(value) not in writer.arrays:
            writer.arrays[id(value)] = _copied(value)
        writer.tokens.append(ARRAY)
        return writer.add(writer.arrays[id(value)])


def _copied(array: numpy.ndarray) -> torch.Tensor:
    """Raises Unflattenable for an array of which torch makes no tensor."""
    try:
        if not array.flags.writeable:  # torch warns of one
            return torch.from_numpy(array.copy(order="K"))
        return torch.from_numpy(array).clone()
    except (ValueError, TypeError) as error:
        raise Unflattenable(f"an array of which torch makes no tensor: {error}") from None


def array_of(tensor: torch.Tensor) -> numpy.ndarray:
    """The array that ``tensor``, or its copy, is."""
    return tensor.detach().cpu().numpy()


def dtype_of(tensor: torch.Tensor) -> numpy.dtype:
    """The type of the array that ``tensor`` is."""
    return numpy.dtype(str(tensor.dtype).removeprefix("torch."))


def number_of(tensor: torch.Tensor, kind: type) -> Any:
    """The number in ``tensor``, of the type ``kind``."""
    return kind(tensor.item())
