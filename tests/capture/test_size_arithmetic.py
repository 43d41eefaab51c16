"""What Python refuses of numbers from sizes, and from data, it refuses in the call, whatever they are used for."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ortmodule import ORTModule, explain
from tests.capture.test_size_functions import some
from tests.selection import each

pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH = 4
LENGTHS = (7, 9, 3, 8, 4, 1, 2)


class Block(nn.Module):
    def __init__(self, use, data):
        super().__init__()
        self.weight, self.use, self.data = nn.Parameter(torch.ones(WIDTH)), use, data

    def forward(self, x, n):
        x = x * self.weight
        return self.use(x, int(n) if self.data else x.shape[0])


#: What Python refuses at one of the lengths, or what is of another kind there: whole, a fraction, complex, large.
NUMBERS = {
    "division": lambda n: 1 / (n - 3),
    "division of sizes": lambda n: n / (n - 3),
    "floor": lambda n: n // (n - 3),
    "floor of a number": lambda n: 7 // (n - 3),
    "rest": lambda n: n % (n - 3),
    "rest of a number": lambda n: 7 % (n - 3),
    "floor by a fraction": lambda n: n // (n - 3.0),
    "rest by a fraction": lambda n: 7.5 % (n - 3.0),
    "divmod": lambda n: sum(divmod(n, n - 3)),
    "divmod of a number": lambda n: sum(divmod(17, n - 3)),
    "inverse": lambda n: (n - 3) ** -1,
    "inverse root": lambda n: (n - 3) ** -0.5,
    "inverse square": lambda n: pow(n - 3, -2),
    "nothing to a power": lambda n: 0.0 ** (3 - n),
    "a whole nothing": lambda n: 0 ** (3 - n),
    "whole or not": lambda n: 2 ** (n - 4),
    "negative powers": lambda n: 2**-n + n**-n,
    "root of a negative number": lambda n: abs((n - 3) ** 0.5),
    "logarithm": lambda n: math.log(n - 3),
    "square root": lambda n: math.sqrt(n - 4),
    "inverse of a root": lambda n: 1 / math.sqrt(n - 3),
    "inverse of a logarithm": lambda n: 1 / math.log(n - 2),
    "fmod": lambda n: math.fmod(n, n - 3),
    "acos": lambda n: math.acos(1 / (n - 2)),
    "too large": lambda n: 10.0 ** (100 * n) / 10.0 ** (99 * n),
    "exp": lambda n: math.exp(100 * n) / math.exp(99 * n),
    "64 bits": lambda n: 10 ** (3 * n) / 10 ** (3 * n - 1),
    "more than 64 bits": lambda n: n * 10**18 / 10**17,
    "quotients": lambda n: 1 / (1 / (n - 3)),
    "nothing of it": lambda n: 1 / (n - 3) * 0,
    "on its own": lambda n: n / n + 1 / (n > 3),
    "in place": lambda n: divided_in_place(n),
    "caught": lambda n: caught(n),
}


def divided_in_place(n):
    n /= n - 3
    return n


def caught(n):
    try:
        return 5 / (n - 3)
    except ZeroDivisionError:
        return 2.5


USES = {
    "factor": lambda x, f: x * f,
    "added": lambda x, f: x + f,
    "filled": lambda x, f: x + torch.full((WIDTH,), f),
    "clamp": lambda x, f: x.clamp(-abs(f), abs(f)),
    "divisor": lambda x, f: x / (f + 0.5),
    "where": lambda x, f: torch.where(x > 0, x, f),
    "bound": lambda x, f: x[: int(f)].sum(0) + x,
    "index": lambda x, f: x + x[int(f) % x.shape[0]],
    "size": lambda x, f: x + torch.ones(int(abs(f)) % 99, WIDTH).sum(),
    "range": lambda x, f: x + torch.arange(int(abs(f)) % 99).sum(),
    "result": lambda x, f: (x, f),
    "nothing": lambda x, f: x * 2,
}
#: Bounds that torch refuses at one of the lengths.
BOUNDS = {
    "step": lambda x, n: x + x[:: n - 3].sum(),
    "step of a range": lambda x, n: x + torch.arange(0, 10, n - 3).sum(),
    "range": lambda x, n: x + torch.arange(n, 8).sum(),
    "length": lambda x, n: x + torch.ones(n - 4, 2).sum(),
    "steps": lambda x, n: x + torch.linspace(0, 1, n - 4).sum(),
    "index": lambda x, n: x + x[(n - 4) * 2],
    "narrow": lambda x, n: x + x.narrow(0, n - 4, 1),
    "split": lambda x, n: x + x.split(n - 3)[0].sum(),
    "chunk": lambda x, n: x + x.chunk(n - 3)[0].sum(),
    "repeat": lambda x, n: x + x.repeat(n - 4, 1).sum(),
    "expand": lambda x, n: x + x[:1].expand(n - 5, WIDTH).sum(),
    "unfold": lambda x, n: x + x.unfold(0, 2 * n - 6, 1).sum(),
    "largest": lambda x, n: x + x.topk(n - 3, 1).values.sum(),
    "window": lambda x, n: x + F.avg_pool1d(x[None], n - 3).sum(),
    "size": lambda x, n: x + F.interpolate(x[None], size=n - 3).sum(),
    "pad": lambda x, n: x + F.pad(x, (0, n - 6)).sum(),
    "written": lambda x, n: written(x, n),
    "shape": lambda x, n: x + x.reshape(n - 3, -1).sum(),
    "shape of nothing": lambda x, n: x + x.new_ones(n - n % 2, 2).view(n // 2, 4).sum(),
}


def written(x, n):
    y = torch.zeros_like(x)
    y[:: n - 3] = 1
    return x + y


def found(module, *given):
    """The results as numbers of float64, or the error."""
    try:
        results = module(*given)
    except Exception as error:
        return type(error).__name__, str(error)
    return [torch.as_tensor(r).detach().to(torch.complex128) for r in results] if type(results) is tuple else results


def compare(use, data):
    eager = Block(use, data)
    ours = ORTModule(copy.deepcopy(eager))
    torch.manual_seed(0)
    for n in LENGTHS:
        x = torch.randn(n, WIDTH)
        expected, result = (found(module, x.clone(), torch.tensor(n)) for module in (eager, ours))
        if type(expected) is tuple or type(result) is tuple:
            assert result == expected, n
        else:
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    return explain(ours)


@pytest.fixture(autouse=True)
def _every_capture(monkeypatch):
    monkeypatch.setenv("ORTMODULE_CAPTURE_SHARE", "inf")


@each("number, use, data", [(n, u, d) for n in NUMBERS for u in USES for d in (True, False)], some(60))
def test_numbers(number, use, data):
    compare(lambda x, n: USES[use](x, NUMBERS[number](n)), data)


@each("name, data", [(name, d) for name in BOUNDS for d in (True, False)], some(8))
def test_bounds(name, data):
    compare(BOUNDS[name], data)


#: Those of one kind wherever Python has them.
FEW = ("division", "floor", "rest by a fraction", "divmod", "inverse", "negative powers", "inverse of a root", "caught")


@each("name", FEW, ("division", "inverse"))
def test_few_graphs(name):
    """One graph is for all lengths at which there is a number; parts of the first batch may have none."""
    assert compare(lambda x, n: x * NUMBERS[name](n), False).exports <= 3


#: Sizes that may be 0, and one number where torch takes a list: one graph is for all.
LISTS = {
    "view": lambda x, n: x + x.new_ones(2 * (n // 2), WIDTH).view(2, n // 2, WIDTH).sum((0, 1)),
    "reshape": lambda x, n: x + x.new_ones(2 * int(n / 2), WIDTH).reshape((int(n / 2), 2, WIDTH)).sum((0, 1)),
    "rolled": lambda x, n: x + x.roll(int(n / 2)),
    "rolled along": lambda x, n: x + torch.roll(x, n // 2, dims=0) + x.roll(shifts=-n, dims=1),
    "rolled by lists": lambda x, n: x + x.roll((n // 2, n), (0, 1)),
    "repeated": lambda x, n: x + x[0].repeat(int(n / 2)).sum() + x[0].tile(n).sum(),
    "expanded": lambda x, n: x + x[0, :1].expand(int(n / 2)).sum() + torch.ones(n // 2).sum(),
}


@each("name, data", [(name, d) for name in LISTS for d in (True, False)], some(3))
def test_one_graph(name, data):
    assert compare(LISTS[name], data).exports == 1
