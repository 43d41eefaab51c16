"""Lets `int(x)`, `sqrt(x)`, `len(x)`, `map(int, x)` and `range(0, x, 8)` follow numbers of tensors, in a trace.

Python makes a plain number of whatever `__int__` or `__len__` returns, so the call itself has to be another one. In the
code of the functions that make such calls the name that is called is replaced for the time of a trace: where an
instruction loads `int` in order to call it, it loads a function of ours; `isinstance(x, int)` still sees the type. So
are functions of `math` and NumPy that are globals (`from math import sqrt`). A trace meets `__int__` or `__len__`
first, so it notes whose code that was (:meth:`ConversionCalls.meet`), and is made once more.
"""

from __future__ import annotations

import builtins
import dis
import functools
import math
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy

from ortmodule.core.names import PACKAGE
from ortmodule.core.objects.interception import Replacement, replaced
from ortmodule.core.objects.references import referrers
from ortmodule.guards.code_reader import all_of, inner

#: Functions of NumPy's that lists of numbers are given to.
_OF_LISTS = ("sum", "prod", "mean", "average", "var", "std", "max", "min", "amax", "amin")
_NUMPY = numpy.__path__[0]
_CALLED: tuple[Any, ...] = (
    int,
    float,
    round,
    len,
    map,
    range,
    *filter(callable, vars(math).values()),
    *(getattr(numpy, name) for name in (*_OF_LISTS, "clip", "round", "around")),
    *(function for function in vars(numpy).values() if isinstance(function, numpy.ufunc)),
)
#: By the id of what is called: the name under which the function in its place is among the builtins.
_NAMES = {id(function): f"ortmodule.{function.__module__}.{function.__name__}" for function in _CALLED}
_LOAD, _EXTENDED, _CALL = (dis.opmap[name] for name in ("LOAD_GLOBAL", "EXTENDED_ARG", "CALL"))
_MOST = 127  # names of a function that one byte counts, beside a bit


@dataclass
class ConversionCalls:
    """The code that converts numbers. ``found``: since :meth:`new` was asked."""

    functions: list[types.FunctionType] = field(default_factory=list)
    _asked: set[types.CodeType] = field(default_factory=set)
    _found: bool = False

    def meet(self, frame: types.FrameType | None) -> None:
        """``frame`` converts a number: another trace sees the call, if its code can be found."""
        while frame is not None and frame.f_code.co_filename.startswith(_NUMPY):  # it was given the number
            frame = frame.f_back
        if frame is None or frame.f_code in self._asked or frame.f_code.co_filename.startswith(PACKAGE):
            return
        self._asked.add(frame.f_code)
        while frame is not None and not _is_calling(frame):  # the one around a comprehension has called `map`
            outer = frame.f_back
            frame = outer if outer is not None and any(c is frame.f_code for c in inner(outer.f_code)) else None
        if frame is None:
            return
        code = frame.f_code
        # A comprehension or an inner function is made anew in each call, from the code of what is around it.
        while frame is not None:
            if any(each is code for each in all_of(frame.f_code)):
                found = _functions_of(frame)
                self.functions += [f for f in found if not any(f is known for known in self.functions)]
                self._found |= bool(found)
            frame = frame.f_back

    def new(self) -> bool:
        """Have there been such calls since this was asked last?"""
        found, self._found = self._found, False
        return found

    @contextmanager
    def replaced(
        self, instead: dict[Callable[..., Any], Callable[..., Any]], others: Sequence[Replacement] = ()
    ) -> Iterator[None]:
        """Inside, the functions that were met call ``instead``, and ``others`` are in place."""
        places = [Replacement(builtins, _NAMES[id(called)], function) for called, function in instead.items()]
        before = [(function, function.__code__) for function in self.functions]
        with replaced([*others, *(places if before else ())]):
            try:
                for function, code in before:
                    function.__code__ = _with_calls_replaced(code, _names(code, function.__globals__))
                yield
            finally:
                for function, code in before:
                    function.__code__ = code


def gives(frame: types.FrameType, count: int) -> bool:
    """Is it a call with so many arguments that ``frame`` is at?"""
    code, at = frame.f_code.co_code, frame.f_lasti
    return at >= 0 and code[at] == _CALL and code[at + 1] == count


def _is_calling(frame: types.FrameType) -> bool:
    return any(_calls(frame.f_code, _names(frame.f_code, frame.f_globals)))


def _functions_of(frame: types.FrameType) -> list[types.FunctionType]:
    """The functions of a frame's code: one that stands where its name says, or all that are alive, which takes long."""
    outer, *names = frame.f_code.co_qualname.split(".")
    found = frame.f_globals.get(outer)
    for name in names:
        found = getattr(found, "__dict__", {}).get(name)
    if isinstance(found, types.FunctionType) and found.__code__ is frame.f_code:
        return [found]
    holders = referrers([frame.f_code])
    return [f for f in holders if isinstance(f, types.FunctionType) and f.__code__ is frame.f_code]


def _names(code: types.CodeType, variables: dict[str, Any]) -> frozenset[tuple[str, str]]:
    """Names in ``code``, and in code inside of it, of what is called -> those of the functions in its place."""
    names = {name for each in all_of(code) for name in each.co_names}
    found = {name: id(variables.get(name, getattr(builtins, name, None))) for name in names}
    kept = id(range) if "stop" in names else None  # `range(0, n, 8).stop` is the size itself
    return frozenset((name, _NAMES[called]) for name, called in found.items() if called in _NAMES and called != kept)


def _calls(code: types.CodeType, instead: frozenset[tuple[str, str]]) -> Iterator[tuple[int, str]]:
    """The places of instructions that load a function of these names in order to call it, where one byte says which,
    with the name of what is called instead."""
    known = dict(instead)
    names, byte_code = code.co_names, code.co_code
    for at in range(0, len(byte_code), 2):
        calls = byte_code[at] == _LOAD and byte_code[at + 1] & 1 and not (at and byte_code[at - 2] == _EXTENDED)
        if calls and (name := names[byte_code[at + 1] >> 1]) in known:
            yield at, known[name]


@functools.lru_cache(maxsize=256)
def _with_calls_replaced(code: types.CodeType, instead: frozenset[tuple[str, str]]) -> types.CodeType:
    names, byte_code = list(code.co_names), bytearray(code.co_code)
    for at, mine in _calls(code, instead):
        if mine not in names:
            if len(names) > _MOST:
                continue
            names.append(mine)
        byte_code[at + 1] = names.index(mine) << 1 | 1
    parts = {id(part): _with_calls_replaced(part, instead) for part in inner(code)}
    constants = tuple(parts.get(id(constant), constant) for constant in code.co_consts)
    return code.replace(co_code=bytes(byte_code), co_names=tuple(names), co_consts=constants)
