"""Finds what forward decides by chance, by time or by the process's state while it is traced.

A trace would keep the number that was drawn for ever. So a draw is refused, wherever its generator is held, and the
innermost submodule that makes it is left to PyTorch. What is seen:

- calls of Python's generators, of the system's randomness and of clocks, by a profile function of this thread. A
  generator that forward makes itself, from a number, gives the same at each call and is let through;
- NumPy's generators (their methods are no functions that Python tells of): those alive whose state has moved.

Models draw a number and compare it with a rate that is 0 (`random.random() < self.layerdrop`): numbers of Python's and
NumPy's global generators are `Drawn`, and let through where every comparison has one possible outcome. Such draws are
made again at each call (``draws``), so the generators go on as in PyTorch.

Where such a number, or one of another distribution of floats, goes into arithmetic, the module is traced once more with
draws as operands (`DrawsOperand`): each is a node that draws in every run, in Python's order, and in Python a number
that knows its tensor (`symbolic_numbers.py`). To decide something with it is refused as before.

Environment variables and context variables that are read are noted (``reads``), and the functions that run (``ran``):
guards compare what they read. So are lines that print or write to a file (``prints``), which no graph does: that is
said.
"""

from __future__ import annotations

import _io
import contextvars
import datetime
import functools
import gc
import math
import os
import random
import sys
import time
import types
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

import numpy
import torch
from torch import nn

from ortmodule import _core
from ortmodule.capture.randomness import held_generators, held_iterators, process_reads
from ortmodule.capture.randomness.drawn_values import is_array
from ortmodule.capture.scalar_guards import user_line
from ortmodule.core import rng_state
from ortmodule.core.errors import DrawsOperand, Moved, NotTraceable
from ortmodule.core.objects.interception import Replacement, replaced
from ortmodule.core.torch_private import get_tracing_state
from ortmodule.guards.code_reader import is_library, module_of
from ortmodule.guards.process_state import ENVIRONMENT, of_context, of_setting

#: A draw from a global generator: the function, and what it is given.
Draw = tuple[Callable[..., Any], tuple[Any, ...]]

_CLOCKS = {
    getattr(time, name)
    for name in (
        "time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time",
        "process_time_ns", "thread_time", "thread_time_ns", "localtime", "gmtime", "ctime", "strftime",
        "clock_gettime", "clock_gettime_ns",
    )
    if hasattr(time, name)
}  # fmt: skip
_ENTROPY = {getattr(os, name) for name in ("urandom", "getrandom") if hasattr(os, name)}
_ENTROPY |= {each for each in (getattr(uuid, "_generate_time_safe", None),) if each is not None}
_SOURCES = _CLOCKS | _ENTROPY | process_reads.SETTINGS | process_reads.MOVING | process_reads.FILES | {print}
_NOW = {"now", "utcnow", "today"}  # of datetime's classes
_DRAWING = {"random", "getrandbits"}  # what all methods of random.Random draw with
#: They read clocks for what they write, or to wait, and give forward nothing of it.
_QUIET = {
    "logging", "warnings", "threading", "queue", "concurrent", "multiprocessing", "subprocess", "tqdm", "rich", "torch",
    "ortmodule",
}  # fmt: skip
_OF_GENERATOR = "sets or reads the state of a torch.Generator"
_FILES: type = vars(_io)["_IOBase"]
_HELPERS = {"random", "secrets", "uuid"}  # modules that draw for the one that calls them
_BELOW_ONE = math.nextafter(1.0, 0.0)

#: Seeds with which the first three numbers from 0 to 1 are all below 0.02, and all above 0.97.
_PYTHON, _NUMPY = (232551, 278652), (95761, 133228)


def seed(high: bool) -> None:
    """What is decided by a number that Python draws shows as a difference between two traces."""
    random.seed(_PYTHON[high])
    numpy.random.seed(_NUMPY[high])


class Drawn(float):
    """A number from ``low`` to ``high`` that was drawn. A comparison whose outcome depends on it, and all else that
    Python does with it, is a decision by chance: NotTraceable."""

    low: float
    high: float


def _drawn(value: float, low: float, high: float) -> Drawn:
    number = Drawn(value)
    number.low, number.high = low, high
    return number


def _decides(*_: Any) -> Any:
    raise NotTraceable(f"{user_line()} draws a random number, and what forward does depends on it")


def _computes(*_: Any) -> Any:
    raise DrawsOperand(f"{user_line()} computes with a random number")


def is_among(values: Iterable[Any]) -> bool:
    """Is one of these a number that was drawn?"""
    return any(type(value) is Drawn or (type(value) in (list, tuple) and is_among(value)) for value in values)


_ARITHMETIC = {f"__{way}{name}__" for name in ("add", "sub", "mul", "truediv", "pow") for way in ("", "r")}
_ARITHMETIC |= {"__neg__", "__abs__", "__pos__"}


def _compared(name: str) -> Callable:
    """The comparison of that name, where both ends of the range give the same."""
    of = getattr(float, name)

    def compare(self: Drawn, other: Any) -> bool:
        if type(other) in (int, float):
            inside = name in ("__eq__", "__ne__") and self.low <= other <= self.high
            if of(self.low, other) == of(self.high, other) and not inside:
                return of(self.low, other)
        return _decides()

    return compare


for _name in ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"):
    setattr(Drawn, _name, _compared(_name))
for _name, _method in vars(float).items():
    if _name not in vars(Drawn) and callable(_method) and _name not in ("__new__", "__getattribute__", "__getformat__"):
        setattr(Drawn, _name, _computes if _name in _ARITHMETIC else _decides)


class Chance:
    """What one trace has seen. ``draws``: those that are to be made again at each call of the graph."""

    def __init__(self, operand: Callable[..., Any] | None = None) -> None:
        """``operand(function, args, kwargs, between)``: draws a number that is an operand of the graph, where it is
        known between which numbers; None: draws are none."""
        self.operand = operand
        self.draws: list[Draw] = []
        self.drawn_from: list[Any] = []  # generators of Python and NumPy, by forward and what PyTorch runs
        self.reads: dict[tuple[int, str], tuple[Any, str]] = {}  # (id of an object, name): the object, and where
        self.prints: dict[str, None] = {}  # lines
        self.ran: dict[types.CodeType, dict[str, Any]] = {}  # functions of Python's with their globals
        self.failure: NotTraceable | None = None
        self._states: list[tuple[Any, Any]] = []
        self._new: list[random.Random] = []  # made by forward
        self._made: list[random.Random] = []  # of those, from a number
        self._busy = False  # a draw that is let through
        self._python: Any = None  # the state of the global generator when PyTorch began to run a node
        self._nodes_draw = False

    @contextmanager
    def looking(self, around: Iterable[Any], modules: Iterable[nn.Module]) -> Iterator[None]:
        """Inside, in this thread, a draw that decides raises NotTraceable, as does the next of an iterator in what is
        ``around`` the ``modules``, or in these."""
        before, states = sys.getprofile(), rng_state.States()
        self.go_on()
        iterators = held_iterators.refused(around, modules, self._fail)
        with _global_draws(self), self._held_draws(), process_reads.without_files(), iterators:
            if before is None:  # a profiler of the user's goes first: NumPy's generators alone are looked at then
                self._look_at_calls()
            try:
                yield
                self.check()
                if self.draws and self._nodes_draw:
                    raise NotTraceable("forward and a submodule that PyTorch runs draw from one generator")
            except Exception:
                if self.operand is None:  # what has failed may be what was drawn: the next trace has it as an operand
                    self._check_moved()
                raise
            finally:
                if before is None:
                    sys.setprofile(None)
                self.drawn_from = states.moved()
                self._states, self._new, self._made = [], [], []

    def _held_draws(self) -> AbstractContextManager[None]:
        """Inside, draws of NumPy's generators are met, wherever these are held. To find the places takes a look at all
        live objects, so they are looked for where a trace has seen that such a generator moves."""
        operand = self.operand
        if operand is None:
            return nullcontext()

        def draw(method: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
            return method(*args, **kwargs) if get_tracing_state() is None else operand(method, args, kwargs, None)

        return held_generators.replaced(draw)

    def go_on(self) -> None:
        """What was drawn since the last check is not forward's: PyTorch has run a node."""
        self._nodes_draw |= self._python is not None and (random.getstate() != self._python or bool(self._moved()))
        self._states = [(generator, rng_state.state_of(generator)) for generator in rng_state.of_numpy()]

    def sees(self, args: tuple) -> bool:
        """Is a draw with these arguments one to look at? Not of a generator that forward has made, nor of the system,
        nor while another one is made."""
        generator = args[0] if args else None
        unseen = isinstance(generator, random.SystemRandom) or any(generator is made for made in self._made)
        return not self._busy and not unseen

    def _moved(self) -> list[Any]:
        return [each for each, state in self._states if not rng_state.equal(rng_state.state_of(each), state)]

    def check(self) -> None:
        """Raises NotTraceable if forward has drawn from a generator of NumPy's, or from any."""
        if self.failure is not None:
            raise self.failure
        self._check_moved()
        self._python = random.getstate()

    def _check_moved(self) -> None:
        for generator in self._moved():
            raise Moved(f"forward draws random numbers from a generator of NumPy's ({_kind(generator)})")

    def draw(self, function: Callable, args: tuple) -> float:
        """A number from a global generator."""
        self._busy = True
        try:
            value = function(*args)
        finally:
            self._busy = False
        self.draws.append((function, args))
        self._states = [(each, rng_state.state_of(each) if each in rng_state.NUMPYS else s) for each, s in self._states]
        return value

    def _look_at_calls(self) -> None:
        """From now on those of this thread are looked at, until `sys.setprofile` says otherwise."""
        seen: dict[int, Any] = {id(code): True for code in (_SEED, _READ, *process_reads.CODES)}
        owners, bases = (contextvars.ContextVar, type), (random.Random, _FILES, torch.Generator)
        given = (self._called, self._began, _SOURCES, owners, bases, seen, self.ran, get_tracing_state)
        _core.look_at_calls(*given)

    def _began(self, frame: types.FrameType) -> None:
        """A function of Python's that is of interest begins."""
        if get_tracing_state() is not None:  # no node, which reads anew at each call
            self.ran.setdefault(frame.f_code, frame.f_globals)
        if frame.f_code is _SEED:
            self._seeded(frame)
        elif frame.f_code is _READ and get_tracing_state() is not None:
            self._note(ENVIRONMENT, frame.f_locals["key"], frame)
        elif frame.f_code in process_reads.CODES and get_tracing_state() is not None and frame.f_back is not None:
            step = process_reads.asks_setting(frame.f_back)
            if step is not None and (setting := process_reads.setting_of_code(frame)) is not None:
                self._note(setting, "value", step)

    def _seeded(self, frame: types.FrameType) -> None:
        """A generator of Python's is seeded: one that forward makes, or one that was there before."""
        generator = frame.f_locals["self"]
        new = frame.f_back is not None and frame.f_back.f_code is _INIT
        if new:
            self._new.append(generator)
        elif get_tracing_state() is not None and not any(generator is each for each in self._new):
            self._fail(
                NotTraceable(f"{user_line(frame.f_back)} seeds a generator of random numbers, which no graph does")
            )
        if frame.f_locals["a"] is not None:
            self._made.append(generator)

    def _called(self, frame: types.FrameType, function: Any, owner: Any) -> None:
        """A function of C code that may be of interest is called."""
        if self._busy or get_tracing_state() is None:
            return
        what = ""
        if function is print or isinstance(owner, _FILES):
            self._note_print(frame, function)
        elif type(owner) is contextvars.ContextVar:
            self._note(of_context(owner), "value", frame)
        elif isinstance(owner, torch.Generator):
            what = "" if _is_quiet(frame) and process_reads.asks_setting(frame) is None else _OF_GENERATOR
        elif function in process_reads.SETTINGS:
            if (step := process_reads.asks_setting(frame)) is not None:
                self._note(of_setting(function), "value", step)
        elif function in process_reads.MOVING or function in process_reads.FILES:
            for step, text in process_reads.asked_moving(function, frame):
                frame, what = step, text
        elif isinstance(owner, random.Random):
            if function.__name__ == "setstate" and not any(owner is new for new in self._new):
                what = "sets the state of a generator of random numbers"
            if function.__name__ in _DRAWING and not any(owner is made for made in self._made):
                what = "draws a random number"
        elif function in _ENTROPY:
            what = "asks the system for random bytes"
        elif function in _CLOCKS or (
            isinstance(owner, type) and issubclass(owner, datetime.date) and function.__name__ in _NOW
        ):
            what = "reads a clock" if not _is_quiet(frame) else ""
        if what and not _is_collecting(frame):
            while frame.f_back is not None and frame.f_globals.get("__name__") in _HELPERS:
                frame = frame.f_back
            self._fail(NotTraceable(f"{user_line(frame)} {what}: a graph would have the same one at each call"))

    def _fail(self, failure: NotTraceable) -> NoReturn:
        self.failure = failure
        raise failure

    def _note_print(self, frame: types.FrameType, function: Any) -> None:
        """A file is used, or something printed, by what users wrote or by their use of logging."""
        while frame.f_back is not None and frame.f_globals.get("__name__") == "logging":
            frame = frame.f_back
        written = function is print or function.__name__ in ("write", "writelines")
        if written and not is_library(module_of(frame.f_globals)):
            self.prints.setdefault(user_line(frame))

    def _note(self, owner: Any, name: Any, frame: types.FrameType) -> None:
        if isinstance(name, str):
            while frame.f_back is not None and frame.f_globals.get("__name__") in _READERS:
                frame = frame.f_back
            self.reads.setdefault((id(owner), name), (owner, user_line(frame)))


_SEED, _READ = random.Random.seed.__code__, type(os.environ).__getitem__.__code__
_INIT = random.Random.__init__.__code__
_READERS = {"os", "_collections_abc"}


def _is_quiet(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _QUIET


def _is_collecting(frame: types.FrameType | None) -> bool:
    """Is it a callback of the garbage collector's that runs, which may be at any time?"""
    codes = {getattr(each, "__code__", None) for each in gc.callbacks}
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame is not None


def _kind(generator: Any) -> str:
    return "the global one" if generator in rng_state.NUMPYS else type(generator).__name__


# --- the global generators --------------------------------------------------------------------------------------------


def _range_of(name: str, args: tuple) -> tuple[float, float] | None:
    """Between which numbers a draw lies, where that is known."""
    if name in ("random", "rand", "random_sample") and not args:
        return 0.0, _BELOW_ONE
    if name in ("randint", "randrange") and 0 < len(args) < 3 and all(type(a) is int for a in args):
        low, end = (0, args[0]) if len(args) == 1 else args
        return float(low), float(end - (name == "randrange"))
    if name == "uniform" and len(args) in (0, 2) and all(type(a) in (int, float) for a in args):
        low, high = sorted(args) if args else (0.0, 1.0)
        return float(low), float(high)
    return None


def _are_numbers(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Is the first of the arguments, from which is drawn, a sequence of numbers of one type?"""
    items = args[0] if args else None
    if isinstance(items, range):
        return True
    return isinstance(items, (list, tuple)) and {*map(type, items)} in ({int}, {float})


def _shuffled(function: Callable) -> Callable[[list[Any]], list[Any]]:
    def shuffle(items: list[Any]) -> list[Any]:
        function(items)
        return items

    return shuffle


def _watched(chance: Chance, owner: Any, name: str, original: Callable) -> Callable:
    def draw(*args: Any, **kwargs: Any) -> Any:
        given = args
        if get_tracing_state() is None or not chance.sees(args):
            return original(*args, **kwargs)
        function = original
        if args and isinstance(args[0], random.Random):
            function, args = types.MethodType(original, args[0]), args[1:]
        between = None if kwargs or (name == "randint" and owner is numpy.random) else _range_of(name, args)
        if owner is not numpy.random and name in _OF_A_SEQUENCE and not _are_numbers(args, kwargs):
            return original(*given, **kwargs)  # what is drawn decides something
        if chance.operand is None:
            floats = between is not None and name not in ("randint", "randrange")
            return _drawn(chance.draw(function, args), *between) if floats and between else _computes()
        if name == "shuffle":
            args[0][:] = chance.operand(_shuffled(function), (list(args[0]),), {}, None)
            return None
        return chance.operand(function, args, kwargs, between)

    return draw


_PYTHONS = (
    "random", "uniform", "triangular", "gauss", "normalvariate", "lognormvariate", "expovariate", "betavariate",
    "gammavariate", "vonmisesvariate", "paretovariate", "weibullvariate",
)  # fmt: skip
_PYTHONS_OTHERS = ("randint", "randrange", "choice", "choices", "sample", "shuffle")
_OF_A_SEQUENCE = frozenset(_PYTHONS_OTHERS[2:])
_NUMPYS = tuple(name for name in sorted(held_generators.DRAWS) if hasattr(numpy.random, name))


def _global_draws(chance: Chance) -> AbstractContextManager[None]:
    """Inside, `random.random()` and the like give numbers that tell of what is done with them."""
    pythons = _PYTHONS + _PYTHONS_OTHERS
    functions = [(random, pythons), (random.Random, pythons), (numpy.random, _NUMPYS)]
    return replaced(
        [
            *(
                Replacement.around(owner, name, functools.partial(_watched, chance, owner, name))
                for owner, names in functions
                for name in names
            ),
            Replacement.around(torch, "from_numpy", _from_numpy),
        ]
    )


def _from_numpy(original: Callable) -> Callable:
    return lambda array: array.as_tensor() if is_array(array) else original(array)
