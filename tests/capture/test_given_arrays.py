"""NumPy's arrays among the arguments: inputs of the graph, or PyTorch's where forward changes or keeps them."""

import copy

import numpy
import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain

pytestmark = pytest.mark.filterwarnings("ignore")


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x, a):
        return self.function(self.linear(x), a)


def normal(rng, n):
    return rng.standard_normal((n, 4)).astype(numpy.float32)


def row(rng, n):
    return normal(rng, n)[0]


def double(rng, n):
    return rng.standard_normal((n, 4))


def whole(rng, n):
    return rng.integers(0, 4, n)


def mask(rng, n):
    return rng.random((n, 4)) > 0.5


CAPTURED = {
    "from_numpy": (lambda y, a: y * torch.from_numpy(a), normal),
    "as_tensor": (lambda y, a: y * torch.as_tensor(a), normal),
    "tensor": (lambda y, a: y * torch.tensor(a, dtype=torch.float32), double),
    "new_tensor": (lambda y, a: y * y.new_tensor(a), double),
    "indices": (lambda y, a: y[:, torch.from_numpy(a)], whole),
    "labels": (lambda y, a: nn.functional.cross_entropy(y, torch.as_tensor(a)), whole),
    "a mask": (lambda y, a: y.masked_fill(torch.from_numpy(a), 0), mask),
    "another type": (lambda y, a: y * torch.from_numpy(a.astype(numpy.float32)), double),
    "integers as floats": (lambda y, a: y + torch.from_numpy(a.astype(numpy.float32))[:, None], whole),
    "truncated": (lambda y, a: y * torch.from_numpy((a * 3).astype(numpy.int64)), normal),
    "a row": (lambda y, a: y * torch.from_numpy(a[0]), normal),
    "each row": (lambda y, a: y * torch.stack([torch.from_numpy(r) for r in a[:2]]).sum(0), normal),
    "turned": (lambda y, a: y @ torch.from_numpy(a.T), normal),
    "in another shape": (lambda y, a: y * torch.from_numpy(a.reshape(-1, 2, 2)).reshape(-1, 4), normal),
    "backwards": (lambda y, a: y * torch.from_numpy(a[::-1].copy()), normal),
    "a number": (lambda y, a: y * a[1] + float(a[0]), row),
    "numbers": (lambda y, a: y * sum(a.tolist()), row),
    "its sizes": (lambda y, a: y * a.shape[0] + y.new_zeros(a.shape), normal),
    "of no dimensions": (lambda y, a: y * torch.from_numpy(a) + a.item(), lambda rng, n: numpy.array(rng.random())),
    "NumPy's arithmetic": (lambda y, a: y * torch.from_numpy((2 * a + 1).clip(-1, 1)), normal),
    "NumPy's functions": (lambda y, a: y * torch.from_numpy(numpy.where(a > 0, numpy.tanh(a), a)), normal),
    "a mean": (lambda y, a: y * float(a.mean()), normal),
    "a bound": (lambda y, a: y[:, : int(a.max()) + 1], whole),
    "stacked": (lambda y, a: y * torch.from_numpy(numpy.stack([a, a])).sum(0), normal),
    "a list": (
        lambda y, a: y * torch.from_numpy(a[0]) + torch.from_numpy(a[1]),
        lambda r, n: [normal(r, n), row(r, n)],
    ),
    "one twice": (
        lambda y, a: y * (2 if a[0] is a[1] else 3) * torch.tensor(a[1]),
        lambda r, n: [normal(r, n)] * 2,
    ),
    "a dictionary": (lambda y, a: y * torch.as_tensor(a["m"]), lambda r, n: {"m": normal(r, n), "name": "x"}),
    "not used": (lambda y, a: y.sin(), normal),
    "its class": (lambda y, a: y * (torch.from_numpy(a) if isinstance(a, numpy.ndarray) else a), normal),
}


def compare(function, make, calls=4):
    torch.manual_seed(0)
    eager = Net(function)
    module = ORTModule(copy.deepcopy(eager))
    for i in range(calls):
        x = torch.randn(3 + i % 3, 4)
        given = [make(numpy.random.default_rng(i), 3 + i % 3) for _ in range(2)]
        results = [m(x, a) for m, a in zip((eager, module), given, strict=True)]
        first = [r[0] if isinstance(r, tuple) else r for r in results]
        torch.testing.assert_close(first[1], first[0])
        numpy.testing.assert_equal(given[1], given[0])
        for y in first:
            y.sum().backward()
        for p, q in zip(eager.parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad)
    return module, results, given


@pytest.mark.parametrize("name", CAPTURED)
def test_an_array_is_an_input(name):
    module, _, _ = compare(*CAPTURED[name])
    report = explain(module)
    assert report.captured and report.exports == 1, report


def test_a_decision_has_a_graph_for_each_answer():
    module, _, _ = compare(lambda y, a: y * 2 if a[0] > 0 else y.sin(), row, calls=6)
    assert explain(module).captured and explain(module).exports == 2


def changes_later(y, a):
    t = torch.from_numpy(a)
    t[0] = 1.0
    return y * t


PYTORCH = {
    "changed": (lambda y, a: (torch.from_numpy(a).add_(1), y)[1], normal),
    "changed through a part": (changes_later, normal),
    "changed by NumPy": (lambda y, a: (a.__setitem__(0, 1.0), y)[1], normal),
    "filled by NumPy": (lambda y, a: (numpy.copyto(a, 1.0), y)[1], normal),
    "changed by a function": (lambda y, a: (numpy.nan_to_num(a, copy=False), y * torch.from_numpy(a))[1],
                              lambda r, n: normal(r, n) * numpy.float32("nan")),
    "returned": (lambda y, a: (y, a), normal),
    "its memory is returned": (lambda y, a: (y, torch.from_numpy(a)), normal),
    "a part of it is returned": (lambda y, a: (y, torch.as_tensor(a)[1:]), normal),
    "a leaf": (lambda y, a: y * torch.tensor(a, requires_grad=True), normal),
    "as it is": (lambda y, a: y * torch.from_numpy(numpy.asarray(a)), normal),
    "objects": (lambda y, a: y * a[0], lambda r, n: numpy.array([r.random(), None])),
}  # fmt: skip


@pytest.mark.parametrize("name", PYTORCH)
def test_what_pytorch_runs(name):
    function, make = PYTORCH[name]
    module, results, given = compare(function, make)
    assert not explain(module).captured
    if isinstance(results[0], tuple):
        for (_, tensor), array in zip(results, given, strict=True):
            assert numpy.shares_memory(numpy.asarray(tensor), array)


def test_a_submodule_of_pytorchs_is_given_none():
    class Changes(nn.Module):
        def forward(self, y, a):
            a[0] = 7.0
            return y * float(a[0, 0])

    changes = Changes()
    module, _, given = compare(lambda y, a: changes(y, a).sin(), normal)
    assert not explain(module).captured and given[1][0, 0] == 7.0


def test_what_is_changed_behind_the_call_changes_nothing():
    array = numpy.ones((3, 4), numpy.float32)
    eager = Net(lambda y, a: y * torch.tensor(a))
    gradients = []
    for m in (eager, ORTModule(copy.deepcopy(eager))):
        array[:] = 2
        y = m(torch.ones(3, 4), array)
        array[:] = 3
        y.sum().backward()
        gradients.append(next(m.parameters()).grad)
    torch.testing.assert_close(gradients[1], gradients[0])


def test_gradients_of_gradients():
    eager = Net(lambda y, a: (y * torch.from_numpy(a)).tanh())
    x, array = torch.randn(3, 4, requires_grad=True), normal(numpy.random.default_rng(0), 3)
    found = []
    for m in (eager, ORTModule(copy.deepcopy(eager))):
        (g,) = torch.autograd.grad(m(x, array).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(g.square().sum(), x)[0])
    torch.testing.assert_close(found[1], found[0])
