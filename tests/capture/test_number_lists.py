"""Sums, means and the like of lists of changing numbers are NumPy's to the last digit, in one graph."""

import math

import numpy
import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from ortmodule.capture.numbers.number_lists import OF_LISTS
from tests.selection import each

COUNTS = (1, 2, 7, 8, 9, 63, 128, 129, 200)
NAMES = ("sum", "prod", "mean", "average", "var", "std", "max", "min", "amax", "amin")


class Net(nn.Module):
    def __init__(self, function, count):
        super().__init__()
        self.linear, self.function = nn.Linear(3, 3), function
        self.others = [math.sin(i) * 10.0 ** (i % 5) for i in range(count - 1)]

    def forward(self, x, n):
        found = self.function([n.item() * 1.1, *self.others])
        return self.linear(x) * found, found


@each("name, count", [(name, count) for name in NAMES for count in COUNTS], lambda case: case[1] in (2, 129))
def test_the_last_digit(name, count):
    torch.manual_seed(0)
    eager = Net(lambda values: getattr(numpy, name)(values), count)
    module = ORTModule(eager)
    for value in (1.7, -2.3, 1e5, 3.3):
        x, n = torch.randn(2, 3), torch.tensor(value, dtype=torch.float64)
        (y, expected), (found_y, found) = eager(x, n), module(x, n)
        assert type(found) is type(expected) and found == expected
        torch.testing.assert_close(found_y, y)
    assert explain(module).captured and explain(module).exports == 1


@pytest.mark.parametrize("function", OF_LISTS, ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_other_arguments_are_the_librarys(function):
    for values in ([1, 2, 3], (0.5, 2.0), numpy.arange(1.0, 4.0), [numpy.float32(0.1), 2]):
        assert OF_LISTS[function](values) == function(values)


def test_functions_are_those_of_the_library_afterwards():
    before = [getattr(numpy, name) for name in NAMES], math.prod
    ORTModule(Net(lambda values: numpy.mean(values), 3))(torch.ones(2, 3), torch.tensor(1.5))
    assert before == ([getattr(numpy, name) for name in NAMES], math.prod)
