"""Follows numbers that Python takes out of tensors while a module is traced: `x.item()`, `int(x)`, `x.tolist()`.

Each becomes a number that knows its tensor (`symbolic_numbers.py`). What Python computes with it, and gives back to
torch as a size, a bound, an index or a factor, is traced; a comparison is a read that each run compares. So one graph
is for all values.

The two traces of a capture must not have the same numbers, or what depends on one would not show: where the data gives
both the same (a pointer that is a buffer), the second trace has one that differs by 1 (:class:`Numbers`). If they do
not agree then, numbers are compared in every run, as other reads are.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import torch

from ortmodule.capture import scalar_guards
from ortmodule.capture.calls.conversion_calls import ConversionCalls
from ortmodule.capture.numbers import numpy_sizes, symbolic_numbers
from ortmodule.capture.numbers.number_functions import OF_MATH, OF_NUMPY
from ortmodule.capture.numbers.number_lists import OF_LISTS
from ortmodule.capture.numbers.part_counts import range_count
from ortmodule.capture.numbers.read_causes import DATA
from ortmodule.capture.numbers.size_functions import OF_SIZES_ALONE, is_size, of_math, rounded
from ortmodule.core.objects.interception import Replacement
from ortmodule.core.size_expr import number_of
from ortmodule.core.torch_private import get_tracing_state, untraced

MOST_ELEMENTS = 256  # of a list of numbers
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DOWN, UP = -1, 1
_ROUNDING = (math.floor, math.ceil, math.trunc)


_current = threading.local()


@contextlib.contextmanager
def compared() -> Iterator[None]:
    """Inside, in this thread, numbers are compared in every run."""
    before = getattr(_current, "compared", False)
    _current.compared = True
    try:
        yield
    finally:
        _current.compared = before


def followed() -> Numbers:
    """For the first traces of a capture."""
    return Numbers(symbolic=not getattr(_current, "compared", False))


@dataclass
class Numbers:
    """What one trace does with numbers from data.

    ``first``: what an earlier trace has taken. Where this one would take the same, another value stands in: one that
    differs by ``step``. ``changed``: that has happened. ``further``: how much larger attributes that count calls are in
    a second trace than in the first.
    """

    symbolic: bool = True  # otherwise they are compared in every run
    first: list[list[Any]] | None = None
    step: int = DOWN
    calls: ConversionCalls = field(default_factory=ConversionCalls)
    taken: list[list[Any]] = field(default_factory=list)  # what one look at a tensor gives
    changed: bool = False
    met: bool = False  # in one of the traces
    counts: Mapping[str, float] = field(default_factory=dict)  # attributes that are other numbers in this trace
    further: int = 1

    def after(self, first: list[list[Any]], step: int, further: int = 1) -> Numbers:
        """For a trace that is to differ from an earlier one, which has taken ``first``."""
        return replace(self, first=first, step=step, further=further)

    def begin(self) -> None:
        """A trace begins."""
        self.taken, self.changed = [], False

    def take(self, recorder: scalar_guards.Recorder, tensor: torch.Tensor) -> Any:
        """The number, or the list of them, in a traced ``tensor``; NotImplemented: it is compared."""
        kinds = _INTEGERS[:-1] + _FLOATS
        if not self.symbolic or tensor.dtype not in kinds or tensor.dim() > 1 or tensor.numel() > MOST_ELEMENTS:
            return NotImplemented
        if recorder.depends_of(tensor) < DATA:
            return NotImplemented
        if tensor.dim():
            recorder.read(tensor.size(0), DATA)  # how many there are
        whole = tensor.dtype in _INTEGERS
        copied = tensor.detach().to(torch.int64 if whole else torch.float64).clone()  # forward may change it
        with untraced():
            values = copied.reshape(-1).tolist()
            if self.first is not None and values == [*self.first[len(self.taken) :], None][0] and values:
                self.changed = True
                values = [_another(v, self.step) for v in values] if len({*values}) < 2 else [*values[1:], values[0]]
                copied.copy_(torch.tensor(values, dtype=copied.dtype).reshape(copied.shape))
        self.taken.append(values)
        self.met = True
        parts = copied.unbind() if tensor.dim() else (copied,)
        found = [symbolic_numbers.known(value, part) for value, part in zip(values, parts, strict=True)]
        return found if tensor.dim() else found[0]

    def converting(self, recorder: scalar_guards.Recorder) -> AbstractContextManager[None]:
        """Inside, `int(x)`, `len(x)` and the like, where such calls have been met, and `math.sqrt(x)` give numbers that
        know their tensors, or sizes."""

        def conversion(kind: Callable[..., Any], convert: Callable[[Any], Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if len(args) == 1 and not kwargs and get_tracing_state() is not None:
                    number = self._number(recorder, args[0])
                    if number is not None:
                        return convert(number)
                    if (size := self.converted(recorder, kind, args[0])) is not None:
                        return size
                return kind(*args, **kwargs)

            return call

        def function(original: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def call(*args: Any, **kwargs: Any) -> Any:
                if get_tracing_state() is None or kwargs or (original in OF_LISTS and len(args) != 1):
                    return original(*args, **kwargs)
                if (found := self._of_size(recorder, original, args)) is not None:
                    return found
                if original in OF_LISTS:
                    args = numpy_sizes.with_sizes(args)
                numbers = [self._number(recorder, a) for a in args]
                return instead(*(a if n is None else n for n, a in zip(numbers, args, strict=True)))

            return call

        called: dict[Callable[..., Any], Callable[..., Any]] = {
            original: function(original, instead) for original, instead in (OF_SIZES_ALONE | OF_MATH | OF_LISTS).items()
        }
        follows = functools.partial(self._follows, recorder)
        called |= {original: numpy_sizes.following(original, follows) for original in OF_NUMPY}
        called |= {rounded: conversion(rounded, rounded) for rounded in _ROUNDING}
        modules = {name: sys.modules[name] for name in ("math", "numpy")}
        of_name = {f: call for f, call in called.items() if f not in OF_NUMPY}
        others = [Replacement(modules[f.__module__], f.__name__, call) for f, call in of_name.items()]
        others += [Replacement(numpy, name, called[f]) for name, f in numpy_sizes.BY_NAME.items()]
        called[int] = conversion(int, symbolic_numbers.whole)
        called[float] = conversion(float, symbolic_numbers.fractional)
        called[round] = conversion(round, round)
        called[len] = functools.partial(self._length, recorder)
        called[range] = functools.partial(self._range, recorder)
        called[map] = functools.partial(_mapped, dict(called))
        return self.calls.replaced(called, others)

    def _follows(self, recorder: scalar_guards.Recorder) -> bool:
        return self.symbolic and recorder.watches()

    def _length(self, recorder: scalar_guards.Recorder, value: Any) -> Any:
        """`len(value)`, of a tensor as a size."""
        if not recorder.watches() or getattr(type(value), "__len__", None) is not torch.Tensor.__len__:
            return len(value)
        if not value.dim():
            return len(value)
        self.met = True
        return value.size(0)

    def _range(self, recorder: scalar_guards.Recorder, *args: Any) -> range:
        """`range(0, n, 8)`: of as many numbers, which alone is read, where Python would read ``n``."""
        if len(args) != 3 or not self._follows(recorder):
            return range(*args)
        start, _, step = args
        with recorder.paused():
            count = range_count(*args)
            number = 0 if count is None else number_of(count) or 0
            if number > 0:
                recorder.read(count)
        if number <= 0:
            return range(*args)
        self.met = True
        return range(start, start + int(number) * step, step)

    def converted(self, recorder: scalar_guards.Recorder, kind: Callable[..., Any], value: Any) -> Any:
        """What ``kind`` makes of a number that follows from sizes; None: it is none, or has to be read."""
        if not self.symbolic or not isinstance(value, torch.Tensor) or not recorder.watches():
            return None
        with recorder.paused():
            if not is_size(value):
                return None
            if kind is float:
                found = value if value.is_floating_point() else value * 1.0
            else:
                found = rounded(kind, value, recorder.read)
        self.met = self.met or found is not None
        return found

    def _of_size(self, recorder: scalar_guards.Recorder, function: Callable[..., Any], args: tuple) -> Any:
        """The same of a function of `math`."""
        if not self.symbolic or not any(isinstance(a, torch.Tensor) for a in args) or not recorder.watches():
            return None
        with recorder.paused():
            found = of_math(function, args, recorder.read)
        self.met = self.met or found is not None
        return found

    def _number(self, recorder: scalar_guards.Recorder, value: Any) -> Any:
        """The symbolic number that ``value`` is, or holds; None: neither."""
        if symbolic_numbers.is_one(value):
            return value
        if not isinstance(value, torch.Tensor) or not recorder.watches():
            return None
        with recorder.paused():
            found = self.take(recorder, value.reshape(())) if value.numel() == 1 else NotImplemented
        return None if found is NotImplemented else found


def _mapped(called: Mapping[Any, Callable[..., Any]], function: Any, /, *iterables: Any) -> Any:
    """`map(function, ...)`, which calls what is ``called`` instead."""
    known = isinstance(function, Hashable)
    return map(called.get(function, function) if known else function, *iterables)


def _another(value: Any, step: int) -> Any:
    if isinstance(value, float):
        return value * (1 + step / 2) + (value == 0) * step / 2
    return value + step if value > 1 or step > 0 else value + 1
