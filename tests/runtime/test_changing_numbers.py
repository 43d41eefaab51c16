"""Python numbers among the arguments that change from call to call are operands of one graph."""

import math

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from ortmodule.core import pytree


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x, n, *more, **named):
        return self.function(self.linear(x), n, *more, **named)


ONE_GRAPH = {
    "a factor": lambda y, n: y * n,
    "from the left": lambda y, n: n * y,
    "mixup": lambda y, n: n * y + (1 - n) * y.flip(0),
    "a power": lambda y, n: y.abs() ** n,
    "a quotient": lambda y, n: y / (n + 1),
    "divided by it": lambda y, n: (n + 1) / (y.abs() + 1),
    "a temperature": lambda y, n: torch.softmax(y / (n + 0.1), -1),
    "subtracted": lambda y, n: n - y,
    "compared": lambda y, n: torch.where(y > n, y, y.sin()),
    "a largest": lambda y, n: torch.maximum(y, torch.zeros_like(y) + n),
    "arithmetic": lambda y, n: y * (2 * n - n / 3 + n**2 - (-n) + abs(n) - n % 0.7 + (n // 0.3)),
    "a decision": lambda y, n: y * n if n > -1 else y,
    "min": lambda y, n: y * min(n, 2000),
    "max": lambda y, n: y * max(-1000.0, n),
    "in a list": lambda y, n: y * [n, 2.0][0],
    "returned": lambda y, n: (y * n, n),
    "a type of 16 bits": lambda y, n: (y.to(torch.bfloat16) * n).float(),
    "beside integers": lambda y, n: y + torch.arange(4) * n,
    "in place": lambda y, n: y.clone().mul_(n),
    "a function of Python's": lambda y, n: nn.functional.gumbel_softmax(y, tau=n + 1.0) * 0 + y * n,
}
FLOATS = (0.25, 0.5, 0.75, 0.3, 1.7, 0.25, 2.9, 0.01, 0.7, 0.33, 0.9, 1.1)
INTS = (1, 2, 3, 4, 50, 6, 7, 8, 9, 10, 11, 1000)


def compare(name, values, functions=ONE_GRAPH):
    torch.manual_seed(0)
    eager = Model(functions[name])
    module = ORTModule(eager)
    for i, value in enumerate(values):
        x = torch.randn(2 + i % 3, 4)
        expected, found = eager(x, value), module(x, value)
        torch.testing.assert_close(found, expected)
        for y in pytree.flatten(found, results=True)[1].numbers().values():
            assert type(y) is type(value)
        a, b = ((t[0] if isinstance(t, tuple) else t).sum() for t in (expected, found))
        gradients = [torch.autograd.grad(t, eager.linear.weight)[0] for t in (a, b)]
        torch.testing.assert_close(gradients[1], gradients[0])
    return explain(module)


@pytest.mark.parametrize("values", [FLOATS, INTS], ids=["float", "int"])
@pytest.mark.parametrize("name", ONE_GRAPH)
def test_one_graph_for_all_values(name, values):
    report = compare(name, values)
    assert report.captured, report.fallback
    assert report.exports == 2  # the first call is for its value


SEVERAL = {
    "a size": lambda y, n: y[:, : int(n) % 3 + 1],
    "a decision": lambda y, n: y.sin() if n > 0.5 else y.cos(),
    "text": lambda y, n: y * len(str(n)),
    "math's": lambda y, n: y * math.exp(-n),
    "a rate": lambda y, n: nn.functional.dropout(y, min(n, 0.0), True),
    "a key": lambda y, n: y * {0.25: 2.0}.get(n, 3.0),
    "an integer's use": lambda y, n: y.repeat(int(n) % 2 + 1, 1),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_right_where_python_looks_at_the_value(name):
    compare(name, FLOATS[:6], SEVERAL)


def test_numbers_that_stay_are_constants():
    torch.manual_seed(0)
    eager = Model(lambda y, n, eps, named: y / (named["scale"] + eps) * n)
    module = ORTModule(eager)
    x = torch.randn(2, 4)
    for n in FLOATS:
        torch.testing.assert_close(module(x, n, 1e-3, named={"scale": 2}), eager(x, n, 1e-3, named={"scale": 2}))
    assert explain(module).exports == 2
    for scale in (3, 4, 5):  # another one changes
        torch.testing.assert_close(
            module(x, 0.5, 1e-3, named={"scale": scale}), eager(x, 0.5, 1e-3, named={"scale": scale})
        )
    assert explain(module).exports <= 4 and explain(module).captured


def test_a_first_value_has_its_own_graph():
    module = ORTModule(Model(lambda y, n: y * n))
    x = torch.randn(2, 4)
    for _ in range(3):
        module(x, 0.5)
    assert explain(module).exports == 1


def test_integers_that_no_tensor_holds():
    eager = Model(lambda y, n: y * (n % 7))
    module = ORTModule(eager)
    x = torch.randn(2, 4)
    for n in (3, 1 << 70, -(1 << 70), 5, 1 << 64):
        torch.testing.assert_close(module(x, n), eager(x, n))


def test_second_derivatives():
    torch.manual_seed(0)
    eager = Model(lambda y, n: (y * n).tanh())
    module = ORTModule(eager)
    x = torch.randn(2, 4, requires_grad=True)
    for n in FLOATS[:4]:
        found = []
        for run in (eager, module):
            (g,) = torch.autograd.grad(run(x, n).sum(), x, create_graph=True)
            found.append(torch.autograd.grad(g.square().sum(), x)[0])
        torch.testing.assert_close(found[1], found[0])


def test_verified(monkeypatch):
    monkeypatch.setenv("ORTMODULE_VERIFY", "1")
    compare("mixup", FLOATS[:5])
