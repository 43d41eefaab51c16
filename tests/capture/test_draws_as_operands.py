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


AROUND = numpy.random.default_rng(9)
HELD = {"a dictionary": [numpy.random.default_rng(1)]}


class Net(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, 4), nn.Linear(4, 2), forward
        self.own = random.Random(7)
        self.kept = []
        self.rng, self.old = numpy.random.default_rng(8), numpy.random.RandomState(9)

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
    module.own.seed(6), module.old.seed(7)
    module.rng.bit_generator.state = numpy.random.default_rng(8).bit_generator.state
    AROUND.bit_generator.state = numpy.random.default_rng(9).bit_generator.state


def states(module):
    python = [
        random.getstate(),
        module.own.getstate(),
        str(module.rng.bit_generator.state),
        str(AROUND.bit_generator.state),
    ]
    return python + [repr(generator.get_state()) for generator in (numpy.random, module.old)]


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


def shuffled(count):
    items = list(range(count))
    random.shuffle(items)
    return items


def array(values):
    return torch.from_numpy(values).float()


def sliced(h, start):
    return h + h[:, start : start + 2].sum(1, keepdim=True)


#: What else than a float is drawn, and goes into tensors alone.
OTHERS = {
    "roll": lambda m, h: h.roll(random.randint(0, 3), 1),
    "an integer": lambda m, h: h * random.randint(1, 9),
    "an index": lambda m, h: h + h[:, random.randrange(4)][:, None],
    "where a slice begins": lambda m, h: sliced(h, random.randint(0, 2)),
    "where a slice ends": lambda m, h: h + h[:, : random.randint(1, 3)].sum(1, keepdim=True),
    "a size": lambda m, h: h + torch.ones(random.randint(1, 3)).sum(),
    "own integer": lambda m, h: h * m.own.randint(1, 9),
    "own gauss": lambda m, h: h * m.own.gauss(0, 1),
    "choice": lambda m, h: h * random.choice([1.0, 2.0, 3.0]),
    "choices": lambda m, h: h * random.choices((1, 2, 3), weights=[1, 2, 3])[0],
    "sample": lambda m, h: h[:, random.sample(range(4), 2)].repeat(1, 2),
    "shuffle": lambda m, h: h[:, shuffled(4)],
    "a shuffled tensor": lambda m, h: h[:, torch.tensor(shuffled(4))],
    "an array": lambda m, h: h + array(numpy.random.normal(size=4)),
    "an array as large": lambda m, h: h + array(numpy.random.normal(size=h.shape)),
    "tensor()": lambda m, h: h * torch.tensor(numpy.random.rand(4), dtype=torch.float32),
    "as_tensor()": lambda m, h: h * torch.as_tensor((numpy.random.rand(4) * 2 - 1).astype(numpy.float32)),
    "computed by NumPy": lambda m, h: h * array(numpy.exp(-numpy.random.rand(4)).clip(0.4, 0.8) + numpy.arange(4)),
    "permutation": lambda m, h: h[:, numpy.random.permutation(4)],
    "permutation of the batch": lambda m, h: h[numpy.random.permutation(h.shape[0])] * 0.5 + h,
    "mixup": lambda m, h: (rate := m.rng.beta(0.4, 0.4)) * h + (1 - rate) * h[m.rng.permutation(h.size(0))],
    "numpy integer": lambda m, h: h * numpy.random.randint(1, 5),
    "numpy choice": lambda m, h: h[:, numpy.random.choice(4, 2, replace=False)].repeat(1, 2),
    "an element": lambda m, h: h * numpy.random.rand(3)[1],
    "tolist": lambda m, h: h * torch.tensor(numpy.random.rand(4).tolist()),
    "a mask": lambda m, h: h * torch.from_numpy(numpy.random.rand(4) > 0.5),
    "Generator": lambda m, h: h * m.rng.random() + array(m.rng.normal(size=4)) * m.rng.integers(1, 5),
    "Generator around": lambda m, h: h * AROUND.random() + array(AROUND.random(4)),
    "RandomState": lambda m, h: h * m.old.rand() + array(m.old.randn(4)),
    "all": lambda m, h: h * random.random() + array(m.rng.normal(size=4)) * m.old.rand() + m.own.gauss(0, 1),
}
SHORT_OTHERS = ("an index", "shuffle", "an array as large", "computed by NumPy", "mixup", "all")


@each("name", OTHERS, SHORT_OTHERS)
def test_integers_lists_and_arrays(name):
    report = compare(OTHERS[name])
    assert report.captured and report.pytorch_calls == 0 and report.exports == 1, report


@each("name", OTHERS, ("mixup",))
def test_verify_finds_nothing(name, monkeypatch):
    monkeypatch.setenv("ORTMODULE_VERIFY", "1")
    compare(OTHERS[name], 2)


def test_generators_in_containers():
    held = HELD["a dictionary"]

    def forward(m, h):
        return h * HELD["a dictionary"][0].random() + held[0].random()

    results = []
    for wrap in (lambda module: module, ORTModule):
        torch.manual_seed(0)
        model = wrap(Net(forward))
        model(torch.ones(2, 4))
        held[0].bit_generator.state = numpy.random.default_rng(5).bit_generator.state
        results.append([model(torch.ones(n, 4)) for n in (2, 3, 2)] + [held[0].random()])
        assert type(held[0]) is numpy.random.Generator
    torch.testing.assert_close(*results)
    assert explain(model).captured


def test_another_generator_in_its_place():
    def forward(m, h):
        return h * m.rng.random()

    torch.manual_seed(0)
    eager = Net(forward)
    ours = ORTModule(copy.deepcopy(eager))
    for seed in (1, 1, 2, 2, 3):
        eager.rng, ours.rng = numpy.random.default_rng(seed), numpy.random.default_rng(seed)
        for n in (2, 3):
            torch.testing.assert_close(ours(torch.ones(n, 4)), eager(torch.ones(n, 4)))


#: A decision is still PyTorch's.
DECISIONS = {
    "compared": lambda m, h: h * 2 if random.random() < 0.5 else h,
    "after": lambda m, h: h * (n := random.random()) if (n := random.random()) < 0.5 else h + n,
    "of Python's": lambda m, h: h * math.sqrt(random.random()),
    "an index": lambda m, h: h * [1, 2, 3, 4][random.randint(0, 3)],
    "own": lambda m, h: h if m.own.gauss(0, 1) > 0 else h.sin(),
    "an integer": lambda m, h: h * 2 if random.randint(0, 3) == 1 else h,
    "a loop": lambda m, h: sum(h.sin() for _ in range(random.randint(1, 3))),
    "text": lambda m, h: h * len(str(random.randint(1, 200))),
    "a function": lambda m, h: random.choice([torch.sin, torch.cos])(h),
    "an array": lambda m, h: h * 2 if numpy.random.rand(3).max() > 0.7 else h,
    "a shuffled array": lambda m, h: (a := numpy.arange(4), m.rng.shuffle(a), h[:, torch.from_numpy(a)])[2],
    "Generator": lambda m, h: h * 2 if m.rng.integers(4) == 1 else h,
    "a result": lambda m, h: (h, m.kept.append(numpy.random.rand(2)))[0],
    "numbers of two types": lambda m, h: h * random.choice([1, 2.5]),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_decisions(name):
    compare(DECISIONS[name])
