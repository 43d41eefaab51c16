"""What custom autograd functions do around themselves happens once in each call, and not for traces and checks."""

import collections
import copy

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain

CALLS = []
COUNTS = collections.Counter()
STATE = {"total": 0.0, "inner": {"steps": [0]}}
LARGEST = torch.zeros(2)


class Log:
    def __init__(self):
        self.lines = []

    def note(self, line):
        self.lines.append(line)


LOG = Log()


class Named(torch.autograd.Function):
    calls = 0


def appends(x):
    CALLS.append(tuple(x.shape))


def counts(x):
    COUNTS["calls"] += 1


def sums(x):
    STATE["total"] += 1.5
    STATE["inner"]["steps"][0] += 1


def calls_a_method(x):
    LOG.note(x.dim())


def sets_its_class(x):
    Named.calls += 1


def writes_a_tensor(x):
    with torch.no_grad():
        LARGEST[0] += 1
        LARGEST[1] = torch.maximum(LARGEST[1], x.abs().max())


EFFECTS = {f.__name__: f for f in (appends, counts, sums, calls_a_method, sets_its_class, writes_a_tensor)}


def left():
    return list(CALLS), dict(COUNTS), copy.deepcopy(STATE), list(LOG.lines), Named.calls, LARGEST.tolist()


def reset():
    CALLS.clear(), COUNTS.clear(), LOG.lines.clear(), LARGEST.zero_()
    STATE.update(total=0.0, inner={"steps": [0]})
    Named.calls = 0


def function(effect, places):
    """An autograd function that has ``effect`` in these places."""

    class Doubles(Named):
        @staticmethod
        def forward(ctx, x):
            if "forward" in places:
                effect(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            if "backward" in places:
                effect(grad)
            return grad * 2

    return Doubles


class Net(nn.Module):
    def __init__(self, apply):
        super().__init__()
        self.first, self.second, self.apply_ = nn.Linear(4, 4), nn.Linear(4, 2), apply

    def forward(self, x):
        return self.second(self.apply_(self.first(x)))


@pytest.mark.parametrize("places", [("forward",), ("forward", "backward")], ids="+".join)
@pytest.mark.parametrize("name", EFFECTS)
def test_as_often_as_in_pytorch(name, places):
    torch.manual_seed(0)
    theirs = Net(function(EFFECTS[name], places).apply)
    ours, effects = ORTModule(copy.deepcopy(theirs)), []
    for model in (theirs, ours):
        reset()
        for step in range(3):
            x = torch.randn(3 + step % 2, 4, generator=torch.Generator().manual_seed(step))
            model(x).sum().backward()
        effects.append(left())
    assert effects[0] == effects[1]
    assert explain(ours).captured and explain(ours).pytorch_calls == 0
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
