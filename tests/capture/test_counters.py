"""Attributes that are numbers, which forward counts: one graph for all values, and PyTorch's results and counts."""

import copy

import torch
from torch import nn

from ortmodule import ORTModule, explain
from tests.selection import each


class Counter(nn.Module):
    """Counts the calls, and computes with the count as ``use`` does."""

    def __init__(self, use, start=0):
        super().__init__()
        self.layer, self.use, self.step = nn.Linear(4, 4), use, start

    def forward(self, x):
        self.step += 1
        return self.use(self.layer(x), self.step)


class Inside(nn.Module):
    """Reads what a submodule has counted."""

    def __init__(self, use, start=0):
        super().__init__()
        self.counter = Counter(lambda h, n: h, start)
        self.use = use

    def forward(self, x):
        return self.use(self.counter(x), self.counter.step)


class Decays(nn.Module):
    """A float that gets smaller."""

    def __init__(self, use, start=0):
        super().__init__()
        self.layer, self.use, self.rate = nn.Linear(4, 4), use, 1.0 + start

    def forward(self, x):
        h = self.use(self.layer(x), self.rate)
        self.rate *= 0.9
        return h


USES = {
    "nothing": lambda h, n: h,
    "a factor": lambda h, n: h * n,
    "annealed": lambda h, n: h * (1 - 0.5 ** (n / 10)),
    "a size": lambda h, n: torch.cat([h, h.new_ones(1 + int(n), 4)]),
    "a fill": lambda h, n: h + torch.full_like(h, n),
}
CASES = [(kind, name) for kind in (Counter, Inside, Decays) for name in USES]


@each("kind, name", CASES, ((Counter, "nothing"), (Inside, "annealed"), (Decays, "a factor")))
def test_one_graph_for_all_counts(kind, name):
    torch.manual_seed(0)
    eager = kind(USES[name])
    ours = ORTModule(copy.deepcopy(eager))
    for rows in (2, 3, 2, 5, 2):
        found = []
        for model in (eager, ours):
            x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows)).requires_grad_()
            model.zero_grad()
            y = model(x)
            y.square().sum().backward()
            counts = [value for m in model.modules() for key, value in vars(m).items() if key in ("step", "rate")]
            found.append((y.detach(), x.grad, *(p.grad for p in model.parameters()), counts))
        *expected, count = found[0]
        *got, our_count = found[1]
        torch.testing.assert_close(got, expected)
        assert our_count == count and [*map(type, our_count)] == [*map(type, count)]
    report = explain(ours)
    assert report.captured, report.fallback
    assert report.exports == 1


def test_count_that_something_else_sets():
    """A number of another type has another graph; what the user sets is what the next call reads."""
    torch.manual_seed(0)
    model = ORTModule(Counter(USES["a factor"]))
    x = torch.ones(2, 4)
    model(x)
    model.step = 7
    torch.testing.assert_close(model(x), 8 * model.layer(x))
    model.step = 0.5
    torch.testing.assert_close(model(x), 1.5 * model.layer(x))
    assert model.step == 1.5


def test_count_that_begins_in_forward():
    class Begins(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            self.count = getattr(self, "count", 0) + 1
            return self.layer(x) * self.count

    torch.manual_seed(0)
    eager = Begins()
    ours = ORTModule(copy.deepcopy(eager))
    for _ in range(4):
        torch.testing.assert_close(ours(torch.ones(2, 4)), eager(torch.ones(2, 4)))
    assert ours.count == eager.count == 4
    assert explain(ours).captured, explain(ours).fallback


def test_second_derivatives_count_once():
    torch.manual_seed(0)
    eager = Counter(lambda h, n: h.square() * n)
    ours = ORTModule(copy.deepcopy(eager))
    for _ in range(3):
        found = []
        for model in (eager, ours):
            x = torch.ones(2, 4, requires_grad=True)
            (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(grad.square().sum(), x)
            found.append((grad.detach(), second, torch.tensor(model.step)))
        torch.testing.assert_close(found[1], found[0])


def test_decision_by_a_count():
    torch.manual_seed(0)
    eager = Counter(lambda h, n: h * 2 if n % 3 == 0 else h)
    ours = ORTModule(copy.deepcopy(eager))
    for _ in range(7):
        torch.testing.assert_close(ours(torch.ones(2, 4)), eager(torch.ones(2, 4)))
    assert ours.step == eager.step == 7


SPECIAL = {
    "odd": lambda n: n % 2,
    "every tenth": lambda n: n % 10 == 0,
    "not every fourth": lambda n: bool(n % 4),
}


@each("name", SPECIAL, ("odd",))
def test_decision_by_a_rest(name):
    """Of every second or tenth call: the call behind it takes another way, and is no reason to refuse both."""
    module = Counter(lambda h, n: h * 2 if SPECIAL[name](n) else h)
    ours, reference = ORTModule(copy.deepcopy(module)), module
    for _ in range(22):
        x = torch.randn(3, 4)
        torch.testing.assert_close(ours(x), reference(x))
    assert ours.step == reference.step
    assert explain(ours).fallback is None and explain(ours).exports == 2
