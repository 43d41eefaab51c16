"""Attributes in slots are written and read as those in dictionaries, and no code of the class runs."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from ortmodule.core import pytree
from ortmodule.core.structures.attributes import attributes_of

RUNS = []


@dataclass
class Plain:
    a: Any
    items: list = field(default_factory=list)

    def __post_init__(self):
        RUNS.append(self)


@dataclass(frozen=True)
class Frozen:
    a: Any
    b: Any = None


@dataclass(slots=True)
class Slots(Plain):
    b: Any = None


@dataclass(slots=True, frozen=True)
class Both:
    a: Any
    b: Any = None


class Private:
    __slots__ = ("__a", "b", "unset")

    def __init__(self, a, b):
        self.__a, self.b = a, b


class Mixed(Private):
    def __init__(self, a, b):
        super().__init__(a, b)
        self.c = 3


VALUES = {
    "a dataclass": lambda x: Plain(x, [x, None, 2]),
    "frozen": lambda x: Frozen(x, 2.5),
    "slots": lambda x: Slots(x, [x], b="text"),
    "both": lambda x: Both(x, Both(x, None)),
    "private": lambda x: Private(x, {"k": x}),
    "mixed": lambda x: Mixed(x, 1),
    "inside": lambda x: [(Private(x, Slots(x)),)],
}


def alike(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a is b
    elif isinstance(a, (list, tuple, dict)):
        assert len(a) == len(b)
        for x, y in zip(*((v.values() if isinstance(v, dict) else v) for v in (a, b)), strict=True):
            alike(x, y)
    elif hasattr(type(a), "__init__") and type(a).__module__ == __name__:
        a, b = attributes_of(a), attributes_of(b)
        assert a.keys() == b.keys()
        alike(a, b)
    else:
        assert a == b


@pytest.mark.parametrize("results", [False, True], ids=["arguments", "results"])
@pytest.mark.parametrize("name", VALUES)
def test_there_and_back(name, results):
    value = VALUES[name](torch.ones(2))
    tensors, structure = pytree.flatten(value, results)
    assert tensors and structure == pytree.flatten(VALUES[name](torch.ones(3)), results)[1]
    RUNS.clear()
    back = structure.rebuild(tensors)
    assert back is not value and not RUNS
    alike(value, back)


def test_an_attribute_that_is_not_set():
    value = Private(torch.ones(2), 1)
    del value.b
    assert list(attributes_of(value)) == ["_Private__a"]
    back = pytree.flatten(value, True)[1].rebuild([torch.ones(2)])
    assert not hasattr(back, "b") and not hasattr(back, "unset")


def test_into_an_object_that_there_is():
    value, target = Slots(torch.ones(2), b=1), Slots(torch.zeros(2), b=2)
    tensors, structure = pytree.flatten(value)
    assert structure.rebuild(tensors, into={0: target}) is target
    alike(value, target)


def test_an_object_without_tensors_is_itself():
    value = Private(1, 2)
    assert pytree.flatten([value], True)[1].rebuild([])[0] is value
