"""Classes that forward makes anew in each call: inside of it, among results, given to what PyTorch runs; one graph."""

import copy
import dataclasses
import random
import typing

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ortmodule import ORTModule, explain
from ortmodule.core import pytree
from tests.core.test_made_alike import MAKERS
from tests.selection import each

pytestmark = pytest.mark.filterwarnings("ignore")


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, given, make):
        return make(self.linear(first(given)).tanh())


class Opaque(Layer):
    def forward(self, given, make):
        torch.rand(()).item() > 2 and print()
        return super().forward(given, make)


class Net(nn.Module):
    def __init__(self, use, make):
        super().__init__()
        self.linear, self.layer, self.opaque = nn.Linear(4, 4), Layer(), Opaque()
        self.use, self.make, self.last = use, make, None

    def forward(self, x):
        return self.use(self, x, self.linear(x), lambda a: of(self.make, a))


def of(make, a):
    cls = make()
    return cls(a=a) if issubclass(cls, (dict, tuple)) else cls(a)


def first(value):
    return value["a"] if isinstance(value, dict) else value.a


def kept(m, made):
    m.last = made
    return first(m.last) * 2


WAYS = {
    "a result": lambda m, x, y, of: of(y),
    "inside": lambda m, x, y, of: first(of(y)) * first(of(x.shape[0])),
    "in containers": lambda m, x, y, of: {"k": [of(y), (of(x), of(y * 2))]},
    "an argument": lambda m, x, y, of: m.layer(of(y), of),
    "an opaque layer": lambda m, x, y, of: first(m.opaque(of(y), of)) * 2,
    "a checkpoint": lambda m, x, y, of: checkpoint(m.layer, of(y), of, use_reentrant=False),
    "an attribute": lambda m, x, y, of: kept(m, of(y)),
    "in itself": lambda m, x, y, of: of(of(y)),
}
SHORT = {
    ("a result", "dataclass"), ("a result", "typed"), ("a result", "plain"), ("inside", "slots"), ("inside", "derived"),
    ("in containers", "frozen"), ("an argument", "make_dataclass"), ("an opaque layer", "dataclass"),
    ("a checkpoint", "namedtuple"), ("an attribute", "generic"), ("in itself", "dictionary"),
}  # fmt: skip


def compare(use, make, values=(None,) * 4):
    torch.manual_seed(0)
    eager = Net(use, make)
    module = ORTModule(copy.deepcopy(eager))
    for i, value in enumerate(values):
        x = torch.randn(2 + i % 3, 4)
        for each_one in (eager, module) if value is not None else ():
            each_one.value = value
        random.seed(i)
        expected = eager(x)
        random.seed(i)
        found = module(x)
        assert type(expected).__name__ == type(found).__name__
        pairs = [tensors(result) for result in ((expected, eager.last), (found, module.last))]
        for a, b in zip(*pairs, strict=True):
            torch.testing.assert_close(b, a)
        for m, result in zip((eager, module), pairs, strict=True):
            m.zero_grad()
            sum(t.square().sum() for t in result if t.requires_grad).backward()
        for p, q in zip(eager.parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad)
    return explain(module)


def tensors(value):
    found = list(pytree.flatten(value, results=True)[0])
    for part in value if isinstance(value, tuple) else ():
        found += [part.computed()] if hasattr(part, "computed") else []
    return found


@each("way, kind", [(w, k) for w in WAYS for k in MAKERS], SHORT)
def test_one_graph(way, kind):
    report = compare(WAYS[way], MAKERS[kind])
    assert report.captured and report.exports == 1, report


def closing(value):
    class Made:
        def __init__(self, a):
            self.a = a

        def computed(self):
            return self.a * value

    return Made


def with_dataclass(a, **fields):
    cls = dataclasses.make_dataclass("Made", [("a", typing.Any), *((k, typing.Any) for k in fields)])
    return cls(a, **fields)


#: What methods of the result close over, or its class holds: the graph's must not be those of its trace.
HELD = {
    "an attribute": (lambda m, x, y: closing(m.value)(y), (2, 2, 3, 3, 4)),
    "a parameter": (lambda m, x, y: closing(m.layer.linear.weight[0])(y), (1, 1, 1)),
    "a result": (lambda m, x, y: closing(y * 2)(y), (1, 1, 1)),
    "a size": (lambda m, x, y: closing(x.shape[0])(y), (1, 1, 1)),
    "a counter": (lambda m, x, y: closing(counted(m))(y), (1, 1, 1)),
    "a draw": (lambda m, x, y: closing(random.random())(y), (1, 1, 1)),
    "a number of the data": (lambda m, x, y: closing(int(x.sum() > 0))(y), (1,) * 5),
    "a list": (lambda m, x, y: closing_over_list()(y), (1, 1, 1)),
    "the module": (lambda m, x, y: closing_over(m)(y), (1, 1, 1)),
    "a size in a field": (lambda m, x, y: with_dataclass(y, n=x.shape[0]), (1, 1, 1)),
}


def counted(m):
    m.count = getattr(m, "count", 0) + 1
    return m.count


def closing_over(m):
    class Made:
        def __init__(self, a):
            self.a = a

        def computed(self):
            return m.layer.linear(self.a)

    return Made


def closing_over_list():
    class Made:
        calls = []

        def __init__(self, a):
            self.a = a

        def computed(self):
            self.calls.append(None)
            return self.a * len(self.calls)

    return Made


@pytest.mark.parametrize("name", HELD)
def test_what_a_result_computes_later(name):
    use, values = HELD[name]
    report = compare(lambda m, x, y, of: (use(m, x, y), 1), None, values)
    if name in ("the module", "a size in a field"):
        assert report.captured and report.exports == 1, report
