"""Keeps the graphs of a module with a loop over a length, one for each, made after one template."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from ortmodule.capture.dynamic_dims import Capture
from ortmodule.capture.loops.check import LoopCheck
from ortmodule.capture.loops.loop import small
from ortmodule.core.errors import DoesNotHold
from ortmodule.core.logger import LOGGER
from ortmodule.engine.plan_cache import drop_oldest
from ortmodule.engine.session import ENGINE_ERRORS
from ortmodule.runtime.compiled_graph import Call, CompiledGraph


class Lengths:
    """Makes the graph of each length when a call of it comes."""

    def __init__(self, origin: CompiledGraph, check: LoopCheck, make: Callable[[Capture, Call], CompiledGraph]) -> None:
        """``origin``: the graph of a short length. ``make``: a graph of what was captured, for such a call."""
        self._origin, self._check, self._make = origin, check, make
        self._latest, self._lock = origin, threading.RLock()
        assert (loop := origin.capture.loop) is not None
        self._pinned = [(dim, size) for dim, size in origin.capture.pinned.items() if dim not in loop.dims]
        self.graphs: OrderedDict[int, CompiledGraph | None] = OrderedDict()

    def at(self, call: Call) -> CompiledGraph | None:
        """The graph for a call of this length; None: its other sizes, or the module's attributes, are not as they were.

        Raises DoesNotHold for a length that is captured by itself.
        """
        loop = self._origin.capture.loop
        assert loop is not None
        n = loop.length(call.shapes)
        fits = all(call.shapes[i][d] == size for (i, d), size in self._pinned)
        if n is None or not fits or not self._origin.guards.hold(call.state.epoch):
            return None
        with self._lock:
            if n not in self.graphs:
                self.graphs[n] = self._made(n, call)
                drop_oldest(self.graphs, _plan_bytes)
            self.graphs.move_to_end(n)
            found = self.graphs[n]
        if found is None:
            raise DoesNotHold(f"a loop of length {n} is captured by itself")
        return found

    def _made(self, n: int, call: Call) -> CompiledGraph | None:
        capture, loop = self._origin.capture, self._origin.capture.loop
        assert loop is not None
        if not loop.template.fits(n):
            return None
        if reason := self._check.holds(n, call.inputs):
            LOGGER.debug("a loop of length %d is captured by itself: %s", n, reason)
            return None
        try:
            made = self._make(replace(capture.at_length(n), sample=small(call.inputs, loop, n)), call)
            made.plan_first(call.shapes)
        except ENGINE_ERRORS as error:
            LOGGER.debug("a loop of length %d is captured by itself: %s", n, error)
            return None
        made.origin, made.failed, made.prediction = self._origin, self._origin.failed, self._latest.prediction
        made.count_for(self._origin.variant)
        self._latest = made
        return made


def _plan_bytes(graph: CompiledGraph | None) -> int:
    if graph is None:
        return 0
    return sum(plan.host_bytes for session in graph.own_sessions() for plan in list(session.plans.values()))
