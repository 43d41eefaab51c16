"""Bounds the time of captures by a share of the time that the module has spent in steps.

The first graph of each mode (training, evaluation, autocast) is captured at once. Another variant (other sizes that a
graph is pinned to, another number read from data, another value of an attribute) runs in PyTorch until it has come
often enough to pay, and until its capture fits into the share. Variants that have a graph always run in it.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ortmodule.core.errors import CallsOwn, FillsCache, NotInEngine, Waits
from ortmodule.core.logger import Log
from ortmodule.core.torch_private import at_end_of_backward

#: Seconds of this process. Tests replace it.
clock: Callable[[], float] = time.perf_counter
#: Calls a function after so many seconds, unless it is cancelled. Tests replace it.
Timer: Callable[[float, Callable[[], None]], Any] = threading.Timer
#: How often a module may get other submodules or parameters, which its graphs are not for, and have a first graph of
#: each mode again.
MOST_CHANGES = 3
#: Seconds for which the first graph of a mode may be looked for, one part left to PyTorch after the other, before it
#: waits as other graphs do.
UNBOUNDED_SECONDS = 10.0
#: Seconds after which a capture says that it goes on.
LONG = 5.0
#: What the engine saves of PyTorch's time, as long as that is not measured; runs of a variant after which it is.
SAVED, MEASURED = 0.5, 8
#: The least that is assumed: a few slow steps are no reason never to capture anything more.
LEAST_SAVED = 0.1
#: Where algorithms are to be deterministic no clock decides: a variant is captured when it comes so often.
OFTEN = 32
#: Variants that are remembered while they wait, and graphs that a module keeps; those used last stay.
MOST_WAITING, MOST_GRAPHS = 256, 64
#: Results of a call in PyTorch that may begin its backward.
_MOST_RESULTS = 16
#: A variant that waits is asked for again when its calls have taken so many times what they had.
MORE = 1.01
#: A reason to wait, which is told with figures.
_SPENT = "captures took their share of the time in steps"


class Variant:
    """Calls that one graph is for, or would be."""

    __slots__ = (
        "what",
        "place",
        "elements",
        "capture",
        "captured",
        "runs",
        "seconds",
        "wasted",
        "waited",
        "eager",
        "used",
        "asked",
    )

    def __init__(self, what: str, place: str, elements: int) -> None:
        """``what`` tells it from the others, ``place`` is the part of that which is the same for all values;
        ``elements``: of a call's tensors."""
        self.what, self.place, self.elements = what, place, elements
        self.capture = 0.0  # seconds, those of failed attempts, too
        self.captured = False
        self.runs, self.seconds = 0, 0.0  # in the engine, forward and backward
        self.wasted = 0.0  # seconds of runs that did not hold
        self.waited, self.eager = 0, 0.0  # calls in PyTorch for want of a graph, and their seconds
        self.used = 0.0  # the clock at the latest run
        self.asked = 0.0  # seconds of its calls from which on :meth:`Budget.still_waits` asks again


class Budget:
    """What the captures of one module have taken, and may take."""

    def __init__(self, share: float, bounded: bool, log: Log) -> None:
        """``share``: of the time in steps, `inf` for no bound. ``bounded``: PyTorch may run the module."""
        self.share, self.log, self.bounded = share if bounded else math.inf, log, bounded
        self.captures = 0  # attempts
        self.seconds = 0.0  # of all of them
        self.first = 0.0  # of those that the bound leaves out
        self.refused = _Seconds()  # calls that PyTorch runs for other reasons
        self.eager = _Seconds()  # calls that it runs for want of a graph
        self.graphs: list[Variant] = []  # variants that have a graph
        self._waiting: OrderedDict[Hashable, Variant] = OrderedDict()
        self._gone = 0.0  # seconds in the engine of variants that are forgotten
        self._modes: dict[Hashable, float] = {}  # seconds of a mode that has no graph yet; inf: it has one
        self._said: frozenset[str] = frozenset()  # places that a user was told of
        self._mode: Hashable = None  # that is captured first
        self._began = 0.0  # the clock at the begin of the attempt that is under way
        self._passes = 0  # of it
        self._recapture = False  # the next capture is one that was allowed before
        self._around: Budget | None = None  # that of the module of which this one is a part
        self._parts: list[Budget] = []

    # --- before a capture ---------------------------------------------------------------------------------------------

    def known_variant(self, key: Hashable) -> Variant | None:
        """The one that waits under ``key``: calls that no graph holds for."""
        if (found := self._waiting.get(key)) is not None:
            self._waiting.move_to_end(key)
        return found

    def variant(self, key: Hashable, describe: Callable[[], tuple[str, str]], elements: int) -> Variant:
        """The same, made where there is none. ``describe``: as :class:`Variant`, what and place."""
        found = self.known_variant(key)
        if found is None:
            found = self._waiting[key] = Variant(*describe(), elements)
            while len(self._waiting) > MOST_WAITING:
                self._waiting.popitem(last=False)
        return found

    def ask(self, variant: Variant, mode: Hashable, must: bool = False) -> None:
        """Raises Waits where ``variant`` is not to be captured now. ``mode``: has its first graph for nothing.
        ``must``: PyTorch must not run it."""
        self._mode = None
        hindrance = self._hindrance(variant, mode, must)
        if hindrance:
            raise self._waits(variant, hindrance)
        if self._is_first(mode):
            self._mode = mode
        elif must or self._recapture or self.share == math.inf:
            self._recapture = False

    def still_waits(self, key: Hashable, mode: Hashable, skipped: Sequence[Variant] = ()) -> bool:
        """Would :meth:`ask` still refuse the variant that waits under ``key``? ``skipped``: those whose graphs were
        not tried, for which :meth:`may_waste` is asked instead."""
        if (variant := self.known_variant(key)) is None:
            return False
        if skipped:
            return not any(map(self.may_waste, skipped))
        if variant.eager < variant.asked:
            return True
        waits = bool(self._hindrance(variant, mode, False))
        if waits and not torch.are_deterministic_algorithms_enabled():
            variant.asked = variant.eager * MORE
        return waits

    def _is_first(self, mode: Hashable) -> bool:
        return self._modes.get(mode, 0.0) < UNBOUNDED_SECONDS

    def _hindrance(self, variant: Variant, mode: Hashable, must: bool) -> str:
        """Why ``variant`` is not to be captured now; "": it may be."""
        if self._around is not None and not must and not self._around.may_capture_part():
            return "captures of the parts of a module are to take no more than their share"
        if self._is_first(mode) or must or self._recapture or self.share == math.inf:
            return ""
        if torch.are_deterministic_algorithms_enabled():
            return f"such a call is captured when it has come {OFTEN} times" if variant.waited < OFTEN else ""
        expected = self.expected
        if variant.eager < expected or variant.eager * self.saved < expected:  # to know `saved` takes time
            return "such a call has not come often enough to pay for a capture"
        return "" if self._fits(expected) else _SPENT

    def share_with(self, part: Budget) -> None:
        """Captures of ``part``, a submodule's that is a graph of its own, its first one too, count as this module's."""
        part._around = self
        if part not in self._parts:
            self._parts.append(part)

    def may_capture_part(self) -> bool:
        captures = sum(part.captures for part in self._parts)
        return self._fits(sum(part.seconds for part in self._parts) / captures if captures else 0.0)

    def may_capture_again(self) -> bool:
        """May another graph take the place of one that there is?"""
        return self._fits(self.expected)

    def capture_again(self, variant: Variant) -> None:
        """Another graph is to take the place of the one of ``variant``, now."""
        self.drop(variant)
        self._recapture = True

    def _fits(self, seconds: float) -> bool:
        """May another capture take so long?"""
        if self.share == math.inf or torch.are_deterministic_algorithms_enabled():
            return True
        fits = self.bounded_seconds + seconds <= self.share * self.steps
        return fits and (self._around is None or self._around._fits(seconds))

    def go_on(self, reason: str) -> None:
        """Raises Waits where another pass of the capture that is under way would take too long. ``reason``: of it."""
        self._passes += 1
        taken = clock() - self._began
        if self._mode is not None and self._modes.get(self._mode, 0.0) + taken < UNBOUNDED_SECONDS:
            return
        expected = taken / self._passes
        if self.bounded_seconds + (0.0 if self._mode is not None else taken) + expected > self.share * self.steps:
            text = f"capturing has taken {taken:.1f} s, and goes on after more steps: {reason}"
            raise Waits(None, text, text)

    def unknown(self, variant: Variant) -> Waits:
        """For a call that a graph might hold for, were it not for too many runs that did not hold."""
        return self._waits(variant, "graphs that may not hold are tried again after more steps")

    def _waits(self, variant: Variant, why: str) -> Waits:
        text = f"there is no graph for it yet: {variant.what}"
        said = variant.place in self._said or (not variant.place and bool(self._said)) or self._around is not None
        self._said |= {variant.place}
        if why is _SPENT and not said:
            spent = f"captures took {self.seconds:.1f} s beside {self.steps:.1f} s in steps"
            why = f"{spent}, and may take {self.share:g} of that and the first graph"
        advice = "explain() lists what waits, ORTMODULE_CAPTURE_SHARE sets what captures may take"
        return Waits(variant, text, "" if said else f"PyTorch runs some calls: {variant.what}; {why}; {advice}")

    # --- a capture ----------------------------------------------------------------------------------------------------

    @contextmanager
    def capturing(self, variant: Variant) -> Iterator[None]:
        """Inside, ``variant`` is captured; :meth:`ask` has allowed it."""
        self._began, self._passes = clock(), 0
        mode, captured, counts = self._mode, False, True
        timer = Timer(LONG, lambda: self._long(variant))
        timer.daemon = True
        timer.start()
        try:
            yield
            captured = True
        except (CallsOwn, FillsCache):  # nothing is captured of such calls
            counts = False
            raise
        finally:
            timer.cancel()
            if counts:
                self._add(variant, clock() - self._began, mode, captured)

    def _add(self, variant: Variant, taken: float, mode: Hashable, captured: bool) -> None:
        self.captures += 1
        self.seconds += taken
        variant.capture += taken
        if mode is not None:
            self._modes[mode] = math.inf if captured else self._modes.get(mode, 0.0) + taken
            self.first += taken
        if not captured:  # it has to come as often once more
            variant.eager = 0.0
        elif not variant.captured:
            variant.captured = True
            self.graphs.append(variant)
            self.discard(variant)

    def _long(self, variant: Variant) -> None:
        self.log.warning(
            f"capturing has taken {LONG:.0f} s so far ({variant.what}), and goes on; a loop over many steps in forward "
            "takes long to capture"
        )

    def discard(self, variant: Variant | None) -> None:
        """Such calls wait for no graph."""
        self._waiting = OrderedDict((key, other) for key, other in self._waiting.items() if other is not variant)

    def add_graph(self, what: str, place: str, elements: int) -> Variant:
        """There is another graph, which a capture made beside the one that it was for."""
        found = Variant(what, place, elements)
        found.captured = True
        self.graphs.append(found)
        return found

    def drop(self, variant: Variant) -> None:
        """Its graph is no more."""
        if variant in self.graphs:
            self.graphs.remove(variant)
            self._gone += variant.seconds

    # --- a run --------------------------------------------------------------------------------------------------------

    def may_waste(self, variant: Variant) -> bool:
        """May its graph run for a call that it may turn out not to hold for?"""
        if variant.wasted <= 2 * variant.seconds or self.share == math.inf:
            return True
        return self.bounded_seconds <= self.share * self.steps

    def in_pytorch(self, forward: Callable, args: tuple, kwargs: dict[str, Any], reason: NotInEngine) -> Any:
        """``forward(*args, **kwargs)``, with the time that it and its backward take."""
        variant = reason.variant if isinstance(reason, Waits) else None
        add = self.refused.add if variant is None else functools.partial(self._add_eager, variant)
        start = clock()
        result = forward(*args, **kwargs)
        add(clock() - start)
        self.refused.calls += variant is None
        if variant is not None:
            variant.waited += 1
            variant.used = start
        if torch.is_grad_enabled():
            _watch_backward(result, add)
        return result

    def _add_eager(self, variant: Variant, seconds: float) -> None:
        variant.eager += seconds
        self.eager.seconds += seconds

    # --- figures ------------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> list[Variant]:
        """The variants without a graph."""
        return list(self._waiting.values())

    @property
    def bounded_seconds(self) -> float:
        """What counts: captures but the first, runs that did not hold, and all of these of parts."""
        of_parts = sum(part.first + part.bounded_seconds for part in self._parts)
        return self.seconds - self.first + of_parts + sum(variant.wasted for variant in self.graphs)

    @property
    def steps(self) -> float:
        """Seconds in steps, forward and backward, in the engine or in PyTorch."""
        engine = sum(variant.seconds for variant in self.graphs)
        return engine + self._gone + self.eager.seconds + self.refused.seconds

    @property
    def expected(self) -> float:
        """Seconds that the next capture will take, probably."""
        return self.seconds / self.captures if self.captures else 0.0

    @property
    def saved(self) -> float:
        """The share of PyTorch's time that the engine saves."""
        measured = [v for v in self.graphs if v.runs >= MEASURED]
        there = sum(self.pytorch_seconds(v) or 0.0 for v in measured)
        took = sum(v.seconds for v in measured if self.pytorch_seconds(v) is not None)
        return max(1 - took / there, LEAST_SAVED) if there else SAVED

    def pytorch_seconds(self, variant: Variant) -> float | None:
        """What the runs of ``variant`` would have taken in PyTorch, about; None: PyTorch has run no such calls."""
        if variant.waited and variant.eager:
            return variant.runs * variant.eager / variant.waited
        others = [v for v in (*self.graphs, *self._waiting.values()) if v.waited and v.eager]
        elements = sum(v.waited * v.elements for v in others)
        if not elements:
            return None
        return variant.runs * variant.elements * sum(v.eager for v in others) / elements


class _Seconds:
    """Seconds of calls that add up."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0

    def add(self, seconds: float) -> None:
        self.seconds += seconds


class _Backward:
    """Measures backward passes in PyTorch: from the first gradient that arrives until the pass is over."""

    def __init__(self, add: Callable[[float], None]) -> None:
        self.add, self.began = add, 0.0
        self.runs = False

    def __call__(self, grads: Any) -> None:
        if not self.runs:
            self.runs, self.began = True, clock()
            at_end_of_backward(self._ended)

    def _ended(self) -> None:
        self.runs = False
        self.add(clock() - self.began)


def _watch_backward(result: Any, add: Callable[[float], None]) -> None:
    if isinstance(result, torch.Tensor):
        values: Sequence[Any] = (result,)
    elif isinstance(result, dict):
        values = list(result.values())
    else:
        values = result if isinstance(result, (list, tuple)) else ()
    watch = _Backward(add)
    for value in values[:_MOST_RESULTS]:
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            value.grad_fn.register_prehook(watch)
