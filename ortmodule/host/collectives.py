"""Makes nodes of collectives that forward calls: PyTorch communicates at their place in the graph, backward included.

Functional collectives (`torch.distributed._functional_collectives`) are operators of torch's. What
`torch.distributed.all_reduce` and the like write into a tensor comes from a method of the process group: the node
returns new tensors, and forward's tensor becomes a copy of these where it waits for them. While a graph is captured
nothing is communicated (:mod:`ortmodule.guards.sharding.collectives`).
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ortmodule.core.errors import NotTraceable
from ortmodule.core.objects.interception import Replacement, replaced
from ortmodule.core.torch_private import TracedGraph, get_tracing_state, operator_name, tree_map_only, wait_tensor

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
            "alltoall_base", "all_to_all_single", "recv", "recv_anysource",
        ),
        False,
    ),
}  # fmt: skip
#: From one rank to another: what sends returns nothing.
_MESSAGES = ("send", "recv", "recv_anysource")
_OTHERS = ("barrier", "monitored_barrier", "_start_coalescing", "_end_coalescing")

MOST_PENDING = 1024  # collectives that are on their way
WAIT = "wait_tensor"  # the name of a node that waits for one

_current = threading.local()

#: (kind, name, function, arguments, those with names): makes a node, and returns its result.
Node = Callable[[str, str, Callable, tuple, dict], Any]


def functional(function: Any) -> str:
    """The name of a functional collective; "": the function is another one."""
    name = operator_name(function)
    return name.removeprefix(_NAMESPACE) if name.startswith(_NAMESPACE) else ""


def call_functional(node: Node, name: str, function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What a functional collective returns: a node begins it, another one waits for it. Raises NotTraceable where there
    is no node for it."""
    if name in _WAITS:
        return args[0]
    if name not in _RETURNS:
        raise NotTraceable(f"forward calls the collective {name}, for which a graph has no node")

    def begin(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        result = function(*args, **kwargs)
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        return _begun(lambda: [wait_tensor(t.detach()) for t in results], results)

    results = node("collective", WAIT, wait_for, tuple(node("collective", name, begin, args, kwargs)), {})
    return list(results) if name.endswith("_coalesced") else results[0]


def _tensors_in(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, found.append, value)
    return found


# --- a collective on its way, between two nodes -----------------------------------------------------------------------

_pending: dict[int, Callable[[], list[torch.Tensor]]] = {}
_numbers = itertools.count()
_lock = threading.Lock()


def number_of(wait: Callable[[], list[torch.Tensor]]) -> torch.Tensor:
    """A number for a collective that has begun, by which :func:`wait_for` finds ``wait``, which returns its results."""
    with _lock:
        number = next(_numbers)
        while len(_pending) >= MOST_PENDING:  # runs that ended with an error
            del _pending[next(iter(_pending))]
        _pending[number] = wait
    return torch.tensor([number])


def _begun(wait: Callable[[], list[torch.Tensor]], results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What a node returns that has begun a collective: its number, and zeros in place of each of ``results``.

    Gradients pass these, so that backward communicates where the collective began, in the order of other ranks.
    """
    return [number_of(wait), *_Places.apply(*results)]


def wait_for(token: torch.Tensor, *places: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The results, in the places of the zeros that stand for them."""
    with _lock:
        wait = _pending.pop(int(token))
    return _Waited.apply(wait, *places)


class _Places(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, *results: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = tuple(torch.zeros_like(t) for t in results)
        context.mark_non_differentiable(*[t for t, r in zip(found, results, strict=True) if not r.requires_grad])
        return found

    @staticmethod
    def backward(context: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grads


class _Waited(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, wait: Callable[[], list[torch.Tensor]], *places: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        found = tuple(wait())
        context.mark_non_differentiable(*[t for t, p in zip(found, places, strict=True) if not p.requires_grad])
        return found

    @staticmethod
    def backward(context: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *grads)


def wait_late(graph: TracedGraph, calls: str, waits: Container[int]) -> None:
    """Moves nodes of the kind ``calls`` with these numbers, which wait for results, to the first use of a result: what
    does not depend on it runs before."""
    for call in list(graph.nodes()):
        if call.kind() != calls or list(call.inputs())[1].toIValue() not in waits:
            continue
        unpacked = next(iter(call.output().uses())).user
        users = {use.user for value in list(unpacked.outputs())[1:] for use in value.uses()}
        nodes = list(graph.nodes())
        inside = [node for node in users if node not in nodes and node.kind() != "prim::Return"]  # of a block
        first = next((node for node in nodes if node in users), None)
        if first is not None and not inside:
            call.moveBefore(first)
            unpacked.moveBefore(first)


# --- collectives that write into tensors ------------------------------------------------------------------------------


class _Place:
    """Stands for a tensor among arguments."""


class _Work:
    """What a collective of a trace gives to wait for: its results are written then."""

    def __init__(self, write: Callable[[], None], name: str) -> None:
        self._write: Callable[[], None] | None = write
        self._name = name

    def wait(self, timeout: Any = None) -> bool:
        write, self._write = self._write, None
        if write is not None:
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
        if (name not in _METHODS and name not in _MESSAGES) or not args:
            raise NotTraceable(f"forward calls {name} of a process group, for which a graph has no node")
        sends = name not in _METHODS
        targets = [] if sends else _tensors_in(args[0])
        if any(t.requires_grad for t in targets):
            text = "changes a tensor that carries a gradient, which autograd does not see"
            raise NotTraceable(f"{name} of a process group {text}")
        given = targets if _METHODS.get(name) else [torch.zeros_like(t) for t in targets]
        operands = (*given, *_tensors_in((args if sends else args[1:], kwargs)))
        begin = self._call(name, original, group, (args, kwargs), len(targets))
        late = name in _MESSAGES or any(getattr(option, "asyncOp", False) for option in (*args, *kwargs.values()))

        def at_once(*tensors: torch.Tensor) -> list[torch.Tensor]:
            return begin(*tensors)[0]()

        def begins(*tensors: torch.Tensor) -> list[torch.Tensor]:
            return _begun(*begin(*tensors))

        with torch.no_grad():
            found = self._node("collective", name, begins if late else at_once, operands, {})

        def write() -> None:
            with torch.no_grad():
                results = self._node("collective", WAIT, wait_for, tuple(found), {}) if late else found
            for target, result in zip(targets, results, strict=True):
                self._write(target, result)

        self._begun.append(_Work(write, name))
        return self._begun[-1]

    def _call(self, name: str, original: Callable, group: Any, arguments: tuple, count: int) -> Callable:
        """What begins the collective, of the first ``count`` tensors for results and of others: it returns what waits
        for the results, and these."""
        outline = tree_map_only(torch.Tensor, lambda t: _Place(), arguments)

        def begin(*tensors: torch.Tensor) -> tuple[Callable[[], list[torch.Tensor]], list[torch.Tensor]]:
            make = torch.clone if _METHODS.get(name) else torch.empty_like
            made = [make(t.detach()) for t in tensors[:count]]
            each = iter((*made, *(t.detach() for t in tensors[count:])))
            args, kwargs = tree_map_only(_Place, lambda place: next(each), outline)
            work = original(group, *args, **kwargs)

            def wait() -> list[torch.Tensor]:
                if work is not None:
                    work.wait()
                return made

            return wait, made

        return begin


def _method(name: str, original: Callable) -> Callable:
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        met = getattr(_current, "met", None)
        if met is None or get_tracing_state() is None:
            return original(group, *args, **kwargs)
        return met.method(name, original, group, args, kwargs)

    return call


def _replacements() -> Iterator[Replacement]:
    group = torch.distributed.ProcessGroup
    for name in dict.fromkeys((*_METHODS, *_MESSAGES, *_OTHERS)):
        if hasattr(group, name):
            yield Replacement.around(group, name, functools.partial(_method, name))


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
