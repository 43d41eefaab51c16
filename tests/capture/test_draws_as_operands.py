"""Numbers that Python draws and that only go into tensors: operands, drawn anew at each call by the same generator."""

import copy
import math
import random

import numpy
import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from tests.selection import each

pytestmark = pytest.mark.filterwarnings("ignore")


class Net(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, 4), nn.Linear(4, 2), forward
        self.own = random.Random(7)

    def forward(self, x):
        return self.last(self.function(self, self.first(x)))


#: What is done with a number.
USES = {
    "factor": lambda h, n: h * n,
    "on the left": lambda h, n: n * h + n,
    "arithmetic": lambda h, n: h * (1 - 2 * n) / (n + 3),
    "in place": lambda h, n: h.clone().mul_(n).add_(h, alpha=2),
    "a tensor": lambda h, n: h + torch.tensor(n) * torch.full((4,), n),
    "lerp": lambda h, n: torch.lerp(h, h.relu(), n),
    "clamp": lambda h, n: h.clamp(max=n),
}
#: What draws it.
DRAWS = {
    "random": lambda m: random.random(),
    "uniform": lambda m: random.uniform(-1, 2),
    "gauss": lambda m: random.gauss(0, 1),
    "betavariate": lambda m: random.betavariate(2, 3),
    "expovariate": lambda m: random.expovariate(2.0),
    "numpy random": lambda m: numpy.random.rand(),
    "numpy uniform": lambda m: numpy.random.uniform(0.5, 1.5),
    "numpy normal": lambda m: numpy.random.normal(1.0, scale=0.1),
    "numpy beta": lambda m: numpy.random.beta(0.4, 0.4),
    "own": lambda m: m.own.random(),
    "own normal": lambda m: m.own.normalvariate(0, 2),
    "two": lambda m: random.random() - 2 * numpy.random.normal(),
    "rate": lambda m: random.random() if random.random() < 1.0 else 0.0,
}
SHORT = {("random", "factor"), ("numpy normal", "arithmetic"), ("own", "a tensor")}


def seeded(module):
    random.seed(3), numpy.random.seed(4), torch.manual_seed(5)
    module.own.seed(6)


def states(module):
    return [random.getstate(), module.own.getstate(), numpy.random.get_state()[1].tolist(), numpy.random.get_state()[2]]


def compare(forward, calls=4):
    torch.manual_seed(0)
    eager = Net(forward)
    module = copy.deepcopy(eager)
    wrapped = ORTModule(module)
    wrapped(torch.ones(2, 4))  # capturing it draws as PyTorch does
    batches, found = [torch.randn(n, 4) for n in (3, 5, 3, 2)[:calls]], []
    for run, own in ((eager, eager), (wrapped, module)):
        seeded(own)
        steps = []
        for x in batches:
            run.zero_grad()
            y = run(x)
            y.square().sum().backward()
            steps.append([y.detach(), *[p.grad.clone() for p in own.parameters()]])
        found.append((steps, states(own)))
    torch.testing.assert_close(found[1][0], found[0][0])
    assert found[1][1] == found[0][1]
    return explain(wrapped)


@each("draw, use", [(draw, use) for draw in DRAWS for use in USES], SHORT)
def test_operands(draw, use):
    report = compare(lambda m, h: USES[use](h, DRAWS[draw](m)))
    assert report.captured and report.pytorch_calls == 0 and report.exports == 1, report


def test_two_draws_used_in_another_order():
    def forward(m, h):
        a, b, c = random.random(), random.random(), random.gauss(0, 1)
        return h * c + b - a

    assert compare(forward).captured


#: A decision is still PyTorch's.
DECISIONS = {
    "compared": lambda m, h: h * 2 if random.random() < 0.5 else h,
    "after": lambda m, h: h * (n := random.random()) if (n := random.random()) < 0.5 else h + n,
    "of Python's": lambda m, h: h * math.sqrt(random.random()),
    "an index": lambda m, h: h * random.choices([1.0, 2.0, 3.0])[0],
    "own": lambda m, h: h if m.own.gauss(0, 1) > 0 else h.sin(),
    "an array": lambda m, h: h + torch.from_numpy(numpy.random.normal(size=4)).float(),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_decisions(name):
    compare(DECISIONS[name])
