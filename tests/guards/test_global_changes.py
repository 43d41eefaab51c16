"""What a trace alone would miss: numbers that follow from sizes, errors, draws, and what lies around a module."""

import argparse
import copy
import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ortmodule import ORTModule, explain
from tests.selection import each
from tests.twins import Pair, rows

pytestmark = pytest.mark.filterwarnings("ignore")


# --- numbers that follow from sizes -----------------------------------------------------------------------------------

WEIGHT = torch.randn(4, 4, 3)
TABLE = {8: 2.0, 12: 3.0}
NUMBERS = {
    "pool": lambda y, n: F.max_pool1d(y, n // 3),
    "padding": lambda y, n: F.conv1d(y, WEIGHT, padding=n // 4),
    "dilation": lambda y, n: F.conv1d(y, WEIGHT, dilation=n // 4),
    "dimension": lambda y, n: y.sum(n % 2 + 1, keepdim=True),
    "shift": lambda y, n: torch.roll(y, n // 3, 2),
    "turns": lambda y, n: torch.rot90(y, n % 4, (1, 2)),
    "place in a list": lambda y, n: y * [1.0, 2.0, 3.0, 4.0, 5.0][n // 4],
    "key": lambda y, n: y * TABLE.get(n, 1.0),
    "member": lambda y, n: y * 2 if n in {8, 12} else y,
}


@each("first", [8, 9], [8])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_follow_from_sizes(name, first):
    pair = Pair(lambda self, x: NUMBERS[name](self.linear(x).mT, x.shape[1]))
    for n in (first, 12, 6, 9, 7, 16, 8):
        torch.testing.assert_close(pair.ours(rows(2, n, 4)), pair.eager(rows(2, n, 4)))


def test_sizes_that_are_written_into_the_graph_need_no_other():
    def forward(self, x):
        n = x.shape[1]
        y = self.linear(x).reshape(len(x) * n, 4).repeat(2, 1).view(2, -1, n, 4)
        return y.expand(2, len(x), n, 4) + torch.zeros(n, 4) + torch.linspace(0, 1, n)[:, None]

    pair = Pair(forward)
    for n in (6, 2, 5, 9):
        assert pair.check(rows(3, n, 4)).exports == 1


def test_an_error_that_python_catches():
    def forward(self, x):
        y = self.linear(x)
        try:
            return y[:, 4]
        except IndexError:
            return y[:, 0]

    pair = Pair(forward)
    for n in (4, 5, 7, 3):
        torch.testing.assert_close(pair.ours(rows(2, n, 4)), pair.eager(rows(2, n, 4)))


def test_an_index_beyond_the_part_that_is_traced():
    """A trace that fails there leaves the index with torch's tracer, which the next one must not find."""
    pair = Pair(lambda self, x, i: self.linear(x)[:, i.max()])
    for last in (39, 38, 39):
        pair.check(rows(8, 40, 4), torch.tensor([3, last]))


# --- what forward changes ---------------------------------------------------------------------------------------------


@torch.no_grad()
def decay(weight):
    weight.mul_(0.9)


def momentum(weight):
    weight.data.mul_(0.5).add_(weight.data, alpha=0.25)


def other_data(weight):
    weight.data = F.normalize(weight.data)


@torch.no_grad()
def several(weight):
    torch._foreach_mul_([weight], 0.5)


@pytest.mark.parametrize("change", [decay, momentum, other_data, several])
def test_parameters_change_once_a_call(change):
    def forward(self, x):
        change(self.linear.weight)
        return self.linear(x)

    pair = Pair(forward)
    for n in (3, 4, 3):
        torch.testing.assert_close(pair.ours(rows(n, 4)), pair.eager(rows(n, 4)))
        torch.testing.assert_close(pair.ours.linear.weight, pair.eager.linear.weight, rtol=0, atol=0)


def test_a_buffer_that_is_read_before_it_changes():
    def forward(self, x):
        y = self.linear(x)
        if not self.buffer[0] > 1:
            y = y * 2
        self.buffer.fill_(2)
        return y

    pair = Pair(forward)
    for reset in (False, False, True, False, True):
        if reset:
            pair.ours.buffer.fill_(1)
            pair.eager.buffer.fill_(1)
        pair.check(rows(3, 4))
        assert torch.equal(pair.ours.buffer, pair.eager.buffer)


# --- draws ------------------------------------------------------------------------------------------------------------

DRAWS = {
    "Python, seldom": lambda self, x: self.linear(x) if random.random() < 0.1 else x,
    "Python, nearly always": lambda self, x: self.linear(x) if random.random() < 0.95 else x,
    "NumPy": lambda self, x: self.linear(x) if numpy.random.rand() < 0.1 else x,
    "a generator of its own": lambda self, x: self.linear(x) if self.own.random() < 0.3 else x,
    "NumPy's, of its own": lambda self, x: self.linear(x) * self.numpys.standard_normal(),
    "torch's, of its own": lambda self, x: self.linear(x) * torch.randn((), generator=self.torchs),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws(name):
    eager = Pair(DRAWS[name]).eager
    eager.own, eager.numpys, eager.torchs = (
        random.Random(1),
        numpy.random.default_rng(1),
        torch.Generator().manual_seed(1),
    )
    found = []
    for module in (eager, ORTModule(copy.deepcopy(eager))):
        module.own, module.numpys = random.Random(1), numpy.random.default_rng(1)
        module.torchs = torch.Generator().manual_seed(1)
        random.seed(3)
        numpy.random.seed(3)
        found.append([module(rows(2, 4)).sum().item() for _ in range(40)])
    assert found[0] == pytest.approx(found[1])


def test_torchs_generator_is_seeded():
    def forward(self, x):
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return self.linear(x) * torch.randn(4)

    pair = Pair(forward)
    for _ in range(3):
        torch.testing.assert_close(pair.ours(rows(2, 4)), pair.eager(rows(2, 4)))


# --- around the module ------------------------------------------------------------------------------------------------

ARGUMENTS = argparse.Namespace(tau=1.0)
SETTINGS = {"scale": 1.0}
SCALES = [1.0]
VECTOR = torch.ones(4)


class Settings:
    scale = 1.0


class Table(dict):
    """As transformers 5.23 has one: its methods take something else than a dict's."""

    def get(self, key):
        return super().get(key) or 1.0

    def __setitem__(self, key, value):
        super().__setitem__(str(key), value)


TABLE_OF_ITS_OWN = Table(scale=1.0)


def helper(x):
    return x


def closure():
    scale = 1.0

    def forward(self, x):
        return self.linear(x) * scale

    def change(value):
        nonlocal scale
        scale = value

    return forward, change


AROUND = {
    "an object": (lambda self, x: self.linear(x) * ARGUMENTS.tau, lambda v: setattr(ARGUMENTS, "tau", v)),
    "a dictionary": (lambda self, x: self.linear(x) * SETTINGS["scale"], lambda v: SETTINGS.update(scale=v)),
    "a dictionary with methods of its own": (
        lambda self, x: self.linear(x) * TABLE_OF_ITS_OWN.get("scale"),
        lambda v: TABLE_OF_ITS_OWN.update(scale=v),
    ),
    "a list": (lambda self, x: self.linear(x) * SCALES[0], lambda v: SCALES.__setitem__(0, v)),
    "a class": (lambda self, x: self.linear(x) * Settings.scale, lambda v: setattr(Settings, "scale", v)),
    "a tensor": (lambda self, x: self.linear(x) * VECTOR, lambda v: globals().update(VECTOR=torch.full((4,), v))),
    "a function": (lambda self, x: helper(self.linear(x)), lambda v: globals().update(helper=lambda x: x * v)),
    "a closure": closure(),
}


@pytest.mark.parametrize("name", AROUND)
def test_what_lies_around_a_module(name):
    forward, change = AROUND[name]
    pair = Pair(forward)
    try:
        for value in (1.0, 2.0, 3.0, 2.0):
            change(value)
            pair.check(rows(2, 4))
        assert explain(pair.ours).exports <= 4
    finally:
        change(1.0)


STEP, HISTORY, PARTS = 0, [], {}


def test_a_global_that_has_the_name_of_an_attribute():
    """As in a script whose loop is beside its module."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.STEP, self.HISTORY, self.PARTS = nn.Linear(4, 4), 2.0, [3.0], {"y": nn.Tanh()}

        def forward(self, x):
            return self.PARTS["y"](self.linear(x)) * self.STEP * self.HISTORY[0]

    eager = Net()
    ours = ORTModule(copy.deepcopy(eager))
    try:
        for i in range(4):
            globals().update(STEP=i, PARTS={"x": i})
            HISTORY.append(i)
            torch.testing.assert_close(ours(rows(2, 4)), eager(rows(2, 4)))
        assert explain(ours).exports == 1
    finally:
        globals().update(STEP=0, PARTS={})
        HISTORY.clear()


class Registry(dict):
    """Takes objects for keys and keeps the names of their classes, as transformers' registry of models does."""

    def __setitem__(self, key, value):
        super().__setitem__(str(type(key)), value)

    def get(self, key):
        return super().get(str(type(key))) or {}


KNOWN = Registry()


def test_a_global_container_of_another_kind():
    """What its class makes of keys is not for a comparison, and nothing of it is lost."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            KNOWN[self] = {"factor": 2.0}

        def forward(self, x):
            return self.linear(x) * KNOWN.get(self)["factor"]

    eager = Net()
    ours = ORTModule(copy.deepcopy(eager))
    torch.testing.assert_close(ours(rows(2, 4)), eager(rows(2, 4)))
    assert explain(ours).captured, explain(ours).fallback
    assert KNOWN.get(eager) == {"factor": 2.0}


FEATURES, CALLS = {}, []


class Counted(nn.Module):
    calls = 0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        FEATURES["y"] = y.detach()
        CALLS.append(len(x))
        Counted.calls += 1
        return y


def test_what_forward_leaves_around_a_module():
    eager = Counted()
    ours = ORTModule(copy.deepcopy(eager))
    for n in (2, 3, 2):
        found = []
        for module in (eager, ours):
            FEATURES.clear()
            CALLS.clear()
            Counted.calls = 5
            module(rows(n, 4))
            found.append((FEATURES["y"], list(CALLS), Counted.calls))
        torch.testing.assert_close(found[0][0], found[1][0])
        assert found[0][1:] == found[1][1:] == ([n], 6)
    assert "around the module" in explain(ours).fallback


KEPT = {}


def test_what_forward_keeps_around_a_module():
    """Made at the first call of a length, and found from then on."""

    def forward(self, x):
        n = x.shape[1]
        if n not in KEPT:
            KEPT[n] = torch.arange(n, dtype=torch.float32)[:, None]
        return self.linear(x) * KEPT[n]

    pair = Pair(forward)
    for n, captured in ((5, False), (5, True), (7, False), (7, True), (5, True)):
        torch.testing.assert_close(pair.ours(rows(2, n, 4)), pair.eager(rows(2, n, 4)))
        assert explain(pair.ours).captured == captured
    assert list(KEPT) == [5, 7] and all(type(n) is int for n in KEPT)


class ByClass(dict):
    """Keys are classes' names, as in transformers' registry of what its models record."""

    def __setitem__(self, owner, value):
        super().__setitem__(str(type(owner)), value)

    def get(self, owner):
        return super().get(str(type(owner))) or 1.0


REGISTRY = ByClass()
dict.update(REGISTRY, {"<class 'int'>": 2.0, "<class 'str'>": 3.0})


def test_a_dictionary_with_methods_of_its_own():
    """Its items are what they were, and are put back by the built-in class's methods."""
    before = dict(REGISTRY)
    pair = Pair(lambda self, x: self.linear(x) * REGISTRY.get(5) + REGISTRY.get(self))
    for n in (3, 4):
        assert pair.check(rows(n, 4)).captured and dict(REGISTRY) == before


def test_what_forward_leaves_in_a_dictionary_with_methods_of_its_own():
    before = dict(REGISTRY)

    def forward(self, x):
        REGISTRY[x] = 7.0
        return self.linear(x)

    pair = Pair(forward)
    try:
        for n, captured in ((3, False), (4, True)):  # from the second call on it changes nothing
            pair.check(rows(n, 4), captured=captured)
            assert dict(REGISTRY) == before | {"<class 'torch.Tensor'>": 7.0}
    finally:
        del REGISTRY["<class 'torch.Tensor'>"]


@pytest.mark.parametrize("table", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients(table):
    class Looked(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.linear = table(50, 8, sparse=True), nn.Linear(8, 3)

        def forward(self, i):
            return self.linear(self.table(i).reshape(len(i), -1, 8).mean(1))

    eager = Looked()
    ours = ORTModule(copy.deepcopy(eager))
    for module in (eager, ours):
        optimizer = torch.optim.SparseAdam(module.table.parameters(), 0.1)
        for n in (4, 5):
            optimizer.zero_grad()
            module(torch.arange(6 * n).reshape(n, 6)).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(ours.table.weight, eager.table.weight)
    assert ours.table.weight.grad.is_sparse
