"""Fields of plain objects are found as Python finds them, with what their values hang on."""

import argparse
import enum
import functools

import pytest
import torch
from torch import nn

from ortmodule.guards import fields
from ortmodule.guards.fields import MISSING, Found


class Plain:
    shared = 1

    def __init__(self):
        self.own = 2

    @property
    def computed(self):
        return self.own + 1


class Slotted:
    __slots__ = ("width",)


class Other(Plain):
    def __getattr__(self, name):
        if name == "there":
            return self.own
        if name == "made":
            return object()
        raise AttributeError(name)


class Past(Plain):
    def peek(self):
        return super().__getattribute__("own")

    def __len__(self):
        return super().__getattribute__("own")


class Kind(enum.Enum):
    ONE = 1


class Meta(type):
    def __setattr__(cls, name, value):
        super().__setattr__(name, value)


class Made(metaclass=Meta):
    pass


def test_where_a_field_is():
    plain = Plain()
    assert fields.found(plain, "own") == Found(2, "object")
    assert fields.found(plain, "shared") == Found(1, "class")
    assert fields.found(plain, "computed") == Found(Plain.computed, "class")
    assert fields.found(plain, "none") == Found(MISSING, "object")
    plain.shared = 5
    assert fields.found(plain, "shared") == Found(5, "object")


def test_slots():
    slotted = Slotted()
    assert fields.found(slotted, "width") == Found(MISSING, "slot")
    slotted.width = 3
    assert fields.found(slotted, "width") == Found(3, "slot")


def test_fields_that_code_finds():
    other = Other()
    assert fields.found(other, "there") == Found(2, "object")  # another one's value
    assert fields.found(other, "made").place == "code"
    assert fields.found(other, "none") == Found(MISSING, "code")


@pytest.mark.parametrize(
    "cls, watchable",
    [
        (Plain, True), (Slotted, True), (Other, True), (Past, False), (Kind, False), (Made, False), (nn.Linear, False),
        (torch.Tensor, False), (int, False), (dict, False), (ValueError, False), (argparse.Namespace, True),
    ],
)  # fmt: skip
def test_is_watchable(cls, watchable):
    assert fields.is_watchable(cls) is watchable


def test_who_sees_all_fields():
    assert fields.shows_all(Plain, "__dict__") and fields.shows_all(Past, "__len__")
    assert not fields.shows_all(Plain, "own") and not fields.shows_all(Past, "__init__")


def test_functions_behind_an_attribute():
    found = {name: list(fields.functions_behind(vars(Plain)[name])) for name in ("computed", "__init__", "shared")}
    assert found == {"computed": [Plain.computed.fget], "__init__": [Plain.__init__], "shared": []}

    def function():
        pass

    for wrapped in (staticmethod(function), classmethod(function), functools.partial(function), Plain().__init__):
        assert len(list(fields.functions_behind(wrapped))) == 1


def test_in_class():
    assert fields.in_class(Other, "shared") == 1 and fields.in_class(Other, "own") is MISSING
    assert fields.in_class(Plain, "computed") is vars(Plain)["computed"]
