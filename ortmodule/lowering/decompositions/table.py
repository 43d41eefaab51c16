"""Registers definitions of operators that the exporter translates wrongly, or in a way that does not train.

A definition takes the operator's arguments in the order of its schema and returns its result. It is traced
(`decompose.py`) on tensors like the operator's operands, so it may look at ranks and types; a size that it takes as a
number becomes a constant, which the comparison of two traces finds. For a form that it does not have it raises
Leave: PyTorch runs such operators inside the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ortmodule.core.errors import Keep

_library = torch.library.Library("ortmodule", "FRAGMENT")
_library.define("sloped(Tensor value, Tensor x, Tensor slope) -> Tensor")
_library.impl("sloped", lambda value, x, slope: value.clone(), "CompositeExplicitAutograd")

DEFINITIONS: dict[str, Callable] = {}


def defines(*kinds: str, recursive: bool = False, sizes: bool = False, grads: bool = False) -> Callable:
    """``recursive``: the definition uses the operator itself, in a form that it keeps. ``sizes``: numbers that are
    computed from sizes come as they are in the trace. ``grads``: operands say whether they need a gradient."""

    def register(function: Callable) -> Callable:
        vars(function).update(recursive=recursive, sizes=sizes, grads=grads)
        DEFINITIONS.update(dict.fromkeys(kinds, function))
        return function

    return register


def sloped(value: Tensor, *slopes: tuple[Tensor, Tensor]) -> Tensor:
    """``value``, with the gradients that PyTorch defines: dx = dy * slope for every (x, slope). For functions where the
    derivative of a composition is something else at the edges, like 0 * infinity."""
    value = value.detach()
    for x, slope in slopes:
        value = torch.ops.ortmodule.sloped(value, x, slope.detach())
    return value


def from_start(index: Tensor, size: int) -> Tensor:
    """``index`` where what is negative counts from the end of a dimension of this ``size``; what is out of range is
    refused."""
    return torch.arange(size)[index]


def shared(a: Tensor, b: Tensor) -> Tensor:
    """``a``, which ``b`` is equal to: each has half of the gradient."""
    a, b = torch.broadcast_tensors(a, b)
    half = torch.full_like(a, 0.5)
    return sloped(a, (a, half), (b, half))


def _gradient(function: Callable, *numbers: float) -> float:
    """Of a function of numbers for the first."""
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [torch.tensor(number, requires_grad=True) for number in numbers]
        return torch.autograd.grad(function(*leaves), leaves)[0].item()


#: What versions of PyTorch do not agree on. Is the gradient of clamp nothing at a number that is a bound, and shared
#: with a tensor that is one (from torch 2.14 on; before, all of it is the operand's)? Is that of fmax and fmin shared
#: by two that are equal (from 2.14 on), and do both get all of it where one is NaN (2.14)?
CLAMP_SHARES = _gradient(lambda x: x.clamp(max=1.0), 1.0) == 0
EXTREMES_SHARE = _gradient(torch.fmax, 1.0, 1.0) == 0.5
EXTREMES_OF_NAN = _gradient(torch.fmax, float("nan"), 1.0) == 1


def _takes_any_index() -> bool:
    try:
        return torch.take_along_dim(torch.arange(2), torch.tensor([3]), 0).item() == 1
    except RuntimeError:
        return False


#: Does take_along_dim take an index of any value, modulo the size (from 2.13 on)? Before, it refused what gather does.
TAKES_ANY_INDEX = _takes_any_index()


#: Types as a graph has them: numbers.
_TYPES = {
    0: torch.uint8, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.int64, 5: torch.float16, 6: torch.float32,
    7: torch.float64, 11: torch.bool, 15: torch.bfloat16,
}  # fmt: skip


def traced_sizes(x: Tensor) -> tuple[Any, Any]:
    """The last two sizes: in a trace they are tensors, which functions of torch take."""
    return x.shape[-2], x.shape[-1]


def dtype_of(dtype: int | torch.dtype | None) -> Any:  # a type, but where None is given
    if isinstance(dtype, int) and dtype not in _TYPES:
        raise Keep
    return _TYPES[dtype] if isinstance(dtype, int) else dtype
