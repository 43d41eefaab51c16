"""A call for which no graph can be made leaves the graphs of other calls as they are."""

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain


class Lengths(nn.Module):
    """Takes another way for each length, and has none that a graph could take where ``refuses(length)``."""

    def __init__(self, refuses):
        super().__init__()
        self.linear, self.refuses, self.runs = nn.Linear(4, 4), refuses, 0

    def forward(self, x):
        y = self.linear(x)
        for _ in range(int(x[:, 0].sum().item())):
            y = y.sin()
        if self.refuses(x.shape[0]):
            y = y * float(y.detach().exp().sum())  # read by Python: what it does depends on values
        return y


def rows(length, steps=1):
    x = torch.full((length, 4), 0.5)
    x[:, 0] = 0
    x[0, 0] = steps
    return x


def run(pair, x):
    """Whether the engine ran it; the result is compared with PyTorch's."""
    eager, ours = pair
    torch.testing.assert_close(ours(x), eager(x))
    return explain(ours).captured


@pytest.fixture
def pair():
    torch.manual_seed(0)
    eager = Lengths(lambda length: length > 10)
    return eager, ORTModule(eager)


def test_a_length_that_is_refused(pair):
    assert run(pair, rows(3))
    assert not any(run(pair, rows(20)) for _ in range(3))
    assert run(pair, rows(3)) and run(pair, rows(3))
    assert not run(pair, rows(20))
    assert run(pair, rows(3))
