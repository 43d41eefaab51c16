"""What `math` and NumPy compute with numbers that change from call to call: one graph for all values."""

import math
from math import log as logarithm
from math import sqrt

import numpy
import numpy as np
import pytest
import torch
from numpy import mean
from torch import nn

from ortmodule import ORTModule, explain
from tests.selection import each

FUNCTIONS = {
    "math.sqrt": lambda n: math.sqrt(n),
    "a global": lambda n: sqrt(n) + logarithm(n, 2),
    "inside": lambda n: sum(sqrt(k) for k in (n, n + 1)),
    "math.log": lambda n: math.log(n),
    "of a base": lambda n: math.log(n, 10) + math.log(10, n + 1),
    "math.cos": lambda n: 0.5 * (1 + math.cos(math.pi * n / 100)),
    "math.pow": lambda n: math.pow(n, 0.5) * math.pow(2, n / 10) + math.hypot(3, n) + math.atan2(n, 2),
    "math.exp": lambda n: math.exp(-n / 5) + math.tanh(n) + math.erf(n / 9) + math.degrees(n) + math.fmod(n, 3),
    "numpy.sqrt": lambda n: numpy.sqrt(n),
    "numpy.log": lambda n: numpy.log(n) + numpy.log1p(n) + numpy.exp(-n / 3) + numpy.arctan(n),
    "numpy.maximum": lambda n: numpy.maximum(n, 3) - numpy.minimum(4, n) / 3,
    "numpy.clip": lambda n: numpy.clip(n, 2, 5) + numpy.clip(n, a_min=None, a_max=3),
    "numpy.round": lambda n: numpy.round(n * 1.25) + numpy.floor(n) + numpy.ceil(n / 2) + numpy.sign(n),
    "numpy.square": lambda n: numpy.square(n) + numpy.absolute(-n) + numpy.power(n, 2) + numpy.hypot(n, 3.5),
    "beside NumPy's": lambda n: numpy.float64(2.5) * n + n / numpy.float32(3) - numpy.divide(n, 7),
    "numpy.mean": lambda n: np.mean([n, 2, n * 1.5]) + numpy.sum([n, 1]) + mean((n, n)),
    "numpy.max": lambda n: numpy.max([n, 4, 2.5]) - numpy.amin((3, n)) + numpy.prod([n, 2]) + math.prod([n, 0.5]),
    "numpy.std": lambda n: numpy.std([n, 1, 2.5]) + numpy.var([n, 3]) + numpy.average([n / 3] * 199 + [0.1]),
    "asked": lambda n: n if math.isfinite(n) and not numpy.isnan(n) and not torch.is_tensor(n) else 0,
}
KINDS = {
    "int": int,
    "float": lambda v: v + 0.3,
    "numpy.float64": lambda v: numpy.float64(v + 0.3),
    "numpy.float32": lambda v: numpy.float32(v + 0.3),
    "numpy.int64": numpy.int64,
    "data": lambda v: torch.tensor(v + 0.3),
}
USES = {
    "factor": lambda y, n: y * n,
    "size": lambda y, n: y.sum() + torch.zeros(int(n) + 1, 5),
    "bound": lambda y, n: y[:, : int(abs(n)) + 1],
    "clamp": lambda y, n: y.clamp(max=n / 10),
    "compared": lambda y, n: y * n if n > -1 else y.sin(),
    "returned": lambda y, n: (y * n, n),
}
VALUES = (5, 3, 6, 7, 2, 9)


class Net(nn.Module):
    def __init__(self, function, use):
        super().__init__()
        self.linear, self.function, self.use = nn.Linear(4, 12), function, use

    def forward(self, x, n):
        return self.use(self.linear(x), self.function(n.item() if isinstance(n, torch.Tensor) else n))


def compare(function, use, values):
    torch.manual_seed(0)
    eager = Net(function, use)
    module = ORTModule(eager)
    for i, value in enumerate(values):
        x = torch.randn(2 + i % 3, 4)
        expected, found = result(eager, x, value), result(module, x, value)
        if isinstance(expected, str):
            assert found == expected
            continue
        for a, b in zip(expected, found, strict=True):
            assert type(a) is type(b)
            torch.testing.assert_close(torch.as_tensor(b), torch.as_tensor(a), equal_nan=True)
        gradients = [torch.autograd.grad(r[0].sum(), eager.linear.weight)[0] for r in (expected, found)]
        torch.testing.assert_close(gradients[1], gradients[0], equal_nan=True)
    return explain(module)


def result(module, x, value):
    try:
        found = module(x, value)
    except (ArithmeticError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return found if isinstance(found, tuple) else (found,)


TRIPLES = [(f, k, u) for f in FUNCTIONS for k in KINDS for u in USES]
SHORT = {
    ("math.sqrt", "int", "size"), ("a global", "float", "factor"), ("inside", "data", "factor"),
    ("of a base", "data", "clamp"), ("math.cos", "int", "compared"), ("math.exp", "float", "returned"),
    ("numpy.sqrt", "numpy.float64", "bound"), ("numpy.log", "data", "compared"), ("numpy.clip", "float", "size"),
    ("numpy.round", "numpy.float32", "bound"), ("numpy.mean", "int", "factor"), ("numpy.mean", "data", "size"),
    ("numpy.max", "float", "factor"), ("numpy.std", "numpy.float64", "clamp"), ("numpy.max", "int", "returned"),
    ("numpy.square", "int", "size"), ("beside NumPy's", "float", "returned"),
}  # fmt: skip


#: Of a number beside one of VALUES the sum is whole, and its last digit decides what `int` makes of it: then there is a
#: graph for each value.
BY_VALUE = {("a global", kind, use) for kind in ("int", "numpy.int64") for use in ("size", "bound")}


@each("function, kind, use", TRIPLES, SHORT)
def test_one_graph_for_all_values(function, kind, use):
    values = [KINDS[kind](v) for v in VALUES]
    report = compare(FUNCTIONS[function], USES[use], values)
    assert report.captured, report.fallback
    if (function, kind, use) not in BY_VALUE and not (use == "returned" and function == "asked"):
        assert report.exports == (1 if kind == "data" else 2)  # the first call is for its value


#: Values for which Python raises an error, or a function has no finite value, or the last digit decides.
EDGES = {
    "math.sqrt": (lambda n: math.sqrt(n), (1.5, 2.5, 0.0, -1.5, 4.0)),
    "math.log": (lambda n: math.log(n), (1.5, 2.5, 0.0, 3.0)),
    "math.exp": (lambda n: math.exp(n), (1.5, 2.5, 800.0, 3.0)),
    "divided": (lambda n: 1 / math.log(n), (1.5, 2.5, 1.0, 3.0)),
    "numpy.log": (lambda n: numpy.log(n), (1.5, 2.5, 0.0, -1.0, 3.0)),
    "a power of two": (lambda n: int(math.log2(n)), (5, 6, 8, 11, 2**40)),
    "a power of ten": (lambda n: math.ceil(math.log(n, 10)) + (math.log10(n) >= 3), (20, 30, 1000, 1001)),
    "NumPy's": (lambda n: numpy.floor(numpy.log2(n)) + int(numpy.log10(n)), (5, 6, 8, 100)),
    "a step": (lambda n: math.log2(n) // 1 + math.log10(n) % 0.5, (5, 6, 8, 11)),
    "a whole array": (lambda n: float((numpy.arange(3) * n).sum() + numpy.mean([n, 1])), (1.5, 2.5, 4.0)),
    "an array by it": (lambda n: torch.from_numpy(numpy.ones(12, numpy.float32) * n), (1.5, 2.5, 4.0, 2)),
    "an axis": (lambda n: float(numpy.mean([[n, 1], [2, n]], axis=0)[0] + numpy.sum([n], dtype=int)), (1.5, 2.5, 4.0)),
    "sums that wrap": (lambda n: float(numpy.sum([n, 1, 2**62])), (5, 6, 2**62)),
    "not finite": (lambda n: float(numpy.max([n, 1.0]) + numpy.sum([n, -n])), (1.5, 2.5, math.inf, math.nan, 3.0)),
    "no number": (lambda n: float(numpy.mean([n, torch.ones(())]) + numpy.median([n, 1, 2])), (1.5, 2.5, 4.0)),
    "with an option": (lambda n: numpy.sqrt(n, dtype=numpy.float32), (1.5, 2.5, 4.0)),
    "many operands": (lambda n: math.hypot(n, 1, 2) + math.gcd(int(n), 6) + math.gamma(n), (1.5, 2.5, 4.0)),
}


@pytest.mark.filterwarnings("ignore")
@each("name", EDGES, ("math.sqrt", "divided", "numpy.log", "a power of two", "NumPy's", "with an option"))
def test_edges(name):
    function, values = EDGES[name]
    compare(function, USES["factor"], values)


def test_functions_are_as_before():
    """A trace leaves the modules that it replaces functions of, and code that calls them, as they were."""
    before, code = dict(vars(math)), FUNCTIONS["a global"].__code__
    compare(FUNCTIONS["a global"], USES["factor"], (2, 3, 4))
    assert vars(math) == before and FUNCTIONS["a global"].__code__ is code
