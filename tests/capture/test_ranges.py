"""A loop over `range(0, n, step)` of a size is one graph for all lengths with as many steps."""

import copy
import itertools

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from ortmodule.capture.numbers import part_counts
from tests.selection import each

pytestmark = pytest.mark.filterwarnings("ignore")


def chunked(x, step):
    return torch.cat([x[:, i : i + step].softmax(1) for i in range(0, x.shape[1], step)], 1)


def in_a_loop(x, step):
    found = []
    for start in range(0, x.shape[1], step):
        end = min(x.shape[1], start + step)
        found.append(x[:, start:end] - x[:, start:end].mean(1, keepdim=True))
    return torch.cat(found, 1)


def numbered(x, step):
    total = 0
    for i, start in enumerate(range(1, x.size(1), step)):
        total = total + x[:, start] * (i + 1)
    return total


def from_behind(x, step):
    return sum(x[:, i] * i for i in range(-1, -x.shape[1], -step))


def counted(x, step):
    return x * len(range(0, x.shape[1], step)) + list(range(2, len(x) * 0 + x.shape[1], step))[-1]


def reversed_and_zipped(x, step):
    starts = reversed(range(0, x.shape[1], step))
    return sum(x[:, a] * b for a, b in zip(starts, range(0, 3 * x.shape[1], 3 * step), strict=True))


def a_type(x, step):
    steps = range(0, x.shape[1], step)
    return x * (len(steps) if isinstance(steps, range) else 100)


def its_stop(x, step):
    return x * range(0, x.shape[1], step).stop


FUNCTIONS = {f.__name__: f for f in (chunked, in_a_loop, numbered, from_behind, counted, reversed_and_zipped, a_type)}


class Net(nn.Module):
    def __init__(self, function, step):
        super().__init__()
        self.line, self.function, self.step = nn.Linear(4, 4), function, step

    def forward(self, x):
        return self.function(self.line(x), self.step)


def as_in_pytorch(eager, ours, x):
    results = []
    for module in (eager, ours):
        module.zero_grad()
        y = module(x)
        y.square().sum().backward()
        results.append([y, *(p.grad for p in module.parameters())])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


@each("step", (4, 8), (8,))
@each("name", FUNCTIONS, ("chunked", "in_a_loop", "from_behind", "a_type"))
def test_as_many_steps_are_one_graph(name, step, monkeypatch):
    monkeypatch.setenv("ORTMODULE_CAPTURE_SHARE", "inf")
    eager = Net(FUNCTIONS[name], step)
    ours = ORTModule(copy.deepcopy(eager))
    exports = set()
    for n in (3 * step, 3 * step - 1, 2 * step + 3):  # three steps, from 0, 1 and 2
        as_in_pytorch(eager, ours, torch.randn(2, n, 4))
        exports.add(explain(ours).exports)  # two where a part of the batch has fewer steps
    assert explain(ours).captured and len(exports) == 1, str(explain(ours))
    for n in (5 * step, 2 * step + 2, step, 5 * step - 1):
        as_in_pytorch(eager, ours, torch.randn(2, n, 4))
    assert explain(ours).captured


def test_where_a_range_ends_is_a_size():
    """Of as many steps or not."""
    eager = Net(its_stop, 8)
    ours = ORTModule(copy.deepcopy(eager))
    for n in (24, 23, 19, 40):
        as_in_pytorch(eager, ours, torch.randn(2, n, 4))


def test_counts(monkeypatch):
    monkeypatch.setattr(part_counts, "is_size", lambda n: True)
    for args in itertools.product(range(-3, 4), range(-6, 20), (-7, -3, -2, 2, 3, 7)):
        assert max(0, part_counts.range_count(*args)) == len(range(*args)), args
    for args in ((0, 5, 1), (0, 5, -1), (0, 5, 0), (0.0, 5, 2), (0, 5, True)):
        assert part_counts.range_count(*args) is None
