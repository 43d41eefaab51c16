"""Says `f(x, out=y)` without `out` while a module is traced, where it writes several tensors or makes one larger."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ortmodule.core.torch_private import get_value_trace, set_value_trace, untraced


def into(
    function: Any, args: tuple, kwargs: dict[str, Any], run: Callable[..., Any], is_made: Callable[[torch.Tensor], bool]
) -> Any:
    """The result of a call that writes to tensors, or NotImplemented where the trace takes it as it is, PyTorch refuses
    it, or it makes a tensor larger that forward has from elsewhere. ``run``: calls a function; ``is_made``: has forward
    made a tensor?"""
    out: Any = kwargs.get("out")
    several = isinstance(out, (tuple, list))
    targets: list[Any] = list(out) if several else [out]
    rest = {name: value for name, value in kwargs.items() if name != "out"}
    if not all(type(t) is torch.Tensor for t in targets) or not _is_allowed(targets, [*args, *rest.values()]):
        return NotImplemented
    if not several and not _is_empty(targets[0]):
        return NotImplemented
    result = run(function, args, rest)
    found = list(result) if isinstance(result, (tuple, list)) else [result]
    if len(found) != len(targets) or not all(
        _fits(target, value, is_made) for target, value in zip(targets, found, strict=True)
    ):
        return NotImplemented
    for target, value in zip(targets, found, strict=True):
        if _sizes(target) == _sizes(value):
            run(torch.Tensor.copy_, (target, value), {})
        else:
            _resize(target, value)
    kind = type(result)
    if not several or kind in (tuple, list):
        return kind(targets) if several else targets[0]
    return getattr(torch.return_types, f"{kind.__name__}_out", kind)(targets)


def _is_allowed(targets: list[torch.Tensor], operands: list[Any]) -> bool:
    """Does PyTorch allow such a call, and is nothing written that it reads?"""
    tensors = list(_tensors(operands))
    carries = torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *targets))
    ids = {id(t) for t in targets}
    return not carries and len(ids) == len(targets) and not any(id(t) in ids for t in tensors)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)


def _sizes(tensor: torch.Tensor) -> tuple[int, ...]:
    with untraced():
        return tuple(tensor.shape)


def _is_empty(tensor: torch.Tensor) -> bool:
    return 0 in _sizes(tensor)


def _fits(target: torch.Tensor, value: Any, is_made: Callable[[torch.Tensor], bool]) -> bool:
    if not isinstance(value, torch.Tensor) or (target.dtype, target.device) != (value.dtype, value.device):
        return False
    return _sizes(target) == _sizes(value) or (_is_empty(target) and is_made(target) and not target._is_view())


def _resize(target: torch.Tensor, value: torch.Tensor) -> None:
    """A tensor without elements shows none under another name: it is ``value`` from now on."""
    with torch.no_grad():
        copy = value.detach().clone()
        with untraced():
            target.resize_(copy.shape).copy_(copy)
    set_value_trace(target, get_value_trace(copy))
