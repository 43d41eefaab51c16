"""Reads the program of a kernel, which the engine writes as text (csrc/ops/chains/triton_program.c).

A line each: ``rows`` or ``elements``; the operands, with their types; constants, with the bits of a float64; steps,
with their parameters, operands and results; the results that are stored. Values are numbered in that order. ::

    rows
    operand bfloat16
    constant float32 3fe0000000000000
    step Cast - 0 -> w:float32
    step LayerNormalization given0 2 -1 -1 -> w:float32 - r:float32
    results 3 4
"""

from __future__ import annotations

import struct
from typing import NamedTuple


class StepResult(NamedTuple):
    """What a step makes. ``letter``: w, all elements; r, a number for each row; C, sums over rows, of each block."""

    number: int
    letter: str
    dtype: str


class KernelStep(NamedTuple):
    """``params``: the number of its pair of parameters, or None; ``draws``: they are those of a dropout. ``operands``:
    values by number, -1 for one that is absent; ``results``: None for one that is not wanted."""

    operator: str
    params: int | None
    draws: bool
    operands: tuple[int, ...]
    results: tuple[StepResult | None, ...]


class Program(NamedTuple):
    """``types``: of all values, by number; constants follow the operands, steps' results the constants."""

    has_rows: bool
    operands: tuple[str, ...]
    constants: tuple[tuple[str, float], ...]
    steps: tuple[KernelStep, ...]
    results: tuple[int, ...]
    types: tuple[str, ...]
    n_params: int

    @property
    def draws(self) -> bool:
        return any(step.draws for step in self.steps)


def read_program(text: str) -> Program:
    """The program that ``text`` is. ValueError for a line that is none of one."""
    first, *lines = text.splitlines()
    operands: list[str] = []
    constants: list[tuple[str, float]] = []
    steps: list[KernelStep] = []
    types: list[str] = []
    results: tuple[int, ...] = ()
    n_params = 0
    for line in lines:
        kind, *words = line.split()
        if kind == "operand":
            operands.append(words[0])
            types.append(words[0])
        elif kind == "constant":
            constants.append((words[0], struct.unpack(">d", bytes.fromhex(words[1]))[0]))
            types.append(words[0])
        elif kind == "step":
            step = _read_step(words, len(types))
            steps.append(step)
            types += [result.dtype for result in step.results if result is not None]
            n_params += step.params is not None
        elif kind == "results":
            results = tuple(map(int, words))
        else:
            raise ValueError(f"a program has no line {line!r}")
    return Program(first == "rows", tuple(operands), tuple(constants), tuple(steps), results, tuple(types), n_params)


def _read_step(words: list[str], number: int) -> KernelStep:
    operator, params, *rest = words
    arrow = rest.index("->")
    results: list[StepResult | None] = []
    for word in rest[arrow + 1 :]:
        if word == "-":
            results.append(None)
            continue
        letter, _, dtype = word.partition(":")
        results.append(StepResult(number, letter, dtype))
        number += 1
    which = None if params == "-" else int(params.removeprefix("given").removeprefix("draws"))
    return KernelStep(operator, which, params.startswith("draws"), tuple(map(int, rest[:arrow])), tuple(results))
