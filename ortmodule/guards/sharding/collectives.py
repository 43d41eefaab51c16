"""Answers collectives aside, without communication: as if all ranks had what this one has.

A rank that captures a graph runs parts of a module in which no other rank takes part. What would come from one other
rank alone are made-up values, the same each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ortmodule.core.errors import NotTraceable
from ortmodule.core.torch_private import TorchDispatchMode, finished_work

#: Of a library's operators that communicate; of DTensors also those that only arrange.
_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "_dtensor")
#: How many made-up values there are before they come again: no power of two, which would be a row.
_PERIOD = 1021


@contextmanager
def alone() -> Iterator[None]:
    """Inside, in this thread, no collective communicates."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        yield
        return
    with OfThisRank():
        yield


def values(shape: torch.Size, kind: torch.dtype, device: torch.device) -> torch.Tensor:
    """Values of a parameter's size: around 1 for one of rank 1, around 0 for a matrix, whose products stay small."""
    if not kind.is_floating_point:
        return torch.zeros(shape, dtype=kind, device=device)
    parts = torch.arange(1, _PERIOD + 1, dtype=torch.float64, device=device).mul((5**0.5 - 1) / 2).fmod(1)
    some = parts / 2 + 0.75 if len(shape) < 2 else (parts - 0.5) * (3.0 / max(1, shape[1:].numel()) ** 0.5)
    count = shape.numel()
    return some.to(kind).repeat(-(-count // _PERIOD))[:count].reshape(shape)


class OfThisRank(TorchDispatchMode):
    """Collectives return what they would if all ranks had what this one has."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping it would first import it, for a second

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(cls, torch.Tensor) and hasattr(cls, "to_local") for cls in types):
            return NotImplemented  # its collectives come here
        if function.namespace not in _NAMESPACES:
            return function(*args, **(kwargs or {}))
        name = function.__name__.partition(".")[0]
        answer = (_IN_PLACE if function.namespace == "c10d" else _FUNCTIONAL).get(name)
        if answer is None:
            raise NotTraceable(f"a capture cannot do without the collective {function}")
        return answer(*args)


# --- those that return new tensors ------------------------------------------------------------------------------------


def _same(tensor: torch.Tensor, *rest: Any) -> torch.Tensor:
    return tensor.clone()


def _gathered(tensor: torch.Tensor, size: int, group: Any) -> torch.Tensor:
    return torch.cat([tensor] * size)


def _scattered(tensor: torch.Tensor, operation: str, size: int, group: Any) -> torch.Tensor:
    return tensor.narrow(0, 0, tensor.shape[0] // size).clone()


def _exchanged(tensor: torch.Tensor, sizes: Sequence[int], given: Sequence[int], group: Any) -> torch.Tensor:
    shape = (sum(sizes), *tensor.shape[1:]) if sizes else tensor.shape
    return _filled(tensor.new_empty(shape), [tensor])


def _each(answer: Callable) -> Callable:
    return lambda tensors, *rest: [answer(tensor, *rest) for tensor in tensors]


_FUNCTIONAL: dict[str, Callable] = {
    **dict.fromkeys(("wait_tensor", "all_reduce", "broadcast", "_wrap_tensor_autograd"), _same),
    "all_gather_into_tensor": _gathered,
    "reduce_scatter_tensor": _scattered,
    "all_to_all_single": _exchanged,
    "all_reduce_coalesced": _each(_same),
    "all_gather_into_tensor_coalesced": _each(_gathered),
    "reduce_scatter_tensor_coalesced": _each(_scattered),
}


# --- those that write into tensors, as `torch.distributed` calls them -------------------------------------------------


def _flat(nested: Any) -> list[torch.Tensor]:
    if isinstance(nested, torch.Tensor):
        return [nested]
    return [t for each in nested for t in _flat(each)] if isinstance(nested, (tuple, list)) else []


def _filled(target: torch.Tensor, sources: Sequence[torch.Tensor]) -> torch.Tensor:
    """``target`` with the values of ``sources``, one after the other and again; made-up ones where there are none."""
    count = target.numel()
    with torch.no_grad():
        if not sources or not sum(t.numel() for t in sources):
            return target.copy_(values(target.shape, target.dtype, target.device))
        given = torch.cat([t.detach().reshape(-1) for t in sources])
        return target.copy_(given.repeat(-(-count // given.numel()))[:count].reshape(target.shape))


def _work(results: Any) -> tuple[Any, Any]:
    return results, finished_work()


def _kept(targets: Any, *rest: Any) -> Any:
    """What all ranks have together, or that of one of them, is what is there."""
    return _work(targets)


def _each_filled(targets: Any, sources: Any, *rest: Any) -> Any:
    """Every target with a source of its size, or with parts of the sources."""
    given = _flat(sources)
    for target in _flat(targets):
        alike = [t for t in given if t.shape == target.shape]
        _filled(target, alike[:1] or given)
    return _work(targets)


def _only_work(answer: Callable) -> Callable:
    return lambda *args: answer(*args)[1]


_IN_PLACE: dict[str, Callable] = {
    **dict.fromkeys(("allreduce_", "broadcast_"), _kept),
    **dict.fromkeys(("reduce_", "allreduce_coalesced_", "send", "barrier"), _only_work(_kept)),
    **dict.fromkeys(
        ("allgather_", "_allgather_base_", "reduce_scatter_", "_reduce_scatter_base_", "scatter_", "alltoall_"),
        _each_filled,
    ),
    **dict.fromkeys(
        (
            "gather_", "alltoall_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_",
            "reduce_scatter_tensor_coalesced_",
        ),
        _only_work(_each_filled),
    ),
    **dict.fromkeys(("recv_", "recv_any_source_"), _only_work(lambda targets, *rest: _each_filled(targets, ()))),
    "monitored_barrier_": lambda *args: None,
}  # fmt: skip
