"""Follows what NumPy and `math` make of a list of numbers that know their tensors: sums, means, the largest.

The order of additions is NumPy's (eight sums side by side), so the graph has its last digit, too. These functions turn
a list into an array without asking what is in it, so they are others while a module is traced (:mod:`data_numbers`).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from ortmodule.capture.numbers import numpy_numbers
from ortmodule.capture.numbers.symbolic_numbers import as_given, fractional, is_float, is_one, value_of, whole

MOST_NUMBERS = 256
_PROD = math.prod
_KINDS = (numpy.float64, numpy.float32, numpy.int64)
_BLOCK, _LANES = 128, 8  # of NumPy's sums


def _sum(numbers: Sequence[Any]) -> Any:
    """The sum in NumPy's order."""
    count = len(numbers)
    if count < _LANES:
        return functools.reduce(operator.add, numbers)
    if count > _BLOCK:
        half = count // 2 - count // 2 % _LANES
        return _sum(numbers[:half]) + _sum(numbers[half:])
    last = count - count % _LANES
    lanes = [functools.reduce(operator.add, numbers[lane:last:_LANES]) for lane in range(_LANES)]
    while len(lanes) > 1:
        lanes = [one + other for one, other in zip(lanes[::2], lanes[1::2], strict=True)]
    return functools.reduce(operator.add, numbers[last:], lanes[0])


def _mean(numbers: Sequence[Any]) -> Any:
    return _sum(numbers) / len(numbers)


def _var(numbers: Sequence[Any]) -> Any:
    middle = _mean(numbers)
    return _mean([(n - middle) * (n - middle) for n in numbers])


def _product(numbers: Sequence[Any]) -> Any:
    return functools.reduce(operator.mul, numbers)


def _chosen(choose: Callable[[Any, Any], Any]) -> Callable[[Sequence[Any]], Any]:
    return lambda numbers: functools.reduce(choose, numbers)


_OF_FRACTIONS = (numpy.mean, numpy.average, numpy.var, numpy.std)  # whole numbers are float64 to them
_MAX, _MIN = _chosen(numpy.maximum), _chosen(numpy.minimum)
_OF_NUMPY: dict[Any, Callable[[Sequence[Any]], Any]] = {
    numpy.sum: _sum, numpy.prod: _product, numpy.mean: _mean, numpy.average: _mean, numpy.var: _var,
    numpy.std: lambda numbers: numpy.sqrt(_var(numbers)), numpy.max: _MAX, numpy.min: _MIN,
    numpy.amax: _MAX, numpy.amin: _MIN,
}  # fmt: skip


def _followed(values: Any) -> bool:
    """Is it a list of numbers, some of which know their tensors?"""
    fits = type(values) in (list, tuple) and 0 < len(values) <= MOST_NUMBERS
    return fits and any(map(is_one, values)) and all(map(numpy_numbers.is_number, values))


def _given(values: Sequence[Any]) -> list[Any]:
    return [as_given(each) if is_one(each) else each for each in values]


def _read(values: Any) -> Any:
    for each in filter(is_one, values if type(values) in (list, tuple) else ()):
        value_of(each)
    return values


def _as_kind(number: Any, kind: Any) -> Any:
    """A number as an element of an array: one of Python's, which rounds as NumPy's of 64 bits, or of 32 bits."""
    if kind is numpy.float32:
        return number
    if is_one(number):
        return fractional(number) if kind is numpy.float64 else whole(number)
    return kind(number).item()


def _of_numpy(original: Callable[..., Any], compute: Callable[[Sequence[Any]], Any]) -> Callable[..., Any]:
    def function(values: Any) -> Any:
        if not _followed(values):
            return original(values)
        given = _given(values)
        kind, result = numpy.asarray(given).dtype.type, original(given)
        if kind is numpy.int64 and original in _OF_FRACTIONS:
            kind = numpy.float64
        if kind not in _KINDS or type(result) is not kind:
            return original(_read(values))
        number = compute([_as_kind(each, kind) for each in values])
        if not is_one(number) or number.value != result.item() or is_float(number) == (kind is numpy.int64):
            return original(_read(values))
        return numpy_numbers.typed(number, kind)

    return function


def _prod_of_math(values: Any) -> Any:
    return _product(values) if _followed(values) else _PROD(values)


#: Functions of one list -> what is called instead in a trace.
OF_LISTS: dict[Callable[..., Any], Callable[..., Any]] = {
    **{original: _of_numpy(original, compute) for original, compute in _OF_NUMPY.items()},
    _PROD: _prod_of_math,
}
