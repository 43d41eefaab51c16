"""Classes and functions that a call makes anew are alike where all that they hold is, and are let go."""

import abc
import collections
import dataclasses
import functools
import gc
import typing
import weakref

import pytest
import torch

from ortmodule.core import pytree
from ortmodule.core.structures.made_alike import MadeAlike, function_token_of, is_found, token_of


class Outer:
    class Inner:
        pass


def plain(value=1, default=1, text="a"):
    class Made:
        tag = text

        def __init__(self, a):
            self.a = a

        def scaled(self, by=default):
            return self.a * value * by

        @property
        def twice(self):
            return self.scaled(2)

        @staticmethod
        def one():
            return value

        @functools.cached_property
        def kept(self):
            return self.a + value

    return Made


def dataclass(value=1, **options):
    @dataclasses.dataclass(**options)
    class Made:
        a: typing.Any
        n: int = value
        items: list = dataclasses.field(default_factory=list)

    return Made


def typed(value=1):
    class Made(typing.NamedTuple):
        a: typing.Any
        n: int = value

        def scaled(self):
            return self.a * value

    return Made


def derived(value=1):
    class Base(abc.ABC):
        __slots__ = ("a",)

        def __init__(self, a):
            self.a = a

        @abc.abstractmethod
        def more(self): ...

    class Made(Base):
        def more(self):
            return super().__sizeof__() + value

    return Made


def generic(value=1):
    T = typing.TypeVar("T")

    class Made(typing.Generic[T]):
        def __init__(self, a):
            self.a = a

        def more(self):
            return Made, value

    return Made


MAKERS = {
    "plain": plain,
    "dataclass": dataclass,
    "frozen": functools.partial(dataclass, frozen=True),
    "slots": functools.partial(dataclass, slots=True, order=True),
    "typed": typed,
    "namedtuple": lambda value=1: collections.namedtuple("Made", ("a", "n"), defaults=(value,)),
    "make_dataclass": lambda value=1: dataclasses.make_dataclass("Made", [("a", object), ("n", int, value)]),
    "derived": derived,
    "generic": generic,
    "dictionary": lambda value=1: type("Made", (dict,), {"more": lambda self: len(self), "n": value}),
}


@pytest.mark.parametrize("name", MAKERS)
def test_made_again(name):
    first, second, other = (MAKERS[name](*value) for value in ((), (), (2,)))
    assert token_of(first) == token_of(second) and hash(token_of(first)) == hash(token_of(second))
    assert token_of(first) != token_of(other) and token_of(first).made is first


def shared(value):
    class Made:
        def more(self):
            return value

    return Made


DIFFERENT = {
    "a default": (plain(), plain(default=2)),
    "an attribute": (plain(), plain(text="b")),
    "a number of another type": (plain(1), plain(1.0)),
    "the sign of zero": (plain(0.0), plain(-0.0)),
    "options": (dataclass(), dataclass(frozen=True)),
    "a list of its own": (shared([]), shared([])),
    "a tensor": (shared(torch.ones(2)), shared(torch.ones(2))),
    "code inside of it": (shared(lambda: 1), shared(lambda: 2)),
    "a class inside of it": (shared(plain(1)), shared(plain(2))),
    "a base": (type("Made", (plain(1),), {}), type("Made", (plain(2),), {})),
    "another function": (plain(), shared(1)),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_not_alike(name):
    first, second = map(token_of, DIFFERENT[name])
    assert first != second and first == token_of(first.made)


def test_what_is_held_may_be_the_same():
    kept = [torch.ones(2)]
    assert token_of(shared(kept)) == token_of(shared(kept))
    assert token_of(shared(plain(1))) == token_of(shared(plain(1)))


def function(value):
    return lambda a, by=value: a * value * by


def test_functions():
    of = [function_token_of(function(value)) for value in (2, 2, 3)]
    assert of[0] == of[1] != of[2]
    assert function_token_of(function) is function
    assert function_token_of(function(torch.ones(1))) != function_token_of(function(torch.ones(1)))
    (tensors, first), (_, second) = (pytree.flatten([torch.ones(2), function(2), plain(2)], True) for _ in "ab")
    assert first == second
    back = first.rebuild(tensors)
    assert back[1](3) == 12 and back[2](3).scaled() == 6
    one, other = (pytree.flatten([torch.ones(2), function(2)])[1] for _ in "ab")
    assert one != other  # a caller's function is its own


def test_classes_that_are_found_stand_for_themselves():
    for cls in (Outer, Outer.Inner, int, collections.OrderedDict, torch.Tensor):
        assert token_of(cls) is cls
    assert is_found(Outer.Inner) and not is_found(plain())
    assert isinstance(token_of(plain()), MadeAlike)


def made(name, tensor):
    cls = MAKERS[name]()
    return cls(a=tensor) if name in ("dictionary", "typed") else cls(tensor)


@pytest.mark.parametrize("name", MAKERS)
def test_structures(name):
    one, other = made(name, torch.ones(2)), made(name, torch.zeros(3))
    (tensors, first), (_, second) = (pytree.flatten({"k": value}, results=True) for value in (one, other))
    assert first == second
    back = first.rebuild([tensors[0] + 1])["k"]
    assert type(back) is type(one)
    assert torch.equal(back["a"] if name == "dictionary" else back.a, torch.full((2,), 2.0))
    assert pytree.flatten(one, by_forward=True)[1] == pytree.flatten(other, by_forward=True)[1]
    assert pytree.flatten(one)[1] != pytree.flatten(other)[1]  # a caller's class is its own


@pytest.mark.parametrize("name", MAKERS)
def test_none_is_kept(name):
    classes = []
    for _ in range(3):
        value = made(name, torch.ones(2))
        classes.append(weakref.ref(type(value)))
        pytree.flatten(value, results=True)
        del value
    gc.collect()
    assert [ref() for ref in classes] == [None] * 3
