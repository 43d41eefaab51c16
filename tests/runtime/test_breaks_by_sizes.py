"""Islands whose results have other sizes in each call become breaks: what is before them runs once."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ortmodule import ORTModule, explain

CALLS = 14  # some more than it takes until it is seen


@pytest.fixture(autouse=True)
def captures_cost_nothing(monkeypatch):
    monkeypatch.setenv("ORTMODULE_CAPTURE_SHARE", "inf")


class Chosen(nn.Module):
    """The rows that Python chooses by what it reads."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(8, 1)

    def forward(self, x):
        scores = self.score(x).squeeze(-1)
        rows = [i for i, score in enumerate(scores.tolist()) if score > scores.mean()]
        return x[rows] * scores[rows, None].sigmoid()


class Halves(Chosen):
    """As many in each call."""

    def forward(self, x):
        scores = self.score(x).squeeze(-1)
        rows = sorted(range(len(x)), key=scores.tolist().__getitem__)[: len(x) // 2]
        return x[rows] * scores[rows, None].sigmoid()


class OrNone(Chosen):
    """None where all is large."""

    def forward(self, x):
        return None if min(x.abs().amax(0).tolist()) > 20 else super().forward(x)


class Thinned(nn.Module):
    def __init__(self, chosen=Chosen, between=None, rate=0.0):
        super().__init__()
        self.first, self.second, self.last = (nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))
        self.one, self.two = chosen(), chosen()
        self.between, self.rate = between or nn.Identity(), rate

    def forward(self, x):
        x = self.one(F.dropout(self.first(x), self.rate))
        x = self.two(self.between(F.dropout(self.second(x), self.rate)) + x)
        return self.last(x)


def rows(number, dtype=torch.float32):
    return torch.randn(10 + number % 3, 8, generator=torch.Generator().manual_seed(number)).to(dtype)


def steps(model, module, calls=CALLS):
    """Both take the same steps: results and gradients are the same."""
    for number in range(calls):
        found, expected = (each(rows(number, each.last[0].weight.dtype)) for each in (model, module))
        torch.testing.assert_close(found, expected)
        for each in (model, module):
            each.zero_grad()
        found.square().sum().backward(), expected.square().sum().backward()
        for ours, theirs in zip(model.parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def made(module):
    torch.manual_seed(0)
    module = module()
    return ORTModule(copy.deepcopy(module)), module


def test_what_nothing_tells_is_a_break():
    model, module = made(Thinned)
    steps(model, module, 5)
    assert explain(model).breaks == [] and explain(model).exports == 1
    steps(model, module)
    assert explain(model).breaks == ["one", "two"] and explain(model).exports == 2
    assert explain(model).pytorch_calls == 0
    _, plan = max(model._ortmodule.latest.pieces[0].plans.items(), key=lambda pair: len(pair[0]))
    assert not plan.plan.prologue


def test_sizes_that_follow_from_the_operands():
    model, module = made(lambda: Thinned(Halves))
    steps(model, module)
    assert explain(model).breaks == [] and set(explain(model).python_ops) == {"one", "two"}


class ReadsBehind(Thinned):
    """Python decides by how many rows are left."""

    def forward(self, x):
        x = self.one(self.first(x))
        if len(x) > 40:
            x = self.second(x)
        return self.last(self.two(x))


def test_a_size_that_python_reads_behind_it():
    model, module = made(ReadsBehind)
    steps(model, module)
    assert "one" not in explain(model).breaks


def test_buffers_that_change():
    model, module = made(lambda: Thinned(between=nn.BatchNorm1d(8)).double())
    steps(model, module)
    assert explain(model).breaks == []
    assert torch.equal(model.between.num_batches_tracked, module.between.num_batches_tracked)
    torch.testing.assert_close(model.between.running_mean, module.between.running_mean)


class Told(nn.Module):
    """All that says whether two ways through it are one: what it drops before a submodule that may return None."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.chosen = nn.Linear(8, 8), nn.Linear(8, 8), OrNone()

    def forward(self, x):
        first = F.dropout(self.first(x), 0.5)
        chosen = self.chosen(first)
        if chosen is None:
            return first, first, F.dropout(self.second(first), 0.5)
        return first, chosen, F.dropout(self.second(chosen), 0.5)


def test_what_was_drawn_is_drawn_again():
    """Where a break returns something else, PyTorch goes on with the masks that the engine had."""
    torch.manual_seed(0)
    model = ORTModule(Told())
    for number in range(CALLS):
        x = rows(number) * (1 if number < CALLS - 1 else 200)
        model.zero_grad()
        breaks = explain(model).breaks
        first, chosen, last = model(x)
        (first.square().sum() + last.sum()).backward()
        drops, before = (first != 0) * 2.0, model.first(x)
        torch.testing.assert_close(first, before * drops)
        expected = (2 * first * drops).t() @ x
    assert breaks == ["chosen"] and chosen is first and explain(model).pytorch_calls == 1
    expected += ((last != 0) * 2.0 @ model.second.weight * drops).t() @ x
    torch.testing.assert_close(model.first.weight.grad, expected, rtol=1e-4, atol=1e-3)
