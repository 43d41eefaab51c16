"""Predicts sizes that data decides from earlier steps, so that a step on a GPU need not wait.

How many rows matter (csrc/ops/movement/rows.c) is part of what a plan is for. A GPU knows the number when it gets to
the step;
a host that waited for it before it started anything would leave the GPU without work meanwhile. So where the last steps
of the same shapes had the same numbers, a step begins with the plan for these, and asks, when all of its forward has
been started, what the numbers are. They are bounds: with fewer rows the results are the same, with more the forward
is done again before the caller has seen anything of it. Which plan a step takes depends on earlier numbers alone, never
on how fast something was, so that the same seed gives the same bits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

#: Steps with the same numbers, after which the next one is expected to have them, too.
STEADY = 3


class Counts:
    """For each of at most ``most`` kinds of steps, which the caller names: the numbers of the last ones."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._last: OrderedDict[Hashable, tuple[tuple[int, ...], int]] = OrderedDict()

    def expected(self, step: Hashable) -> tuple[int, ...]:
        """The numbers that such a step is going to have, probably; () where that is not known."""
        numbers, times = self._last.get(step, ((), 0))
        return numbers if times >= STEADY else ()

    def learn(self, step: Hashable, numbers: tuple[int, ...]) -> None:
        """Such a step had these numbers."""
        last, times = self._last.pop(step, ((), 0))
        self._last[step] = numbers, times + 1 if numbers == last else 1
        if len(self._last) > self._most:
            self._last.popitem(last=False)
