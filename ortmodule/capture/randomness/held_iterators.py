"""Refuses what takes the next of an iterator that is there before the call.

How far an iterator has come is kept in a generator's frame, or in C: a trace can neither look at it nor put it back.
So while a module is traced another object stands wherever an iterator is held that its code can get to: in attributes,
globals, closures, lists. To ask that for anything ends the trace, and the iterator has not moved.
"""

from __future__ import annotations

import _io
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ortmodule.capture.randomness.held_generators import in_places_of
from ortmodule.capture.scalar_guards import user_line
from ortmodule.core.errors import NotTraceable
from ortmodule.core.names import ADVANCES
from ortmodule.core.objects.references import referrers
from ortmodule.core.pytree import CONSTANTS
from ortmodule.core.structures.classes import is_made_by_statement
from ortmodule.guards.code_reader import is_librarys
from ortmodule.guards.writes.surroundings import values_around

_FILES: type = vars(_io)["_IOBase"]
#: Nothing else can be put into these.
_FIXED = (tuple, functools.partial, types.BuiltinMethodType, types.MethodWrapperType)
_ATTRIBUTES = frozenset(vars(nn.Module()))


def _is_iterator(value: Any) -> bool:
    """Is it one of Python's, or of a library's? Those of users' classes are objects, which are looked into."""
    cls = type(value)
    own = is_made_by_statement(cls) and not is_librarys(cls)
    return hasattr(cls, "__next__") and not own and not isinstance(value, _FILES)


class _Standing:
    """Stands for an iterator; ``refuse(what)`` raises NotTraceable."""

    __slots__ = ("_kind", "_refuse")

    def __init__(self, iterator: Any, refuse: Callable[[], Any]) -> None:
        self._kind, self._refuse = type(iterator), refuse

    __class__ = property(lambda self: self._kind)  # for isinstance()

    def __iter__(self) -> _Standing:
        return self

    def __next__(self) -> Any:
        return self._refuse()

    def __getattr__(self, name: str) -> Any:
        if name != "__dict__" and any(name in vars(base) for base in self._kind.__mro__[:-1]):
            return self._refuse()
        raise AttributeError(name)


def _found(around: Iterable[Any], modules: Iterable[nn.Module]) -> list[Any]:
    own = [object.__getattribute__(module, "__dict__") for module in modules]  # vars() would be a read of forward's
    held = [value for attributes in own for key, value in attributes.items() if key not in _ATTRIBUTES]
    held = [value for value in held if not isinstance(value, (*CONSTANTS, torch.Tensor, nn.Module))]
    found = {id(each): each for each in (*around, *values_around(held)) if _is_iterator(each)}
    return list(found.values())


@contextmanager
def refused(around: Iterable[Any], modules: Iterable[nn.Module], fail: Callable[[NotTraceable], Any]) -> Iterator[None]:
    """Inside, ``fail`` is called where an iterator in ``around``, or in attributes of ``modules``, is asked for
    something."""

    def refuse() -> Any:
        return fail(NotTraceable(f"{user_line()} {ADVANCES}"))

    iterators = _found(around, modules)
    holders = [each for each in referrers(iterators) if each is not iterators] if iterators else []
    for holder in holders:
        if isinstance(holder, _FIXED):
            kind = type(holder).__name__
            fail(NotTraceable(f"an iterator is in a {kind} that forward can get to; if it {ADVANCES}"))
    with in_places_of({id(each): _Standing(each, refuse) for each in iterators}, holders):
        yield
