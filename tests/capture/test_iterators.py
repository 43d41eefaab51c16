"""Iterators that forward advances: each call gets what it gets in PyTorch, from the first on."""

import copy
import functools
import itertools

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 4


def stream():
    n = 0.0
    while True:
        n += 1
        yield n


#: Iterators by kind, each from its beginning.
KINDS = {
    "generator": stream,
    "count": itertools.count,
    "cycle": lambda: itertools.cycle([1.0, 2.0, 3.0]),
    "of a list": lambda: iter([float(n) for n in range(1, STEPS + 1)]),  # not one more than there are calls
    "map": lambda: map(float, itertools.count(1)),
    "chain": lambda: itertools.chain([1.0, 2.0], itertools.repeat(3.0)),
    "of calls": lambda: iter(iter(range(1, 99)).__next__, 50),
}


class Holder:
    def __init__(self, held):
        self.held = held


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held):
        self.held = held


class Scaled(nn.Module):
    """``take()``: the number that the result of this call is multiplied by; ``held``: put into an attribute."""

    def __init__(self, take, held=None):
        super().__init__()
        self.layer, self.take, self.held = nn.Linear(3, 3), take, held

    def forward(self, x):
        return self.layer(x) * self.take(self)


def of_global(iterator):
    global current
    current = iterator
    return Scaled(lambda module: next(current))


current = None


class Shared:
    numbers = None


def of_class(iterator):
    Shared.numbers = iterator
    return Scaled(lambda module: next(Shared.numbers))


def of_nested(iterator):
    inner = nn.Sequential(nn.Linear(3, 3), Scaled(lambda module: next(module.held), iterator))
    return nn.Sequential(inner, nn.Linear(3, 3))


#: Where forward finds the iterator, and how it takes the next.
PLACES = {
    "an attribute": lambda it: Scaled(lambda module: next(module.held), it),
    "of a submodule": of_nested,
    "an object in an attribute": lambda it: Scaled(lambda module: next(module.held.held), Holder(it)),
    "a slot of an object": lambda it: Scaled(lambda module: next(module.held.held), Slotted(it)),
    "a list in an attribute": lambda it: Scaled(lambda module: next(module.held[0]), [it]),
    "a closure": lambda it: Scaled(lambda module: next(it)),
    "a closure's list": lambda it: (lambda held: Scaled(lambda module: next(held[0])))([it]),
    "a global": of_global,
    "a class": of_class,
    "a default": lambda it: Scaled(lambda module, held=it: next(held)),
    "a partial": lambda it: Scaled(functools.partial(lambda held, module: next(held), it)),
    "a bound method": lambda it: (lambda take: Scaled(lambda module: take()))(it.__next__),
    "a loop that is left": lambda it: Scaled(lambda module: [n for n in itertools.islice(it, 1)][0]),
    "with a default": lambda it: Scaled(lambda module: next(it, 0.0)),
    "errors are caught": lambda it: Scaled(lambda module: or_one(it)),
}


def or_one(iterator):
    try:
        return next(iterator)
    except Exception:
        return 1.0


def losses(module):
    found = []
    for n in range(STEPS):
        loss = module(torch.full((2 + n % 2, 3), 0.5)).square().sum()
        loss.backward()
        found.append(loss.detach())
    return torch.stack(found)


def check(kind, place):
    modules = []
    for wrap in (lambda module: module, ORTModule):
        torch.manual_seed(0)
        modules.append((wrap(PLACES[place](KINDS[kind]())), wrap))
        if len(modules) == 1:
            expected = losses(modules[0][0])
    torch.testing.assert_close(losses(modules[1][0]), expected)
    assert "iterator" in explain(modules[1][0]).fallback


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind):
    check(kind, "an attribute")
    check(kind, "a closure")


@pytest.mark.parametrize("place", PLACES)
def test_places(place):
    check("generator", place)
    check("count", place)


class Named(nn.Module):
    """An iterator that it was named by; forward reads it, and does not advance it."""

    numbers = itertools.count()

    def __init__(self):
        super().__init__()
        self.layer, self.name, self.held = nn.Linear(3, 3), f"layer {next(Named.numbers)}", stream()

    def forward(self, x):
        return self.layer(x) if self.held is not None else x


def test_one_that_forward_does_not_advance():
    torch.manual_seed(0)
    eager = Named()
    ours = ORTModule(eager)
    held, numbers = eager.held, Named.numbers
    for n in (2, 3, 2):
        x = torch.randn(n, 3)
        torch.testing.assert_close(ours(x), eager.layer(x))
    assert explain(ours).captured, explain(ours).fallback
    assert eager.held is held and Named.numbers is numbers and next(held) == 1.0


class Makes(nn.Module):
    """It takes the next of iterators that it has made."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x):
        numbers = stream()
        for layer, scale in zip(self.layers, numbers, strict=False):
            x = layer(x) * scale
        return x * next(numbers)


def test_one_that_forward_makes():
    torch.manual_seed(0)
    eager = Makes()
    ours = ORTModule(copy.deepcopy(eager))
    for n in (2, 3, 2):
        x = torch.randn(n, 3)
        torch.testing.assert_close(ours(x), eager(x))
    assert explain(ours).captured, explain(ours).fallback
