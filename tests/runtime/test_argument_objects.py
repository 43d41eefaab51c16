"""Arguments that are objects of libraries' and users' classes, and sparse tensors."""

import collections
import copy
import threading

import pytest
import torch
import transformers
from torch import nn

from ortmodule import ORTModule, explain

pytestmark = pytest.mark.filterwarnings("ignore")


class Net(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.a, self.b, self.function = nn.Linear(4, 4), nn.Linear(4, 4), forward

    def forward(self, batch, *more):
        return self.function(self, batch, *more)


class Batch:
    factor = 2.0

    def __init__(self, x, mask=None):
        self.x, self.mask, self.size = x, mask, len(x)
        self._lock = threading.Lock()  # of its own, and no matter of the module's

    @property
    def rows(self):
        return self.x if self.mask is None else self.x * self.mask[:, None]

    def scaled(self):
        return self.rows * self.factor * SCALE[0]


SCALE = [1.5]


class Wide(Batch):
    def __init__(self, x):
        super().__init__(x)
        self.others = {"x": x, "parts": [Batch(x[:1]), Batch(x[1:])]}


def encoding(x):
    return transformers.BatchEncoding({"x": x}, encoding=[object() for _ in x], n_sequences=1)


OBJECTS = {
    "UserDict": (lambda x: collections.UserDict(x=x), lambda m, b: m.b(m.a(b["x"]))),
    "BatchEncoding": (encoding, lambda m, b: m.b(m.a(b["x"] + b.get("none", 0)))),
    "keywords": (lambda x: collections.UserDict(input=x), lambda m, b: m.b(m.a(*b.values()))),
    "a class": (Batch, lambda m, b: m.b(m.a(b.x)) * b.size),
    "its methods": (lambda x: Batch(x, (x > 0).any(-1)), lambda m, b: m.b(m.a(b.scaled()))),
    "nested": (Wide, lambda m, b: m.a(b.others["parts"][1].rows) + m.b(b.others["parts"][0].x)),
}


def step(module, *args):
    module.zero_grad()
    y = module(*args)
    y.square().sum().backward()
    return [y.detach(), *[p.grad for p in module.parameters()]]


def compare(wrapped, eager, *args):
    torch.testing.assert_close(step(wrapped, *args), step(eager, *args))


@pytest.mark.parametrize("name", OBJECTS)
def test_objects(name):
    make, forward = OBJECTS[name]
    eager = Net(forward)
    wrapped = ORTModule(copy.deepcopy(eager))
    for _ in range(3):
        compare(wrapped, eager, make(torch.randn(3, 4)))
    assert explain(wrapped).captured and explain(wrapped).exports == 1, explain(wrapped)


def test_attributes_are_compared():
    """Of the argument, of its class, and what its methods read."""
    eager = Net(lambda m, b: m.b(m.a(b.scaled())) + b.size)
    wrapped = ORTModule(copy.deepcopy(eager))
    x = torch.randn(3, 4)
    compare(wrapped, eager, Batch(x))
    other = Batch(x)
    other.size = 5
    compare(wrapped, eager, other)
    Batch.factor = 3.0
    try:
        compare(wrapped, eager, Batch(x))
        SCALE[0] = 0.5
        compare(wrapped, eager, Batch(x))
    finally:
        Batch.factor, SCALE[0] = 2.0, 1.5
    compare(wrapped, eager, Batch(x))


def set_attribute(m, b):
    b.hidden = m.a(b.x)
    return m.b(b.hidden)


def look_inside(m, b):
    return m.b(m.a(b.x)) * (2 if b._lock.locked() else 1)


@pytest.mark.parametrize("forward, captured", [(set_attribute, True), (look_inside, False)])
def test_what_forward_does_to_it(forward, captured):
    eager = Net(forward)
    wrapped = ORTModule(copy.deepcopy(eager))
    ours, theirs = Batch(torch.randn(3, 4)), Batch(torch.zeros(0))
    theirs.x, theirs.size = ours.x, ours.size
    torch.testing.assert_close(step(wrapped, ours), step(eager, theirs))
    assert hasattr(ours, "hidden") == hasattr(theirs, "hidden")
    assert explain(wrapped).captured == captured


# --- sparse tensors ---------------------------------------------------------------------------------------------------


def sparse(n, coalesced=True):
    a = (torch.rand(n, n) > 0.5).float().to_sparse()
    if coalesced:
        return a
    return torch.sparse_coo_tensor(torch.cat([a.indices()] * 2, 1), torch.cat([a.values()] * 2), a.shape)


SPARSE = {
    "mm": lambda m, x, a: torch.sparse.mm(a, m.a(x)).relu(),
    "spmm": lambda m, x, a: m.b(torch.spmm(a, m.a(x)).relu()),
    "matmul": lambda m, x, a: a @ m.b(x).tanh() + a.t() @ m.a(x),
    "dense": lambda m, x, a: m.a(x) * a.to_dense().sum(1, keepdim=True),
    "half of it": lambda m, x, a: torch.sparse.mm(a * 0.5, m.a(x)),
}


@pytest.mark.parametrize("coalesced", [True, False])
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_arguments(name, coalesced):
    eager = Net(SPARSE[name])
    wrapped = ORTModule(copy.deepcopy(eager))
    for n in (5, 5, 7, 5):
        compare(wrapped, eager, torch.randn(n, 4), sparse(n, coalesced))
    assert explain(wrapped).captured, explain(wrapped).fallback


def test_a_sparse_argument_that_is_changed():
    eager = Net(lambda m, x, a: torch.sparse.mm(a.mul_(2), m.a(x)))
    wrapped = ORTModule(copy.deepcopy(eager))
    x, a = torch.randn(5, 4), sparse(5)
    b = a.clone()
    torch.testing.assert_close(step(wrapped, x, a), step(eager, x, b))
    torch.testing.assert_close(a.to_dense(), b.to_dense())


class Memory:
    """As a key-value cache: a submodule changes its attributes."""

    def __init__(self):
        self.kept = torch.zeros(1, 4)
        self.layers = [torch.zeros(1, 4)]


class Remembers(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.linear, self.way = nn.Linear(4, 4), way

    def forward(self, x, memory):
        y = self.linear(x)
        if self.way == "attribute":
            memory.kept = torch.cat([memory.kept, y])
            return y + memory.kept.sum(0)
        memory.layers[0] = memory.layers[0] + y.sum(0)
        return y + memory.layers[0]


class Holds(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), Remembers(way), nn.Linear(4, 1)

    def forward(self, x, memory):
        return self.last(torch.tanh(self.inner(self.first(x), memory)))


@pytest.mark.parametrize("way", ["attribute", "item"])
def test_a_submodule_changes_the_object(way):
    """The caller's own: what it does in one call is there in the next."""
    torch.manual_seed(0)
    eager = Holds(way)
    ours = ORTModule(copy.deepcopy(eager))
    memories = [Memory(), Memory()]
    for _ in range(4):
        x = torch.randn(3, 4)
        found = [module(x, memory) for module, memory in zip((eager, ours), memories, strict=True)]
        torch.testing.assert_close(found[1], found[0])
        torch.testing.assert_close(memories[1].kept, memories[0].kept)
        torch.testing.assert_close(memories[1].layers, memories[0].layers)


SLICES = {
    "a dimension": lambda m, x, s: m.a(x[s]).sum(0) * 2,
    "in a tuple": lambda m, x, s: m.a(x)[s, 1:3].sum(0),
    "its bounds": lambda m, x, s: m.a(x)[: s.stop].sum(0) * (0 if s.start is None else s.start + 1),
    "assigned": lambda m, x, s: torch.zeros(6, 4).index_fill(0, torch.arange(6)[s], 1) * m.a(x),
    "its indices": lambda m, x, s: m.a(x) * len(range(*s.indices(6))),
}


@pytest.mark.parametrize("name", SLICES)
def test_slices(name):
    torch.manual_seed(0)
    theirs = Net(lambda m, batch, s: SLICES[name](m, batch["x"], s))
    ours = ORTModule(copy.deepcopy(theirs))
    bounds = [(0, 2), (1, 4), (2, 5), (0, 6), (1, 3, 2), (None, 3), (1, 4)]
    for step, each in enumerate(bounds):
        x, results = torch.randn(6, 4, generator=torch.Generator().manual_seed(step)), []
        for model in (ours, theirs):
            model.zero_grad()
            result = model({"x": x}, slice(*each))
            result.square().sum().backward()
            results.append([result.detach(), model.a.weight.grad])
        torch.testing.assert_close(*results)
    assert explain(ours).engine_calls >= len(bounds) - 2
