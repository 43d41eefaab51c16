"""Runs kernels on the CPU by Triton's interpreter, which has no functions of libdevice: these are torch's here."""

from __future__ import annotations

import ctypes
import functools
import importlib
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

#: Functions of libdevice that torch has by another name.
_TORCH = {"rint": torch.round}


def _apply(function: Callable[..., torch.Tensor], operands: Sequence[Any]) -> Any:
    """The function of blocks of the interpreter's."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    arrays = np.broadcast_arrays(*(operand.handle.data for operand in operands))
    made = function(*(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays)).numpy()
    shaped = max((operand.type for operand in operands), key=lambda kind: math.prod(getattr(kind, "shape", ())))
    shape = [max(sizes) for sizes in zip(*(_sizes(operand.type, len(made.shape)) for operand in operands), strict=True)]
    kind = tl.block_type(shaped.scalar, shape) if shaped.is_block() else shaped
    return tl.core.tensor(TensorHandle(made, shaped.scalar), kind)


def _sizes(kind: Any, rank: int) -> list[int]:
    """Of a block; of a number, of a block as which it broadcasts."""
    sizes = [int(size) for size in kind.shape] if kind.is_block() else []
    return [1] * (rank - len(sizes)) + sizes


class Libdevice:
    """libdevice's functions of one or two floats, as the interpreter calls them."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = _TORCH.get(name) or getattr(torch, name, None) or getattr(torch.special, name)
        return lambda *operands: _apply(function, operands)


def tensor_at(address: int, dtype: str, count: int) -> torch.Tensor:
    """``count`` elements of the engine's memory, as a tensor; booleans as bytes."""
    kind: torch.dtype = torch.uint8 if dtype == "bool" else getattr(torch, dtype)
    if not count:
        return torch.empty(0, dtype=kind)
    return torch.frombuffer((ctypes.c_char * (count * kind.itemsize)).from_address(address), dtype=kind)


def _range(*bounds: Any) -> range:
    """As Python's, of numbers as the interpreter has them, which newer versions of NumPy do not convert."""
    return range(*(int(b.handle.data.item()) if hasattr(b, "handle") else int(b) for b in bounds))


@functools.cache
def _round_as_gpus_do() -> None:
    """The interpreter cuts float32 to bfloat16, and makes others of its small numbers; here they are rounded."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    cut = interpreter._convert_float

    def convert(given: np.ndarray, from_type: Any, to_type: Any, mode: Any) -> np.ndarray:
        names = str(from_type), str(to_type)
        if names == ("fp32", "bf16"):
            rounded = torch.from_numpy(np.ascontiguousarray(given)).to(torch.bfloat16)
            return rounded.view(torch.int16).numpy().view(np.uint16)
        if names == ("bf16", "fp32"):
            bits = np.ascontiguousarray(given).view(np.int16)
            return torch.from_numpy(bits).view(torch.bfloat16).float().numpy()
        return cut(given, from_type, to_type, mode)

    interpreter._convert_float = convert


def complete(namespace: dict[str, Any]) -> None:
    """Gives a kernel's globals what the interpreter lacks."""
    _round_as_gpus_do()
    namespace |= {"libdevice": Libdevice(), "range": _range}


def is_on() -> bool:
    """Was Triton imported, or will it be, to interpret kernels?"""
    if "triton" in sys.modules:
        return bool(sys.modules["triton"].knobs.runtime.interpret)
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")
