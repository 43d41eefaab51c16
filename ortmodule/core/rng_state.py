"""Saves and restores generators of random numbers: torch's, Python's, NumPy's, and those that a module holds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import torch
from torch import nn

from ortmodule.core import devices

#: class -> (its state, put it back)
_OWN: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    random.Random: (random.Random.getstate, random.Random.setstate),
    numpy.random.RandomState: (numpy.random.RandomState.get_state, numpy.random.RandomState.set_state),
    numpy.random.Generator: (
        lambda generator: generator.bit_generator.state,
        lambda generator, state: setattr(generator.bit_generator, "state", state),
    ),
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
}


class States:
    """What all generators hold now. Those of ``modules`` are found among their attributes."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._torch, self._python, self._numpy = devices.generators(), random.getstate(), numpy.random.get_state()
        self._own = [
            (value, name, _OWN[type(value)][0](value))
            for module in modules
            for name, value in module.__dict__.items()
            if type(value) in _OWN
        ]

    def drawn_from(self) -> str | None:
        """The attribute whose generator has been drawn from since."""
        for generator, name, state in self._own:
            if not _equal(_OWN[type(generator)][0](generator), state):
                return name
        return None

    def put_back(self) -> None:
        devices.set_generators(self._torch)
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)
        for generator, _, state in self._own:
            _OWN[type(generator)][1](generator, state)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return numpy.array_equal(a, b)
