"""Knows which calls PyTorch runs, so that others like them are not looked at anew.

A call that waits for a graph, or is refused, is taken apart, and its graph looked for. What comes of it is the same
for the next such call, as long as the module is the same, nothing was captured, and the budget allows no capture. So it
is remembered by what can be seen of plain arguments at a glance. Where a graph may hold, it is always looked for.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ortmodule.core import pytree
from ortmodule.core.errors import NotInEngine, Waits
from ortmodule.core.structures.tokens import NUMBER
from ortmodule.core.torch_private import KEEPS, PARAMETRIZE, in_backward, saving_hooks
from ortmodule.runtime.calls.capture_budget import Budget, Variant
from ortmodule.runtime.calls.module_state import ModuleState
from ortmodule.runtime.compiled_graph import Call, CompiledGraph
from ortmodule.runtime.variants.plain_arguments import kind_of

MOST = 1024  # kinds of calls; calls whose numbers there are graphs for
#: Calls in a row that are none of those that are known: looking costs them time.
MOST_VAIN = 32
_BY_SHAPES = object()


class KnownCall(NamedTuple):
    """What was found of a call that PyTorch runs."""

    reason: NotInEngine
    state: ModuleState
    waiting: Hashable  # the key of the variant among those that wait; None: such calls are refused
    mode: Hashable
    skipped: tuple[Variant, ...]  # of graphs that may hold, but seldom do
    by_shapes: bool  # is it true for inputs of these sizes alone?
    numbers: tuple[tuple[int, Any], ...]  # those that are a part of it, by their places among the call's


def found_of(
    call: Call, reason: NotInEngine, graphs: Sequence[CompiledGraph], by_shapes: bool, waiting: Hashable = None,
    unknown: bool = False,
) -> KnownCall | None:  # fmt: skip
    """What holds for other calls like ``call``, which PyTorch runs for this reason; None: nothing does. ``graphs``: of
    its key, none of which holds; ``waiting``: as of :class:`KnownCall`; ``unknown``: some of them have not run."""
    tree = call.tree
    if tree.sharded or tree.tables or tree.resized or call.count != len(call.inputs) or "" in call.state.hooked:
        return None
    if any(graph.depends_on_more for graph in graphs):
        return None
    skipped = tuple([graph.variant for graph in graphs if graph.variant.wasted]) if unknown else ()
    numbers = _fixed_numbers(call.arguments)
    return KnownCall(reason, call.state, waiting, call.mode, skipped, by_shapes or bool(graphs), numbers)


def with_found(refusal: NotInEngine, call: Call, refused: Mapping[object, NotInEngine]) -> NotInEngine:
    """``refusal`` with what holds for other calls like ``call``. ``refused``: all, by what they are true for."""
    refusal.found = found_of(call, refusal, (), refused.get(call.key) is not refusal)
    return refusal


def waits_for(call: Call, reason: str) -> Waits:
    """For a call that PyTorch runs this once."""
    waits: Waits[Variant] = Waits(None, reason, "")
    waits.inputs = call.inputs[: call.count]
    return waits


def _fixed_numbers(arguments: pytree.Structure) -> tuple[tuple[int, Any], ...]:
    """The numbers that are no operands, by their places among all numbers."""
    fixed: dict[int, Any] = dict(arguments.numbers())
    operands = {i + 1 for i, token in enumerate(arguments.tokens) if token is NUMBER}
    return tuple((place, fixed[i]) for place, i in enumerate(sorted(fixed.keys() | operands)) if i in fixed)


class KnownWaits:
    """The calls of one module that PyTorch is known to run."""

    def __init__(self) -> None:
        self.known: dict[Hashable, Any] = {}  # KnownCall, by the kind of call, or that and the sizes of its inputs
        self._captured: set[frozenset] = set()  # numbers of calls that there are graphs for
        self._vain = 0

    def clear(self) -> None:
        """There may be another graph now."""
        self.known.clear()

    def add_captured(self, given: tuple[tuple, dict[str, Any]]) -> None:
        """There is a graph for a call with these arguments."""
        self.known.clear()
        if (kind := kind_of(*given)) is not None and kind[2]:
            self._captured.add(frozenset(kind[2]))

    def add(self, args: tuple, kwargs: dict[str, Any], found: KnownCall) -> None:
        """PyTorch runs this call, and others like it."""
        if (kind := kind_of(args, kwargs)) is None or len(self._captured) > MOST:
            return
        if len(self.known) >= MOST:
            self.known.clear()
        if isinstance(found.reason, Waits):
            found.reason.inputs = None  # they are not to live as long
        if found.by_shapes:
            self.known[kind[0]] = _BY_SHAPES
            self.known[kind[0], tuple([t.shape for t in kind[1]])] = found
        else:
            self.known[kind[0]] = found

    def look(self, args: tuple, kwargs: dict[str, Any], now: Any, budget: Budget) -> NotInEngine | None:
        """Why PyTorch runs this call, where that is known. ``now``: gives the module's state."""
        if (kind := kind_of(args, kwargs)) is None or (found := self._found(kind, now)) is None:
            self._vain += 1
            if self._vain >= MOST_VAIN:
                self._vain = 0
                self.known.clear()
            return None
        self._vain = 0
        if (
            PARAMETRIZE.get(KEEPS) or in_backward() or not torch.is_grad_enabled() or saving_hooks() is not None
        ):  # may be computed again
            return None
        if found.waiting is not None and not budget.still_waits(found.waiting, found.mode, found.skipped):
            self.known.clear()
            return None
        return found.reason

    def _found(self, kind: tuple, now: Any) -> KnownCall | None:
        what, tensors, numbers = kind
        found = self.known.get(what)
        if found is _BY_SHAPES:
            found = self.known.get((what, tuple([t.shape for t in tensors])))
        if found is None:
            return None
        if numbers and (
            any([numbers[place] != value for place, value in found.numbers]) or frozenset(numbers) in self._captured
        ):
            return None
        if found.state is not now():
            self.known.clear()
            return None
        return None if found.state.watch.holds(tensors) else found
