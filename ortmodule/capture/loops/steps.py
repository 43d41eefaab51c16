"""Describes the steps of a loop as functions of their number: what a template of graphs consists of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy

from ortmodule.capture.loops.sequence import Item, Literal


@dataclass(frozen=True)
class Affine:
    """``i * step + n * length + start``"""

    start: int
    step: int = 0
    length: int = 0

    def at(self, i: int, n: int) -> int:
        return i * self.step + n * self.length + self.start

    def of(self, numbers: range, n: int) -> Sequence[int]:
        """Of all steps of a range."""
        count, first = len(numbers), self.at(numbers.start, n)
        stride = self.step * numbers.step
        return range(first, first + stride * count, stride) if stride else [first] * count


@dataclass(frozen=True)
class Result:
    """A result of step ``step`` of a section: of its item ``item``."""

    section: int
    item: int
    port: int
    step: Affine


@dataclass(frozen=True)
class Number:
    """A constant whose elements are ``(i * step + n * length + start) * factor``, computed in float64 or int64."""

    kind: int
    dtype: numpy.dtype
    shape: tuple[int, ...]
    start: numpy.ndarray
    step: numpy.ndarray
    length: numpy.ndarray
    factor: float | None = None

    def at(self, i: int, n: int) -> Literal:
        value = self.start + self.step * i + self.length * n
        value = value if self.factor is None else value * self.factor
        return Literal(self.kind, value.astype(self.dtype).reshape(self.shape))

    def bytes_of(self, numbers: range, n: int) -> list[bytes]:
        """The elements' bytes in each step of a range, as those of :meth:`at`."""
        steps = numpy.arange(numbers.start, numbers.stop).reshape(-1, *(1 for _ in self.start.shape))
        rows = self.start + self.step * steps + self.length * n
        rows = (rows if self.factor is None else rows * self.factor).astype(self.dtype)
        return [row.tobytes() for row in rows]


@dataclass(frozen=True)
class Filled:
    """A constant vector of one value, ``size`` long."""

    kind: int
    value: numpy.ndarray
    size: Affine

    def at(self, i: int, n: int) -> Literal:
        return Literal(self.kind, numpy.full(self.size.at(i, n), self.value, dtype=self.value.dtype))


Formula = Result | Number | Filled | Literal | str


@dataclass
class Step:
    """One step of a section as a function of its number: of each item the operands."""

    operands: list[list[Formula]]


@dataclass
class Section:
    """``items``, once, or in each of ``count(n)`` steps."""

    items: list[Item]
    repeats: bool
    fewer: int = 0  # steps than n, may be negative
    first: list[Step] = field(default_factory=list)
    rest: Step | None = None
    last: list[Step] = field(default_factory=list)
    names: list[list[str]] = field(default_factory=list)  # of each item's results

    def count(self, n: int) -> int:
        return n - self.fewer if self.repeats else 1

    def step(self, i: int, n: int) -> Step:
        count = self.count(n)
        if i < len(self.first):
            return self.first[i]
        if i >= count - len(self.last):
            return self.last[i - count + len(self.last)]
        assert self.rest is not None
        return self.rest


def constant_at(constant: Formula, i: int, n: int) -> Literal:
    assert not isinstance(constant, (str, Result))
    return constant if isinstance(constant, Literal) else constant.at(i, n)
