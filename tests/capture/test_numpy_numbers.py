"""Numbers of NumPy's among the arguments that change from call to call are operands of one graph."""

import numpy
import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from tests.selection import each


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x, n):
        return self.function(self.linear(x), n)


ONE_GRAPH = {
    "a factor": lambda y, n: y * n,
    "from the left": lambda y, n: n * y - n,
    "arithmetic": lambda y, n: y * (n * 3 - n / 7 + n**2 + n // 2 + n % 3 + abs(-n)),
    "rounded to its type": lambda y, n: y.double() * (n * n + n) / 3,
    "with another type": lambda y, n: y * (n * numpy.float32(2.5)) + numpy.float64(0.1) * n,
    "compared": lambda y, n: y * n if n > 0 else y.sin(),
    "returned": lambda y, n: (y * n, n, n + 1, n.item()),
    "a tensor": lambda y, n: y * torch.tensor(n),
    "as a tensor": lambda y, n: (y, torch.as_tensor(n)),
    "full": lambda y, n: y + torch.full((4,), n),
    "converted": lambda y, n: y * float(n) + int(n),
    "astype": lambda y, n: (y * n.astype(numpy.float16), n.astype(numpy.int64)),
    "its class": lambda y, n: y * n if isinstance(n, numpy.floating) else y + n,
    "its type": lambda y, n: y * n if n.dtype == numpy.float32 and not n.shape else y - n,
    "in place": lambda y, n: y.clone().mul_(n),
}
FRACTIONS, WHOLE = (0.3, 0.5, 1.3, 2.2), (1, 2, 50, 100)
KINDS = {
    "float32": FRACTIONS,
    "float64": FRACTIONS,
    "float16": FRACTIONS,
    "int64": WHOLE,
    "int8": WHOLE,
    "uint8": WHOLE,
}


def compare(function, values):
    torch.manual_seed(0)
    eager = Net(function)
    module = ORTModule(eager)
    for i, value in enumerate(values):
        x = torch.randn(2 + i % 3, 4)
        with numpy.errstate(all="ignore"):
            expected, found = eager(x, value), module(x, value)
        for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (expected, found)), strict=True):
            assert type(a) is type(b)
            torch.testing.assert_close(torch.as_tensor(b), torch.as_tensor(a))
        first = [r[0] if isinstance(r, tuple) else r for r in (expected, found)]
        gradients = [torch.autograd.grad(y.sum(), eager.linear.weight)[0] for y in first]
        torch.testing.assert_close(gradients[1], gradients[0])
    return explain(module)


@pytest.mark.parametrize("name", ONE_GRAPH)
@each("kind", KINDS, ("float32", "int8"))
def test_one_graph_for_all_values(name, kind):
    report = compare(ONE_GRAPH[name], [numpy.dtype(kind).type(v) for v in KINDS[kind]])
    assert report.captured, report.fallback
    assert report.exports == 2  # the first call is for its value


SIZES = {
    "a bound": lambda y, n: y[:, :n],
    "an index": lambda y, n: y[:, n - 1],
    "repeated": lambda y, n: y.repeat(n, 1),
    "a size": lambda y, n: y.sum() + torch.zeros(n, 2),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_and_indices(name):
    report = compare(SIZES[name], [numpy.int64(v) for v in (1, 3, 2, 4)])
    assert report.captured and report.exports == 2


SEVERAL = {
    "NumPy's functions": lambda y, n: y * float(numpy.gcd(n, 6)),
    "a loop": lambda y, n: sum(y * i for i in range(n)) + y,
    "bits": lambda y, n: y * (n & 1),
    "text": lambda y, n: y * len(str(n)),
    "an array": lambda y, n: y * torch.from_numpy(numpy.ones(4) * n).float(),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_what_looks_at_the_value_has_a_graph_for_each(name):
    report = compare(SEVERAL[name], [numpy.int64(v) for v in (1, 3, 2, 12)])
    assert report.captured and report.exports > 2


def test_integers_that_wrap_or_are_divided_by():
    report = compare(lambda y, n: y * (n + numpy.int8(100)), [numpy.int8(v) for v in (1, 2, 100, 27, 28)])
    assert report.captured and report.exports == 2
    compare(lambda y, n: y + (7 // n), [numpy.int64(v) for v in (1, 2, 0, 3)])
    compare(lambda y, n: y + (7.0 / n), [numpy.float32(v) for v in (1, 2, 0, 3)])
    compare(lambda y, n: y + n**n, [numpy.int64(v) for v in (1, 2, 0, 3)])


def test_beside_numbers_of_pythons():
    def function(y, n):
        a, b = n
        return y * (a * b + b / a - b**a) if a < b * 100 else y

    for kind, values in ((numpy.float32, (0.1, 0.2, 0.3)), (numpy.int64, (1, 2, 3))):
        report = compare(function, [(kind(v), v * 10) for v in values])
        assert report.captured and report.exports == 2
