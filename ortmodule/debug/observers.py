"""Lets observers see each run of the engine: verification, statistics of memory and of input density.

An observer is called before each forward, and may return a function that is called with the result. Backward is watched
through hooks on the autograd node that a forward leaves behind, so the way of a step itself knows nothing of observers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ortmodule.debug.step_stats import Density, Memory
from ortmodule.debug.verify import Verifier
from ortmodule.runtime.dispatcher import Dispatcher


class Observer(Protocol):
    def before_forward(self, graph: Any, call: Any) -> Callable[[Any], None] | None: ...


class Observers:
    """The observers of one module."""

    def __init__(self, observers: list[Observer]) -> None:
        self.observers = observers

    @staticmethod
    def of(owner: Dispatcher) -> Observers | None:
        """Those that the module's settings ask for, or None."""
        config, log = owner.config, owner.log
        found: list[Observer] = []
        # The first observer sees a forward first, and its result last.
        if config.verify:
            found.append(Verifier(config.verify, log, lambda: owner.parts.draw()))
        if config.print_input_density:
            found.append(Density(owner.module, log))
        if config.print_memory_stats:
            found.append(Memory(log))
        return Observers(found) if found else None

    def run(self, graph: Any, call: Any) -> Any:
        """Runs ``graph``, and calls the observers before and after it."""
        after = [observer.before_forward(graph, call) for observer in self.observers]
        result = graph(call)
        for after_forward in reversed(after):
            if after_forward is not None:
                after_forward(result)
        return result

    def one(self, cls: type) -> Any:
        """The observer of this class."""
        return next(observer for observer in self.observers if isinstance(observer, cls))
