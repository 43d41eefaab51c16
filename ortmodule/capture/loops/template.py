"""Makes the graph of any length of what `finder.py` has found."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from ortmodule.capture.loops.sequence import NODE, PART, READ, RESULT
from ortmodule.capture.loops.steps import Filled, Result, Section, constant_at
from ortmodule.capture.loops.writer import StepWriter, Writer, name_of, operand_name, without_nodes
from ortmodule.capture.scalar_guards import Read

MOST_STEPS = 99_999


class Template:
    """The graph of every length from ``least`` on."""

    def __init__(self, model: onnx.ModelProto, like: onnx.ModelProto, sections: list[Section]) -> None:
        """``model``: one of the graphs; ``like``: another."""
        self.sections = sections
        self._around = without_nodes(model, like)
        self._writers: dict[int, StepWriter] = {}
        self.least = self._least()

    def _least(self) -> int:
        """The least length with one step that is like the others in every loop."""
        loops = [s for s in self.sections if s.repeats]
        return max(s.fewer + len(s.first) + len(s.last) + 1 for s in loops)

    def fits(self, n: int) -> bool:
        """Is there a graph for length ``n``?"""
        return self.least <= n <= MOST_STEPS and all(self._within(n))

    def _within(self, n: int) -> Iterator[bool]:
        """Does every operand of a graph of this length exist?"""
        for section in self.sections:
            count = section.count(n)
            ends = {len(section.first), count - len(section.last) - 1}  # between them it is linear
            numbers = {*range(len(section.first)), *ends, *range(count - len(section.last), count)}
            for i in numbers.intersection(range(count)):
                for operands in section.step(i, n).operands:
                    for each in operands:
                        if isinstance(each, Result):
                            yield 0 <= each.step.at(i, n) < self.sections[each.section].count(n)
                        elif isinstance(each, Filled):
                            yield each.size.at(i, n) >= 0

    def reads(self, n: int) -> list[Read]:
        """What Python reads from sizes at length ``n``."""
        found = []
        for section in self.sections:
            if any(item.what == READ for item in section.items):
                for i in range(section.count(n)):
                    for item, operands in zip(section.items, section.step(i, n).operands, strict=True):
                        if item.read is not None:
                            (number,) = operands
                            value = float(constant_at(number, i, n).value)
                            found.append(Read(None, value, item.read.depends, item.read.place, item.read.submodule))
        return found

    def model(self, n: int) -> onnx.ModelProto:
        """The graph of length ``n``, which :meth:`fits`."""
        writer = Writer(n)
        for index, section in enumerate(self.sections):
            count = section.count(n)
            fast = self._step_writer(index)
            i = 0
            while i < count:
                if fast is not None and len(section.first) <= i < count - len(section.last):
                    writer.steps(fast, range(i, count - len(section.last)))
                    i = count - len(section.last)
                    continue
                for q, (item, operands) in enumerate(zip(section.items, section.step(i, n).operands, strict=True)):
                    writer.add(item, [operand_name(self.sections, each, i, n, writer) for each in operands],
                               [name_of(section, q, port, i) for port in range(len(section.names[q]))])  # fmt: skip
                i += 1
        return writer.finished(self._around)

    def _step_writer(self, index: int) -> StepWriter | None:
        """None where a step has a part of a node that other steps have parts of, too."""
        section, around = self.sections[index], [*self.sections[:index][-1:], *self.sections[index + 1 :][:1]]
        if not section.repeats or PART in (section.items[0].what, around[-1].items[0].what):
            return None
        if {section.items[-1].what, *(s.items[-1].what for s in around[:-1])} - {NODE, PART}:
            return None
        if any(item.what in (RESULT, READ) for item in section.items):
            return None
        if index not in self._writers:
            self._writers[index] = StepWriter(self.sections, section)
        return self._writers[index]
