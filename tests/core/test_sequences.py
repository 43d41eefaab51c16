"""Classes derived from lists and tuples come back with their attributes, and their code does not run."""

import collections

import pytest
import torch

from ortmodule.core import pytree


class Tagged(list):
    def __init__(self, items, tag):
        super().__init__(items)
        self.tag = tag


class Pair(tuple):
    def __new__(cls, a, b):
        made = super().__new__(cls, (a, b))
        made.both = [a, b]
        return made


class Named(collections.namedtuple("Named", "a b")):
    pass


VALUES = {
    "a list": lambda x: Tagged([x, 1], "tag"),
    "a tuple": lambda x: Pair(x, 2),
    "a named tuple": lambda x: Named(x, None),
    "torch's": lambda x: torch.max(x[None], 1),
    "inside": lambda x: {"k": Tagged([Pair(x, x)], x)},
}


@pytest.mark.parametrize("name", VALUES)
def test_there_and_back(name):
    value = VALUES[name](torch.ones(2))
    tensors, structure = pytree.flatten(value, True)
    back = structure.rebuild(tensors)
    for a, b in ((value["k"], back["k"]), (value["k"][0], back["k"][0])) if name == "inside" else ((value, back),):
        assert a is not b and type(a) is type(b) and len(a) == len(b)
        assert all(x is y or x == y for x, y in zip(a, b, strict=True) if not isinstance(x, tuple))
        assert getattr(a, "__dict__", {}).keys() == getattr(b, "__dict__", {}).keys()
    assert getattr(back, "tag", "tag") == "tag"
    assert getattr(value, "both", [None])[0] is getattr(back, "both", [None])[0]


def test_into_a_list_that_there_is():
    target = Tagged([], "old")
    tensors, structure = pytree.flatten(Tagged([torch.ones(2)], "new"))
    assert structure.rebuild(tensors, into={0: target}) is target
    assert target.tag == "new" and target[0] is tensors[0]


def test_attributes_tell_structures_apart():
    first, second = (pytree.flatten(Tagged([torch.ones(2)], tag))[1] for tag in ("a", "b"))
    assert first != second
