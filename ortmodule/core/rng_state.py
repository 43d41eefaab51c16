"""Saves and restores generators of random numbers: torch's, Python's and NumPy's, wherever they are held."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from ortmodule.core import devices
from ortmodule.core.objects.live_objects import LiveObjects

#: What the functions of `numpy.random` draw from.
_random: Any = numpy.random
NUMPYS = (_random.rand.__self__, _random.get_bit_generator())

#: class -> (its state, put it back). NumPy's Generator has all of its state in a BitGenerator, RandomState some.
_KINDS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    random.Random: (random.Random.getstate, random.Random.setstate),
    numpy.random.BitGenerator: (
        lambda generator: generator.state,
        lambda generator, state: setattr(generator, "state", state),
    ),
    numpy.random.RandomState: (
        lambda generator: generator.get_state(legacy=False),
        numpy.random.RandomState.set_state,
    ),
}
_NUMPYS_KINDS = (numpy.random.BitGenerator, numpy.random.RandomState)


class _Found(threading.local):
    """What the latest capture of a thread has found; ``met``: torch's generators that it draws from."""

    def __init__(self) -> None:
        self.generators: list[Any] | None = None
        self.met: dict[int, tuple[torch.Generator, Any]] = {}


_found = _Found()


def _functions(generator: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]:
    return next(functions for kind, functions in _KINDS.items() if isinstance(generator, kind))


def state_of(generator: Any) -> Any:
    """What a random.Random, or NumPy's BitGenerator or RandomState holds now."""
    return _functions(generator)[0](generator)


def equal(a: Any, b: Any) -> bool:
    """Are these states of a generator the same?"""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b if isinstance(a, (int, float, str)) else numpy.array_equal(a, b)


_alive_ones = LiveObjects(tuple(_KINDS))


def _alive() -> list[Any]:
    """Python's and NumPy's generators, wherever they are held. (torch's are not known to the garbage collector.)"""
    return [each for each in _alive_ones.all() if not isinstance(each, random.SystemRandom)]  # has no state


@contextmanager
def found() -> Iterator[None]:
    """From here on, in this thread, generators are those that are alive now: looking for them takes milliseconds.
    Afterwards torch's that were met have the state that they were met with."""
    _found.generators, _found.met = None, {}  # what the last look has found is not to be kept by that alone
    _found.generators = _alive()
    try:
        yield
    finally:
        _put_back_met()
        _found.met = {}


def meet(generator: torch.Generator) -> None:
    """A generator is about to be drawn from for the first time, perhaps."""
    if id(generator) not in _found.met:
        _found.met[id(generator)] = generator, generator.get_state()


def _put_back_met() -> None:
    for generator, state in _found.met.values():
        generator.set_state(state)


def generators() -> list[Any]:
    """Those that :func:`found` has found, or that are alive."""
    return _alive() if _found.generators is None else _found.generators


def of_numpy() -> list[Any]:
    """NumPy's among :func:`generators`."""
    return [each for each in generators() if isinstance(each, _NUMPYS_KINDS)]


class States:
    """What torch's generators and others hold now."""

    def __init__(self, others: Sequence[Any] | None = None) -> None:
        """``others``: Python's and NumPy's; None: all of these."""
        self._torch = devices.generators()
        self._states = [(each, state_of(each)) for each in (generators() if others is None else others)]

    def moved(self) -> list[Any]:
        """Those of Python and NumPy that hold something else by now."""
        return [each for each, state in self._states if not equal(state_of(each), state)]

    def put_back(self) -> None:
        _put_back_met()
        devices.set_generators(self._torch)
        for generator, state in self._states:
            _functions(generator)[1](generator, state)
