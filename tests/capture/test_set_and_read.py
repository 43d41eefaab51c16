"""Attributes that forward sets and then reads: what they were before the call is no matter."""

import copy

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain

pytestmark = pytest.mark.filterwarnings("ignore")


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)


class Tensor(Base):
    def forward(self, x):
        self.h = self.layer(x)
        return torch.tanh(self.h) + self.h.mean()


class Items(Base):
    def forward(self, x):
        self.memo = {}
        self.memo["h"] = self.layer(x)
        self.memo["g"] = torch.tanh(self.memo["h"])
        return self.memo["g"]


class Losses(Base):
    def forward(self, x):
        self.losses = []
        h = self.layer(x)
        self.losses.append(h.square().mean())
        self.losses.append(h.sum() * 0.1)
        return torch.tanh(h) + sum(self.losses)


class Number(Base):
    def forward(self, x):
        self.scale = x.shape[1] * 0.5
        return self.layer(x) * self.scale


class Part(nn.Module):
    """Sets its own; the one around it reads that."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        self.loss = self.layer(x).square().mean()
        return self.layer(x)


class Around(Base):
    def __init__(self):
        super().__init__()
        self.part = Part()

    def forward(self, x):
        return self.part(self.layer(x)) + self.part.loss


class ReadFirst(Base):
    """It looks at what the call before has left."""

    def forward(self, x):
        before = getattr(self, "seen", None)
        self.seen = (x.shape[1],)
        y = self.layer(x) + len(self.seen)
        return y if before is None else y * 2


class OfTheClass(Base):
    scale = 2.0

    def forward(self, x):
        y = self.layer(x) * self.scale
        self.scale = 3.0
        return y + self.scale


KINDS = [Tensor, Items, Losses, Number, Around]
OTHERS = [ReadFirst, OfTheClass]


def compare(kind, lengths):
    torch.manual_seed(0)
    model = kind()
    wrapped, expected = ORTModule(copy.deepcopy(model)), model
    for length in lengths:
        x = torch.randn(2, length, 8)
        found = []
        for each, own in ((wrapped, wrapped._ortmodule.module), (expected, expected)):
            own.zero_grad()
            y = each(x)
            y.sum().backward()
            left = [v for v in vars(own).values() if isinstance(v, torch.Tensor)]
            found.append([y.detach(), *(t.detach() for t in left), *(p.grad for p in own.parameters())])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    return explain(wrapped)


@pytest.mark.parametrize("kind", KINDS)
def test_one_graph_for_all_calls(kind):
    report = compare(kind, [4, 4, 6, 4, 5, 4])
    assert report.captured and report.exports == 1 and report.pytorch_calls == 0, report


@pytest.mark.parametrize("kind", OTHERS)
def test_what_was_read_before_counts(kind):
    compare(kind, [4, 4, 4, 4])
