"""Makes nodes of collectives that forward calls: PyTorch communicates at their place in the graph, backward included.

Functional collectives (`torch.distributed._functional_collectives`) are operators of torch's. What
`torch.distributed.all_reduce` and the like write into a tensor comes from a method of the process group: the node
returns new tensors, and forward's tensor becomes a copy of these where it waits for them. While a graph is captured
nothing is communicated (:mod:`ortmodule.guards.collectives`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ortmodule.core.errors import NotTraceable
from ortmodule.core.interception import Replacement, replaced
from ortmodule.core.torch_private import get_tracing_state, tree_map_only

_NAMESPACE = "_c10d_functional::"
#: What only waits for the result of another one, which a node has done already.
_WAITS = ("wait_tensor", "_wrap_tensor_autograd")
_RETURNS = (
    "all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single",
    "all_reduce_coalesced", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced",
)  # fmt: skip
#: Methods of a process group whose first argument gets the result, by whether that is read, too.
_METHODS = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced", "broadcast", "reduce"), True),
    **dict.fromkeys(
        (
            "allgather", "_allgather_base", "all_gather_single", "allgather_coalesced",
            "allgather_into_tensor_coalesced", "all_gather_single_coalesced", "reduce_scatter",
            "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced",
            "reduce_scatter_single_coalesced", "gather", "scatter", "alltoall",
            "alltoall_base", "all_to_all_single",
        ),
        False,
    ),
}  # fmt: skip
_OTHERS = ("send", "recv", "recv_anysource", "barrier", "monitored_barrier", "_start_coalescing", "_end_coalescing")

_current = threading.local()

#: (kind, name, function, arguments, those with names): makes a node, and returns its result.
Node = Callable[[str, str, Callable, tuple, dict], Any]


def functional(function: Any) -> str:
    """The name of a functional collective; "": the function is another one."""
    if isinstance(function, torch._ops.OpOverload):
        name = function._schema.name
    elif isinstance(function, torch._ops.OpOverloadPacket):
        name = function._qualified_op_name
    else:
        return ""
    return name.removeprefix(_NAMESPACE) if name.startswith(_NAMESPACE) else ""


def call_functional(node: Node, name: str, function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What a functional collective returns, as a node's result. Raises NotTraceable where there is no node for it."""
    if name in _WAITS:
        return args[0]
    if name not in _RETURNS:
        raise NotTraceable(f"forward calls the collective {name}, for which a graph has no node")

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        waits = torch.ops._c10d_functional.wait_tensor
        return list(map(waits, result)) if isinstance(result, (tuple, list)) else waits(result)

    return node("collective", name, call, args, kwargs)


class _Place:
    """Stands for a tensor among arguments."""


class _Work:
    """What a collective of a trace gives to wait for: its results are written then."""

    def __init__(self, write: Callable[[], None], name: str) -> None:
        self._write: Callable[[], None] | None = write
        self._name = name

    def wait(self, timeout: Any = None) -> bool:
        if self._write is not None:
            self._write, write = None, self._write
            write()
        return True

    def is_waited(self) -> bool:
        return self._write is None

    def __getattr__(self, name: str) -> Any:
        raise NotTraceable(f"forward asks for {name} of what {self._name} returns")


class Collectives:
    """The collectives of one trace that write into tensors."""

    def __init__(self, node: Node, write: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        """``write``: puts a result into a tensor, as a part of the trace."""
        self._node, self._write = node, write
        self._begun: list[_Work] = []

    def check(self) -> None:
        """Raises NotTraceable where forward has not waited for a result."""
        begun, self._begun = self._begun, []
        if not all(work.is_waited() for work in begun):
            raise NotTraceable("forward does not wait for a collective that it begins (async_op=True)")

    def method(self, name: str, original: Callable, group: Any, args: tuple, kwargs: dict) -> _Work:
        if name not in _METHODS or not args:
            raise NotTraceable(f"forward calls {name} of a process group, for which a graph has no node")
        targets: list[torch.Tensor] = []
        tree_map_only(torch.Tensor, targets.append, args[0])
        if any(t.requires_grad for t in targets):
            text = "changes a tensor that carries a gradient, which autograd does not see"
            raise NotTraceable(f"{name} of a process group {text}")
        reads, count = _METHODS[name], len(targets)
        given = targets if reads else [torch.zeros_like(t) for t in targets]
        others: list[torch.Tensor] = []
        tree_map_only(torch.Tensor, others.append, (args[1:], kwargs))
        outline = tree_map_only(torch.Tensor, lambda t: _Place(), (args, kwargs))

        def call(*tensors: torch.Tensor) -> list[torch.Tensor]:
            made = [t.detach().clone() if reads else torch.empty_like(t) for t in tensors[:count]]
            each = iter((*made, *(t.detach() for t in tensors[count:])))
            args, kwargs = tree_map_only(_Place, lambda place: next(each), outline)
            work = original(group, *args, **kwargs)
            if work is not None:
                work.wait()
            return made

        with torch.no_grad():
            results = self._node("collective", name, call, (*given, *others), {})

        def write() -> None:
            for target, result in zip(targets, results, strict=True):
                self._write(target, result)

        self._begun.append(_Work(write, name))
        return self._begun[-1]


def _method(name: str, original: Callable) -> Callable:
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        met = getattr(_current, "met", None)
        if met is None or get_tracing_state() is None:
            return original(group, *args, **kwargs)
        return met.method(name, original, group, args, kwargs)

    return call


def _replacements() -> Iterator[Replacement]:
    group = torch.distributed.ProcessGroup
    for name in (*_METHODS, *_OTHERS):
        if hasattr(group, name):
            yield Replacement.around(group, name, lambda original, name=name: _method(name, original))


@contextmanager
def recording(met: Collectives) -> Iterator[None]:
    """Inside, in this thread, what is traced calls process groups by way of ``met``."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        yield
        return
    before, _current.met = getattr(_current, "met", None), met
    try:
        with replaced(_replacements()):
            yield
    finally:
        _current.met = before
