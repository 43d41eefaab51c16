"""Reads sizes of tensors inside of `torch.vmap`, and notes its results.

The tracer knows operators and their results behind a `vmap`, which have the batch as one more dimension, and not the
tensors that forward sees there: it would refuse to tell their sizes, which are those of the tensors that `vmap` has
made them of. A graph is for the sizes that are asked for there. No function of torch's returns what a `vmap` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ortmodule.capture import scalar_guards
from ortmodule.core.objects.interception import Replacement
from ortmodule.core.torch_private import VMAP_RESULTS, unbatched

_SIZE, _SHAPE = torch.Tensor.size, torch.Tensor.shape.__get__  # type: ignore[attr-defined]  # a getter of C
_LENGTH = torch.Tensor.__len__
_COUNTS = frozenset([torch.numel, torch.Tensor.numel, torch.Tensor.nelement])
_FUNCTIONS = _COUNTS | {_SIZE, _SHAPE, _LENGTH}


def read(function: Any, args: tuple, kwargs: dict[str, Any], call: Callable[..., Any]) -> Any:
    """The sizes, or the number, that ``function`` asks for; NotImplemented: it asks for no sizes of such a tensor.

    ``call``: calls a function in the trace.
    """
    if function not in _FUNCTIONS or not args or (found := unbatched(args[0])) is None:
        return NotImplemented
    sizes = torch.Size([_number(call(_SIZE, (found[0], place), {})) for place in found[1]])
    if function in _COUNTS:
        return math.prod(sizes)
    if function is _LENGTH:
        return len(sizes) and sizes[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return sizes if dim is None else sizes[dim]


def results_told(made: Callable[[list[torch.Tensor]], None]) -> list[Replacement]:
    """What stands in place of torch's function for the results of a `vmap`. ``made``: is told of each."""

    def around(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def result(*args: Any) -> torch.Tensor:
            found = function(*args)
            made([found])
            return found

        return result

    return [Replacement.around(module, name, around) for module, name in VMAP_RESULTS]


def _number(size: torch.Tensor) -> int:
    scalar_guards.read(size)
    return int(scalar_guards.untraced_item(size))
