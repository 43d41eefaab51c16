"""Other functions take the place of those that forward calls by a name: graphs of these do not go on."""

import copy
import types

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from tests.selection import each

pytestmark = pytest.mark.filterwarnings("ignore")


def twice(h):
    return h * 2


def other(h):
    return h * 7 + 1


#: A function, and another one.
FUNCTIONS = {
    "python": (twice, other),
    "of torch": (torch.relu, torch.tanh),
    "scripted": (torch.jit.script(twice), torch.jit.script(other)),
    "python, then scripted": (twice, torch.jit.script(other)),
}
helpers = types.ModuleType("helpers")  # a module that users wrote
helpers.__file__ = __file__
called = helpers.called = twice


class Held:
    called = staticmethod(twice)
    table = types.SimpleNamespace(called=twice)


class Plain:
    def called(self, h):
        return h * 2


plain = Plain()


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.call(self.linear(x))


class Global(Base):
    def call(self, h):
        return called(h)


class InModule(Base):
    def call(self, h):
        return helpers.called(h)


class InClass(Base):
    def call(self, h):
        return Held.called(h)


class InNamespace(Base):
    def call(self, h):
        return Held.table.called(h)


class Attribute(Base):
    def __init__(self):
        super().__init__()
        self.called = twice

    def call(self, h):
        return self.called(h)


class Static(Base):
    called = staticmethod(twice)

    def call(self, h):
        return self.called(h)


class Method(Base):
    def called(self, h):
        return h * 2

    def call(self, h):
        return self.called(h)


class OfClass(Base):
    @classmethod
    def called(cls, h):
        return h * 2

    def call(self, h):
        return self.called(h)


class OfObject(Base):
    def call(self, h):
        return plain.called(h)


class InClosure(Base):
    def __init__(self):
        super().__init__()
        self.used = closure(twice)

    def call(self, h):
        return self.used(h)


def closure(function):
    return lambda h: function(h)


def globally(module, function):
    globals()["called"] = function


def in_closure(module, function):
    module.used.__closure__[0].cell_contents = function


#: A class of modules, and how to put a function in the place of the one that it calls.
WAYS = {
    Global: globally,
    InModule: lambda module, function: setattr(helpers, "called", function),
    InClass: lambda module, function: setattr(Held, "called", staticmethod(function)),
    InNamespace: lambda module, function: setattr(Held.table, "called", function),
    Attribute: lambda module, function: setattr(module, "called", function),
    Static: lambda module, function: setattr(type(module), "called", staticmethod(function)),
    Method: lambda module, function: setattr(type(module), "called", lambda self, h: function(h)),
    OfClass: lambda module, function: setattr(type(module), "called", classmethod(lambda cls, h: function(h))),
    OfObject: lambda module, function: setattr(Plain, "called", lambda self, h: function(h)),
    InClosure: in_closure,
}


@each(
    "kind,functions",
    [(kind, name) for kind in WAYS for name in FUNCTIONS],
    ((Global, "scripted"), (InModule, "python"), (InClass, "of torch"), (OfClass, "python"), (InClosure, "of torch")),
)
def test_another_function(kind, functions):
    torch.manual_seed(0)
    eager = kind()
    ours = ORTModule(copy.deepcopy(eager))
    for function in (*FUNCTIONS[functions], FUNCTIONS[functions][0]):
        for module in (eager, ours._ortmodule.module):
            WAYS[kind](module, function)
        for _ in range(2):
            x = torch.randn(4, 3)
            found, expected = ours(x), eager(x)
            torch.testing.assert_close(found, expected)
            grads = [
                torch.autograd.grad(y.square().sum(), m.parameters()) for y, m in ((found, ours), (expected, eager))
            ]
            torch.testing.assert_close(*grads)
    assert explain(ours).captured
