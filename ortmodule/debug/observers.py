"""What looks on while the engine runs: verification, statistics of memory and of input density.

An observer is told before each forward, and may return a function that is called with the result. Backward is watched
through hooks on the autograd node that a forward leaves behind, so the way of a step itself knows nothing of observers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ortmodule.debug.step_stats import Density, Memory
from ortmodule.debug.verify import Verifier

if TYPE_CHECKING:
    from ortmodule.runtime.dispatcher import Runner


class Observer(Protocol):
    def before_forward(self, graph: Any, call: Any) -> Callable[[Any], None] | None: ...


class Observers:
    """The observers of one module."""

    def __init__(self, observers: list[Observer]) -> None:
        self.observers = observers

    @staticmethod
    def of(runner: Runner) -> Observers | None:
        """Those that the module's settings ask for, or None."""
        options, log, found = runner.options, runner.log, []
        # The first is told of a forward first, and of its result last.
        if options["VERIFY"]:
            found.append(Verifier(options["VERIFY"], runner.forward, log))
        if options["PRINT_INPUT_DENSITY"]:
            found.append(Density(runner.module, log))
        if options["PRINT_MEMORY_STATS"]:
            found.append(Memory(log))
        return Observers(found) if found else None

    def run(self, graph: Any, call: Any) -> Any:
        """Runs ``graph``, and tells the observers."""
        after = [observer.before_forward(graph, call) for observer in self.observers]
        result = graph(call.inputs, call.eager)
        for told in reversed(after):
            if told is not None:
                told(result)
        return result

    def one(self, cls: type) -> Any:
        """The observer of this class."""
        return next(observer for observer in self.observers if isinstance(observer, cls))
