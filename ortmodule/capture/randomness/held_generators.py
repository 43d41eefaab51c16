"""Stands in the places of NumPy's generators while a module is traced, and meets what they draw.

Methods of NumPy's generators can be neither replaced nor seen. So wherever one is held, in attributes, globals,
closures, lists and dictionaries, another object stands in its place for the time of a trace.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy

from ortmodule.core import rng_state
from ortmodule.core.objects.references import referrers
from ortmodule.core.structures.classes import is_made_by_statement

_KINDS = (numpy.random.Generator, numpy.random.RandomState)
#: What gives numbers and arrays alone, and changes nothing that it is given.
DRAWS = frozenset((
    "random", "rand", "randn", "random_sample", "standard_normal", "normal", "uniform", "integers", "randint", "choice",
    "permutation", "permuted", "beta", "exponential", "gamma", "laplace", "lognormal", "triangular", "weibull",
    "binomial", "poisson", "dirichlet", "standard_exponential", "standard_gamma", "multivariate_normal",
))  # fmt: skip


class _Standing:
    """Stands for a generator; ``draw(method, args, kwargs)``: what stands for what it draws."""

    def __init__(self, generator: Any, draw: Callable[[Any, tuple, dict[str, Any]], Any]) -> None:
        self._generator, self._draw = generator, draw

    __class__ = property(lambda self: type(self._generator))  # for isinstance()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._generator, name)
        return (lambda *args, **kwargs: self._draw(value, args, kwargs)) if name in DRAWS else value


def _alive() -> list[Any]:
    """NumPy's generators, the global ones aside."""
    found = [each for each in rng_state.of_numpy() if not any(each is other for other in rng_state.NUMPYS)]
    bits = [each for each in found if isinstance(each, numpy.random.BitGenerator)]
    made = [each for each in referrers(bits) if isinstance(each, numpy.random.Generator)] if bits else []
    return [*(each for each in found if isinstance(each, numpy.random.RandomState)), *made]


@contextmanager
def replaced(draw: Callable[[Any, tuple, dict[str, Any]], Any]) -> Iterator[None]:
    """Inside, what the generators that are alive draw goes through ``draw``."""
    generators = _alive()
    standing = {id(each): _Standing(each, draw) for each in generators}
    own = (generators, rng_state.generators())
    holders = [each for each in referrers(generators) if not any(each is mine for mine in own)] if generators else []
    with in_places_of(standing, holders):
        yield


@contextmanager
def in_places_of(standing: dict[int, Any], holders: Iterable[Any]) -> Iterator[None]:
    """Inside, wherever ``holders`` have an object whose id is in ``standing``, they have what stands there for it."""
    places: list[tuple[Callable[[Any], None], Any]] = []
    try:
        for holder in holders:
            for put, each in _places_in(holder, standing):
                places.append((put, each))
                put(standing[id(each)])
        yield
    finally:
        for put, each in places:
            put(each)


def _places_in(holder: Any, known: dict[int, Any]) -> list[tuple[Callable[[Any], None], Any]]:
    """Functions that put another object into a place of ``holder``, with the objects there whose ids are ``known``."""
    if isinstance(holder, types.CellType):
        return [(lambda value: setattr(holder, "cell_contents", value), holder.cell_contents)]
    if isinstance(holder, list):
        return [(_item(holder, i), each) for i, each in enumerate(holder) if id(each) in known]
    if isinstance(holder, dict) and "__module__" in holder:  # a class's, which remembers what it has found there
        holder = next((each for each in referrers([holder]) if isinstance(each, type)), holder)
    if isinstance(holder, type):
        held = [(name, each) for name, each in vars(holder).items() if id(each) in known]
        return [(_attribute(holder, name), each) for name, each in held]
    if isinstance(holder, (types.FrameType, _Standing)):
        return []
    attributes = holder if isinstance(holder, dict) else getattr(holder, "__dict__", None)
    found = list(attributes.items()) if isinstance(attributes, dict) else []
    places = [(_item(attributes, key), each) for key, each in found if id(each) in known]
    slots = [part for cls in type(holder).__mro__ if is_made_by_statement(cls) for part in vars(cls).values()]
    for slot in [part for part in slots if isinstance(part, types.MemberDescriptorType)]:
        each = getattr(holder, slot.__name__, None)
        if id(each) in known:
            places.append((_attribute(holder, slot.__name__), each))
    return places


def _item(container: Any, key: Any) -> Callable[[Any], None]:
    return lambda value: container.__setitem__(key, value)


def _attribute(owner: Any, name: str) -> Callable[[Any], None]:
    return lambda value: setattr(owner, name, value)
