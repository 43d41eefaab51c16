"""Results, arguments and attributes that are objects of users' classes: with slots, frozen, with code of their own."""

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from ortmodule.core import pytree
from ortmodule.core.structures.attributes import attributes_of

pytestmark = pytest.mark.filterwarnings("ignore")


@dataclass
class Plain:
    a: Any
    b: Any = None
    n: int = 3


@dataclass(frozen=True)
class Frozen:
    a: Any
    b: Any = None


@dataclass(slots=True)
class Slots:
    a: Any
    b: Any = None
    n: int = 3


@dataclass(slots=True, frozen=True)
class Both:
    a: Any
    b: Any = None


@dataclass
class Counts:
    a: Any
    items: list = field(default_factory=list)
    twice: Any = field(init=False)

    def __post_init__(self):
        self.a, self.twice = self.a + 1, self.a * 2


class Bare:
    __slots__ = ("a", "b")

    def __init__(self, a, b):
        self.a, self.b = a, b


class Wider(Bare):
    def __init__(self, a, b):
        super().__init__(a, b)
        self.c = a + 1


class Tagged(list):
    def __init__(self, items, tag):
        super().__init__(items)
        self.tag = tag


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function
        self.kept = Slots(torch.ones(4), None, 2)

    def forward(self, x):
        return self.function(self, x)


RESULTS = {
    "frozen": lambda m, y, x: Frozen(y, x * 2),
    "slots": lambda m, y, x: Slots(y, x.shape[0]),
    "both": lambda m, y, x: Both(y),
    "code of its own": lambda m, y, x: Counts(y, [y + 1, None]),
    "bare": lambda m, y, x: Bare(y, "text"),
    "wider": lambda m, y, x: Wider(y, [Both(y * 2)]),
    "nested": lambda m, y, x: {"k": (Slots(Plain(y, 1), Both(x)), None)},
    "one object twice": lambda m, y, x: (lambda one: (one, [one]))(Slots(y)),
    "a list": lambda m, y, x: Tagged([y, 2], "tag"),
    "an attribute": lambda m, y, x: (setattr(m, "last", Slots(y, x)), m.last.a * 3)[1],
    "read": lambda m, y, x: y * m.kept.a * m.kept.n,
}


def parts(value):
    return pytree.flatten(value, results=True)


def compare(function, calls=3, given=lambda x: x):
    torch.manual_seed(0)
    eager = Net(function)
    eager.last = None
    module = ORTModule(copy.deepcopy(eager))
    for i in range(calls):
        arguments = given(torch.randn(2 + i % 2, 4))
        both = arguments, copy.deepcopy(arguments)
        expected, found = (m(a) for m, a in zip((eager, module), both, strict=True))
        for one, other in ((expected, found), both, (eager.kept, module.kept), (eager.last, module.last)):
            (first, structure), (second, another) = parts(one), parts(other)
            assert structure == another
            for a, b in zip(first, second, strict=True):
                assert a.requires_grad == b.requires_grad
                torch.testing.assert_close(b, a)
        for result in (expected, found):
            sum(t.square().sum() for t in parts(result)[0]).backward()
        for p, q in zip(eager.parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad)
    return module, expected, found


@pytest.mark.parametrize("name", RESULTS)
def test_results(name):
    module, _, found = compare(lambda m, x: RESULTS[name](m, m.linear(x), x))
    report = explain(module)
    assert report.captured and report.exports == 1, report
    if name == "one object twice":
        assert found[0] is found[1][0]


def puts(m, o):
    o.b = m.linear(o.a)
    return o.b * 2


def counts(m, o):
    o.n += 1
    return m.linear(o.a) * o.n


def removes(m, o):
    del o.b
    return m.linear(o.a)


ARGUMENTS = {
    "read": (Slots, lambda m, o: m.linear(o.a) * o.n),
    "frozen": (Both, lambda m, o: m.linear(o.a)),
    "put into": (Slots, puts),
    "counted": (Slots, counts),
    "removed": (lambda x: Bare(x, 3), removes),
    "replaced": (Slots, lambda m, o: replace(o, b=m.linear(o.a))),
    "returned": (lambda x: Wider(x, x), lambda m, o: (o, m.linear(o.a) + o.c)),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name):
    make, function = ARGUMENTS[name]
    module, _, _ = compare(function, given=make)
    assert explain(module).captured and explain(module).exports == 1


def sets(**values):
    def function(m, x):
        for name, value in values.items():
            setattr(m.kept, name, value(m.kept))
        return m.linear(x) * m.kept.n

    return function


CHANGED = {
    "a number": sets(n=lambda kept: kept.n + 1),
    "a constant": sets(b=lambda kept: "text"),
    "a tensor": sets(b=lambda kept: torch.ones(2) * kept.n),
    "both": sets(n=lambda kept: kept.n + 1, b=lambda kept: torch.ones(2) * kept.n),
}


@pytest.mark.parametrize("name", CHANGED)
def test_changes_of_slots_in_attributes(name):
    module, _, _ = compare(CHANGED[name])
    assert not explain(module).captured


def test_each_slot_is_put_back_behind_a_trace():
    module, _, _ = compare(lambda m, x: removes_and_sets(m, x))
    assert "b" in attributes_of(module.kept)


def removes_and_sets(m, x):
    del m.kept.b
    m.kept.b = 4
    return m.linear(x)
