"""Functions of forward's get other code, or defaults, as a notebook's `%autoreload` gives them: graphs do not go on."""

import copy
import types

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain


def helper(h, k=2):
    return h * k


def keyword(h, *, k=3):
    return h - k


class Plain:
    def method(self, h, k=1.0):
        return h + k

    @property
    def half(self):
        return 0.5


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.plain = nn.Linear(3, 3), Plain()
        self.table, self.own = {"a": lambda h: h * 2}, lambda h: h + 1

    @property
    def scale(self):
        return 2.0

    @staticmethod
    def static(h):
        return h * 1.5

    @classmethod
    def of_class(cls, h):
        return h / 2

    def forward(self, x):
        return keyword(helper(self.linear(x)))


class Net(Base):
    def forward(self, x):
        h = self.plain.method(super().forward(x)) * self.plain.half
        return self.of_class(self.static(self.own(self.table["a"](h)))) * self.scale


def code(find, other):
    """``find(module)`` gets the code of ``other``."""

    def change(module):
        function = find(module)
        function.__code__ = other.__code__

    return change


CHANGES = {
    "forward": code(lambda m: Base.forward, lambda self, x: self.linear(x) * 7),  # found by super()
    "a global function": code(lambda m: helper, lambda h, k=2: h - k),
    "an object's method": code(lambda m: Plain.method, lambda self, h, k=1.0: h * k * 3),
    "an object's property": code(lambda m: Plain.half.fget, lambda self: 0.25),
    "in a dictionary": code(lambda m: m.table["a"], lambda h: h * 9),
    "in an attribute": code(lambda m: m.own, lambda h: h * 8),
    "a property": code(lambda m: Base.scale.fget, lambda self: 5.0),
    "a static method": code(lambda m: Base.static, lambda h: h * 4),
    "a class method": code(lambda m: Base.of_class.__func__, lambda cls, h: h * 6),
    "a default": lambda m: setattr(helper, "__defaults__", (5,)),
    "a method's default": lambda m: setattr(Plain.method, "__defaults__", (5.0,)),
    "a keyword's default": lambda m: setattr(keyword, "__kwdefaults__", {"k": 6}),
}
FUNCTIONS = [
    helper, keyword, Plain.method, Plain.half.fget, Base.forward, Base.scale.fget, Base.static, Base.of_class.__func__
]  # fmt: skip


@pytest.fixture(autouse=True)
def as_they_were():
    kept = [(f, f.__code__, f.__defaults__, copy.copy(f.__kwdefaults__)) for f in FUNCTIONS]
    yield
    for function, *values in kept:
        for name, value in zip(("__code__", "__defaults__", "__kwdefaults__"), values, strict=True):
            setattr(function, name, value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CHANGES)
def test_as_in_pytorch(name):
    torch.manual_seed(0)
    theirs = Net()
    for attribute in (theirs.own, theirs.table["a"]):
        assert isinstance(attribute, types.FunctionType)
    ours = ORTModule(copy.deepcopy(theirs))
    ours.module.own, ours.module.table = theirs.own, dict(theirs.table)
    for step in range(3):
        if step == 1:
            CHANGES[name](theirs)
        results = []
        for model in (ours, theirs):
            x = torch.arange(6.0).reshape(2, 3).requires_grad_()
            model(x).square().sum().backward()
            results.append([model(x).detach(), x.grad])
        torch.testing.assert_close(*results)
    assert explain(ours).exports == 2 and explain(ours).pytorch_calls == 0


def test_the_same_code_again():
    """A file that is read anew without a change makes equal code, for which the graph goes on."""
    ours = ORTModule(Net())
    x = torch.ones(2, 3)
    ours(x)
    for function in FUNCTIONS:
        function.__code__ = function.__code__.replace()
    ours(x)
    assert explain(ours).engine_calls == 2 and explain(ours).exports == 1
