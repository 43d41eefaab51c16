"""Finds the repetition in graphs of one module at different lengths.

A loop of Python's over a length is unrolled by a trace, so each length has another graph. :func:`find` takes the graphs
of two lengths n and n + 1. Where one has a stretch of nodes once more than the other (and behind as many of the same)
that is a step of the loop. Every operand of a step is then written as a function of the number i of the step and of n:
a result of step a * i + b * n + c, a constant of the same kind. The first steps may differ from the rest, and the last:
they are written one by one. A graph made of that for a third length has to be the one that is exported there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy
import onnx

from ortmodule.capture.loops.sequence import Item, Literal, Operand, Ref, alike, sequence
from ortmodule.capture.loops.steps import Affine, Filled, Formula, Number, Result, Section, Step
from ortmodule.capture.loops.template import Template
from ortmodule.capture.scalar_guards import Read
from ortmodule.core.errors import Unrepeatable

_MOST_FIRST, _MOST_LAST = 3, 2  # steps that may differ from the rest
_LEAST_ALIKE = 2  # steps of the shorter graph that have to be like each other
_DIGITS = range(1, 13)


@dataclass
class _Unrolled:
    """The items of one graph, and where each is: (section, step, item of it)."""

    n: int
    items: list[Item]
    places: list[tuple[int, int, int]]
    begins: list[int]  # of each section

    def item(self, section: Section, index: int, step: int, item: int) -> Item:
        return self.items[self.begins[index] + step * len(section.items) + item]


def find(models: Sequence[tuple[int, onnx.ModelProto, Sequence[Read]]]) -> Template:
    """The template behind graphs of three lengths n, n + 1 and a longer one, each with what Python read from sizes.

    Raises Unrepeatable.
    """
    (n1, model1, reads1), (n2, model2, reads2), (n3, model3, reads3) = models
    assert n2 == n1 + 1 and n3 > n2
    one, two = sequence(model1, reads1), sequence(model2, reads2)
    insertions = _insertions([item.token for item in one], [item.token for item in two])
    sections = _segments(two, insertions, n2)
    unrolled = [_laid_out(sections, n, items) for n, items in ((n1, one), (n2, two))]
    for index, section in enumerate(sections):
        section.names = _names(section, index, unrolled[1])
    for index, section in enumerate(sections):
        _describe(sections, index, section, unrolled)
    template = Template(model2, model1, sections)
    for n, model, reads in models:
        if not template.fits(n) or not alike(sequence(template.model(n), template.reads(n)), sequence(model, reads)):
            raise Unrepeatable(f"the graph of length {n} is not the same steps {n} times")
    return template


# --- where the steps are ----------------------------------------------------------------------------------------------


def _insertions(one: list[tuple], two: list[tuple]) -> list[tuple[int, int]]:
    """Where ``two`` has a stretch once more: (where it begins, how long it is). Raises Unrepeatable."""
    tried: set[tuple[int, int]] = set()

    def search(i: int, j: int) -> list[tuple[int, int]] | None:
        while i < len(one) and j < len(two) and one[i] == two[j]:
            i, j = i + 1, j + 1
        if i == len(one) and j == len(two):
            return []
        if (i, j) in tried:
            return None
        tried.add((i, j))
        for length in range(1, min(len(two) - len(one) - (j - i), j) + 1):
            if two[j : j + length] == two[j - length : j] and (
                (i < len(one) and j + length < len(two) and one[i] == two[j + length])
                or (i == len(one) and j + length == len(two))
            ):
                rest = search(i, j + length)
                if rest is not None:
                    return [(j, length), *rest]
        return None

    found = search(0, 0)
    if not found:
        raise Unrepeatable("the longer graph has no stretch once more that is in both")
    return found


def _segments(two: list[Item], insertions: list[tuple[int, int]], n: int) -> list[Section]:
    """The sections of the longer graph, of length ``n``."""
    sections, begin = [], 0
    for at, length in insertions:
        end = at + length
        start = end - length
        while start - length >= begin and all(
            a.token == b.token for a, b in zip(two[start - length : start], two[start : start + length], strict=True)
        ):
            start -= length
        if start > begin:
            sections.append(Section(two[begin:start], False))
        count = (end - start) // length
        sections.append(Section(two[end - length : end], True, n - count))
        begin = end
    if begin < len(two):
        sections.append(Section(two[begin:], False))
    return sections


def _laid_out(sections: list[Section], n: int, items: list[Item]) -> _Unrolled:
    places: list[tuple[int, int, int]] = []
    begins = []
    for index, section in enumerate(sections):
        begins.append(len(places))
        for step in range(section.count(n)):
            places += [(index, step, item) for item in range(len(section.items))]
    if len(places) != len(items):
        raise Unrepeatable("the graphs differ by another number of nodes than there are in a step")
    return _Unrolled(n, items, places, begins)


def _names(section: Section, index: int, unrolled: _Unrolled) -> list[list[str]]:
    return [
        list(unrolled.item(section, index, section.count(unrolled.n) - 1, q).outputs) for q in range(len(section.items))
    ]


# --- what the operands are --------------------------------------------------------------------------------------------

_Sample = tuple[int, int, Operand]  # step, length, what is there


def _describe(sections: list[Section], index: int, section: Section, unrolled: Sequence[_Unrolled]) -> None:
    """Finds how few steps at both ends differ from the rest. Raises Unrepeatable."""
    if not section.repeats:
        section.first = [_step(sections, index, [[(0, u)] for u in unrolled])]
        return
    shorter = section.count(unrolled[0].n)
    reason: Unrepeatable | None = None
    for differing in range(_MOST_FIRST + _MOST_LAST + 1):
        for last in range(min(differing, _MOST_LAST) + 1):
            first = differing - last
            if first > _MOST_FIRST or shorter - differing < _LEAST_ALIKE:
                continue
            try:
                section.rest = _step(
                    sections,
                    index,
                    [[(i, u) for i in range(first, section.count(u.n) - last)] for u in unrolled],
                )
                section.first = [_step(sections, index, [[(i, u)] for u in unrolled]) for i in range(first)]
                section.last = [
                    _step(sections, index, [[(section.count(u.n) - last + k, u)] for u in unrolled], of_end=True)
                    for k in range(last)
                ]
                return
            except Unrepeatable as error:
                reason = error
    raise reason or Unrepeatable("a loop has too few steps")


def _step(sections: list[Section], index: int, groups: list[list[tuple[int, _Unrolled]]], of_end: bool = False) -> Step:
    """``groups``: for each of the graphs the steps that are to be one. ``of_end``: a step that is counted from the
    end, so a function of the length alone."""
    section = sections[index]
    found = []
    for q in range(len(section.items)):
        samples = [(0 if of_end else i, u, u.item(section, index, i, q)) for group in groups for i, u in group]
        arity = {len(item.operands) for _, _, item in samples}
        if len(arity) != 1:
            raise Unrepeatable("an operator has more operands in one step than in another")
        found.append([_operand(samples, slot) for slot in range(arity.pop())])
    return Step(found)


def _operand(samples: list[tuple[int, _Unrolled, Item]], slot: int) -> Formula:
    given = [(i, u, item.operands[slot]) for i, u, item in samples]
    _, _, one = given[0]
    if isinstance(one, str):
        if any(each != one for _, _, each in given):
            raise Unrepeatable("an operand is another input")
        return one
    if isinstance(one, Ref):
        where = []
        for i, u, each in given:
            if not isinstance(each, Ref):
                raise Unrepeatable("an operand is a constant in some steps")
            section, step, item = u.places[each.item]
            where.append(((section, item, each.port), i, u.n, step))
        if len({place for place, *_ in where}) != 1:
            raise Unrepeatable("an operand is the result of another operator")
        return Result(*where[0][0], _affine([(i, n, step) for _, i, n, step in where]))
    literals = [(i, u.n, each) for i, u, each in given if isinstance(each, Literal)]
    if len(literals) != len(given):
        raise Unrepeatable("an operand is a constant in some steps")
    return _constant_of(literals)


def _slopes(samples: list[tuple[int, int, int]]) -> Affine:
    known = {(i, n): value for i, n, value in samples}
    step = next((known[i + 1, n] - v for (i, n), v in known.items() if (i + 1, n) in known), 0)
    length = next((known[i, n + 1] - v for (i, n), v in known.items() if (i, n + 1) in known), 0)
    i, n, value = samples[0]
    return Affine(value - i * step - n * length, step, length)


def _affine(samples: list[tuple[int, int, int]]) -> Affine:
    """Raises Unrepeatable where the values are no such function."""
    found = _slopes(samples)
    if any(found.at(i, n) != value for i, n, value in samples):
        raise Unrepeatable("an operand is not from a step that is as far away in each step")
    return found


def _constant_of(samples: list[tuple[int, int, Literal]]) -> Formula:
    """Raises Unrepeatable."""
    _, _, one = samples[0]
    if all(one.same(each) for _, _, each in samples):
        return one
    if any(each.kind != one.kind for _, _, each in samples):
        raise Unrepeatable("a constant has another type")
    kind, value = one.kind, one.value
    if any(each.value.shape != value.shape for _, _, each in samples):
        if any(each.value.ndim != 1 or not each.value.size for _, _, each in samples) or any(
            (each.value != value[0]).any() for _, _, each in samples
        ):
            raise Unrepeatable("a constant has another shape")
        return Filled(kind, value[:1], _affine([(i, n, each.value.size) for i, n, each in samples]))
    if kind == onnx.TensorProto.BFLOAT16 or value.dtype.kind not in "if" or value.size > 64:
        raise Unrepeatable("a constant is another one in each step")
    flat = [(i, n, each.value.reshape(-1)) for i, n, each in samples]
    for factor in (None, *_factors(flat)) if value.dtype.kind == "f" else (None,):
        number = _number(kind, value, flat, factor)
        if number is not None:
            return number
    raise Unrepeatable("a constant is no multiple of the step's number")


def _number(
    kind: int, like: numpy.ndarray, flat: list[tuple[int, int, numpy.ndarray]], factor: float | None
) -> Number | None:
    """The whole numbers, times ``factor``, that the constants are."""
    whole = []
    for i, n, value in flat:
        wide = value.astype(numpy.float64) if like.dtype.kind == "f" else value.astype(numpy.int64)
        scaled = wide if factor is None else wide / factor
        if like.dtype.kind == "f":
            if not (numpy.isfinite(scaled).all() and (abs(scaled) < 2**24).all()):
                return None
            scaled = numpy.rint(scaled).astype(numpy.int64)
        whole.append((i, n, scaled))
    lines = [_slopes([(i, n, int(v[k])) for i, n, v in whole]) for k in range(like.size)]
    start, step, length = (
        numpy.array([getattr(line, name) for line in lines], dtype=numpy.int64) for name in ("start", "step", "length")
    )
    found = Number(kind, like.dtype, like.shape, start, step, length, factor)
    for i, n, value in flat:
        if found.at(i, n).value.tobytes() != value.tobytes():
            return None
    return found


def _factors(flat: list[tuple[int, int, numpy.ndarray]]) -> Iterator[float]:
    """Short decimal numbers that the constants may be multiples of: 0.1 of `t * 0.1`, whose ``t`` grows or falls with
    the steps, or is the last of each length."""
    by_step = {(i, n): float(value[0]) for i, n, value in flat}
    for (i, n), value in by_step.items():
        for after in (by_step.get((i + 1, n)), by_step.get((i, n + 1))):
            if after is None or not numpy.isfinite(after - value) or after == value:
                continue
            for digits in _DIGITS:
                short = float(f"{abs(after - value):.{digits}g}")
                if abs(short - abs(after - value)) <= 1e-5 * short:
                    yield short
            return
